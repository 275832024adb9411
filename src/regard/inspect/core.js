"use strict";
// Data, colours, and building the document. Text from outside only ever becomes a text node.

const data = JSON.parse(document.getElementById("data").textContent);
let numbers = null; // the ArrayBuffer behind all arrays

async function unpack(text) {
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

const KINDS = { u2: Uint16Array, i2: Int16Array };
const NONE = -32768;

function values(entry) {
  if (!entry.values) {
    const count = entry.shape.reduce((a, b) => a * b, 1);
    entry.values = new KINDS[entry.type](numbers, entry.at, count);
  }
  return entry.values;
}

// A row along the last axis, as numbers; null where there is none.
function row(entry, ...index) {
  const shape = entry.shape, width = shape[shape.length - 1], all = values(entry);
  let start = 0;
  for (let i = 0; i < shape.length - 1; i++) start = start * shape[i] + index[i];
  start *= width;
  const out = new Array(width);
  for (let i = 0; i < width; i++) {
    const v = all[start + i];
    out[i] = entry.type === "i2" && v === NONE ? null : v * entry.scale;
  }
  return out;
}

// One matrix of weights with its largest number. `head` -1 is the mean over heads.
const planes = new Map();
function plane(entry, head) {
  const key = entry.at + ":" + head;
  if (planes.has(key)) return planes.get(key);
  const all = values(entry), scale = entry.scale;
  const [T, S] = entry.shape.slice(-2), size = T * S, heads = entry.shape.length === 3 ? entry.shape[0] : 1;
  const out = new Float32Array(size);
  let max = 0;
  for (let i = 0; i < size; i++) {
    let v = 0;
    if (head >= 0) v = all[head * size + i];
    else { for (let h = 0; h < heads; h++) v += all[h * size + i]; v /= heads; }
    out[i] = v * scale;
    if (out[i] > max) max = out[i];
  }
  const made = { T, S, data: out, max, at: (t, s) => out[t * S + s] };
  if (planes.size > 40) planes.delete(planes.keys().next().value);
  planes.set(key, made);
  return made;
}

// The document

const SVG = "http://www.w3.org/2000/svg";
const SAFE = /^(class|aria-[a-z]+|role|type|tabindex|title|lang|dir|colspan|scope|id|for|value|d|width|height)$/;

function h(tag, props, ...children) {
  const made = tag === "svg" || tag === "path" ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value === null || value === undefined) continue;
    else if (name === "style") Object.assign(made.style, value);
    else if (SAFE.test(name)) made.setAttribute(name, String(value));
  }
  for (const child of children.flat(3)) {
    if (child === null || child === undefined) continue;
    made.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return made;
}

const put = (parent, ...children) => { parent.replaceChildren(...children.flat().filter((c) => c)); return parent; };

// A token as it can be seen: blanks and controls shown, a lone mark on a circle.
function visible(token) {
  let text = token.replace(/ /g, "␣").replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/[\u0000-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)));
  text = text.replace(/[\p{Cf}\p{Cs}\p{Zl}\p{Zp}\u007f-\u009f]/gu, "·");
  if (/^\p{M}/u.test(text)) text = "◌" + text;
  return text || "∅";
}

const cutter = typeof Intl !== "undefined" && Intl.Segmenter ? new Intl.Segmenter() : null;
function shorter(text, most) {
  const parts = cutter ? Array.from(cutter.segment(text), (s) => s.segment) : Array.from(text);
  return parts.length > most ? parts.slice(0, most - 1).join("") + "…" : text;
}

const SPECIAL = new Set(["<sos>", "<eos>", "<pad>"]);
// A space before a word is part of many tokens: it is shown, but quietly.
const leads = (token) => /^ [^ ]/.test(token);
const word = (token) => h("bdi", { class: SPECIAL.has(token) ? "special" : null }, leads(token) ? [h("i", {}, "␣"), visible(token.slice(1))] : visible(token));
// A token row is written in the direction of its text: features, which stand before it, are written like names.
const rightToLeft = (name) => data.directions[name] === "rtl";

