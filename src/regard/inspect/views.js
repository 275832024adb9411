// The views. Each is a function that fills a panel, and may return what to do once the panel is laid out.

const tokensOf = (name) => data.tokens[name] || [];

function choice(label, names, chosen, choose) {
  const buttons = names.map((name, i) => h("button", { type: "button", "aria-pressed": String(i === chosen), click: () => choose(i) }, name));
  return h("div", { class: "control", role: "group", "aria-label": label }, h("span", {}, label), h("div", { class: "choice" }, buttons));
}
function select(label, names, chosen, choose) {
  const list = h("select", { "aria-label": label, change: () => choose(list.selectedIndex) }, names.map((name) => h("option", {}, name)));
  list.selectedIndex = chosen;
  return h("label", { class: "control" }, h("span", {}, label), list);
}
const pick = (label, names, chosen, choose) => (names.join("").length > 64 || names.length > 16 ? select : choice)(label, names, chosen, choose);
const told = (from, weight, to) => [h("b", {}, word(from)), weight === null ? "" : "  attends to  ", weight === null ? "" : h("b", {}, word(to)), weight === null ? "" : "  with  " + weight.toFixed(weight < 0.1 ? 3 : 2)];

const VIEWS = [];
const view = (name, title, when, fill) => VIEWS.push({ name, title, when, fill });

view("alignment", "Alignment", () => data.alignment.length > 0, (panel, room) => {
  const entry = data.alignment[state.alignment], m = plane(entry.weights, 0);
  const rows = tokensOf("output"), columns = tokensOf("source");
  const strings = links({
    rows, columns, at: m.at, max: m.max, chosen: state.pinned, label: "Lines between the source and the output",
    rowsName: "output", columnsName: "source",
    onHover: (t, s) => { if (t !== null) grid.mark(t, null); else if (s === null) grid.mark(null); },
    onPick: (t) => { state.pinned = t === null ? undefined : t; if (t !== null) state.step = t; },
  });
  const grid = matrix({
    rows, columns, at: m.at, max: m.max, room: room - 44, mirrored: rightToLeft("source"), label: "Attention of the output, down, over the source, across",
    tell: (t, s) => (s === null ? told(rows[t], m.at(t, best(m, t)), columns[best(m, t)]) : told(rows[t], m.at(t, s), columns[s])),
    onHover: (t) => strings.mark(t),
    onPick: (t) => { state.step = t; go("output"); },
  });
  put(panel,
    h("div", { class: "controls" },
      data.alignment.length > 1 ? select("weights", data.alignment.map((a) => a.name), state.alignment, (i) => { state.alignment = i; refresh(); }) : null,
      legend(m.max)),
    h("div", { class: "beside" },
      h("section", { class: "card" }, h("h2", {}, "Each output token (below) and the source tokens that it attends to (above)"), strings.node),
      h("section", { class: "card" }, h("h2", {}, "The same as a matrix"), grid.node)));
  return strings.settle;
});

const best = (m, t) => { let at = 0; for (let s = 1; s < m.S; s++) if (m.at(t, s) > m.at(t, at)) at = s; return at; };

// Attention rollout: a layer passes on half of what it was given and half of what its heads brought, from the first on.
const ROLLED = -2;
const rolls = (map) => map.rows === map.columns && data.maps.filter((m) => m.kind === map.kind).length > 1;
const rolled = new Map();
function roll(map) {
  if (rolled.has(map.name)) return rolled.get(map.name);
  const m = plane(map.weights, -1), n = m.T, under = data.maps.find((o) => o.kind === map.kind && o.layer === map.layer - 1);
  const below = under ? roll(under) : null, out = new Float32Array(n * n);
  for (let t = 0; t < n; t++) for (let k = 0; k < n; k++) {
    const share = 0.5 * m.data[t * n + k] + (t === k ? 0.5 : 0);
    if (share < 1e-7) continue;
    if (!below) { out[t * n + k] += share; continue; }
    for (let s = 0; s < n; s++) out[t * n + s] += share * below.data[k * n + s];
  }
  const made = { T: n, S: n, data: out, max: out.reduce((a, b) => Math.max(a, b), 0), at: (t, s) => out[t * n + s] };
  rolled.set(map.name, made);
  return made;
}
const chosen = (map) => (state.head === ROLLED && rolls(map) ? roll(map) : plane(map.weights, map.heads.length > 1 ? Math.max(-1, state.head) : 0));
// Another map: the head of the same number, if it has one, else the mean.
function changeMap(index) {
  const before = data.maps[state.map], map = data.maps[index];
  state.map = index;
  state.head = state.head === ROLLED ? (rolls(map) ? ROLLED : -1) : state.head < 0 ? -1 : map.heads.indexOf(before.heads[state.head]);
}

