// @ts-check
// Controls: choices and lists, head buttons, and the choice of an attention map.

import { h, roving } from "../shared/dom.js";
import { word } from "../shared/text.js";
import { data, plane, planeOf, strongest } from "./core.js";
import { go, refresh, shell, state } from "./tabs.js";
import { kindName } from "./words.js";

// chosen: the index of a name, or a predicate for names.
export function choice(label, names, chosen, choose) {
  const on = typeof chosen === "function" ? chosen : (i) => i === chosen;
  const buttons = names.map((name, i) =>
    h("button", { type: "button", "aria-pressed": String(on(i)), click: (event) => choose(i, event) }, name),
  );
  roving(buttons, {
    start: Math.max(
      0,
      names.findIndex((_, i) => on(i)),
    ),
  });
  return h(
    "div",
    { class: "control", role: "group", "aria-label": label },
    h("span", {}, label),
    h("div", { class: "choice" }, buttons),
  );
}

export function select(label, names, chosen, choose) {
  const list = h(
    "select",
    { "aria-label": label, change: () => choose(list.selectedIndex) },
    names.map((name) => h("option", {}, name)),
  );
  list.selectedIndex = chosen;
  return h("label", { class: "control" }, h("span", {}, label), list);
}

export const pick = (label, names, chosen, choose) =>
  (names.join("").length > 64 || names.length > 16 ? select : choice)(label, names, chosen, choose);

export const toggle = (label, on, title, turn) =>
  h("button", { type: "button", class: "quiet toggle", "aria-pressed": String(on), title, click: turn }, label);

// Head buttons: a click opens the head or, on a page with a model, silences it.

export const isSilenced = (map, index) => shell.live !== null && shell.live.isSilenced(map, index);

// A key press that toggles the silencing of a head.
export const silencing = (map, index) => (event) => {
  if (
    !shell.live ||
    index === null ||
    event.key !== "s" ||
    event.ctrlKey ||
    event.metaKey ||
    event.altKey ||
    event.target.tagName === "SELECT"
  )
    return;
  event.preventDefault();
  shell.live.silence(map, index);
};

export function headButton(map, index, look, ...content) {
  const at = data.maps.indexOf(map),
    silenced = isSilenced(map, index);
  const name = `${kindName(map.kind)} layer ${map.layer + 1} head ${map.heads[index] + 1}`;
  const open = () => {
    state.map = at;
    state.head = index;
    state.many = false;
    go("heads");
  };
  const { says, ...shape } = look;
  return h(
    "button",
    {
      ...shape,
      class: shape.class + (silenced ? " muted" : ""),
      type: "button",
      "aria-label": name + (says ? ", " + says : "") + (silenced ? ", silenced" : ""),
      click: () => (shell.live && state.silencing ? shell.live.silence(map, index) : open()),
      keydown: silencing(map, index),
    },
    ...content,
  );
}

// The action of a click on a head, if there is a choice.
export const clickChoice = () =>
  shell.live
    ? onScreen(
        choice("a click", ["opens a head", "silences it"], state.silencing ? 1 : 0, (i) => {
          state.silencing = i === 1;
          refresh();
        }),
      )
    : null;
const onScreen = (node) => {
  node.classList.add("on-screen");
  return node;
}; // useless on paper

// The button of the single shown head.
export function silenceButton(map, index) {
  if (!shell.live || index === null) return null;
  const silenced = isSilenced(map, index);
  return h(
    "button",
    {
      class: "quiet toggle",
      type: "button",
      "aria-pressed": String(silenced),
      title: "Its output is set to zero, for all inputs (key: s)",
      click: () => shell.live.silence(map, index),
    },
    silenced ? "Restore this head" : "Silence this head",
  );
}

// Attention maps: the chosen map, and rollout.

// Attention rollout: the output of a layer is half its input and half the mean of its heads, multiplied over layers.
export const ROLLED = -2; // instead of a head index
export const rolls = (map) => map.rows === map.columns && data.maps.filter((m) => m.kind === map.kind).length > 1;
const rolled = new WeakMap();
function roll(map) {
  if (rolled.has(map)) return rolled.get(map);
  const m = plane(map.weights, -1),
    n = m.T,
    under = data.maps.find((o) => o.kind === map.kind && o.layer === map.layer - 1);
  const below = under ? roll(under) : null,
    out = new Float32Array(n * n);
  for (let t = 0; t < n; t++)
    for (let k = 0; k < n; k++) {
      const share = 0.5 * m.data[t * n + k] + (t === k ? 0.5 : 0);
      if (share < 1e-7) continue;
      if (!below) {
        out[t * n + k] += share;
        continue;
      }
      for (let s = 0; s < n; s++) out[t * n + s] += share * below.data[k * n + s];
    }
  rolled.set(map, planeOf(out, n, n));
  return rolled.get(map);
}

