// @ts-check
// The overview as a view: the picture, with link buttons over its parts.

import { h, put, spatial } from "../shared/dom.js";
import { clickChoice, headButton, isSilenced } from "./controls.js";
import { data } from "./core.js";
import { overviewLayout } from "./overview.js";
import { storedImportance } from "./session.js";
import { canvasSurface, ink } from "./surface.js";
import { go, saveButtons, shell, state } from "./tabs.js";
import { show } from "./words.js";

const IDLE = 250; // milliseconds without activity before heads are measured

export const overviewView = {
  name: "overview",
  title: "Overview",
  when: () => data.maps.length > 0,
  fill: fillOverview,
};

function lead({ view, walk, layer, map, picture }, maps) {
  if (map) {
    state.map = maps.indexOf(map);
    state.head = -1;
    state.many = false;
    go("heads");
    return;
  }
  if (walk !== undefined) {
    state.walk = walk;
    state.walkLayer = layer;
    go("walk");
    return;
  }
  if (picture !== undefined) state.picture = picture;
  go(view);
}

function spotButton(spot, maps) {
  const { x, y, w, h: high, label, map, index, gauge } = spot;
  const style = { left: x + "px", top: y + "px", width: w + "px", height: high + "px" };
  if (map && index >= 0) {
    const bar = h(
      "span",
      { class: "gauge", style: { left: gauge.x - x + "px", top: gauge.y - y + "px", width: gauge.w + "px" } },
      h("i"),
    );
    return {
      node: headButton(map, index, { class: "spot", style, says: label, title: label }, bar),
      fill: bar.firstChild,
    };
  }
  return {
    node: h("button", {
      class: "spot",
      type: "button",
      style,
      "aria-label": label,
      title: label,
      click: () => lead(spot, maps),
    }),
    fill: null,
  };
}

// The share of the largest loss of log-probability, as a bar width.
const gaugeShare = (changes, spot) => {
  const change = changes.get(`${spot.map.name}/${spot.index}`),
    most = Math.max(1e-6, ...changes.values());
  return change === undefined ? null : { change, share: Math.max(0, change / most) };
};

function fillOverview(panel, room) {
  const layout = overviewLayout(room),
    maps = data.maps,
    trace = data;
  const surface = canvasSurface(layout.width, layout.height);
  for (const mark of layout.marks) mark(surface);
  const shown = layout.spots.filter((spot) => !spot.view || shell.shown.some((v) => v.name === spot.view)),
    buttons = shown.map((spot) => spotButton(spot, maps));
  spatial(
    buttons.map(({ node }) => node),
    shown.map(({ x, y, w, h: high }) => [x + w / 2, y + high / 2]),
  );
  const importance = shell.live ? shell.live.importance(trace) : storedImportance(trace);
  const figure = { width: layout.width, height: layout.height, paint: (on) => paintAll(on, layout, importance) };
  put(
    panel,
    h(
      "p",
      { class: "dim" },
      "The whole model with this input. Under each head: what it mostly attends to here",
      importance ? ", and by a bar how much log-probability the output loses without it" : "",
      ". Click a part to open its view.",
      trace.steps.length
        ? ""
        : " This model predicts nothing, so there is nothing that its heads could be important for.",
    ),
    clickChoice() ? h("div", { class: "controls" }, clickChoice()) : null,
    h(
      "div",
      { class: "with-save" },
      h(
        "div",
        { class: "figure overview", role: "group", "aria-label": "The model" },
        surface.node,
        buttons.map(({ node }) => node),
      ),
      saveButtons(figure, "model"),
    ),
  );
  if (importance) measureWhenIdle(importance, shown, buttons);
}

function paintAll(surface, layout, importance) {
  for (const mark of layout.marks) mark(surface);
  for (const spot of layout.spots)
    if (spot.gauge) {
      const found = importance ? gaugeShare(importance.changes, spot) : null;
      if (found) surface.rect(spot.gauge.x, spot.gauge.y, spot.gauge.w * found.share, 3, { fill: ink("--second") });
      if (isSilenced(spot.map, spot.index))
        surface.path(`M${spot.gauge.x} ${spot.gauge.y - spot.gauge.w}l${spot.gauge.w} ${spot.gauge.w}`, {
          stroke: ink("--second"),
          line: 2,
        });
    }
}

// Measure one head at a time while the page is idle and this drawing is shown.
function measureWhenIdle(importance, spots, buttons) {
  const tell = () =>
    spots.forEach((spot, i) => {
      const found = spot.gauge && gaugeShare(importance.changes, spot);
      if (!found) return;
      buttons[i].fill.style.width = `${100 * found.share}%`;
      const change = `${found.change < 0 ? "gains" : "loses"} ${show(Math.abs(found.change))}`;
      buttons[i].node.title = `${spot.label}; without it the output ${change} of log-probability`;
    });
  tell();
  const idle = window.requestIdleCallback
    ? (next) => window.requestIdleCallback(next, { timeout: 500 })
    : (next) => setTimeout(next, 40);
  const next = () => {
    if (importance.done || !buttons[0] || !buttons[0].node.isConnected) return;
    try {
      importance.step();
    } catch (error) {
      return;
    } // some heads are not measured
    tell();
    idle(next);
  };
  setTimeout(() => idle(next), IDLE);
}
