// What the page shows, and building the document. Text from outside only ever becomes a text node.

// The trace that views read when they draw; it is replaced when a model in the page computes another.
export let data = null;
export function setData(next) { data = next; }

// Draw with another trace; what the drawing made must not read `data` later.
export function withData(other, draw) {
  const before = data;
  data = other;
  try { return draw(); } finally { data = before; }
}

const ARRAYS = { u2: Uint16Array, i2: Int16Array, f4: Float32Array };
const NONE = -32768; // in signed integers: no number

async function inflate(text) {
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

// Give every array of a stored trace its numbers.
export function attachNumbers(node, buffer) {
  if (node === null || typeof node !== "object") return;
  if (node.shape && node.type in ARRAYS)
    node.values = new ARRAYS[node.type](
      buffer,
      node.at,
      node.shape.reduce((a, b) => a * b, 1),
    );
  else for (const child of Object.values(node)) attachNumbers(child, buffer);
}

// The trace in the document, with its numbers.
export async function storedData() {
  const stored = JSON.parse(document.getElementById("data").textContent);
  attachNumbers(stored, await inflate(stored.numbers));
  return stored;
}

export const values = (entry) => entry.values;

// A row along the last axis, as numbers; null where there is none.
export function row(entry, ...index) {
  const shape = entry.shape, width = shape[shape.length - 1], all = values(entry);
  let start = 0;
  for (let i = 0; i < shape.length - 1; i++) start = start * shape[i] + index[i];
  start *= width;
  const out = new Array(width);
  for (let i = 0; i < width; i++) {
    const v = all[start + i];
    out[i] = (entry.type === "i2" && v === NONE) || !Number.isFinite(v) ? null : v * entry.scale;
  }
  return out;
}

// One matrix of weights with its largest number. `head` -1 is the mean over heads.
const planes = new WeakMap();
export function plane(entry, head) {
  if (!planes.has(entry)) planes.set(entry, new Map());
  const made = planes.get(entry);
  if (!made.has(head)) made.set(head, makePlane(entry, head));
  return made.get(head);
}

function makePlane(entry, head) {
  const all = values(entry), scale = entry.scale;
  const [T, S] = entry.shape.slice(-2), size = T * S, heads = entry.shape.length === 3 ? entry.shape[0] : 1;
  const out = new Float32Array(size);
  for (let i = 0; i < size; i++) {
    let v = 0;
    if (head >= 0) v = all[head * size + i];
    else { for (let h = 0; h < heads; h++) v += all[h * size + i]; v /= heads; }
    out[i] = v * scale;
  }
  return planeOf(out, T, S);
}

export function planeOf(numbers, T, S) {
  let max = 0;
  for (const v of numbers) if (v > max) max = v;
  return { T, S, data: numbers, max, at: (t, s) => numbers[t * S + s] };
}

// The key to which a query attends most.
export function strongest(m, t) {
  let at = 0;
  for (let s = 1; s < m.S; s++) if (m.at(t, s) > m.at(t, at)) at = s;
  return at;
}

export const clamp = (x, low, high) => Math.max(low, Math.min(high, x));

// The document

export const SVG = "http://www.w3.org/2000/svg";
const SAFE = new Set(
  (
    "class role type tabindex title lang dir colspan scope id for value d width height list placeholder min max step " +
    "rows accept autocomplete autocapitalize spellcheck maxlength hidden open disabled"
  ).split(" "),
);
const isSafe = (name) => SAFE.has(name) || /^aria-[a-z]+$/.test(name);

export function h(tag, props, ...children) {
  const made = tag === "svg" || tag === "path" ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value === null || value === undefined) continue;
    else if (name === "style") Object.assign(made.style, value);
    else if (isSafe(name)) made.setAttribute(name, String(value));
  }
  for (const child of children.flat(3)) {
    if (child === null || child === undefined) continue;
    made.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return made;
}

export const put = (parent, ...children) => {
  parent.replaceChildren(...children.flat().filter((c) => c));
  return parent;
};

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
      if (nodes[next]) { event.preventDefault(); nodes[next].focus(); }
    });
  });
}

// Arrow keys move among nodes on a plane: to the nearest one in that direction. centres: [x, y] of each.
export function spatial(nodes, centres) {
  const away = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  let at = 0;
  const focus = (i) => { nodes[at].setAttribute("tabindex", "-1"); at = i; nodes[i].setAttribute("tabindex", "0"); };
  const nearest = (from, [dx, dy]) => {
    let found = -1, least = Infinity;
    centres.forEach(([x, y], i) => {
      const ahead = (x - centres[from][0]) * dx + (y - centres[from][1]) * dy,
        aside = Math.abs((x - centres[from][0]) * dy) + Math.abs((y - centres[from][1]) * dx);
      if (ahead > 1 && ahead + 3 * aside < least) { least = ahead + 3 * aside; found = i; }
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
      if (next >= 0 && event.key in { ...away, Home: 1, End: 1 }) { event.preventDefault(); nodes[next].focus(); }
    });
  });
}
