// @ts-check
// The image view: attention of the class token or a patch, and the mean attention distance of heads by layer.

import { h, put, roving } from "../shared/dom.js";
import { percent } from "../shared/text.js";
import { choice, chosenPlane, mapControls, ROLLED } from "./controls.js";
import { clamp, data, plane } from "./core.js";
import { canvasSurface, css, ink } from "./surface.js";
import { refresh, saveButtons, state } from "./tabs.js";
import { show, tokensOf } from "./words.js";

const GLOW = [244, 154, 36];

// The picture at its original size, cached.
const films = new WeakMap();
export function filmOf(shot) {
  if (films.has(shot)) return films.get(shot);
  const bytes = shot.bytes || Uint8Array.from(atob(shot.pixels), (c) => c.charCodeAt(0)); // computed here or stored
  const image = new ImageData(shot.width, shot.height);
  for (let i = 0; i < shot.width * shot.height; i++)
    for (let c = 0; c < 4; c++) {
      image.data[4 * i + c] = c === 3 ? 255 : bytes[i * shot.channels + (shot.channels === 3 ? c : 0)];
    }
  films.set(shot, image);
  return image;
}

// weights: one per patch; patches with little weight fade, patches with much weight glow.
function paintImage(surface, shot, side, weights, max) {
  const across = shot.width / shot.size,
    scale = side / shot.width,
    cell = shot.size * scale;
  surface.pixels(filmOf(shot), 0, 0, side, shot.height * scale, shot.width > side);
  weights.forEach((w, i) => {
    const share = w / (max || 1),
      x = (i % across) * cell,
      y = Math.floor(i / across) * cell;
    surface.rect(x, y, cell, cell, { fill: "rgb(10,14,20)", opacity: 0.5 * (1 - share) });
    surface.rect(x, y, cell, cell, { fill: css(GLOW), opacity: 0.78 * share });
  });
}

function paintPatchLines(surface, across, down, cell) {
  const style = { stroke: "#ffffff", opacity: 0.16 };
  if (cell < 10) return;
  for (let i = 1; i < across; i++) surface.path(`M${i * cell - 0.5} 0V${down * cell}`, style);
  for (let i = 1; i < down; i++) surface.path(`M0 ${i * cell - 0.5}H${across * cell}`, style);
}

function patchWeights(m, from) {
  const list = Array.from({ length: m.S - 1 }, (_, s) => m.at(from, s + 1));
  return [list, Math.max(...list, 1e-9)];
}

export const imageView = {
  name: "image",
  title: "Image",
  when: () => data.image !== null && data.maps.length > 0,
  fill: fillImage,
};

const patchName = (t, names) => (t === 0 ? "the class token" : `patch ${names[t]}`);

function fillImage(panel, room) {
  const shot = data.image,
    map = data.maps[state.map],
    names = tokensOf("source");
  const across = shot.width / shot.size,
    down = shot.height / shot.size; // state.patch 0: the class token
  const chooseFrom = (i) => {
    if (i === 0) state.patch = 0;
    else if (!state.patch) state.patch = Math.floor(down / 2) * across + Math.floor(across / 2) + 1;
    refresh();
  };
  const alone = map.heads.length > 1 && state.head >= 0;
  const place = alone ? `head ${map.heads[state.head] + 1}` : `layer ${map.layer + 1}`;
  const photo = photoFigure(room, shot, chosenPlane(map), names);
  put(
    panel,
    h("p", { class: "dim" }, "Which patches of the image a head attends to, from the class token or from a patch."),
    h(
      "div",
      { class: "controls" },
      mapControls(),
      choice(
        "from",
        ["class token", state.patch ? `patch ${names[state.patch]}` : "a patch"],
        state.patch ? 1 : 0,
        chooseFrom,
      ),
    ),
    h(
      "div",
      { class: "photos" },
      h(
        "section",
        { class: "card" },
        h(
          "h2",
          {},
          state.head === ROLLED
            ? `The inputs in ${patchName(state.patch, names)} after layer ${map.layer + 1}`
            : `Attention of ${patchName(state.patch, names)} in ${place}`,
        ),
        photo.node,
        h("p", { class: "dim" }, "Click a patch to see its attention; click it again to see that of the class token."),
        saveButtons(photo, "image"),
      ),
      h(
        "section",
        { class: "card" },
        h("h2", {}, `All heads of layer ${map.layer + 1}`),
        headPhotos(shot, map),
        Object.keys(data.distances).length ? distances(map) : null,
      ),
    ),
  );
}

