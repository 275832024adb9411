// @ts-check
// Building the document. Text from outside only ever becomes a text node.

export const SVG = "http://www.w3.org/2000/svg";
const ATTRIBUTES = new Set(
  (
    "accept autocapitalize autocomplete autocorrect checked class colspan d dir disabled download for height hidden " +
    "href id lang list max maxlength min multiple name open placeholder role rows sandbox scope spellcheck step " +
    "tabindex title type value width"
  ).split(" "),
);

/** @typedef {Node | string | number | boolean | null | undefined} Child */
/** @typedef {Child | Child[] | Child[][]} Children */

/**
 * An element. Functions become event listeners; attributes that are null, undefined or false are left out.
 * @template {string} T
 * @param {T} tag
 * @param {Record<string, unknown> | null} [props]
 * @param {...Children} children
 * @returns {T extends keyof HTMLElementTagNameMap ? HTMLElementTagNameMap[T] : HTMLElement}
 */
export function h(tag, props, ...children) {
  const svg = tag === "svg" || tag === "path";
  const element = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (typeof value === "function") element.addEventListener(name, /** @type {EventListener} */ (value));
    else if (value === null || value === undefined || value === false) continue;
    else if (name === "style") Object.assign(element.style, value);
    else if (/^aria-[a-z]+$/.test(name)) element.setAttribute(name, String(value));
    else if (ATTRIBUTES.has(name)) element.setAttribute(name, value === true ? "" : String(value));
    else throw new Error(`no attribute ${name}`);
  }
  put(element, ...children);
  // @ts-expect-error the two ways to create an element have no common type
  return element;
}

/**
 * Replace the children of an element; empty ones are left out.
 * @template {Element} E
 * @param {E} parent
 * @param {...Children} children
 * @returns {E}
 */
export function put(parent, ...children) {
  const filled = children.flat(3).filter((child) => child || child === 0);
  parent.replaceChildren(...filled.map((child) => (child instanceof Node ? child : String(child))));
  return parent;
}

// The keyboard: one stop of the Tab key for many nodes

// Arrow keys move among nodes, up and down by `across`; null is a gap.
export function roving(nodes, { across = 1, start = 0, mirrored = false } = {}) {
  let at = Math.max(0, nodes[start] ? start : nodes.findIndex(Boolean));
  const sideways = mirrored ? -1 : 1;
  nodes.forEach((node, i) => {
    if (!node) return;
    node.setAttribute("tabindex", i === at ? "0" : "-1");
    node.addEventListener("focus", () => {
      nodes[at].setAttribute("tabindex", "-1");
      at = i;
      node.setAttribute("tabindex", "0");
    });
    node.addEventListener("keydown", (event) => {
      const step = {
        ArrowLeft: -sideways,
        ArrowRight: sideways,
        ArrowUp: -across,
        ArrowDown: across,
        Home: 1,
        End: -1,
      }[event.key];
      if (!step) return;
      let next = event.key === "Home" ? 0 : event.key === "End" ? nodes.length - 1 : i + step;
      while (next in nodes && !nodes[next]) next += step;
      if (nodes[next]) {
        event.preventDefault();
        nodes[next].focus();
      }
    });
  });
}

// Arrow keys move among nodes on a plane: to the nearest one in that direction. centres: [x, y] of each.
export function spatial(nodes, centres) {
  const away = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  let at = 0;
  const focus = (i) => {
    nodes[at].setAttribute("tabindex", "-1");
    at = i;
    nodes[i].setAttribute("tabindex", "0");
  };
  const nearest = (from, [dx, dy]) => {
    let found = -1,
      least = Infinity;
    centres.forEach(([x, y], i) => {
      const ahead = (x - centres[from][0]) * dx + (y - centres[from][1]) * dy,
        aside = Math.abs((x - centres[from][0]) * dy) + Math.abs((y - centres[from][1]) * dx);
      if (ahead > 1 && ahead + 3 * aside < least) {
        least = ahead + 3 * aside;
        found = i;
      }
    });
    return found;
  };
  nodes.forEach((node, i) => {
    node.setAttribute("tabindex", i === 0 ? "0" : "-1");
    node.addEventListener("focus", () => focus(i));
    node.addEventListener("keydown", (event) => {
      const next =
        event.key === "Home"
          ? 0
          : event.key === "End"
            ? nodes.length - 1
            : away[event.key]
              ? nearest(i, away[event.key])
              : -1;
      if (next >= 0 && event.key in { ...away, Home: 1, End: 1 }) {
        event.preventDefault();
        nodes[next].focus();
      }
    });
  });
}
