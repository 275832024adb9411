// @ts-check
// Figures of attention: a matrix with tokens on both axes, and lines between two rows of words.

import { direction } from "../shared/direction.js";
import { h, put, roving } from "../shared/dom.js";
import { isSpecial, word } from "../shared/text.js";
import { clamp } from "./core.js";
import { canvasSurface, colour, css, ink, inkOn, textWidth } from "./surface.js";
import { figureLabel, rightToLeft, show } from "./words.js";

// A matrix with tokens on both axes, and the legend of its colours.

// options: rows, columns (tokens), at(t, s), max, label, room (px), signed, mirrored (columns from the right),
// shade(t, s) -> rgb, onPick(t, s), onHover(t, s), tell(t, s) -> nodes; for numeric axes: numbered, first, firstRow,
// stretch, tall
export function matrix(options) {
  const layout = matrixLayout(options);
  const { T, S, left, top, wide, cell, place, width, height } = layout;
  const base = canvasSurface(width, height),
    over = canvasSurface(width, height);
  paintMatrix(base, options, layout);
  const read = h("p", { class: "read", "aria-live": "polite" });
  const figure = h(
    "div",
    {
      class: "figure",
      tabindex: 0,
      role: "application",
      "aria-label": options.label + ". Arrow keys move, Enter chooses.",
    },
    base.node,
    over.node,
  );
  let at = null;
  function mark(t, s) {
    at = t === null ? null : [t, s];
    over.clear();
    if (at === null) {
      put(read);
      return;
    }
    const accent = ink("--accent");
    over.rect(left, top + t * cell, wide * S, cell, { fill: accent, opacity: 0.12 });
    if (s !== null) over.rect(left + place(s) * wide, top, wide, cell * T, { fill: accent, opacity: 0.12 });
    if (s !== null)
      over.rect(left + place(s) * wide - 0.5, top + t * cell - 0.5, Math.max(3, wide), Math.max(3, cell), {
        stroke: accent,
        line: 1.5,
      });
    put(read, ...options.tell(t, s));
  }
  const find = (event) => {
    const box = base.node.getBoundingClientRect();
    const s = Math.floor((event.clientX - box.left - left) / wide),
      t = Math.floor((event.clientY - box.top - top) / cell);
    return t >= 0 && t < T && s < S && s >= -4 ? [t, place(clamp(s, 0, S - 1))] : null;
  };
  const hover = (t, s) => {
    mark(t, s);
    if (options.onHover) options.onHover(t, s);
  };
  figure.addEventListener("pointermove", (event) => {
    const hit = find(event);
    hover(hit ? hit[0] : null, hit ? hit[1] : null);
  });
  figure.addEventListener("pointerleave", () => hover(null, null));
  figure.addEventListener("click", (event) => {
    const hit = find(event);
    if (hit && options.onPick) options.onPick(...hit);
  });
  figure.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (step) {
      event.preventDefault();
      const [t, s] = at || [0, -1];
      hover(
        clamp(t + step[0], 0, T - 1),
        clamp((s === null ? 0 : s) + (options.mirrored ? -step[1] : step[1]), 0, S - 1),
      );
    } else if ((event.key === "Enter" || event.key === " ") && at && options.onPick) {
      event.preventDefault();
      options.onPick(...at);
    } else if (event.key === "Escape") hover(null, null);
  });
  return {
    node: h("div", {}, h("div", { class: "scroll" }, figure), read),
    mark: (t, s) => (t === null ? mark(null, null) : mark(t, s)),
    width,
    height,
    paint: (surface) => paintMatrix(surface, options, layout),
  };
}

