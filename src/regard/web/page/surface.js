// @ts-check
// Colours, and surfaces to draw on.

import { constants } from "../shared/constants.js";
import { h, SVG } from "../shared/dom.js";

// Colours: one hue whose lightness encodes the value, and two hues around zero for signed values. Both are safe for
// red-green colour blindness.

const rgb = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const RAMPS = {
  light: {
    over: [
      [164, 84, 8],
      [222, 168, 104],
      [252, 250, 247],
      [138, 178, 214],
      [22, 84, 152],
    ],
  },
  dark: {
    up: [
      [26, 29, 34],
      [28, 55, 86],
      [38, 98, 150],
      [98, 168, 226],
      [226, 242, 255],
    ],
    over: [
      [240, 170, 92],
      [138, 88, 36],
      [30, 33, 39],
      [42, 90, 138],
      [136, 194, 248],
    ],
  },
};
let themeName = "light"; // cached, because reading styles for every point is slow
export const theme = () => themeName;
export function setTheme(name) {
  themeName = name;
  document.documentElement.dataset.theme = name;
}
const stopsOf = (kind) => RAMPS[themeName][kind] ?? constants.ramp.map(rgb);
const ramps = { light: {}, dark: {} };
// The 256 colours of a scale.
export function ramp(kind = "up") {
  const made = ramps[themeName];
  if (!made[kind]) {
    const stops = stopsOf(kind);
    made[kind] = Array.from({ length: 256 }, (_, i) => {
      const x = (i / 255) * (stops.length - 1),
        k = Math.min(stops.length - 2, Math.floor(x));
      return stops[k].map((c, j) => Math.round(c + (x - k) * (stops[k + 1][j] - c)));
    });
  }
  return made[kind];
}
export const colour = (share, kind = "up") => ramp(kind)[Math.max(0, Math.min(255, Math.round(255 * share)))];
export const css = (rgb) => `rgb(${rgb[0]},${rgb[1]},${rgb[2]})`;
const brightness = (rgb) => rgb.reduce((sum, c, i) => sum + [0.2126, 0.7152, 0.0722][i] * (c / 255) ** 2.2, 0);
export const inkOn = (rgb) => (brightness(rgb) > 0.19 ? "#0d1014" : "#f7f9fb");
// Hues that distinguish heads; each is always shown with the head number.
const HUES = {
  light: [
    [26, 90, 158],
    [196, 86, 20],
    [28, 128, 84],
    [158, 52, 126],
    [140, 108, 0],
    [92, 80, 190],
    [8, 130, 144],
    [122, 70, 40],
  ],
  dark: [
    [112, 176, 240],
    [244, 158, 92],
    [96, 204, 150],
    [228, 134, 200],
    [222, 190, 84],
    [168, 158, 248],
    [88, 204, 216],
    [206, 160, 130],
  ],
};
export const hue = (number) => HUES[theme()][number % 8];
export const hueShade = (number, share) => {
  const ground = ramp()[0];
  return hue(number).map((c, i) => Math.round(ground[i] + Math.min(1, share) * (c - ground[i])));
};

// Custom properties of the style sheet and the font, cached because reading them for every token is slow.
const inks = {};
export function ink(name) {
  const key = theme() + name;
  if (!inks[key]) inks[key] = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return inks[key];
}
let family = null;
export const fontFamily = () => (family = family || getComputedStyle(document.body).fontFamily);

// Drawing surfaces: figures use the same calls for a canvas on the screen and for an SVG document to save.
//
// rect(x, y, w, h, {fill, stroke, line, opacity, round})
// text(string, x, y, {size, align, fill, direction, angle, most, weight}), where most is the maximal width
// path(d, {stroke, line, opacity, fill})
// pixels(image, x, y, w, h, smooth), where image is ImageData

const TEXT = { size: 13, align: "left", fill: "#000", direction: "ltr", angle: 0, most: null, weight: 400 };

