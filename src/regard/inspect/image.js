// The image: what the class token or one of the patches attends to, and the mean attention distance of heads by layer.

const GLOW = [244, 154, 36];

// The picture at its own size, made once.
let film = null;
function filmOf(shot) {
  if (film) return film;
  const bytes = atob(shot.pixels), image = new ImageData(shot.width, shot.height);
  for (let i = 0; i < shot.width * shot.height; i++) for (let c = 0; c < 4; c++) {
    image.data[4 * i + c] = c === 3 ? 255 : bytes.charCodeAt(i * shot.channels + (shot.channels === 3 ? c : 0));
  }
  film = document.createElement("canvas");
  film.width = shot.width; film.height = shot.height;
  film.getContext("2d").putImageData(image, 0, 0);
  return film;
}

// weights: one per patch; the picture fades where there is none, and glows where there is much.
function paintImage(pen, shot, side, weights, max) {
  const across = shot.width / shot.size, scale = side / shot.width, cell = shot.size * scale;
  pen.imageSmoothingEnabled = shot.width > side;
  pen.drawImage(filmOf(shot), 0, 0, side, shot.height * scale);
  weights.forEach((w, i) => {
    const share = w / (max || 1), x = (i % across) * cell, y = Math.floor(i / across) * cell;
    pen.fillStyle = `rgba(10,14,20,${0.5 * (1 - share)})`;
    pen.fillRect(x, y, cell, cell);
    pen.fillStyle = `rgba(${GLOW},${0.78 * share})`;
    pen.fillRect(x, y, cell, cell);
  });
}

function patchWeights(m, from) {
  const list = Array.from({ length: m.S - 1 }, (_, s) => m.at(from, s + 1));
  return [list, Math.max(...list, 1e-9)];
}