// The layout. Labels that do not fit above their column are slanted; axes too fine for labels get numbers.
function matrixLayout(options) {
  const T = options.rows.length,
    S = options.columns.length;
  const rows = options.rows.map(figureLabel),
    columns = options.columns.map(figureLabel);
  const widths = (list) => list.map((text) => textWidth(text, 14));
  const rowWidth = Math.min(130, Math.max(12, ...widths(rows))) + 12;
  const columnWidths = widths(columns),
    widest = Math.min(130, Math.max(10, ...columnWidths));
  const cell = clamp(Math.floor(Math.min((options.room - rowWidth - 24) / S, (options.tall || 640) / T)), 2, 38);
  const wide = options.stretch ? clamp(Math.floor((options.room - rowWidth - 8) / S), 2, 14) : cell;
  const fits = columnWidths.map((w) => w + 2 <= wide),
    flat = fits.every(Boolean);
  const named = wide >= (options.numbered ? 20 : 12),
    rowNamed = cell >= 12; // smaller cells show their labels on hover
  const left = rowNamed ? rowWidth : 44,
    top = !named ? 22 : flat ? 24 : Math.ceil(widest * 0.87 + 14);
  const lean = named && !flat ? widest * 0.5 : 12;
  const place = (s) => (options.mirrored ? S - 1 - s : s); // maps a key to its column, and a column to its key
  const gap = Math.min(wide, cell) >= (options.signed ? 12 : 8) ? 1 : 0;
  return {
    T,
    S,
    rows,
    columns,
    rowWidth,
    cell,
    wide,
    fits,
    named,
    rowNamed,
    left,
    top,
    place,
    gap,
    width: left + wide * S + lean,
    height: top + cell * T + 2,
  };
}

export const shadeOf = (v, max, signed) => (signed ? colour(0.5 + v / (2 * max || 1), "over") : colour(v / (max || 1)));

function paintMatrix(surface, options, layout) {
  const { T, S, left, top, wide, cell, gap } = layout;
  const shade = options.shade || ((t, s) => shadeOf(options.at(t, s), options.max, options.signed));
  if (gap) paintCells(surface, options, layout, shade);
  else surface.pixels(matrixImage(layout, shade), left, top, wide * S, cell * T);
  surface.rect(left - 0.5, top - 0.5, wide * S + (gap ? 0 : 1), cell * T + (gap ? 0 : 1), { stroke: ink("--line") });
  paintRowNames(surface, options, layout);
  paintColumnNames(surface, options, layout);
}

function paintCells(surface, options, { T, S, left, top, wide, cell, gap, place }, shade) {
  const inside = wide >= 30 && !options.signed;
  for (let t = 0; t < T; t++)
    for (let s = 0; s < S; s++) {
      const v = options.at(t, s),
        rgb = shade(t, s),
        x = left + place(s) * wide,
        y = top + t * cell;
      surface.rect(x, y, wide - gap, cell - gap, { fill: css(rgb) });
      if (inside && v >= 0.095)
        surface.text(v >= 0.995 ? "1" : v.toFixed(2).slice(1), x + (wide - gap) / 2, y + cell / 2 + 4, {
          size: 11,
          align: "center",
          fill: inkOn(rgb),
        });
    }
}

function matrixImage({ T, S, place }, shade) {
  const image = new ImageData(S, T);
  for (let t = 0, i = 0; t < T; t++)
    for (let s = 0; s < S; s++, i += 4) {
      const rgb = shade(t, place(s));
      image.data[i] = rgb[0];
      image.data[i + 1] = rgb[1];
      image.data[i + 2] = rgb[2];
      image.data[i + 3] = 255;
    }
  return image;
}

const tokenInk = (token) => (isSpecial(token) ? ink("--faint") : ink("--ink"));
const nameSize = (px) => Math.min(14, Math.max(10, px - 1));

function paintRowNames(surface, options, { T, rows, rowWidth, left, top, cell, rowNamed }) {
  const from = options.firstRow === undefined ? 1 : options.firstRow;
  if (!rowNamed) {
    eachTick(T, from, (t, name) =>
      surface.text(name, left - 6, top + (t + 0.5) * cell + 4, { size: 11, align: "right", fill: ink("--faint") }),
    );
    return;
  }
  rows.forEach((name, t) =>
    surface.text(name, left - 8, top + t * cell + cell / 2 + 4.5, {
      size: nameSize(cell),
      align: "right",
      fill: tokenInk(options.rows[t]),
      direction: direction(name),
      most: rowWidth - 8,
    }),
  );
}

function paintColumnNames(surface, options, { S, columns, left, top, wide, gap, fits, named, place }) {
  const from = options.first === undefined ? 1 : options.first;
  if (!named) {
    eachTick(S, from, (s, name) =>
      surface.text(name, left + (place(s) + 0.5) * wide, top - 6, { size: 11, align: "center", fill: ink("--faint") }),
    );
    return;
  }
  columns.forEach((name, s) => {
    const style = { size: nameSize(wide), fill: tokenInk(options.columns[s]), direction: direction(name) },
      x = left + place(s) * wide + (wide - gap) / 2;
    if (fits[s]) surface.text(name, x, top - 8, { ...style, align: "center" });
    else surface.text(name, x + (fits.some(Boolean) ? -3 : 4), top - 6, { ...style, angle: -Math.PI / 3, most: 126 });
  });
}

