// Buttons that stand for a head: they open it or, on a page with a model, silence it.

import { data, h } from "./core.js";
import { choice } from "./controls.js";
import { go, refresh, shell, state } from "./tabs.js";
import { kindName } from "./text.js";

export const isSilenced = (map, index) => shell.live !== null && shell.live.isSilenced(map, index);

// A key press that silences a head, or lets it speak again.
export const silencing = (map, index) => (event) => {
  if (!shell.live || index === null || event.key !== "s" || event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT") return;
  event.preventDefault();
  shell.live.silence(map, index);
};

export function headButton(map, index, look, ...content) {
  const at = data.maps.indexOf(map), silenced = isSilenced(map, index);
  const open = () => { state.map = at; state.head = index; state.many = false; go("heads"); };
  return h("button", {
    ...look, class: look.class + (silenced ? " muted" : ""), type: "button", "aria-label": `${kindName(map.kind)} layer ${map.layer + 1} head ${map.heads[index] + 1}${look.says ? ", " + look.says : ""}${silenced ? ", silenced" : ""}`,
    click: () => (shell.live && state.silencing ? shell.live.silence(map, index) : open()), keydown: silencing(map, index),
  }, ...content);
}

// What a click on a head does, where there is a choice.
export const clickChoice = () => (shell.live ? onScreen(choice("a click", ["opens a head", "silences it"], state.silencing ? 1 : 0, (i) => { state.silencing = i === 1; refresh(); })) : null);
const onScreen = (node) => { node.classList.add("on-screen"); return node; }; // it means nothing on paper

// The button of the head that is shown alone.
export function silenceButton(map, index) {
  if (!shell.live || index === null) return null;
  const silenced = isSilenced(map, index);
  return h("button", { class: "quiet toggle", type: "button", "aria-pressed": String(silenced), title: "Its output is set to zero, for all inputs (key: s)", click: () => shell.live.silence(map, index) }, silenced ? "Restore this head" : "Silence this head");
}