function mapControls() {
  const kinds = [...new Set(data.maps.map((m) => m.kind))];
  const current = data.maps[state.map];
  const layers = data.maps.map((m, i) => [m, i]).filter(([m]) => m.kind === current.kind);
  const heads = ["mean", ...current.heads.map((n) => String(n + 1)), ...(rolls(current) ? ["rollout"] : [])];
  return [
    kinds.length > 1 ? choice("attention", kinds.map(kindName), kinds.indexOf(current.kind), (i) => {
      const same = data.maps.findIndex((m) => m.kind === kinds[i] && m.layer === current.layer);
      changeMap(same >= 0 ? same : data.maps.findIndex((m) => m.kind === kinds[i]));
      state.pinnedHead = undefined; refresh();
    }) : null,
    layers.length > 1 ? pick("layer", layers.map(([m]) => String(m.layer + 1)), layers.findIndex(([, i]) => i === state.map), (i) => {
      changeMap(layers[i][1]); refresh();
    }) : null,
    heads.length > 2 ? pick("head", heads, state.head === ROLLED ? heads.length - 1 : state.head + 1, (i) => { state.head = i > current.heads.length ? ROLLED : i - 1; refresh(); }) : null,
  ];
}

view("heads", "Heads", () => data.maps.length > 0, (panel, room) => {
  const map = data.maps[state.map], m = chosen(map);
  const rows = tokensOf(map.rows), columns = tokensOf(map.columns);
  const strings = links({
    rows, columns, at: m.at, max: m.max, upright: true, chosen: state.pinnedHead, label: "Queries and keys",
    rowsName: map.rows, columnsName: map.columns,
    onHover: (t, s) => { if (t !== null) grid.mark(t, null); else if (s === null) grid.mark(null); },
    onPick: (t) => { state.pinnedHead = t === null ? undefined : t; },
  });
  const grid = matrix({
    rows, columns, at: m.at, max: m.max, room: room > 780 ? room - 470 : room - 44, mirrored: rightToLeft(map.columns), label: `${kindName(map.kind)} attention, layer ${map.layer + 1}`,
    tell: (t, s) => (s === null ? told(rows[t], m.at(t, best(m, t)), columns[best(m, t)]) : told(rows[t], m.at(t, s), columns[s])),
    onHover: (t) => strings.mark(t),
    onPick: (t) => walkTo(map, t),
  });
  put(panel, h("div", { class: "controls" }, mapControls(), legend(m.max)),
    h("section", { class: "card split" },
      h("div", {}, h("h2", {}, state.head === ROLLED && rolls(map) ? `What is left of each (right) in each (left) after layer ${map.layer + 1}` : "Queries (left) and the keys that they attend to (right)"), strings.node),
      h("div", {}, h("h2", {}, "As a matrix"), grid.node)));
  return strings.settle;
});

view("model", "All heads", () => data.maps.some((m) => m.heads.length > 1) || data.maps.length > 1, (panel, room) => {
  const kinds = [...new Set(data.maps.map((m) => m.kind))];
  put(panel, h("p", { class: "dim" }, "Every head of every layer, each with its own scale: queries down, keys across. Choose one to enlarge it."),
    kinds.map((kind) => {
      const maps = data.maps.filter((m) => m.kind === kind);
      const most = Math.max(...maps.map((m) => Math.max(...m.heads) + 1));
      const size = clamp(Math.floor((room - 110) / most) - 18, 28, 104);
      const grid = h("div", { class: "grid", style: { gridTemplateColumns: `max-content repeat(${most}, max-content)` } }, h("span"));
      for (let k = 0; k < most; k++) grid.append(h("span", { class: "side", style: { textAlign: "center" } }, String(k + 1)));
      const cells = [];
      for (const map of maps) {
        grid.append(h("span", { class: "side" }, `layer ${map.layer + 1}`));
        for (let k = 0; k < most; k++) {
          const index = map.heads.indexOf(k);
          cells.push(index < 0 ? null : h("button", {
            class: "thumb", type: "button", "aria-label": `${kindName(kind)} layer ${map.layer + 1} head ${k + 1}`,
            click: () => { state.map = data.maps.indexOf(map); state.head = index; go("heads"); },
          }, thumbnail(plane(map.weights, index), size, rightToLeft(map.columns))));
          grid.append(cells[cells.length - 1] || h("span", { class: "dim", title: "pruned", style: { textAlign: "center" } }, "·"));
        }
      }
      roving(cells, { across: most });
      return h("section", { class: "card" }, h("h2", {}, kindName(kind)), h("div", { class: "scroll" }, grid));
    }));
});