function eachTick(count, from, draw) {
  const every = [10, 20, 25, 50, 100, 200].find((n) => count / n <= 12) || 500;
  for (let i = 0; i < count; i++) if ((i + from) % every === 0) draw(i, String(i + from).replace("-", "−"));
}

export function legend(max, signed) {
  const strip = canvasSurface(96, 10);
  for (let i = 0; i < 96; i++) strip.rect(i, 0, 1, 10, { fill: css(colour(i / 95, signed ? "over" : "up")) });
  const name = (x) => (Math.abs(x) >= 0.095 ? show(x, 3) : x.toPrecision(2)).replace("-", "−");
  return h("span", { class: "legend" }, signed ? name(-max) : "0", strip.node, name(max));
}

// Lines between two rows of words.

const INSET = 7; // pixels between a word and the edge of its button

// options: rows, columns (tokens), at, max, upright, label, chosen, onHover(t), onPick(t), rowsName, columnsName (of
// token rows); layers: [{at, stroke()}], sets of lines with their own colours; `at` is their maximum
export function links(options) {
  const T = options.rows.length,
    S = options.columns.length;
  let pinned = options.chosen === undefined || options.chosen >= T ? null : options.chosen;
  const bold = Math.max(options.max, 0.25); // keep lines thin when all weights are small
  const layers = options.layers || [{ at: options.at, stroke: null }];
  const lines = h("svg", { "aria-hidden": "true", width: 0, height: 0 });
  const button = (token, i, isRow) =>
    h(
      "button",
      {
        class: "word",
        type: "button",
        title: token.length > 12 ? token : null,
        "aria-pressed": isRow ? String(pinned === i) : null,
        pointerenter: () => point(isRow ? i : null, isRow ? null : i),
        pointerleave: () => point(null, null),
        focus: () => point(isRow ? i : null, isRow ? null : i),
        blur: () => point(null, null),
        click: () => {
          if (isRow) pin(pinned === i ? null : i);
        },
      },
      word(token),
    );
  const rows = options.rows.map((token, i) => button(token, i, true));
  const columns = options.columns.map((token, i) => button(token, i, false));
  const sides = (list, isRow) => {
    const name = isRow ? options.rowsName : options.columnsName,
      mirrored = !options.upright && rightToLeft(name);
    roving(list, { mirrored, start: isRow && pinned !== null ? pinned : 0 });
    return h(
      "div",
      { class: options.upright ? null : "words", role: "group", "aria-label": name, dir: mirrored ? "rtl" : null },
      list,
    );
  };
  const space = h("div", { style: options.upright ? {} : { height: "110px" } });
  const box = h("div", {
    class: "links " + (options.upright ? "columns" : ""),
    role: "group",
    "aria-label": options.label,
  });
  put(
    box,
    ...(options.upright
      ? [sides(rows, true), sides(columns, false)]
      : [sides(columns, false), space, sides(rows, true)]),
    lines,
  );

  let places = null;
  function locate() {
    if (!options.upright) spread(box, S, T);
    const origin = box.getBoundingClientRect();
    const spot = (node, isRow) => {
      const b = node.getBoundingClientRect();
      if (options.upright)
        return [isRow ? b.right - origin.left + 4 : b.left - origin.left - 4, b.top - origin.top + b.height / 2];
      return [b.left - origin.left + b.width / 2, isRow ? b.top - origin.top - 3 : b.bottom - origin.top + 3];
    };
    places = [rows.map((n) => spot(n, true)), columns.map((n) => spot(n, false))];
    lines.setAttribute("width", String(box.scrollWidth));
    lines.setAttribute("height", String(box.scrollHeight));
  }
  function curve(t, s) {
    const [[x1, y1], [x2, y2]] = [places[0][t], places[1][s]];
    if (options.upright) {
      const m = (x1 + x2) / 2;
      return `M${x1} ${y1}C${m} ${y1} ${m} ${y2} ${x2} ${y2}`;
    }
    const m = (y1 + y2) / 2;
    return `M${x1} ${y1}C${x1} ${m} ${x2} ${m} ${x2} ${y2}`;
  }
  const look = (layer, t, s, faint) => {
    const share = layer.at(t, s) / bold;
    return { opacity: Math.min(1, 0.1 + 0.9 * share) * (faint ? 0.13 : 1), line: 0.6 + 3.2 * share };
  };
  const stroke = (layer, t, s, faint) => {
    const path = h("path", { d: curve(t, s) }),
      { opacity, line } = look(layer, t, s, faint);
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
    if (all && resting) {
      lines.replaceChildren(...resting);
      return;
    }
    const made = all || worth.length < 1500 ? worth.map(([layer, a, b]) => stroke(layer, a, b, !all)) : [];
    if (all) resting = made;
    for (const layer of layers) {
      if (t !== null)
        for (let k = 0; k < S; k++) if (layer.at(t, k) > 0.01 * options.max) made.push(stroke(layer, t, k, false));
      if (s !== null)
        for (let k = 0; k < T; k++) if (layer.at(k, s) > 0.01 * options.max) made.push(stroke(layer, k, s, false));
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
    columns.forEach((node, k) => {
      paint(node, t === null ? null : options.at(t, k) / (options.max || 1));
      node.classList.toggle("on", k === s);
    });
    rows.forEach((node, k) => {
      paint(node, s === null ? null : options.at(k, s) / (options.max || 1));
      node.classList.toggle("on", k === t);
    });
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
  // As a standalone figure: the words in place, with the visible lines or those of the chosen word.
  function paint(surface) {
    const origin = box.getBoundingClientRect();
    const chosen =
      pinned === null
        ? worth
        : layers.flatMap((layer) =>
            Array.from({ length: S }, (_, s) => [layer, pinned, s]).filter(
              ([, t, s]) => layer.at(t, s) > 0.01 * options.max,
            ),
          );
    for (const [layer, t, s] of chosen)
      surface.path(curve(t, s), {
        stroke: layer.stroke ? layer.stroke() : ink("--accent"),
        ...look(layer, t, s, false),
      });
    const write = (node, token, align) => {
      const b = node.getBoundingClientRect(),
        special = isSpecial(token),
        x = { left: b.left + INSET, center: b.left + b.width / 2, right: b.right - INSET }[align];
      surface.text(figureLabel(token), x - origin.left, b.top - origin.top + b.height / 2 + 5, {
        size: special ? 12 : 15,
        align,
        fill: ink(special ? "--faint" : "--ink"),
        direction: direction(token),
        most: b.width,
      });
    };
    rows.forEach((node, t) => write(node, options.rows[t], options.upright ? "right" : "center"));
    columns.forEach((node, s) => write(node, options.columns[s], options.upright ? "left" : "center"));
  }
  const reach = () => {
    const { left } = box.getBoundingClientRect();
    return Math.max(...[...rows, ...columns].map((node) => node.getBoundingClientRect().right - left));
  };
  const settle = () => {
    locate();
    resting = null;
    aim(null, null);
  };
  return {
    node: options.upright ? box : h("div", { class: "scroll" }, box),
    settle,
    mark: (t, s) => aim(t, s === undefined ? null : s),
    paint,
    get width() {
      return reach();
    },
    get height() {
      return box.scrollHeight;
    },
  };
}

// Spread out a short text, within limits.
function spread(box, S, T) {
  const [up, down] = box.querySelectorAll(".words");
  for (const side of [up, down]) {
    side.style.minWidth = "0";
    side.style.gap = "3px";
  }
  const gap = Math.min(
    clamp((box.clientWidth - up.offsetWidth) / S, 0, 20),
    clamp((box.clientWidth - down.offsetWidth) / T, 0, 20),
  );
  for (const side of [up, down]) {
    side.style.gap = 3 + gap + "px";
    side.style.minWidth = "100%";
  }
}

// The visible lines: the largest few of each row, so that long texts stay fast.
function worthALine(layer, T, S, bold) {
  const few = T * S > 4000 ? 3 : 8,
    worth = [];
  for (let t = 0; t < T; t++) {
    const order = Array.from({ length: S }, (_, s) => s).filter((s) => layer.at(t, s) > 0.04 * bold);
    order.sort((a, b) => layer.at(t, b) - layer.at(t, a));
    for (const s of order.slice(0, few)) worth.push([layer, t, s]);
  }
  return worth;
}
