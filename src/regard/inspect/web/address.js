// The state of the page in the fragment of its address, so that a link points at a thing: #heads?attention=cross&layer=2&head=3
// Whatever is read from an address is checked; what does not fit is left as it is.

import { data } from "./core.js";
import { ROLLED, rolls } from "./maps.js";
import { refresh, shell, state } from "./tabs.js";

const whole = (text, low, high) => (/^\d{1,6}$/.test(text) && Number(text) >= low && Number(text) <= high ? Number(text) : null);
const numbersIn = (text) => text.split(",").map((part) => whole(part, 0, 999999)).filter((n) => n !== null);

// Each part: what is written of the state (null: nothing), and how it is read back.
const currentMap = () => data.maps[state.map];
const PARTS = {
  attention: {
    write: () => (new Set(data.maps.map((m) => m.kind)).size > 1 ? currentMap().kind : null),
    read: (text) => { const at = data.maps.findIndex((m) => m.kind === text); if (at >= 0) state.map = at; },
  },
  layer: {
    write: () => currentMap().layer + 1,
    read: (text) => { const at = data.maps.findIndex((m) => m.kind === currentMap().kind && String(m.layer + 1) === text); if (at >= 0) state.map = at; },
  },
  head: {
    write: () => (state.many ? state.heads.map((n) => n + 1).join(",") : state.head === ROLLED ? "rollout" : state.head >= 0 ? currentMap().heads[state.head] + 1 : null),
    read: (text) => {
      const numbers = numbersIn(text).map((n) => n - 1).filter((n) => currentMap().heads.includes(n));
      state.many = numbers.length > 1;
      state.heads = numbers;
      state.head = text === "rollout" && rolls(currentMap()) ? ROLLED : numbers.length ? currentMap().heads.indexOf(numbers[0]) : -1;
    },
  },
  query: { write: () => (state.pinnedHead === undefined ? null : state.pinnedHead + 1), read: (text) => { const n = whole(text, 1, 100000); if (n !== null) state.pinnedHead = n - 1; } },
  token: { write: () => (state.pinned === undefined ? null : state.pinned + 1), read: (text) => { const n = whole(text, 1, 100000); if (n !== null) state.pinned = n - 1; } },
  step: { write: () => state.step + 1, read: (text) => { const n = whole(text, 1, 100000); if (n !== null) state.step = n - 1; } },
  weights: { write: () => (state.alignment ? state.alignment + 1 : null), read: (text) => { const n = whole(text, 1, data.alignment.length); if (n !== null) state.alignment = n - 1; } },
  words: { write: () => (state.words ? 1 : null), read: (text) => { state.words = text === "1"; } },
  patch: { write: () => state.patch || null, read: (text) => { const n = whole(text, 0, data.tokens.source ? data.tokens.source.length - 1 : 0); if (n !== null) state.patch = n; } },
  stack: { write: () => data.walks[state.walk].name, read: (text) => { const at = data.walks.findIndex((w) => w.name === text); if (at >= 0) state.walk = at; } },
  block: { write: () => state.walkLayer + 1, read: (text) => { const n = whole(text, 1, data.walks[state.walk].layers.length); if (n !== null) state.walkLayer = n - 1; } },
  row: { write: () => state.walkRow + 1, read: (text) => { const n = whole(text, 1, 100000); if (n !== null) state.walkRow = n - 1; } },
  of: { write: () => state.walkHead + 1, read: (text) => { const n = whole(text, 1, 1000); if (n !== null) state.walkHead = n - 1; } },
  numbers: { write: () => state.numbers || null, read: (text) => { const n = whole(text, 0, 2); if (n !== null) state.numbers = n; } },
  picture: { write: () => (state.picture ? state.picture + 1 : null), read: (text) => { const n = whole(text, 1, data.positions.length); if (n !== null) state.picture = n - 1; } },
};
const OF_VIEW = {
  image: ["attention", "layer", "head", "patch"], alignment: ["weights", "token", "words"], heads: ["attention", "layer", "head", "query", "words"],
  output: ["step"], position: ["picture"], walk: ["stack", "block", "row", "of", "numbers"], attribution: ["weights"],
};

// A page with a model adds the parts of what was asked: extra.write() -> [[name, value]], extra.read(parts) -> whether it computes anew
let extra = null;
export function addToAddress(parts) { extra = parts; }

export function writeAddress() {
  const parts = (OF_VIEW[state.view] || []).map((name) => [name, PARTS[name].write()]);
  const kept = [...parts, ...(extra ? extra.write() : [])].filter(([, value]) => value !== null && value !== undefined && value !== "");
  return state.view + (kept.length ? "?" + new URLSearchParams(kept.map(([name, value]) => [name, String(value)])) : "");
}

const MOST_READ = 20000; // characters of an address that are read

// Take over what an address says; false if it says nothing.
export function readAddress(hash) {
  const [name, query] = hash.replace(/^#/, "").slice(0, MOST_READ).split(/\?(.*)/s), parts = new URLSearchParams(query || "");
  if (!name && !query) return false;
  if (extra) extra.read(parts);
  if (shell.shown.some((v) => v.name === name)) state.view = name;
  for (const part of OF_VIEW[state.view] || []) if (parts.has(part)) PARTS[part].read(parts.get(part));
  return true;
}

const TYPING = 200; // milliseconds without a key after which the address follows what was typed

// Keep the address up to date, and follow one that is changed by hand or by a link.
export function followAddress() {
  let last = null, waiting = 0;
  const write = () => {
    if (parent !== window) window.name = state.view; // a frame that is given another page opens it at the same view
    const now = "#" + writeAddress();
    if (now === last) return;
    last = now;
    try { history.replaceState(null, "", now); } catch (error) { /* a frame without an address */ }
  };
  shell.changed.push(() => { // at every key it would be slow, and a browser refuses it after a while
    clearTimeout(waiting);
    if (shell.still) waiting = setTimeout(write, TYPING);
    else write();
  });
  write();
  window.addEventListener("hashchange", () => { if (location.hash !== last && readAddress(location.hash)) refresh(); });
}