// The image under the attention of one patch; patches can be hovered and selected.
function photoFigure(room, shot, m, names) {
  const across = shot.width / shot.size,
    down = shot.height / shot.size;
  const side = Math.round(clamp(Math.min(room - 44, 460, (460 * shot.width) / shot.height), 96, 460)),
    cell = side / across;
  const high = (side * shot.height) / shot.width;
  const base = canvasSurface(side, high),
    over = canvasSurface(side, high);
  const paint = (surface) => {
    paintImage(surface, shot, side, ...patchWeights(m, state.patch));
    paintPatchLines(surface, across, down, cell);
  };
  paint(base);
  const read = h("p", { class: "read", "aria-live": "polite" });
  let at = null;
  const outline = (t, width) => {
    if (t === 0) return;
    const x = ((t - 1) % across) * cell,
      y = Math.floor((t - 1) / across) * cell;
    for (const [stroke, line] of [
      ["#0a0e14", width + 2],
      ["#ffffff", width],
    ])
      over.rect(x + 1, y + 1, cell - 2, cell - 2, { stroke, line });
  };
  function point(t) {
    at = t;
    over.clear();
    outline(state.patch, 2.5);
    if (t !== null) outline(t, 1);
    const rest = `${percent(m.at(state.patch, 0))} of its attention goes to the class token.`;
    put(
      read,
      h("b", {}, state.patch === 0 ? "The class token" : `Patch ${names[state.patch]}`),
      ...(t === null
        ? [": ", rest]
        : ["  attends to  ", h("b", {}, patchName(t, names)), `  with  ${m.at(state.patch, t).toFixed(3)}`]),
    );
  }
  const choose = (t) => {
    state.patch = t === state.patch ? 0 : t;
    refresh();
  };
  const find = (event) => {
    const box = base.node.getBoundingClientRect();
    return (
      1 +
      clamp(Math.floor((event.clientY - box.top) / cell), 0, down - 1) * across +
      clamp(Math.floor((event.clientX - box.left) / cell), 0, across - 1)
    );
  };
  const figure = h(
    "div",
    {
      class: "figure photo",
      tabindex: 0,
      role: "application",
      "aria-label":
        "The image. Arrow keys move over patches, Enter shows the attention of one, Escape that of the class token.",
      pointermove: (event) => point(find(event)),
      pointerleave: () => point(null),
      click: (event) => choose(find(event)),
      keydown: (event) => {
        const step = { ArrowUp: -across, ArrowDown: across, ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (step) {
          event.preventDefault();
          const next = (at || state.patch || 1) + (at === null ? 0 : step);
          point(clamp(next, 1, across * down));
        } else if ((event.key === "Enter" || event.key === " ") && at) {
          event.preventDefault();
          choose(at);
        } else if (event.key === "Escape" && state.patch) {
          state.patch = 0;
          refresh();
        }
      },
    },
    base.node,
    over.node,
  );
  point(null);
  return { node: h("div", {}, figure, read), width: side, height: high, paint };
}

function headPhotos(shot, map) {
  const size = 84;
  const shots = map.heads.map((number, index) => {
    const surface = canvasSurface(size, (size * shot.height) / shot.width);
    paintImage(surface, shot, size, ...patchWeights(plane(map.weights, index), state.patch));
    return h(
      "button",
      {
        class: "thumb",
        type: "button",
        "aria-pressed": String(state.head === index),
        "aria-label": `head ${number + 1}`,
        click: () => {
          state.head = state.head === index ? -1 : index;
          refresh();
        },
      },
      surface.node,
      h("small", {}, String(number + 1)),
    );
  });
  roving(shots, { start: Math.max(0, state.head) });
  return h("div", { class: "shots" }, shots);
}

// Mean distance by depth: a row of dots per layer, and the numbers.
function distances(current) {
  const maps = data.maps.filter((m) => m.name in data.distances),
    far = data.distances;
  const most = Math.max(...maps.map((m) => Math.max(...m.heads) + 1));
  const surface = canvasSurface(300, 150);
  paintDistances(surface, maps, far, current);
  return h(
    "div",
    { class: "far" },
    h("h2", {}, "Attention distance by layer"),
    h(
      "p",
      { class: "dim" },
      "The mean distance between a patch and the patches it attends to, weighted by attention, in pixels. Each dot is a head.",
    ),
    surface.node,
    h(
      "details",
      {},
      h("summary", {}, "As numbers"),
      h(
        "div",
        { class: "scroll" },
        h(
          "table",
          { class: "numbers" },
          h(
            "thead",
            {},
            h(
              "tr",
              {},
              h("th", {}, "layer"),
              Array.from({ length: most }, (_, k) => h("th", { scope: "col" }, String(k + 1))),
            ),
          ),
          h(
            "tbody",
            {},
            maps.map((m) =>
              h(
                "tr",
                {},
                h("th", { scope: "row", class: "token" }, String(m.layer + 1)),
                Array.from({ length: most }, (_, k) => {
                  const index = m.heads.indexOf(k);
                  return h("td", {}, index < 0 ? "·" : show(far[m.name][index], 2));
                }),
              ),
            ),
          ),
        ),
      ),
    ),
  );
}

function paintDistances(surface, maps, far, current) {
  const top = Math.max(...maps.flatMap((m) => far[m.name]), 1e-9),
    left = 34,
    bottom = 24,
    { width, height } = surface;
  const x = (i) => left + ((i + 0.5) * (width - left)) / maps.length,
    y = (v) => 8 + (1 - v / top) * (height - bottom - 16);
  const faint = { size: 11, fill: ink("--faint") };
  for (const v of [0, top / 2, top]) {
    surface.text(show(v, 2), left - 6, y(v) + 4, { ...faint, align: "right" });
    surface.path(`M${left} ${Math.round(y(v)) - 0.5}H${width}`, { stroke: ink("--line") });
  }
  const every = Math.ceil(maps.length / 12);
  maps.forEach((m, i) => {
    if (i % every === 0) surface.text(String(m.layer + 1), x(i), height - 8, { ...faint, align: "center" });
    far[m.name].forEach((v, k, all) => {
      const on = m === current && k === state.head,
        r = on ? 5 : 3.5;
      const cx =
        x(i) + (all.length > 1 ? (k / (all.length - 1) - 0.5) * Math.min(14, (width - left) / maps.length / 2) : 0);
      surface.rect(cx - r, y(v) - r, 2 * r, 2 * r, {
        fill: on ? css(GLOW) : ink("--accent"),
        opacity: on ? 1 : 0.75,
        round: r,
      });
    });
  });
}
