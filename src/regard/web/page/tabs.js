// @ts-check
// Views and tabs: selection, redrawing, and saving figures.

import { h, put, roving } from "../shared/dom.js";
import { data, withData } from "./core.js";
import { canvasSurface, ink, reuseCanvases, setTheme, svgSurface, theme } from "./surface.js";

// The selection shared by all views. head: an index in the map; walkHead, heads: head numbers, which survive
// pruning. many: several heads at once; words: tokens grouped to words; numbers: detail of vectors; silencing: a
// click on a head silences it.
export const state = {
  view: "",
  map: 0,
  head: -1,
  step: 0,
  alignment: 0,
  picture: 0,
  walk: 0,
  walkLayer: 0,
  walkHead: 0,
  walkRow: 1,
  patch: 0,
  many: false,
  heads: [],
  words: false,
  numbers: 0,
  silencing: false,
};

// A view is {name, title, when, fill}: `when` returns whether the view has content; `fill` draws into a panel of
// a given width and may return a function to call after layout. It must not read `data` after drawing. The shell
// holds the parts of the document for views, the drawn views, and listeners to changes of the selection. room:
// pixels for the views. live: the functions of a page with a model. still: no scrolling, because the user types
// above the views. draft: the final result will follow.
export const shell = {
  panel: null,
  tabs: [],
  shown: [],
  traces: () => [data],
  changed: [],
  room: 0,
  live: null,
  still: false,
  draft: false,
};

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
  const holder =
    document.activeElement && shell.panel.contains(document.activeElement) ? address(document.activeElement) : null;
  for (const tab of shell.tabs) {
    const on = tab.id === "tab-" + found.name;
    tab.setAttribute("aria-selected", String(on));
    tab.setAttribute("tabindex", on ? "0" : "-1");
  }
  shell.panel.setAttribute("aria-labelledby", "tab-" + found.name);
  reuseCanvases(shell.panel.querySelectorAll("canvas"), () => draw(found, shell.panel, shell.room));
  const again = holder && restore(holder);
  if (again) again.focus({ preventScroll: true });
  tellChanged();
}

export function tellChanged() {
  for (const tell of shell.changed) tell();
}

// Draw a view of one trace, or of two side by side (on a narrow page one below the other).
export function draw(found, target, room) {
  const traces = shell.traces();
  const settling = traces.length === 1 ? [found.fill(target, room)] : drawBoth(found, target, room, traces);
  for (const settle of settling) if (settle) settle();
}

const NARROW = 760,
  BETWEEN = 28; // pixels

function drawBoth(found, target, room, traces) {
  const wide = room >= NARROW,
    each = wide ? (room - BETWEEN) / 2 : room;
  const bodies = traces.map(() => h("div")),
    shared = h("div");
  put(
    target,
    shared,
    h(
      "div",
      { class: "compared" + (wide ? " two" : "") },
      traces.map((trace, i) =>
        h("div", {}, h("p", { class: "which", dir: "auto" }, Object.values(trace.texts)[0]), bodies[i]),
      ),
    ),
  );
  const settling = traces.map((trace, i) => withData(trace, () => (found.when() ? found.fill(bodies[i], each) : null)));
  shareControls(shared, bodies);
  return settling;
}

// Move the controls that both drawings share above them.
function shareControls(shared, bodies) {
  const own = (body, selector) => Array.from(body.querySelectorAll(selector));
  const intro = ":scope > p.dim",
    control = ":scope > .controls > .control, :scope > .controls > .toggle";
  const controls = own(bodies[0], control);
  put(shared, ...own(bodies[0], intro), controls.length ? h("div", { class: "controls" }, controls) : null);
  for (const body of bodies.slice(1)) for (const node of [...own(body, intro), ...own(body, control)]) node.remove();
}

// Redrawn elements keep the focus: the element is identified by its index among similar ones, whose number may
// change.
const kindOf = (node) => `${node.tagName}.${node.classList[0] || ""}`;
const focusable = (kind) =>
  Array.from(shell.panel.querySelectorAll("button, select, [tabindex]")).filter((node) => kindOf(node) === kind);
const address = (node) => ({ kind: kindOf(node), index: focusable(kindOf(node)).indexOf(node) });
const restore = ({ kind, index }) => focusable(kind)[index] || null;

// Save a figure as SVG with real text, or as PNG, always in light colours.

const MARGIN = 12; // pixels around a figure
const SHARP = 3,
  MOST_PIXELS = 24e6; // pixels of a PNG per page pixel, and in total

// figure: {width, height, paint(surface)}
export function drawnOn(surface, figure) {
  surface.rect(-MARGIN, -MARGIN, surface.width, surface.height, { fill: ink("--card") });
  figure.paint(surface);
  return surface;
}

function inLight(draw) {
  const before = theme();
  setTheme("light");
  try {
    return draw();
  } finally {
    setTheme(before);
  }
}

export const figureSvg = (figure) =>
  inLight(() => drawnOn(svgSurface(figure.width + 2 * MARGIN, figure.height + 2 * MARGIN, MARGIN), figure).markup());

export function figurePng(figure) {
  const width = figure.width + 2 * MARGIN,
    height = figure.height + 2 * MARGIN;
  const ratio = Math.min(SHARP, Math.sqrt(MOST_PIXELS / (width * height)));
  const { node } = inLight(() => drawnOn(canvasSurface(width, height, ratio, MARGIN), figure));
  return new Promise((resolve) => node.toBlob(resolve, "image/png"));
}

function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

const fileName = (title, what, ending) =>
  `${
    [title, state.view, what]
      .join(" ")
      .replace(/[^\p{L}\p{M}\p{N}]+/gu, "-")
      .replace(/^-+|-+$/g, "")
      .slice(0, 80) || "figure"
  }.${ending}`;

// A frame may not download; figures can be saved from the page itself.
export function saveButtons(figure, what) {
  if (parent !== window) return null;
  const { title } = data;
  const buttons = [
    h(
      "button",
      {
        type: "button",
        title: "Save this figure as SVG",
        "aria-label": `Save ${what} as SVG`,
        click: () => download(new Blob([figureSvg(figure)], { type: "image/svg+xml" }), fileName(title, what, "svg")),
      },
      "SVG",
    ),
    h(
      "button",
      {
        type: "button",
        title: "Save this figure as PNG",
        "aria-label": `Save ${what} as PNG`,
        click: async () => download(await figurePng(figure), fileName(title, what, "png")),
      },
      "PNG",
    ),
  ];
  roving(buttons);
  return h("div", { class: "save", role: "group", "aria-label": `Save ${what}` }, buttons);
}
