// The walk: one token through one layer, card by card.

import { data, h, put } from "./core.js";
import { choice, pick, select } from "./controls.js";
import { go, refresh, state } from "./tabs.js";
import { tokensOf, visible } from "./text.js";
import { hasWhole } from "./vectors.js";
import { walkCard } from "./walkcards.js";

const AMOUNTS = ["first eight", "whole vectors", "all tokens"];

export function walkTo(map, t) {
  const name = map.kind === "encoder" ? "encoder" : "decoder";
  const index = data.walks.findIndex((w) => w.name === name);
  if (index < 0) return;
  state.walk = index;
  state.walkLayer = Math.min(map.layer, data.walks[index].layers.length - 1);
  state.walkRow = t;
  state.walkHead = map.heads[Math.max(0, state.head)];
  go("walk");
}

export const walkView = { name: "walk", title: "Walk", when: () => data.walks.length > 0, fill: fillWalk };

function fillWalk(panel, room) {
  const walk = data.walks[state.walk], number = Math.min(state.walkLayer, walk.layers.length - 1), layer = walk.layers[number];
  const tokens = tokensOf(walk.rows), first = layer.flatMap((c) => c.vectors)[0];
  const many = first ? first.first.shape[first.first.shape.length - 2] : tokens.length, token = Math.min(state.walkRow, many - 1);
  const maps = data.maps.filter((m) => layer.some((c) => c.scores && c.scores.map === m.name));
  const heads = [...new Set(maps.flatMap((m) => m.heads))].sort((a, b) => a - b); // of any attention of this layer
  const head = heads.includes(state.walkHead) ? state.walkHead : heads[0];
  const names = tokens.slice(0, many).map((each, i) => `${i + 1}  ${visible(each)}`), whole = hasWhole(layer), pictures = whole ? state.numbers : 0;
  const intro = walk.layers.length > 1 || walk.layers[0].length > 8 ? "One token through one layer" : "One step of the decoder";
  put(panel,
    h("p", { class: "dim" }, `${intro}, with this model's own numbers. Of each vector the first eight are shown${pictures ? ", and the whole of it as a picture" : ""}.`),
    h("div", { class: "controls" },
      data.walks.length > 1 ? choice("stack", data.walks.map((w) => w.name), state.walk, (i) => { state.walk = i; state.walkRow = 0; refresh(); }) : null,
      walk.layers.length > 1 ? pick("layer", walk.layers.map((_, i) => String(i + 1)), number, (i) => { state.walkLayer = i; refresh(); }) : null,
      select("token", names, token, (i) => { state.walkRow = i; refresh(); }),
      heads.length > 1 ? pick("head", heads.map((n) => String(n + 1)), heads.indexOf(head), (i) => { state.walkHead = heads[i]; refresh(); }) : null,
      whole ? choice("numbers", AMOUNTS, state.numbers, (i) => { state.numbers = i; refresh(); }) : null),
    many < tokens.length ? h("p", { class: "note" }, `The walk is kept for the first ${many} of ${tokens.length} tokens.`) : null,
    h("ol", { class: "walk" }, layer.map((c) => walkCard(c, token, head, { room: room - 44, tokens, pictures }))));
}