const MOST_MEASURED = 4000;
const measured = new Map(); // widths of texts; most tokens are measured again at every key
let ruler = null;
// The width of a text in pixels.
export function textWidth(string, size = 13, weight = 400) {
  ruler = ruler || document.createElement("canvas").getContext("2d");
  const key = `${size} ${weight} ${string}`;
  if (!measured.has(key)) {
    if (measured.size > MOST_MEASURED) measured.clear();
    ruler.font = fontOf(size, weight);
    measured.set(key, ruler.measureText(string).width);
  }
  return measured.get(key);
}
const fontOf = (size, weight) => `${weight} ${size}px ${fontFamily()}`;

function sheetOf(image) {
  const sheet = document.createElement("canvas");
  sheet.width = image.width;
  sheet.height = image.height;
  sheet.getContext("2d").putImageData(image, 0, 0);
  return sheet;
}

// One shared sheet, as large as the largest picture, because a new canvas per picture is slow.
let shared = null;
function sharedSheet(image) {
  if (!shared || shared.node.width < image.width || shared.node.height < image.height) {
    const node = document.createElement("canvas");
    node.width = Math.max(image.width, shared ? shared.node.width : 0);
    node.height = Math.max(image.height, shared ? shared.node.height : 0);
    shared = { node, pen: node.getContext("2d", { willReadFrequently: true }) };
  }
  shared.pen.putImageData(image, 0, 0);
  return shared.node;
}

// Canvases of the previous drawing, for reuse.
let spare = new Map();
const sizeKey = (width, height) => `${width} ${height}`;
export function reuseCanvases(nodes, draw) {
  for (const node of nodes) {
    const key = sizeKey(node.width, node.height);
    if (!spare.has(key)) spare.set(key, []);
    spare.get(key).push(node);
  }
  try {
    return draw();
  } finally {
    spare = new Map();
  }
}

function canvasOf(width, height) {
  const again = (spare.get(sizeKey(width, height)) || []).shift();
  if (again) {
    const pen = again.getContext("2d");
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.clearRect(0, 0, width, height);
    return again;
  }
  const node = h("canvas", { "aria-hidden": "true" });
  node.width = width;
  node.height = height;
  return node;
}

const screenRatio = () => Math.min(2, window.devicePixelRatio || 1);

// margin: the offset of the origin from the upper left corner
export function canvasSurface(width, height, ratio = screenRatio(), margin = 0) {
  const node = canvasOf(Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio)));
  node.style.width = width + "px";
  node.style.height = height + "px";
  const pen = node.getContext("2d");
  pen.scale(ratio, ratio);
  pen.translate(margin, margin);
  function paint(style, fill, stroke) {
    pen.globalAlpha = style.opacity === undefined ? 1 : style.opacity;
    if (style.fill && style.fill !== "none") {
      pen.fillStyle = style.fill;
      fill();
    }
    if (style.stroke) {
      pen.strokeStyle = style.stroke;
      pen.lineWidth = style.line || 1;
      pen.lineCap = "round";
      stroke();
    }
    pen.globalAlpha = 1;
  }
  return {
    node,
    pen,
    width,
    height,
    clear: () => pen.clearRect(0, 0, width, height),
    rect(x, y, w, high, style) {
      if (!style.round) {
        paint(
          style,
          () => pen.fillRect(x, y, w, high),
          () => pen.strokeRect(x, y, w, high),
        );
        return;
      }
      pen.beginPath();
      pen.roundRect(x, y, w, high, style.round);
      paint(
        style,
        () => pen.fill(),
        () => pen.stroke(),
      );
    },
    text(string, x, y, style) {
      const { size, align, fill, direction, angle, most, weight } = { ...TEXT, ...style };
      pen.font = fontOf(size, weight);
      pen.textAlign = align;
      pen.fillStyle = fill;
      pen.direction = direction;
      const write = (a, b) => (most ? pen.fillText(string, a, b, most) : pen.fillText(string, a, b));
      if (!angle) {
        write(x, y);
        return;
      }
      pen.save();
      pen.translate(x, y);
      pen.rotate(angle);
      write(0, 0);
      pen.restore();
    },
    path(d, style) {
      const line = new Path2D(d);
      paint(
        style,
        () => pen.fill(line),
        () => pen.stroke(line),
      );
    },
    pixels(image, x, y, w, high, smooth = false) {
      pen.imageSmoothingEnabled = smooth;
      pen.drawImage(sharedSheet(image), 0, 0, image.width, image.height, x, y, w, high);
    },
  };
}