// One stop of the Tab key for many nodes: arrow keys move among them, up and down by `across`; null is a gap.
function roving(nodes, { across = 1, start = 0, mirrored = false } = {}) {
  let at = Math.max(0, nodes[start] ? start : nodes.findIndex(Boolean));
  const sideways = mirrored ? -1 : 1;
  nodes.forEach((node, i) => {
    if (!node) return;
    node.setAttribute("tabindex", i === at ? "0" : "-1");
    node.addEventListener("focus", () => { nodes[at].setAttribute("tabindex", "-1"); at = i; node.setAttribute("tabindex", "0"); });
    node.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -sideways, ArrowRight: sideways, ArrowUp: -across, ArrowDown: across, Home: 1, End: -1 }[event.key];
      if (!step) return;
      let next = event.key === "Home" ? 0 : event.key === "End" ? nodes.length - 1 : i + step;
      while (next in nodes && !nodes[next]) next += step;
      if (nodes[next]) { event.preventDefault(); nodes[next].focus(); }
    });
  });
}

// Numbers for people

function show(x, digits = 3) {
  if (x === null || x === undefined) return "−∞";
  const text = Math.abs(x) >= 100 ? x.toFixed(0) : Math.abs(x) >= 10 ? x.toFixed(digits - 2) : x.toFixed(digits - 1);
  return text.replace("-", "−");
}
const percent = (p) => (p === null ? "" : p >= 0.995 && p < 0.9995 ? (100 * p).toFixed(1) + "%" : p >= 0.01 || p === 0 ? Math.round(100 * p) + "%" : p >= 0.0005 ? (100 * p).toFixed(1) + "%" : "<0.1%");

// Colours: one hue whose lightness alone carries the number, and two hues around nothing for signed ones.
// Both can be told apart without seeing red and green.

const RAMPS = {
  light: { up: [[255, 255, 255], [214, 228, 241], [128, 178, 216], [44, 112, 176], [8, 45, 99]], over: [[164, 84, 8], [222, 168, 104], [252, 250, 247], [138, 178, 214], [22, 84, 152]] },
  dark: { up: [[26, 29, 34], [28, 55, 86], [38, 98, 150], [98, 168, 226], [226, 242, 255]], over: [[240, 170, 92], [138, 88, 36], [30, 33, 39], [42, 90, 138], [136, 194, 248]] },
};
const theme = () => (document.documentElement.dataset.theme === "dark" ? "dark" : "light");
const tables = {};
function table(kind) {
  const key = theme() + kind;
  if (!tables[key]) {
    const stops = RAMPS[theme()][kind];
    tables[key] = Array.from({ length: 256 }, (_, i) => {
      const x = (i / 255) * (stops.length - 1), k = Math.min(stops.length - 2, Math.floor(x));
      return stops[k].map((c, j) => Math.round(c + (x - k) * (stops[k + 1][j] - c)));
    });
  }
  return tables[key];
}
const colour = (share, kind = "up") => table(kind)[Math.max(0, Math.min(255, Math.round(255 * share)))];
const css = (rgb) => `rgb(${rgb[0]},${rgb[1]},${rgb[2]})`;
const light = (rgb) => rgb.reduce((sum, c, i) => sum + [0.2126, 0.7152, 0.0722][i] * (c / 255) ** 2.2, 0);
const inkOn = (rgb) => (light(rgb) > 0.19 ? "#0d1014" : "#f7f9fb");
const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// What is chosen, shared by all views

const state = { view: "alignment", map: 0, head: -1, step: 0, alignment: 0, picture: 0, walk: 0, walkLayer: 0, walkHead: 0, walkRow: 1 }; // head: an index among those of the map; walkHead: the number of a head, which outlives pruning
const KIND_NAMES = { cross: "Cross", encoder: "Encoder self", decoder: "Decoder self" };
const kindName = (kind) => KIND_NAMES[kind] || kind;
