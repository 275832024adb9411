// Building the document. Text from outside only ever becomes a text node.

const ALLOWED = /^(class|aria-[a-z]+|role|type|tabindex|title|dir|lang|id|for|href|name|value|min|max|step|rows|placeholder|accept|download|spellcheck|autocomplete|autocapitalize|autocorrect|sandbox|scope|colspan|d)$/;

export function h(tag, props, ...children) {
  const svg = tag === "svg" || tag === "path";
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value === null || value === undefined || value === false) continue;
    else if (name === "disabled" || name === "hidden" || name === "checked" || name === "multiple") made[name] = true;
    else if (ALLOWED.test(name)) made.setAttribute(name, String(value));
    else throw new Error(`no attribute ${name}`);
  }
  put(made, ...children);
  return made;
}

export function put(parent, ...children) {
  parent.replaceChildren(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return parent;
}

// A token as it can be seen: blanks and controls shown, a lone combining mark on a circle.
export function visible(token) {
  let text = token.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/[\u0000-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)));
  text = text.replace(/[\p{Cf}\p{Cs}\p{Zl}\p{Zp}\u007f-\u009f]/gu, "·");
  if (/^\p{M}/u.test(text)) text = "◌" + text;
  return text.replace(/ /g, "␣") || "∅";
}

const SPECIAL = new Set(["<sos>", "<eos>", "<pad>"]);
export const isEnd = (token) => token === "<eos>";

// A space before a word is part of many tokens; it is shown as a gap.
export function word(token) {
  if (isEnd(token)) return h("bdi", { class: "special" }, "end");
  return h("bdi", { class: SPECIAL.has(token) ? "special" : null }, /^ [^ ]/.test(token) ? [h("i", {}, "␣"), visible(token.slice(1))] : visible(token));
}

const RIGHT_TO_LEFT = /[\p{Script=Hebrew}\p{Script=Arabic}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/u;
// The direction of tokens in a row: that of their first letter.
export function direction(tokens) {
  const strong = tokens.filter((t) => !SPECIAL.has(t)).join("").match(/\p{L}/u);
  return strong && RIGHT_TO_LEFT.test(strong[0]) ? "rtl" : "ltr";
}

export const percent = (p) => (p >= 0.9995 ? "100%" : p >= 0.995 || p < 0.01 ? (p < 0.0005 ? "<0.1%" : (100 * p).toFixed(1) + "%") : Math.round(100 * p) + "%");
export const number = (x) => x.toFixed(Math.abs(x) >= 100 ? 1 : 2).replace("-", "−");
export const counted = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;

// A bar whose length is a share; `style` as an attribute would be refused by the content security policy.
export function bar(share) {
  const made = h("span", { class: "meter", "aria-hidden": "true" }, h("span", {}));
  made.firstChild.style.width = `${Math.max(1, 100 * share)}%`;
  return made;
}
