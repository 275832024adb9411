// @ts-check
// The page around the views: title, texts, tabs, theme, paper, and the state of the page in its address.

import { h, put } from "../shared/dom.js";
import { ROLLED, rolls } from "./controls.js";
import { data } from "./core.js";
import { positionView } from "./pictures.js";
import { setTheme, theme } from "./surface.js";
import { draw, go, refresh, shell, state } from "./tabs.js";
import { alignmentView, allHeadsView, headsView } from "./view-attention.js";
import { imageView } from "./view-image.js";
import { attributionView, lensView, outputView, speaking } from "./view-output.js";
import { overviewView } from "./view-overview.js";
import { walkView } from "./view-walk.js";
import { show } from "./words.js";

// The state of the page in the fragment of its address, so that links can point to a detail:
// #heads?attention=cross&layer=2&head=3. Values read from an address are validated; invalid ones are ignored.

const whole = (text, low, high) =>
  /^\d{1,6}$/.test(text) && Number(text) >= low && Number(text) <= high ? Number(text) : null;
const numbersIn = (text) =>
  text
    .split(",")
    .map((part) => whole(part, 0, 999999))
    .filter((n) => n !== null);

// Functions that write (null: omit) and read each part.
const currentMap = () => data.maps[state.map];
const PARTS = {
  attention: {
    write: () => (new Set(data.maps.map((m) => m.kind)).size > 1 ? currentMap().kind : null),
    read: (text) => {
      const at = data.maps.findIndex((m) => m.kind === text);
      if (at >= 0) state.map = at;
    },
  },
  layer: {
    write: () => currentMap().layer + 1,
    read: (text) => {
      const at = data.maps.findIndex((m) => m.kind === currentMap().kind && String(m.layer + 1) === text);
      if (at >= 0) state.map = at;
    },
  },
  head: {
    write: () =>
      state.many
        ? state.heads.map((n) => n + 1).join(",")
        : state.head === ROLLED
          ? "rollout"
          : state.head >= 0
            ? currentMap().heads[state.head] + 1
            : null,
    read: (text) => {
      const numbers = numbersIn(text)
        .map((n) => n - 1)
        .filter((n) => currentMap().heads.includes(n));
      state.many = numbers.length > 1;
      state.heads = numbers;
      state.head =
        text === "rollout" && rolls(currentMap())
          ? ROLLED
          : numbers.length
            ? currentMap().heads.indexOf(numbers[0])
            : -1;
    },
  },
  query: {
    write: () => (state.pinnedHead === undefined ? null : state.pinnedHead + 1),
    read: (text) => {
      const n = whole(text, 1, 100000);
      if (n !== null) state.pinnedHead = n - 1;
    },
  },
  token: {
    write: () => (state.pinned === undefined ? null : state.pinned + 1),
    read: (text) => {
      const n = whole(text, 1, 100000);
      if (n !== null) state.pinned = n - 1;
    },
  },
  step: {
    write: () => state.step + 1,
    read: (text) => {
      const n = whole(text, 1, 100000);
      if (n !== null) state.step = n - 1;
    },
  },
  weights: {
    write: () => (state.alignment ? state.alignment + 1 : null),
    read: (text) => {
      const n = whole(text, 1, data.alignment.length);
      if (n !== null) state.alignment = n - 1;
    },
  },
  words: {
    write: () => (state.words ? 1 : null),
    read: (text) => {
      state.words = text === "1";
    },
  },
  patch: {
    write: () => state.patch || null,
    read: (text) => {
      const n = whole(text, 0, data.tokens.source ? data.tokens.source.length - 1 : 0);
      if (n !== null) state.patch = n;
    },
  },
  stack: {
    write: () => data.walks[state.walk].name,
    read: (text) => {
      const at = data.walks.findIndex((w) => w.name === text);
      if (at >= 0) state.walk = at;
    },
  },
  block: {
    write: () => state.walkLayer + 1,
    read: (text) => {
      const n = whole(text, 1, data.walks[state.walk].layers.length);
      if (n !== null) state.walkLayer = n - 1;
    },
  },
  row: {
    write: () => state.walkRow + 1,
    read: (text) => {
      const n = whole(text, 1, 100000);
      if (n !== null) state.walkRow = n - 1;
    },
  },
  of: {
    write: () => state.walkHead + 1,
    read: (text) => {
      const n = whole(text, 1, 1000);
      if (n !== null) state.walkHead = n - 1;
    },
  },
  numbers: {
    write: () => state.numbers || null,
    read: (text) => {
      const n = whole(text, 0, 2);
      if (n !== null) state.numbers = n;
    },
  },
  picture: {
    write: () => (state.picture ? state.picture + 1 : null),
    read: (text) => {
      const n = whole(text, 1, data.positions.length);
      if (n !== null) state.picture = n - 1;
    },
  },
};
const OF_VIEW = {
  image: ["attention", "layer", "head", "patch"],
  alignment: ["weights", "token", "words"],
  heads: ["attention", "layer", "head", "query", "words"],
  output: ["step"],
  position: ["picture"],
  walk: ["stack", "block", "row", "of", "numbers"],
  attribution: ["weights"],
};