VIEWS.unshift({ name: "image", title: "Image", when: () => data.image !== null, fill: (panel, room) => {
  const shot = data.image, map = data.maps[state.map], names = tokensOf("source");
  const m = chosen(map);
  state.patch = state.patch || 0; // 0: the class token
  const across = shot.width / shot.size, down = shot.height / shot.size;
  const side = Math.round(clamp(Math.min(room - 44, 460, (460 * shot.width) / shot.height), 96, 460)), cell = side / across;
  const high = (side * shot.height) / shot.width;
  const [base, pen] = canvasOf(side, high), [over, mark] = canvasOf(side, high);
  const [weights, max] = patchWeights(m, state.patch);
  paintImage(pen, shot, side, weights, max);
  pen.strokeStyle = "rgba(255,255,255,.16)";
  if (cell >= 10) for (let i = 1; i < Math.max(across, down); i++) {
    if (i < across) pen.strokeRect(i * cell - 0.5, -1, 0, high + 2);
    if (i < down) pen.strokeRect(-1, i * cell - 0.5, side + 2, 0);
  }
  const read = h("p", { class: "read", "aria-live": "polite" });
  const who = (t) => (t === 0 ? "the class token" : `patch ${names[t]}`);
  let at = null;
  const outline = (t, width) => {
    if (t === 0) return;
    const x = ((t - 1) % across) * cell, y = Math.floor((t - 1) / across) * cell;
    for (const [ink_, line] of [["#0a0e14", width + 2], ["#ffffff", width]]) { mark.strokeStyle = ink_; mark.lineWidth = line; mark.strokeRect(x + 1, y + 1, cell - 2, cell - 2); }
  };
  function point(t) {
    at = t;
    mark.clearRect(0, 0, side, high);
    outline(state.patch, 2.5);
    if (t !== null) outline(t, 1);
    const rest = `${percent(m.at(state.patch, 0))} of its attention goes to the class token.`;
    put(read, h("b", {}, state.patch === 0 ? "The class token" : `Patch ${names[state.patch]}`), ...(t === null ? [": ", rest] : ["  attends to  ", h("b", {}, who(t)), `  with  ${m.at(state.patch, t).toFixed(3)}`]));
  }
  const choose = (t) => { state.patch = t === state.patch ? 0 : t; refresh(); };
  const find = (event) => {
    const box = base.getBoundingClientRect();
    return 1 + clamp(Math.floor((event.clientY - box.top) / cell), 0, down - 1) * across + clamp(Math.floor((event.clientX - box.left) / cell), 0, across - 1);
  };
  const figure = h("div", { class: "figure photo", tabindex: 0, role: "application", "aria-label": "The image. Arrow keys move over patches, Enter shows the attention of one, Escape that of the class token.",
    pointermove: (event) => point(find(event)), pointerleave: () => point(null), click: (event) => choose(find(event)),
    keydown: (event) => {
      const step = { ArrowUp: -across, ArrowDown: across, ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (step) { event.preventDefault(); const next = (at || state.patch || 1) + (at === null ? 0 : step); point(clamp(next, 1, across * down)); }
      else if ((event.key === "Enter" || event.key === " ") && at) { event.preventDefault(); choose(at); }
      else if (event.key === "Escape" && state.patch) { state.patch = 0; refresh(); }
    } }, base, over);
  point(null);
  put(panel, h("div", { class: "controls" }, mapControls(),
      choice("from", ["class token", state.patch ? `patch ${names[state.patch]}` : "a patch"], state.patch ? 1 : 0, (i) => { if (i === 0) { state.patch = 0; refresh(); } else if (!state.patch) { state.patch = Math.floor(down / 2) * across + Math.floor(across / 2) + 1; refresh(); } })),
    h("div", { class: "photos" },
      h("section", { class: "card" }, h("h2", {}, state.head === ROLLED ? `What ${who(state.patch)} is made of after layer ${map.layer + 1}` : `Attention of ${who(state.patch)} in ${map.heads.length > 1 && state.head >= 0 ? `head ${map.heads[state.head] + 1}` : "layer " + (map.layer + 1)}`), figure, read,
        h("p", { class: "dim" }, "Choose a patch to see its attention, once more to see that of the class token.")),
      h("section", { class: "card" }, h("h2", {}, `All heads of layer ${map.layer + 1}`), headRow_(shot, map), Object.keys(data.distances).length ? distances(map) : null)));
} });

function headRow_(shot, map) {
  const size = 84;
  const shots = map.heads.map((number, index) => {
    const [made, pen] = canvasOf(size, (size * shot.height) / shot.width);
    paintImage(pen, shot, size, ...patchWeights(plane(map.weights, index), state.patch));
    return h("button", { class: "thumb", type: "button", "aria-pressed": String(state.head === index), "aria-label": `head ${number + 1}`,
      click: () => { state.head = state.head === index ? -1 : index; refresh(); } }, made, h("small", {}, String(number + 1)));
  });
  roving(shots, { start: Math.max(0, state.head) });
  return h("div", { class: "shots" }, shots);
}

// Mean distance by depth: a row of dots per layer, and the numbers.
function distances(current) {
  const maps = data.maps.filter((m) => m.name in data.distances);
  const top = Math.max(...maps.flatMap((m) => data.distances[m.name]), 1e-9);
  const wide = 300, high = 150, left = 34, bottom = 24;
  const [made, pen] = canvasOf(wide, high);
  const x = (i) => left + ((i + 0.5) * (wide - left)) / maps.length, y = (v) => 8 + (1 - v / top) * (high - bottom - 16);
  pen.font = "11px " + FONT(); pen.fillStyle = ink("--faint"); pen.strokeStyle = ink("--line"); pen.textAlign = "right";
  for (const v of [0, top / 2, top]) { pen.fillText(show(v, 2), left - 6, y(v) + 4); pen.strokeRect(left, Math.round(y(v)) - 0.5, wide - left, 0); }
  pen.textAlign = "center";
  const every = Math.ceil(maps.length / 12);
  maps.forEach((m, i) => { if (i % every === 0) pen.fillText(String(m.layer + 1), x(i), high - 8); });
  maps.forEach((m, i) => data.distances[m.name].forEach((v, k) => {
    const on = m === current && k === state.head;
    pen.beginPath(); pen.arc(x(i) + (data.distances[m.name].length > 1 ? (k / (data.distances[m.name].length - 1) - 0.5) * Math.min(14, (wide - left) / maps.length / 2) : 0), y(v), on ? 5 : 3.5, 0, 7);
    pen.fillStyle = on ? css(GLOW) : ink("--accent"); pen.globalAlpha = on ? 1 : 0.75; pen.fill(); pen.globalAlpha = 1;
  }));
  const most = Math.max(...maps.map((m) => Math.max(...m.heads) + 1));
  return h("div", { class: "far" }, h("h2", {}, "Attention distance by layer"), h("p", { class: "dim" }, "The mean distance between a patch and what it attends to, in pixels, by weight. Each dot is a head."), made,
    h("details", {}, h("summary", {}, "As numbers"), h("div", { class: "scroll" }, h("table", { class: "numbers" },
      h("thead", {}, h("tr", {}, h("th", {}, "layer"), Array.from({ length: most }, (_, k) => h("th", { scope: "col" }, String(k + 1))))),
      h("tbody", {}, maps.map((m) => h("tr", {}, h("th", { scope: "row", class: "token" }, String(m.layer + 1)), Array.from({ length: most }, (_, k) => {
        const index = m.heads.indexOf(k);
        return h("td", {}, index < 0 ? "·" : show(data.distances[m.name][index], 2));
      }))))))));
}
