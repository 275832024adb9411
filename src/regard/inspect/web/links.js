// Lines between two rows of words.

import { clamp, h, put } from "./core.js";
import { colour, css, ink, inkOn } from "./colours.js";
import { roving } from "./controls.js";
import { directionOf, figureLabel, rightToLeft, SPECIAL, word } from "./text.js";

const INSET = 7; // pixels between a word and the edge of its button

// options: rows, columns (tokens), at, max, upright, label, chosen, onHover(t), onPick(t), rowsName, columnsName (of token rows);
//          layers: [{at, stroke()}], several sets of lines in their own colours, of which `at` is the largest
export function links(options) {
  const T = options.rows.length, S = options.columns.length;
  let pinned = options.chosen === undefined || options.chosen >= T ? null : options.chosen;
  const bold = Math.max(options.max, 0.25); // weights that are all small stay thin
  const layers = options.layers || [{ at: options.at, stroke: null }];
  const lines = h("svg", { "aria-hidden": "true", width: 0, height: 0 });
  const button = (token, i, isRow) => h("button", {
    class: "word", type: "button", title: token.length > 12 ? token : null, "aria-pressed": isRow ? String(pinned === i) : null,
    pointerenter: () => point(isRow ? i : null, isRow ? null : i), pointerleave: () => point(null, null),
    focus: () => point(isRow ? i : null, isRow ? null : i), blur: () => point(null, null),
    click: () => { if (isRow) pin(pinned === i ? null : i); },
  }, word(token));
  const rows = options.rows.map((token, i) => button(token, i, true));
  const columns = options.columns.map((token, i) => button(token, i, false));
  const sides = (list, isRow) => {
    const name = isRow ? options.rowsName : options.columnsName, mirrored = !options.upright && rightToLeft(name);
    roving(list, { mirrored, start: isRow && pinned !== null ? pinned : 0 });
    return h("div", { class: options.upright ? null : "words", role: "group", "aria-label": name, dir: mirrored ? "rtl" : null }, list);
  };
  const space = h("div", { style: options.upright ? {} : { height: "110px" } });
  const box = h("div", { class: "links " + (options.upright ? "columns" : ""), role: "group", "aria-label": options.label });
  put(box, ...(options.upright ? [sides(rows, true), sides(columns, false)] : [sides(columns, false), space, sides(rows, true)]), lines);

  let places = null;
  function locate() {
    if (!options.upright) spread(box, S, T);
    const origin = box.getBoundingClientRect();
    const spot = (node, isRow) => {
      const b = node.getBoundingClientRect();
      if (options.upright) return [isRow ? b.right - origin.left + 4 : b.left - origin.left - 4, b.top - origin.top + b.height / 2];
      return [b.left - origin.left + b.width / 2, isRow ? b.top - origin.top - 3 : b.bottom - origin.top + 3];
    };
    places = [rows.map((n) => spot(n, true)), columns.map((n) => spot(n, false))];
    lines.setAttribute("width", box.scrollWidth);
    lines.setAttribute("height", box.scrollHeight);
  }
  function curve(t, s) {
    const [[x1, y1], [x2, y2]] = [places[0][t], places[1][s]];
    if (options.upright) { const m = (x1 + x2) / 2; return `M${x1} ${y1}C${m} ${y1} ${m} ${y2} ${x2} ${y2}`; }
    const m = (y1 + y2) / 2;
    return `M${x1} ${y1}C${x1} ${m} ${x2} ${m} ${x2} ${y2}`;
  }
  const look = (layer, t, s, faint) => {
    const share = layer.at(t, s) / bold;
    return { opacity: Math.min(1, 0.1 + 0.9 * share) * (faint ? 0.13 : 1), line: 0.6 + 3.2 * share };
  };
  const stroke = (layer, t, s, faint) => {
    const path = h("path", { d: curve(t, s) }), { opacity, line } = look(layer, t, s, faint);
    path.style.strokeOpacity = String(opacity);
    path.style.strokeWidth = String(line);
    if (layer.stroke) path.style.stroke = layer.stroke();
    return path;
  };
  const worth = layers.flatMap((layer) => worthALine(layer, T, S, bold));
  let resting = null;
  function draw(t, s) {
    if (!places) return;
    const all = t === null && s === null;
    if (all && resting) { lines.replaceChildren(...resting); return; }
    const made = all || worth.length < 1500 ? worth.map(([layer, a, b]) => stroke(layer, a, b, !all)) : [];
    if (all) resting = made;
    for (const layer of layers) {
      if (t !== null) for (let k = 0; k < S; k++) if (layer.at(t, k) > 0.01 * options.max) made.push(stroke(layer, t, k, false));
      if (s !== null) for (let k = 0; k < T; k++) if (layer.at(k, s) > 0.01 * options.max) made.push(stroke(layer, k, s, false));
    }
    lines.replaceChildren(...made);
  }
  function tint(t, s) {
    const paint = (node, share) => {
      const rgb = share === null ? null : colour(share);
      node.style.backgroundColor = rgb ? css(rgb) : "";
      node.style.color = rgb ? inkOn(rgb) : "";
      const inner = node.firstChild;
      if (inner) inner.style.color = rgb ? "inherit" : "";
    };
    columns.forEach((node, k) => { paint(node, t === null ? null : options.at(t, k) / (options.max || 1)); node.classList.toggle("on", k === s); });
    rows.forEach((node, k) => { paint(node, s === null ? null : options.at(k, s) / (options.max || 1)); node.classList.toggle("on", k === t); });
  }
  function aim(t, s) {
    const at = t === null && s === null ? pinned : t;
    draw(at, s);
    tint(at, s);
  }
  function point(t, s) {
    aim(t, s);
    if (options.onHover) options.onHover(t, s);
  }
  function pin(t) {
    pinned = t;
    rows.forEach((node, k) => node.setAttribute("aria-pressed", String(k === t)));
    aim(null, null);
    if (options.onPick) options.onPick(t);
  }
  // As a figure of its own: the words where they stand, and the lines that are worth one, or those of the chosen word.
  function paint(surface) {
    const origin = box.getBoundingClientRect();
    const chosen = pinned === null ? worth : layers.flatMap((layer) => Array.from({ length: S }, (_, s) => [layer, pinned, s]).filter(([, t, s]) => layer.at(t, s) > 0.01 * options.max));
    for (const [layer, t, s] of chosen) surface.path(curve(t, s), { stroke: layer.stroke ? layer.stroke() : ink("--accent"), ...look(layer, t, s, false) });
    const write = (node, token, align) => {
      const b = node.getBoundingClientRect(), special = SPECIAL.has(token), x = { left: b.left + INSET, center: b.left + b.width / 2, right: b.right - INSET }[align];
      surface.text(figureLabel(token), x - origin.left, b.top - origin.top + b.height / 2 + 5, { size: special ? 12 : 15, align, fill: ink(special ? "--faint" : "--ink"), direction: directionOf(token), most: b.width });
    };
    rows.forEach((node, t) => write(node, options.rows[t], options.upright ? "right" : "center"));
    columns.forEach((node, s) => write(node, options.columns[s], options.upright ? "left" : "center"));
  }
  const reach = () => { const { left } = box.getBoundingClientRect(); return Math.max(...[...rows, ...columns].map((node) => node.getBoundingClientRect().right - left)); };
  const settle = () => { locate(); resting = null; aim(null, null); };
  return {
    node: options.upright ? box : h("div", { class: "scroll" }, box), settle, mark: (t, s) => aim(t, s === undefined ? null : s),
    paint, get width() { return reach(); }, get height() { return box.scrollHeight; },
  };
}

// A short text spreads out, within reason.
function spread(box, S, T) {
  const [up, down] = box.querySelectorAll(".words");
  for (const side of [up, down]) { side.style.minWidth = "0"; side.style.gap = "3px"; }
  const gap = Math.min(clamp((box.clientWidth - up.offsetWidth) / S, 0, 20), clamp((box.clientWidth - down.offsetWidth) / T, 0, 20));
  for (const side of [up, down]) { side.style.gap = 3 + gap + "px"; side.style.minWidth = "100%"; }
}

// Everything that is worth a line: of each row the largest few, so that long texts stay quick.
function worthALine(layer, T, S, bold) {
  const few = T * S > 4000 ? 3 : 8, worth = [];
  for (let t = 0; t < T; t++) {
    const order = Array.from({ length: S }, (_, s) => s).filter((s) => layer.at(t, s) > 0.04 * bold);
    order.sort((a, b) => layer.at(t, b) - layer.at(t, a));
    for (const s of order.slice(0, few)) worth.push([layer, t, s]);
  }
  return worth;
}
