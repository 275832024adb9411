// Views and their tabs: which there are, which is shown, and drawing it again.

import { data } from "./core.js";

// What is chosen, shared by all views. head: an index among those of the map; walkHead: the number of a head, which outlives pruning.
export const state = { view: "", map: 0, head: -1, step: 0, alignment: 0, picture: 0, walk: 0, walkLayer: 0, walkHead: 0, walkRow: 1, patch: 0 };

// A view is {name, title, when, fill}: `when` there is something to show, `fill` draws it into a panel of so many pixels, and may
// return what to do once the panel is laid out. It reads `data` as it draws, and never after.
// The parts of the document that views are drawn into, what is drawn there, and who wants to know that something else was chosen.
// live: what a page with a model can do. still: the page must not scroll, since someone types above the views.
export const shell = { panel: null, tabs: [], shown: [], traces: () => [data], changed: [], live: null, still: false };

export function go(name) {
  state.view = name;
  const tab = shell.tabs.find((t) => t.id === "tab-" + name);
  if (tab && document.activeElement !== tab) tab.focus({ preventScroll: true });
  if (tab) tab.scrollIntoView({ block: "nearest" });
  refresh();
}

export function refresh() {
  const found = shell.shown.find((v) => v.name === state.view) || shell.shown[0];
  if (!found) return;
  const holder = document.activeElement && shell.panel.contains(document.activeElement) ? address(document.activeElement) : null;
  for (const tab of shell.tabs) {
    const on = tab.id === "tab-" + found.name;
    tab.setAttribute("aria-selected", String(on));
    tab.setAttribute("tabindex", on ? "0" : "-1");
  }
  shell.panel.setAttribute("aria-labelledby", "tab-" + found.name);
  draw(found, shell.panel, shell.panel.clientWidth);
  const again = holder && restore(holder);
  if (again) again.focus({ preventScroll: true });
  for (const tell of shell.changed) tell();
}

// Draw a view: of one trace, or of two side by side.
export function draw(found, target, room) {
  const settle = found.fill(target, room);
  if (settle) settle();
}

// A redrawn control keeps the focus: it is found again by its place among those that can have it.
const focusable = () => Array.from(shell.panel.querySelectorAll("button, select, [tabindex]"));
const address = (node) => ({ index: focusable().indexOf(node), tag: node.tagName });
const restore = (holder) => { const node = focusable()[holder.index]; return node && node.tagName === holder.tag ? node : null; };