view("output", "Output", () => data.steps.length > 0, (panel) => {
  const most = Math.max(...data.steps.map((s) => s.entropy), 1);
  const lines = data.steps.map((step, t) => {
    const choose = () => { state.step = t; refresh(); };
    return h("tr", { class: t === state.step ? "on" : "", "aria-expanded": String(t === state.step), click: choose,
      keydown: (event) => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(); } } },
      h("td", {}, String(t + 1)), h("td", {}, word(step.token)),
      h("td", {}, h("span", { class: "bar", style: { width: 70 * step.probability + "px" } }), percent(step.probability)),
      h("td", {}, h("span", { class: "bar other", style: { width: (46 * step.entropy) / most + "px" } }), step.entropy.toFixed(2)),
      h("td", {}, step.candidates.slice(0, 4).map(([token, p]) => h("span", { class: "chip" + (token === step.token ? " chosen" : "") }, word(token), h("small", {}, percent(p))))));
  });
  // The details of the chosen step stand right below it, so that they are on the screen wherever it is.
  const step = data.steps[state.step];
  const details = h("tr", { class: "details" }, h("td"), h("td", { colspan: 4 },
    h("h2", {}, data.unit === "class" ? "Class: " : `Token ${state.step + 1}: `, word(step.token)), candidates(step),
    speaking() >= 0 ? h("button", { class: "quiet", type: "button", click: () => { state.walk = speaking(); state.walkLayer = data.walks[state.walk].layers.length - 1; state.walkRow = state.step; go("walk"); } }, "Walk through this step") : null));
  roving(lines, { start: state.step });
  put(panel, h("section", { class: "card scroll" }, h("table", { class: "steps" },
    h("thead", {}, h("tr", {}, ["", data.unit, "probability", "entropy, bits", "candidates"].map((t) => h("th", { scope: "col" }, t)))),
    h("tbody", {}, lines.flatMap((line, t) => (t === state.step ? [line, details] : [line]))))));
  return () => { for (const line of [details, lines[state.step]]) line.scrollIntoView({ block: "nearest" }); };
});

// The walk that ends in a prediction.
const speaking = () => data.walks.findIndex((w) => w.layers[w.layers.length - 1].some((c) => c.show === "prediction"));

function candidates(step) {
  const top = Math.max(...step.candidates.map((c) => c[1]), 1e-9);
  return h("table", {}, h("thead", {}, h("tr", {}, ["", "logit", "probability"].map((t) => h("th", { scope: "col" }, t)))),
    h("tbody", {}, step.candidates.map(([token, p, logit]) => h("tr", { class: token === step.token ? "chosen" : null },
      h("td", {}, word(token)), h("td", { class: "dim" }, show(logit)), h("td", {}, h("span", { class: "bar", style: { width: (150 * p) / top + "px" } }), percent(p))))));
}

