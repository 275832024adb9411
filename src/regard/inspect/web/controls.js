// Controls: choices, lists, and one stop of the Tab key for many nodes.

import { h } from "./core.js";

// Arrow keys move among nodes, up and down by `across`; null is a gap.
export function roving(nodes, { across = 1, start = 0, mirrored = false } = {}) {
  let at = Math.max(0, nodes[start] ? start : nodes.findIndex(Boolean));
  const sideways = mirrored ? -1 : 1;
  nodes.forEach((node, i) => {
    if (!node) return;
    node.setAttribute("tabindex", i === at ? "0" : "-1");
    node.addEventListener("focus", () => { nodes[at].setAttribute("tabindex", "-1"); at = i; node.setAttribute("tabindex", "0"); });
    node.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -sideways, ArrowRight: sideways, ArrowUp: -across, ArrowDown: across, Home: 1, End: -1 }[event.key];
      if (!step) return;
      let next = event.key === "Home" ? 0 : event.key === "End" ? nodes.length - 1 : i + step;
      while (next in nodes && !nodes[next]) next += step;
      if (nodes[next]) { event.preventDefault(); nodes[next].focus(); }
    });
  });
}

// chosen: the index of a name, or a function that tells whether one is chosen.
export function choice(label, names, chosen, choose) {
  const on = typeof chosen === "function" ? chosen : (i) => i === chosen;
  const buttons = names.map((name, i) => h("button", { type: "button", "aria-pressed": String(on(i)), click: (event) => choose(i, event) }, name));
  roving(buttons, { start: Math.max(0, names.findIndex((_, i) => on(i))) });
  return h("div", { class: "control", role: "group", "aria-label": label }, h("span", {}, label), h("div", { class: "choice" }, buttons));
}

export function select(label, names, chosen, choose) {
  const list = h("select", { "aria-label": label, change: () => choose(list.selectedIndex) }, names.map((name) => h("option", {}, name)));
  list.selectedIndex = chosen;
  return h("label", { class: "control" }, h("span", {}, label), list);
}

export const pick = (label, names, chosen, choose) => (names.join("").length > 64 || names.length > 16 ? select : choice)(label, names, chosen, choose);

export const toggle = (label, on, title, turn) => h("button", { type: "button", class: "quiet toggle", "aria-pressed": String(on), title, click: turn }, label);

// Arrow keys move among nodes on a plane: to the nearest one in that direction. centres: [x, y] of each.
export function spatial(nodes, centres) {
  const away = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  let at = 0;
  const focus = (i) => { nodes[at].setAttribute("tabindex", "-1"); at = i; nodes[i].setAttribute("tabindex", "0"); };
  const nearest = (from, [dx, dy]) => {
    let found = -1, least = Infinity;
    centres.forEach(([x, y], i) => {
      const ahead = (x - centres[from][0]) * dx + (y - centres[from][1]) * dy, aside = Math.abs((x - centres[from][0]) * dy) + Math.abs((y - centres[from][1]) * dx);
      if (ahead > 1 && ahead + 3 * aside < least) { least = ahead + 3 * aside; found = i; }
    });
    return found;
  };
  nodes.forEach((node, i) => {
    node.setAttribute("tabindex", i === 0 ? "0" : "-1");
    node.addEventListener("focus", () => focus(i));
    node.addEventListener("keydown", (event) => {
      const next = event.key === "Home" ? 0 : event.key === "End" ? nodes.length - 1 : away[event.key] ? nearest(i, away[event.key]) : -1;
      if (next >= 0 && event.key in { ...away, Home: 1, End: 1 }) { event.preventDefault(); nodes[next].focus(); }
    });
  });
}
