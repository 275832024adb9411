// @ts-check
// The writing direction of a text, by the rule of `direction` in regard/text/codec.py.

// Bidi classes of all characters in order (Unicode 14): a run is its length in base 36 (none: 1) and its class, which is
// L (left to right), R (right to left: R or AL), or "-" (neither). Unassigned characters extend the run before them.
const BIDI_RUNS = `
1t-qL6-qL1b-La-L4-L5-nL-vL-chL2-7Le-2Le-5L9-L3l-4L2-8L-5L2-L-32L-3wL7-74L1g-R-R2-R2-R9-1cR8-R2-R-Rd-1cRy-3R-2tRf-2R7-2R
a-nR-uRt-2hRb-1mR9-2R4-3R-oR4-R9-R3-R7-15R5-1eRg-16R1l-1jL-L-4L8-4L-3L7-aL2-tL-1mL-4L6-6L-kL4-cL2-7L-2L5-1lL2-3Lo-nL2-
3L-bL2-1lL-4L8-4L3-iL4-bL8-L8-1mL-2L-L6-6La-bL4-sL-1pL-cL3-zLe-3L-1jL-L3-5Li-aL4-iL7-2L-1mL-fL9-dL4-qL2-1lL2-4L5-7L-kL
4-rL-20L5-3L6-2hL-2Lc-7L8-2qL-2L9-bL8-20L2-rL-L-L5-1fLe-L5-L2-5L1d-8L-2uL4-L6-L2-2L2-pL2-4L3-gL4-dL-2L2-6L-fL-jjL3-1cL
g-2oL-hrL-qL5-36L3-tL2-uLe-iLe-1gL2-L7-8L-2Lb-7L-L3-gLw-39L2-yL-3aL3-4L2-9L-6Ld-48Ly-nL2-2L3-1kL-L9-L-2L8-6Ld-1cL2c-1cL
-L5-L-5L-14L9-cL2-wL4-2L2-L3-1kL-L2-3L-L3-1mL8-2L5-45L3-Ld-L7-4L-6L-3L2-5iL1s-cdL-L3-bL3-dL3-dL5-bLh-LR2p-3Lb-Lg-gL2q-L
4-L2-aL-L3-5L6-L-L-L-4L-bL2-4L5-5L4-2Lg-15Lbx-1xLq-L7a-26Lci-L9f-74Llc-6dL6-4L3-7L7-3jL-2oLf9-3Lp-9L4-2L-5L2-5L4-2gL4-
3L-2iL-5gL1c-19L3-1cLg-sL3-1eLf-cL4-4nL4-2rL2-vL-534L1s-h3kL1s-8tL3-2nLh-uL2-28L2-eLy-2uL-3dL-3L-4L-pL2-L8-8L8-1gLc-1wL
a-iLi-dL-12L8-pLb-1aL3-1cL-2L4-2L2-13L-1vL6-2L2-2Lb-3L-8L-1bL-1fL-L3-2L2-5L2-L-16L2-8Lb-2xL6-39L-2L-4L3-fn1LR-aR-esRi-
3jRx-dR37-3zRy-qL6-qLb-3eLw-75L-1qL25-3L1s-19L3n-2oLw-3aLa-w0L7zR-69Rf-14R8-4lR6-26R7-dgR9o-17R2-49Rb-1dR4-3eRL-1iLf-bL
k-aL-2L2-aL3-1dL4-2L2-7Lb-1fL3-10L5-L9-1pL-cL2-1gL9-aL4-2L-2nL3-2L-L2-6L1u-2nL-3Ld-gL2-1lL2-3L-11L4a-1kL8-2L3-L-nL-2cL
6-L-4L2-L2-6mL6-4L2-L2-rL10-1fL8-2L-L2-vLw-17L-L-2L6-L-2tL3-2L4-L9-73L9-L2-74L2-L-4L-40L8-4L-wL6-2L2-14L6-2L4-8L9-L6-2L
3-1aLd-L2-baLe-2cLn-L7-L2-L23-1dLl-L9-1sL3-2L-L-9nL2-68L16-esxL5-1nL7-t4L-1rL4-27L-Lc-f59L2-L3ow-evL3-9Lg-2L7-uL4-1nL
6v-wL2o-orL-1lL-1lL-1lL-1lL-aL1e-e8L1j-4L1e-8L-eL-mLv9-74L74-1cL7-afLi-18L4-fLyp-wL5sR1c-1wR7-145Rf4-vL-1mL6-1pL1l-3eL
2ow-gutdL1ekf-2t4wL`;

/** @type {RegExp | null} */
let strongCharacter = null;

/** A pattern for one strong character; a character from right to left is in group 1. */
function strongPattern() {
  const ranges = { L: "", R: "", "-": "" };
  let next = 0;
  for (const [, length, name] of BIDI_RUNS.matchAll(/([0-9a-z]*)([LR-])/g)) {
    const first = next;
    next += length ? parseInt(length, 36) : 1;
    ranges[name] += `\\u{${first.toString(16)}}-\\u{${(next - 1).toString(16)}}`;
  }
  return new RegExp(`[${ranges.L}]|([${ranges.R}])`, "u");
}

/**
 * The direction of the first strong character of a text; left to right without one.
 * @param {string} text
 * @returns {"ltr" | "rtl"}
 */
export function direction(text) {
  strongCharacter ??= strongPattern();
  return strongCharacter.exec(text)?.[1] ? "rtl" : "ltr";
}