view("lens", "Logit lens", () => data.lens.length > 0, (panel) => {
  const read = h("p", { class: "read", "aria-live": "polite" }, "Point at a cell to see the runners-up.");
  const tell = (lens, t) => put(read, `${lens.label}, ${data.unit} ${t + 1}:  `, ...lens.steps[t].map(([token, p]) => h("span", { class: "chip" }, h("b", {}, word(token)), h("small", {}, percent(p)))));
  const cells = [];
  const line = (lens) => h("tr", {}, h("th", { scope: "row" }, lens.label), lens.steps.map((step, t) => {
    const [token, p] = step[0], rgb = colour(0.75 * p);
    cells.push(h("span", { class: "cell" + (token === data.steps[t].token ? " chosen" : ""), style: { backgroundColor: css(rgb), color: inkOn(rgb) },
      pointerenter: () => tell(lens, t), focus: () => tell(lens, t) }, h("bdi", {}, shorter(visible(token), 12)), h("small", { dir: "ltr" }, percent(p))));
    return h("td", {}, cells[cells.length - 1]);
  }));
  const rows = data.lens.map(line), mirrored = rightToLeft("output");
  roving(cells, { across: data.steps.length, mirrored });
  const last = data.lens[data.lens.length - 1].steps, other = data.steps.filter((step, t) => last[t][0][0] !== step.token).length;
  const differs = data.unit === "class" ? "The class shown is another one." : `At ${other} of ${data.steps.length} tokens the output has another one, which the search or a given text preferred.`;
  put(panel, h("p", { class: "dim" }, `What each layer would predict if the LM head read its vector. The last row is what the whole model finds most probable. ${other ? differs + " " : ""}The stronger the colour the surer; bold agrees with the output.`),
    h("section", { class: "card" }, h("div", { class: "scroll" }, h("table", { class: "lens", dir: mirrored ? "rtl" : null },
      h("thead", {}, h("tr", {}, h("th"), data.steps.map((step) => h("th", { scope: "col" }, word(step.token))))),
      h("tbody", {}, rows))), read));
});

const plural = (name) => name.replace(/^\w+/, "$&s"); // pair of dimensions -> pairs of dimensions

view("position", "Position", () => data.positions.length > 0, (panel, room) => {
  const found = data.positions[state.picture], [T, S] = found.values.shape, all = values(found.values);
  const at = (t, s) => all[t * S + s] * found.values.scale;
  let max = 0;
  for (const v of all) max = Math.max(max, Math.abs(v) * found.values.scale);
  const numbersFrom = (count, first) => Array.from({ length: count }, (_, i) => String(i + first));
  const grid = matrix({
    rows: numbersFrom(T, found.rows === "head" ? 1 : 0), columns: numbersFrom(S, found.first_column), at, max, signed: true, stretch: true, tall: found.rows === "head" ? 300 : 520, first: found.first_column, firstRow: found.rows === "head" ? 1 : 0, numbered: true,
    room: room - 44, label: found.caption, tell: (t, s) => [`${found.rows} ${found.rows === "head" ? t + 1 : t}`, s === null ? "" : `, ${found.columns} ${s + found.first_column}: `, h("b", {}, s === null ? "" : show(at(t, s)))],
  });
  const cards = [h("section", { class: "card" }, h("p", {}, found.caption), h("p", { class: "dim" }, `${plural(found.rows)} down, ${plural(found.columns)} across`), grid.node)];
  if (found.columns === "dimension") {
    const N = Math.min(T, 64), like = new Float32Array(N * N);
    for (let i = 0; i < N; i++) for (let j = 0; j < N; j++) {
      let dot = 0, a = 0, b = 0;
      for (let s = 0; s < S; s++) { const u = at(i, s), v = at(j, s); dot += u * v; a += u * u; b += v * v; }
      like[i * N + j] = dot / (Math.sqrt(a * b) || 1);
    }
    const near = matrix({ rows: numbersFrom(N, 0), columns: numbersFrom(N, 0), at: (t, s) => like[t * N + s], max: 1, signed: true, numbered: true, first: 0, firstRow: 0, tall: 400, room: Math.min(room - 44, 480), label: "How alike two positions are",
      tell: (t, s) => [`positions ${t} and ${s === null ? t : s}: `, h("b", {}, show(like[t * N + (s === null ? t : s)]))] });
    cards.push(h("section", { class: "card" }, h("h2", {}, "How alike two positions are"), h("p", { class: "dim" }, "The cosine between their vectors: a model can tell near from far by it."), near.node));
  }
  put(panel, h("div", { class: "controls" },
    data.positions.length > 1 ? choice("stack", data.positions.map((p) => p.name), state.picture, (i) => { state.picture = i; refresh(); }) : null, legend(max, true)), ...cards);
});
