// Figures: a matrix with tokens on both axes, and lines between two rows of words.

const FONT = () => getComputedStyle(document.body).fontFamily;
const directionOf = (label) => (/^\P{L}*[\p{Script=Hebrew}\p{Script=Arabic}\p{Script=Syriac}\p{Script=Thaana}\p{Script=Nko}]/u.test(label) ? "rtl" : "ltr"); // of one token
const clamp = (x, low, high) => Math.max(low, Math.min(high, x));

function canvasOf(width, height) {
  const ratio = Math.min(2, window.devicePixelRatio || 1);
  const made = h("canvas", { "aria-hidden": "true" });
  made.width = Math.max(1, Math.round(width * ratio));
  made.height = Math.max(1, Math.round(height * ratio));
  made.style.width = width + "px";
  made.style.height = height + "px";
  const pen = made.getContext("2d");
  pen.scale(ratio, ratio);
  return [made, pen];
}

// options: rows, columns (tokens), at(t, s), max, label, room (px), signed, mirrored (columns from the right), onPick(t, s), onHover(t, s), tell(t, s) -> nodes
function matrix(options) {
  const T = options.rows.length, S = options.columns.length;
  const measure = document.createElement("canvas").getContext("2d");
  measure.font = "14px " + FONT();
  const text = (token) => shorter(visible(leads(token) ? token.slice(1) : token), 14);
  const rows = options.rows.map(text), columns = options.columns.map(text);
  const widths = (list) => list.map((t) => measure.measureText(t).width);
  const rowWidth = Math.min(130, Math.max(12, ...widths(rows))) + 12;
  const columnWidths = widths(columns), widest = Math.min(130, Math.max(10, ...columnWidths));
  const cell = clamp(Math.floor(Math.min((options.room - rowWidth - 24) / S, (options.tall || 640) / T)), 2, 38);
  const wide = options.stretch ? clamp(Math.floor((options.room - rowWidth - 8) / S), 2, 14) : cell;
  const fits = columnWidths.map((w) => w + 2 <= wide), flat = fits.every(Boolean);
  const named = wide >= (options.numbered ? 20 : 12), rowNamed = cell >= 12; // smaller ones are named when pointed at
  const first = options.first === undefined ? 1 : options.first;
  const left = rowNamed ? rowWidth : 44, top = !named ? 22 : flat ? 24 : Math.ceil(widest * 0.87 + 14);
  const lean = named && !flat ? widest * 0.5 : 12;
  const width = left + wide * S + lean, height = top + cell * T + 2;
  const [base, pen] = canvasOf(width, height);
  const [over, mark] = canvasOf(width, height);

  const place = (s) => (options.mirrored ? S - 1 - s : s); // the column of a key, and the key of a column
  const shade = (v) => (options.signed ? colour(0.5 + v / (2 * options.max || 1), "over") : colour(v / (options.max || 1)));
  const gap = Math.min(wide, cell) >= (options.signed ? 12 : 8) ? 1 : 0;
  if (gap) {
    const inside = wide >= 30 && !options.signed;
    pen.textAlign = "center";
    for (let t = 0; t < T; t++) for (let s = 0; s < S; s++) {
      const v = options.at(t, s), rgb = shade(v);
      pen.fillStyle = css(rgb);
      pen.fillRect(left + place(s) * wide, top + t * cell, wide - gap, cell - gap);
      if (inside && v >= 0.095) {
        pen.font = "11px " + FONT();
        pen.fillStyle = inkOn(rgb);
        pen.fillText(v >= 0.995 ? "1" : v.toFixed(2).slice(1), left + place(s) * wide + (wide - gap) / 2, top + t * cell + cell / 2 + 4);
      }
    }
  } else {
    const image = new ImageData(S, T);
    for (let t = 0, i = 0; t < T; t++) for (let s = 0; s < S; s++, i += 4) {
      const rgb = shade(options.at(t, place(s)));
      image.data[i] = rgb[0]; image.data[i + 1] = rgb[1]; image.data[i + 2] = rgb[2]; image.data[i + 3] = 255;
    }
    const small = document.createElement("canvas");
    small.width = S; small.height = T;
    small.getContext("2d").putImageData(image, 0, 0);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(small, left, top, wide * S, cell * T);
  }
  pen.strokeStyle = ink("--line");
  pen.strokeRect(left - 0.5, top - 0.5, wide * S + (gap ? 0 : 1), cell * T + (gap ? 0 : 1));
  pen.fillStyle = ink("--ink");
  pen.textBaseline = "alphabetic";
  const special = (token) => (SPECIAL.has(token) ? ink("--faint") : ink("--ink"));
  const size = (px) => Math.min(14, Math.max(10, px - 1)) + "px " + FONT();
  if (rowNamed) {
    pen.font = size(cell); pen.textAlign = "right";
    rows.forEach((label, t) => { pen.fillStyle = special(options.rows[t]); pen.direction = directionOf(label); pen.fillText(label, left - 8, top + t * cell + cell / 2 + 4.5, rowWidth - 8); });
  } else ticks(T, options.firstRow === undefined ? 1 : options.firstRow, (t, name) => { pen.textAlign = "right"; pen.fillText(name, left - 6, top + (t + 0.5) * cell + 4); });
  if (named) {
    pen.font = size(wide);
    columns.forEach((label, s) => {
      pen.fillStyle = special(options.columns[s]);
      pen.direction = directionOf(label);
      const x = left + place(s) * wide + (wide - gap) / 2;
      if (fits[s]) { pen.textAlign = "center"; pen.fillText(label, x, top - 8); return; }
      pen.save(); pen.translate(x + (fits.some(Boolean) ? -3 : 4), top - 6); pen.rotate(-Math.PI / 3); pen.textAlign = "left"; pen.fillText(label, 0, 0, 126); pen.restore();
    });
  } else ticks(S, first, (s, name) => { pen.textAlign = "center"; pen.fillText(name, left + (place(s) + 0.5) * wide, top - 6); });
  function ticks(count, from, draw) {
    pen.font = "11px " + FONT(); pen.fillStyle = ink("--faint");
    const every = [10, 20, 25, 50, 100, 200].find((n) => count / n <= 12) || 500;
    for (let i = 0; i < count; i++) if ((i + from) % every === 0) draw(i, String(i + from).replace("-", "−"));
  }

  const read = h("p", { class: "read", "aria-live": "polite" });
  const figure = h("div", { class: "figure", tabindex: 0, role: "application", "aria-label": options.label + ". Arrow keys move, Enter chooses." }, base, over);
  let at = null;
  function show_(t, s) {
    at = t === null ? null : [t, s];
    mark.clearRect(0, 0, width, height);
    if (at === null) { put(read); return; }
    const accent = ink("--accent");
    mark.strokeStyle = accent;
    mark.globalAlpha = 0.12; mark.fillStyle = accent;
    mark.fillRect(left, top + t * cell, wide * S, cell);
    if (s !== null) mark.fillRect(left + place(s) * wide, top, wide, cell * T);
    mark.globalAlpha = 1; mark.lineWidth = 1.5;
    if (s !== null) mark.strokeRect(left + place(s) * wide - 0.5, top + t * cell - 0.5, Math.max(3, wide), Math.max(3, cell));
    put(read, ...options.tell(t, s));
  }
  const find = (event) => {
    const box = base.getBoundingClientRect();
    const s = Math.floor((event.clientX - box.left - left) / wide), t = Math.floor((event.clientY - box.top - top) / cell);
    return t >= 0 && t < T && s < S && s >= -4 ? [t, place(clamp(s, 0, S - 1))] : null;
  };
  const hover = (t, s) => { show_(t, s); if (options.onHover) options.onHover(t, s); };
  figure.addEventListener("pointermove", (event) => { const hit = find(event); hover(hit ? hit[0] : null, hit ? hit[1] : null); });
  figure.addEventListener("pointerleave", () => hover(null, null));
  figure.addEventListener("click", (event) => { const hit = find(event); if (hit && options.onPick) options.onPick(...hit); });
  figure.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (step) {
      event.preventDefault();
      const [t, s] = at || [0, -1];
      hover(clamp(t + step[0], 0, T - 1), clamp((s === null ? 0 : s) + (options.mirrored ? -step[1] : step[1]), 0, S - 1));
    } else if ((event.key === "Enter" || event.key === " ") && at && options.onPick) { event.preventDefault(); options.onPick(...at); }
    else if (event.key === "Escape") hover(null, null);
  });
  return { node: h("div", {}, h("div", { class: "scroll" }, figure), read), mark: (t, s) => (t === null ? show_(null, null) : show_(t, s)) };
}

