// Attention maps: which one is chosen, and its rollout.

import { data, h, plane, planeOf, strongest } from "./core.js";
import { choice, pick } from "./controls.js";
import { refresh, state } from "./tabs.js";
import { kindName, word } from "./text.js";

// Attention rollout: a layer passes on half of what it was given and half of what its heads brought, from the first on.
export const ROLLED = -2; // in place of a head
export const rolls = (map) => map.rows === map.columns && data.maps.filter((m) => m.kind === map.kind).length > 1;
const rolled = new WeakMap();
function roll(map) {
  if (rolled.has(map)) return rolled.get(map);
  const m = plane(map.weights, -1), n = m.T, under = data.maps.find((o) => o.kind === map.kind && o.layer === map.layer - 1);
  const below = under ? roll(under) : null, out = new Float32Array(n * n);
  for (let t = 0; t < n; t++) for (let k = 0; k < n; k++) {
    const share = 0.5 * m.data[t * n + k] + (t === k ? 0.5 : 0);
    if (share < 1e-7) continue;
    if (!below) { out[t * n + k] += share; continue; }
    for (let s = 0; s < n; s++) out[t * n + s] += share * below.data[k * n + s];
  }
  rolled.set(map, planeOf(out, n, n));
  return rolled.get(map);
}

export const chosenPlane = (map) => (state.head === ROLLED && rolls(map) ? roll(map) : plane(map.weights, map.heads.length > 1 ? Math.max(-1, state.head) : 0));

// Another map: the head of the same number, if it has one, else the mean.
export function changeMap(index) {
  const before = data.maps[state.map], map = data.maps[index];
  state.map = index;
  state.head = state.head === ROLLED ? (rolls(map) ? ROLLED : -1) : state.head < 0 ? -1 : map.heads.indexOf(before.heads[state.head]);
}

export function mapControls() {
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

// A cell of a map in words; without a key, the one with the largest weight.
export function told(m, rows, columns, t, s) {
  const key = s === null ? strongest(m, t) : s, weight = m.at(t, key);
  return [h("b", {}, word(rows[t])), "  attends to  ", h("b", {}, word(columns[key])), "  with  " + weight.toFixed(weight < 0.1 ? 3 : 2)];
}