// A page with a model adds its own parts: extra.write() -> [[name, value or null]], extra.read(parts)
let extra = null;
export function addToAddress(parts) {
  extra = parts;
}

export function writeAddress() {
  const parts = (OF_VIEW[state.view] || []).map((name) => [name, PARTS[name].write()]);
  const kept = [...parts, ...(extra ? extra.write() : [])].filter(([, value]) => value !== null);
  return (
    state.view + (kept.length ? "?" + new URLSearchParams(kept.map(([name, value]) => [name, String(value)])) : "")
  );
}

const MOST_READ = 20000; // characters read from an address

// Apply an address; false if it is empty.
export function readAddress(hash) {
  const [name, query] = hash
      .replace(/^#/, "")
      .slice(0, MOST_READ)
      .split(/\?(.*)/s),
    parts = new URLSearchParams(query || "");
  if (!name && !query) return false;
  if (extra) extra.read(parts);
  if (shell.shown.some((v) => v.name === name)) state.view = name;
  for (const part of OF_VIEW[state.view] || []) if (parts.has(part)) PARTS[part].read(parts.get(part));
  return true;
}

const TYPING = 200; // milliseconds without a key until the address is updated

// Keep the address up to date, and follow manual changes and links.
export function followAddress() {
  let last = null,
    waiting = 0;
  const write = () => {
    if (parent !== window) window.name = state.view; // a frame reopens the next page at the same view
    const now = "#" + writeAddress();
    if (now === last) return;
    last = now;
    try {
      history.replaceState(null, "", now);
    } catch (error) {
      /* a frame without an address */
    }
  };
  shell.changed.push(() => {
    // updating at every key is slow, and browsers limit the rate
    clearTimeout(waiting);
    if (shell.still) waiting = setTimeout(write, TYPING);
    else write();
  });
  write();
  window.addEventListener("hashchange", () => {
    if (location.hash !== last && readAddress(location.hash)) refresh();
  });
}

// The views in tab order.

export const VIEWS = [
  overviewView,
  imageView,
  alignmentView,
  headsView,
  allHeadsView,
  outputView,
  lensView,
  attributionView,
  positionView,
  walkView,
];

// The page around the views: title, texts, facts, tabs, theme.

const sentence = (name) =>
  h("dd", { dir: "auto", class: data.texts[name].length > 120 ? "small" : null }, data.texts[name]);

function tabOf(v) {
  return h(
    "button",
    {
      role: "tab",
      type: "button",
      id: "tab-" + v.name,
      "aria-controls": "panel",
      click: () => go(v.name),
      keydown: (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key],
          all = shell.shown,
          at = all.indexOf(v);
        const next =
          event.key === "Home"
            ? 0
            : event.key === "End"
              ? all.length - 1
              : step
                ? (at + step + all.length) % all.length
                : null;
        if (next !== null) {
          event.preventDefault();
          go(all[next].name);
        }
      },
    },
    v.title,
  );
}

function themeButton() {
  const button = h("button", {
    class: "quiet",
    type: "button",
    click: () => {
      take(theme() === "dark" ? "light" : "dark");
      refresh();
    },
  });
  const take = (name) => {
    setTheme(name);
    button.textContent = name === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", `Change to ${name === "dark" ? "light" : "dark"} colours`);
  };
  const wish = window.matchMedia("(prefers-color-scheme: dark)");
  take(wish.matches ? "dark" : "light");
  wish.addEventListener("change", () => {
    take(wish.matches ? "dark" : "light");
    refresh();
  });
  return button;
}

const facts = () => [...Object.entries(data.facts), ["log-probability", show(data.score)]];