function legend(max, signed) {
  const [strip, pen] = canvasOf(96, 10);
  for (let i = 0; i < 96; i++) { pen.fillStyle = css(colour(i / 95, signed ? "over" : "up")); pen.fillRect(i, 0, 1, 10); }
  const name = (x) => (Math.abs(x) >= 0.095 ? show(x, 3) : x.toPrecision(2)).replace("-", "−");
  return h("span", { class: "legend" }, signed ? name(-max) : "0", strip, name(max));
}

// options: rows, columns (tokens), at, max, upright, label, chosen, onHover(t), onPick(t), rowsName, columnsName (of token rows)
function links(options) {
  const T = options.rows.length, S = options.columns.length;
  let pinned = options.chosen === undefined ? null : options.chosen;
  const bold = Math.max(options.max, 0.25); // weights that are all small stay thin
  const lines = h("svg", { "aria-hidden": "true" });
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
    if (!options.upright) { // a short text spreads out, within reason
      const [up, down] = box.querySelectorAll(".words");
      for (const side of [up, down]) { side.style.minWidth = "0"; side.style.gap = "3px"; }
      const gap = Math.min(clamp((box.clientWidth - up.offsetWidth) / S, 0, 20), clamp((box.clientWidth - down.offsetWidth) / T, 0, 20));
      for (const side of [up, down]) { side.style.gap = 3 + gap + "px"; side.style.minWidth = "100%"; }
    }
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
  const stroke = (t, s, faint) => {
    const share = options.at(t, s) / bold;
    const path = h("path", { d: curve(t, s) });
    path.style.strokeOpacity = String(Math.min(1, 0.1 + 0.9 * share) * (faint ? 0.13 : 1));
    path.style.strokeWidth = String(0.6 + 3.2 * share);
    return path;
  };
  // Everything that is worth a line: of each row the largest few, so that long texts stay quick.
  const few = T * S > 4000 ? 3 : 8;
  const worth = [];
  for (let t = 0; t < T; t++) {
    const order = Array.from({ length: S }, (_, s) => s).filter((s) => options.at(t, s) > 0.04 * bold);
    order.sort((a, b) => options.at(t, b) - options.at(t, a));
    for (const s of order.slice(0, few)) worth.push([t, s]);
  }
  let resting = null;
  function draw(t, s) {
    if (!places) return;
    const all = t === null && s === null;
    if (all && resting) { lines.replaceChildren(...resting); return; }
    const made = all || worth.length < 1500 ? worth.map(([a, b]) => stroke(a, b, !all)) : [];
    if (all) resting = made;
    if (t !== null) for (let k = 0; k < S; k++) if (options.at(t, k) > 0.01 * options.max) made.push(stroke(t, k, false));
    if (s !== null) for (let k = 0; k < T; k++) if (options.at(k, s) > 0.01 * options.max) made.push(stroke(k, s, false));
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
  function look(t, s) {
    const row = t === null && s === null ? pinned : t;
    draw(row, s);
    tint(row, s);
  }
  function point(t, s) {
    look(t, s);
    if (options.onHover) options.onHover(t, s);
  }
  function pin(t) {
    pinned = t;
    rows.forEach((node, k) => node.setAttribute("aria-pressed", String(k === t)));
    look(null, null);
    if (options.onPick) options.onPick(t);
  }
  const settle = () => { locate(); resting = null; look(null, null); };
  return { node: options.upright ? box : h("div", { class: "scroll" }, box), settle, mark: (t, s) => look(t, s === undefined ? null : s) };
}

// A small picture of one head: where the picture has fewer points than the matrix, the largest weight of each wins.
function thumbnail(m, size, mirrored) {
  const [made, pen] = canvasOf(size, size);
  const T = m.T, S = m.S, pixels = Math.min(made.width, 168);
  const high = Math.min(T, pixels), wide = Math.min(S, pixels);
  const image = new ImageData(wide, high);
  const best = new Float32Array(wide * high);
  for (let t = 0; t < T; t++) {
    const y = Math.floor((t * high) / T);
    for (let s = 0; s < S; s++) {
      const i = y * wide + Math.floor(((mirrored ? S - 1 - s : s) * wide) / S), v = m.data[t * S + s];
      if (v > best[i]) best[i] = v;
    }
  }
  for (let i = 0; i < best.length; i++) {
    const rgb = colour(best[i] / (m.max || 1));
    image.data[4 * i] = rgb[0]; image.data[4 * i + 1] = rgb[1]; image.data[4 * i + 2] = rgb[2]; image.data[4 * i + 3] = 255;
  }
  const small = document.createElement("canvas");
  small.width = wide; small.height = high;
  small.getContext("2d").putImageData(image, 0, 0);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(small, 0, 0, size, size);
  return made;
}