export const chosenPlane = (map) =>
  state.head === ROLLED && rolls(map)
    ? roll(map)
    : plane(map.weights, map.heads.length > 1 ? Math.max(-1, state.head) : 0);

// Change the map, and keep the head number if it exists; otherwise show the mean.
export function changeMap(index) {
  const before = data.maps[state.map],
    map = data.maps[index];
  state.map = index;
  state.head =
    state.head === ROLLED
      ? rolls(map)
        ? ROLLED
        : -1
      : state.head < 0
        ? -1
        : map.heads.indexOf(before.heads[state.head]);
}

// The heads shown together: [{number, index}]; empty unless several are selected.
export function severalHeads(map) {
  const chosen = state.many
    ? map.heads.map((number, index) => ({ number, index })).filter(({ number }) => state.heads.includes(number))
    : [];
  return chosen.length > 1 ? chosen.slice(0, MOST_HEADS) : [];
}
const MOST_HEADS = 8; // the number of hues

// A shift click, or any click in the mode for several heads, adds or removes a head.
function chooseHead(map, i, adds) {
  if (!adds || i === 0 || i > map.heads.length) {
    state.many = false;
    state.head = i > map.heads.length ? ROLLED : i - 1;
    return;
  }
  const number = map.heads[i - 1];
  if (!state.many) {
    state.many = true;
    state.heads = state.head >= 0 ? [map.heads[state.head]] : [];
  }
  state.heads = state.heads.includes(number) ? state.heads.filter((n) => n !== number) : [...state.heads, number];
  state.head = map.heads.indexOf(state.heads[state.heads.length - 1] ?? number);
}

export function mapControls({ several = false } = {}) {
  const kinds = [...new Set(data.maps.map((m) => m.kind))];
  const current = data.maps[state.map];
  const layers = data.maps.map((m, i) => ({ m, i })).filter(({ m }) => m.kind === current.kind);
  const heads = ["mean", ...current.heads.map((n) => String(n + 1)), ...(rolls(current) ? ["rollout"] : [])];
  const alone = state.head === ROLLED ? heads.length - 1 : state.head + 1,
    many = several && state.many;
  const pressed = many ? (i) => i > 0 && state.heads.includes(current.heads[i - 1]) : alone;
  return [
    kinds.length > 1
      ? choice("attention", kinds.map(kindName), kinds.indexOf(current.kind), (i) => {
          const same = data.maps.findIndex((m) => m.kind === kinds[i] && m.layer === current.layer);
          changeMap(same >= 0 ? same : data.maps.findIndex((m) => m.kind === kinds[i]));
          state.pinnedHead = undefined;
          refresh();
        })
      : null,
    layers.length > 1
      ? pick(
          "layer",
          layers.map(({ m }) => String(m.layer + 1)),
          layers.findIndex(({ i }) => i === state.map),
          (i) => {
            changeMap(layers[i].i);
            refresh();
          },
        )
      : null,
    heads.length > 2
      ? (many ? choice : pick)("head", heads, pressed, (i, event) => {
          chooseHead(current, i, several && (state.many || (event && event.shiftKey)));
          refresh();
        })
      : null,
    several && current.heads.length > 1
      ? toggle(
          "several",
          many,
          "Several heads at once, each in its own colour; a click with the shift key does the same",
          () => {
            state.many = !state.many;
            if (state.many) state.heads = state.head >= 0 ? [current.heads[state.head]] : current.heads.slice(0, 3);
            refresh();
          },
        )
      : null,
  ];
}

// The single shown head, on a page that can silence it; null for several heads or their mean.
export const oneHead = (map) =>
  map.heads.length === 1 ? 0 : state.head >= 0 && !severalHeads(map).length ? state.head : null;

const weightText = (weight) => weight.toFixed(weight < 0.1 ? 3 : 2);

// A cell of a map in words; without a key, that of the largest weight. heads: several, each with its plane.
export function told(m, rows, columns, t, s, heads = []) {
  const key = s === null ? strongest(m, t) : s;
  const weights = heads.length
    ? heads.map(({ number, plane: own }) => `${weightText(own.at(t, key))} (head ${number + 1})`).join(", ")
    : weightText(m.at(t, key));
  return [h("b", {}, word(rows[t])), "  attends to  ", h("b", {}, word(columns[key])), "  with  " + weights];
}