// Rewrite the texts above the views for a new trace.
export function writeTexts() {
  put(
    shell.pair,
    Object.keys(data.texts).flatMap((name) => [h("dt", {}, name), sentence(name)]),
  );
  put(
    shell.notes,
    data.notes.map((note) => h("p", { class: "note", role: "note" }, note.text)),
  );
  const told = facts(),
    key = JSON.stringify(told);
  if (key !== factsWritten)
    put(
      shell.facts,
      told.flatMap(([name, fact]) => [h("dt", {}, name), h("dd", {}, fact)]),
    );
  factsWritten = key;
}
let factsWritten = "";

// Select the most informative map: the last cross-attention, the last layer of an image encoder, else the first.
function chooseFirst() {
  const last = data.maps.map((m) => m.kind).lastIndexOf("cross");
  state.map = last >= 0 ? last : data.image ? data.maps.length - 1 : 0;
  state.walk = Math.max(0, speaking());
}

// Redraw when the width for the views changes. The width is stored here, because reading it while drawing forces a
// layout.
function followWidth() {
  let waiting = 0;
  new ResizeObserver(() => {
    const room = shell.panel.clientWidth; // zero while hidden, as on paper
    if (!room || room === shell.room) return;
    shell.room = room;
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(refresh);
  }).observe(shell.panel);
}

// Open the view of the address; in a frame, which may have none, the view of the previous page.
function openWanted() {
  let wanted = "";
  try {
    wanted = location.hash || (parent !== window ? window.name : "");
  } catch (error) {
    /* a frame without an address */
  }
  state.view = shell.shown[0] ? shell.shown[0].name : "";
  readAddress(wanted);
}

// above: content over the views instead of the texts of the trace, which are then printed only.
export function buildPage(above = null) {
  document.title = data.title + " · regard";
  shell.shown = VIEWS.filter((v) => v.when());
  shell.panel = h("div", { role: "tabpanel", id: "panel", tabindex: -1, style: { outline: "none" } });
  shell.tabs = shell.shown.map(tabOf);
  shell.pair = h("dl", { class: "pair" });
  shell.notes = h("div");
  shell.facts = h("dl");
  put(
    document.getElementById("app"),
    h(
      "header",
      {},
      h("h1", {}, h("bdi", {}, data.title)),
      h("span", { class: "grow" }),
      h("span", { class: "brand" }, "regard"),
      themeButton(),
    ),
    above,
    shell.pair,
    shell.notes,
    h("details", {}, h("summary", {}, "The model"), shell.facts),
    h("div", { role: "tablist", "aria-label": "Views" }, shell.tabs),
    shell.panel,
  );
  if (above) document.documentElement.classList.add("live");
  writeTexts();
  chooseFirst();
  openWanted();
  shell.room = shell.panel.clientWidth;
  refresh();
  followAddress();
  followWidth();
  readyForPaper();
  document.documentElement.dataset.ready = "yes";
}

export function tooOld() {
  put(
    document.getElementById("app"),
    h(
      "p",
      { class: "note" },
      "This browser is too old to unpack the numbers of this page: it lacks DecompressionStream.",
    ),
  );
}

// Print all views in light colours, one below the other, at the width of the paper.

const PAPER = 700; // pixels
let finishPrinting = null; // restores the page after printing

function startPrinting() {
  if (finishPrinting) return;
  const root = document.documentElement,
    details = /** @type {HTMLDetailsElement} */ (document.querySelector("main > details")),
    sheets = h("div", { class: "sheets" });
  const before = { theme: theme(), open: details.open, top: window.scrollY };
  finishPrinting = () => {
    sheets.remove();
    setTheme(before.theme);
    root.classList.remove("printing");
    details.open = before.open;
    refresh();
    window.scrollTo(0, before.top);
    finishPrinting = null;
  };
  setTheme("light");
  root.classList.add("printing");
  details.open = true;
  shell.panel.after(sheets);
  for (const v of shell.shown) {
    const body = h("div");
    sheets.append(h("section", {}, h("h1", {}, v.title), body));
    draw(v, body, PAPER);
    /** @type {NodeListOf<HTMLElement>} */
    const boxes = body.querySelectorAll(".scroll");
    for (const box of boxes)
      if (box.scrollWidth > box.clientWidth + 1) box.style.zoom = String(box.clientWidth / box.scrollWidth);
  }
}

export function readyForPaper() {
  window.addEventListener("beforeprint", startPrinting);
  window.addEventListener("afterprint", () => {
    if (finishPrinting) finishPrinting();
  });
}
