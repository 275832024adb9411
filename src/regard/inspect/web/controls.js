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

export function choice(label, names, chosen, choose) {
  const buttons = names.map((name, i) => h("button", { type: "button", "aria-pressed": String(i === chosen), click: (event) => choose(i, event) }, name));
  roving(buttons, { start: chosen });
  return h("div", { class: "control", role: "group", "aria-label": label }, h("span", {}, label), h("div", { class: "choice" }, buttons));
}

export function select(label, names, chosen, choose) {
  const list = h("select", { "aria-label": label, change: () => choose(list.selectedIndex) }, names.map((name) => h("option", {}, name)));
  list.selectedIndex = chosen;
  return h("label", { class: "control" }, h("span", {}, label), list);
}

export const pick = (label, names, chosen, choose) => (names.join("").length > 64 || names.length > 16 ? select : choice)(label, names, chosen, choose);
