// "Save this figure": as SVG, with text as text, and as PNG. Always in light colours, as on paper.

import { data, h } from "./core.js";
import { ink, setTheme, theme } from "./colours.js";
import { roving } from "./controls.js";
import { canvasSurface, svgSurface } from "./surface.js";
import { state } from "./tabs.js";

const MARGIN = 12; // pixels around a figure
const SHARP = 3, MOST_PIXELS = 24e6; // pixels of a PNG per pixel of the page, and in all

// figure: {width, height, paint(surface)}
export function drawnOn(surface, figure) {
  surface.rect(-MARGIN, -MARGIN, surface.width, surface.height, { fill: ink("--card") });
  figure.paint(surface);
  return surface;
}

function inLight(draw) {
  const before = theme();
  setTheme("light");
  try { return draw(); } finally { setTheme(before); }
}

export const figureSvg = (figure) => inLight(() => drawnOn(svgSurface(figure.width + 2 * MARGIN, figure.height + 2 * MARGIN, MARGIN), figure).markup());

export function figurePng(figure) {
  const width = figure.width + 2 * MARGIN, height = figure.height + 2 * MARGIN;
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

const fileName = (title, what, ending) => `${[title, state.view, what].join(" ").replace(/[^\p{L}\p{M}\p{N}]+/gu, "-").replace(/^-+|-+$/g, "").slice(0, 80) || "figure"}.${ending}`;

// A frame may not download; there the figure is saved from the page itself.
export function saveButtons(figure, what) {
  if (parent !== window) return null;
  const { title } = data;
  const buttons = [
    h("button", { type: "button", title: "Save this figure as SVG", "aria-label": `Save ${what} as SVG`, click: () => download(new Blob([figureSvg(figure)], { type: "image/svg+xml" }), fileName(title, what, "svg")) }, "SVG"),
    h("button", { type: "button", title: "Save this figure as PNG", "aria-label": `Save ${what} as PNG`, click: async () => download(await figurePng(figure), fileName(title, what, "png")) }, "PNG"),
  ];
  roving(buttons);
  return h("div", { class: "save", role: "group", "aria-label": `Save ${what}` }, buttons);
}
