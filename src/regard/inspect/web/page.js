// The page around the views: title, texts, facts, tabs, theme.

import { followAddress, readAddress } from "./address.js";
import { setTheme, theme } from "./colours.js";
import { data, h, put } from "./core.js";
import { draw, go, refresh, shell, state } from "./tabs.js";
import { show } from "./text.js";
import { speaking } from "./view-output.js";
import { VIEWS } from "./views.js";

const sentence = (name) => h("dd", { dir: "auto", class: data.texts[name].length > 120 ? "small" : null }, data.texts[name]);

function tabOf(v) {
  return h("button", {
    role: "tab", type: "button", id: "tab-" + v.name, "aria-controls": "panel", click: () => go(v.name),
    keydown: (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], all = shell.shown, at = all.indexOf(v);
      const next = event.key === "Home" ? 0 : event.key === "End" ? all.length - 1 : step ? (at + step + all.length) % all.length : null;
      if (next !== null) { event.preventDefault(); go(all[next].name); }
    },
  }, v.title);
}

function themeButton() {
  const button = h("button", { class: "quiet", type: "button", click: () => { take(theme() === "dark" ? "light" : "dark"); refresh(); } });
  const take = (name) => { setTheme(name); button.textContent = name === "dark" ? "Light" : "Dark"; button.setAttribute("aria-label", `Change to ${name === "dark" ? "light" : "dark"} colours`); };
  const wish = window.matchMedia("(prefers-color-scheme: dark)");
  take(wish.matches ? "dark" : "light");
  wish.addEventListener("change", () => { take(wish.matches ? "dark" : "light"); refresh(); });
  return button;
}

const facts = () => [...Object.entries(data.facts), ["log-probability", data.score === null ? "−∞" : show(data.score)]];

// What is above the views, written again when the trace is another.
export function writeTexts() {
  put(shell.pair, Object.keys(data.texts).flatMap((name) => [h("dt", {}, name), sentence(name)]));
  put(shell.notes, data.notes.map((note) => h("p", { class: "note", role: "note" }, note)));
  const told = facts(), key = JSON.stringify(told);
  if (key !== factsWritten) put(shell.facts, told.flatMap(([name, fact]) => [h("dt", {}, name), h("dd", {}, fact)]));
  factsWritten = key;
}
let factsWritten = "";

// The map that is most worth seeing: the last cross-attention, the last layer of an image's encoder, else the first.
function chooseFirst() {
  const last = data.maps.map((m) => m.kind).lastIndexOf("cross");
  state.map = last >= 0 ? last : data.image ? data.maps.length - 1 : 0;
  state.walk = Math.max(0, speaking());
}

// Draw again when the room for the views is another. It is known from here: asking for it while drawing would lay the page out
// once more.
function followWidth() {
  let waiting = 0;
  new ResizeObserver(() => {
    if (shell.panel.clientWidth === shell.room) return;
    shell.room = shell.panel.clientWidth;
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(refresh);
  }).observe(shell.panel);
}

// What the address asks for; in a frame, which may have none, the view of the page that was there before.
function openWanted() {
  let wanted = "";
  try { wanted = location.hash || (parent !== window ? window.name : ""); } catch (error) { /* a frame without an address */ }
  state.view = shell.shown[0] ? shell.shown[0].name : "";
  readAddress(wanted);
}

// above: what stands over the views instead of the texts of the trace, which are then for paper alone.
export function buildPage(above = null) {
  document.title = data.title + " · regard";
  shell.shown = VIEWS.filter((v) => v.when());
  shell.panel = h("div", { role: "tabpanel", id: "panel", tabindex: -1, style: { outline: "none" } });
  shell.tabs = shell.shown.map(tabOf);
  shell.pair = h("dl", { class: "pair" });
  shell.notes = h("div");
  shell.facts = h("dl");
  put(document.getElementById("app"),
    h("header", {}, h("h1", {}, h("bdi", {}, data.title)), h("span", { class: "grow" }), h("span", { class: "brand" }, "regard"), themeButton()),
    above, shell.pair, shell.notes,
    h("details", {}, h("summary", {}, "The model"), shell.facts),
    h("div", { role: "tablist", "aria-label": "Views" }, shell.tabs), shell.panel);
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
  put(document.getElementById("app"), h("p", { class: "note" }, "This browser is too old to unpack the numbers of this page (it lacks DecompressionStream)."));
}

// On paper: light colours, and all views one below the other, each as wide as the paper.

const PAPER = 700; // pixels
let finishPrinting = null; // what makes the page as it was

function startPrinting() {
  if (finishPrinting) return;
  const root = document.documentElement, details = document.querySelector("main > details"), sheets = h("div", { class: "sheets" });
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
    for (const box of body.querySelectorAll(".scroll")) if (box.scrollWidth > box.clientWidth + 1) box.style.zoom = String(box.clientWidth / box.scrollWidth);
  }
}

export function readyForPaper() {
  window.addEventListener("beforeprint", startPrinting);
  window.addEventListener("afterprint", () => { if (finishPrinting) finishPrinting(); });
}