const short = (x) => String(Math.round(x * 100) / 100);
// characters allowed in XML
const xmlText = (string) => string.replace(/[^\u0009\u000a\u0020-\ud7ff\ue000-\ufffd\u{10000}-\u{10ffff}]/gu, "·");

export function svgSurface(width, height, margin = 0) {
  // a separate document, which loads nothing
  const paper = document.implementation.createDocument(SVG, "svg", null),
    node = paper.documentElement;
  const add = (tag, attributes, text) => {
    const made = paper.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes))
      if (value !== null && value !== undefined)
        made.setAttribute(name, typeof value === "number" ? short(value) : value);
    if (text !== undefined) made.textContent = text;
    node.append(made);
    return made;
  };
  for (const [name, value] of Object.entries({
    width: short(width),
    height: short(height),
    viewBox: `${-margin} ${-margin} ${short(width)} ${short(height)}`,
    "font-family": fontFamily(),
  }))
    node.setAttribute(name, value);
  const look = ({ fill, stroke, line, opacity }) => ({
    fill: fill || "none",
    stroke: stroke || null,
    "stroke-width": stroke ? line || 1 : null,
    "stroke-linecap": stroke ? "round" : null,
    opacity: opacity === undefined ? null : opacity,
  });
  return {
    node,
    width,
    height,
    rect(x, y, w, high, style) {
      add("rect", { x, y, width: w, height: high, rx: style.round, ...look(style) });
    },
    text(string, x, y, style) {
      const { size, align, fill, direction, angle, most, weight } = { ...TEXT, ...style };
      // SVG aligns relative to the text direction, a canvas relative to the page.
      const anchor = align === "center" ? "middle" : (align === "left") === (direction === "ltr") ? "start" : "end";
      const tight = most && textWidth(string, size, weight) > most;
      add(
        "text",
        {
          x,
          y,
          "font-size": size,
          fill,
          "text-anchor": anchor,
          direction: direction === "rtl" ? direction : null,
          "font-weight": weight === 400 ? null : String(weight),
          transform: angle ? `rotate(${short((angle * 180) / Math.PI)} ${short(x)} ${short(y)})` : null,
          textLength: tight ? most : null,
          lengthAdjust: tight ? "spacingAndGlyphs" : null,
          "xml:space": "preserve",
        },
        xmlText(string),
      );
    },
    path(d, style) {
      add("path", { d, ...look(style) });
    },
    pixels(image, x, y, w, high, smooth = false) {
      add("image", {
        x,
        y,
        width: w,
        height: high,
        preserveAspectRatio: "none",
        href: sheetOf(image).toDataURL("image/png"),
        "image-rendering": smooth ? null : "pixelated",
      });
    },
    markup: () => new XMLSerializer().serializeToString(node),
  };
}

// A small picture of one head; each point shows the largest weight of the cells it covers.

const MOST = 168; // points per side

export function thumbnailImage(m, mirrored, pixels = MOST) {
  const T = m.T,
    S = m.S,
    high = Math.min(T, pixels),
    wide = Math.min(S, pixels);
  const image = new ImageData(wide, high),
    largest = new Float32Array(wide * high);
  for (let t = 0; t < T; t++) {
    const y = Math.floor((t * high) / T);
    for (let s = 0; s < S; s++) {
      const i = y * wide + Math.floor(((mirrored ? S - 1 - s : s) * wide) / S),
        v = m.data[t * S + s];
      if (v > largest[i]) largest[i] = v;
    }
  }
  const scale = ramp(),
    times = 255 / (m.max || 1);
  for (let i = 0; i < largest.length; i++) {
    const rgb = scale[Math.round(Math.min(255, largest[i] * times))];
    image.data[4 * i] = rgb[0];
    image.data[4 * i + 1] = rgb[1];
    image.data[4 * i + 2] = rgb[2];
    image.data[4 * i + 3] = 255;
  }
  return image;
}

export function thumbnail(m, size, mirrored) {
  const surface = canvasSurface(size, size);
  surface.pixels(thumbnailImage(m, mirrored, Math.min(surface.node.width, MOST)), 0, 0, size, size);
  return surface.node;
}
