// @ts-check
// Input fields of the live page: text, tokens, and an image to draw or drop.

import { h, put } from "../shared/dom.js";
import { fit, growingField, TYPED } from "../shared/fields.js";
import { visible, word } from "../shared/text.js";
import { filmOf } from "./view-image.js";

// changed(text) is called at every key press; for an input method, at the end of a composition.
export function textField(id, text, oneLine, changed) {
  const field = growingField({ id, class: "field", rows: 1, maxlength: 4000 });
  field.value = text;
  field.addEventListener("input", () => {
    if (oneLine && /[\n\r]/.test(field.value)) {
      field.value = field.value.replace(/[\n\r]+/g, " ");
      fit(field);
    }
    changed(field.value);
  });
  if (oneLine)
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter") event.preventDefault();
    });
  return field;
}

// Removable chips of tokens, and a field to add more. read() -> ids; change(ids); encode(text) -> {ids, unknown}
export function tokenChips(label, hint, { read, change, encode, name }) {
  const chips = h("span", { class: "chips" }),
    status = h("small", { class: "status" });
  const field = h("input", {
    ...TYPED,
    type: "text",
    "aria-label": label,
    placeholder: hint,
    maxlength: 500,
  });
  field.addEventListener("change", () => {
    if (!field.value) return;
    const { ids, unknown } = encode(field.value);
    put(status, unknown.length ? `not in the vocabulary: ${unknown.map(visible).join(", ")}` : null);
    if (unknown.length || !ids.length) return;
    field.value = "";
    change([...read(), ...ids]);
  });
  function write() {
    put(
      chips,
      read().map((id, i) =>
        h(
          "button",
          {
            type: "button",
            class: "chip-button",
            "aria-label": `remove ${visible(name(id))}`,
            click: () =>
              change(
                read().filter((_, k) => k !== i),
                i,
              ),
          },
          word(name(id)),
          h("span", { "aria-hidden": "true" }, "×"),
        ),
      ),
    );
  }
  write();
  return { node: h("div", { class: "control" }, h("span", {}, label), chips, field, status), write };
}

// A drawing pad with the image size of the model; it also accepts an image file.

const PAD_SIDE = 196; // pixels on the screen of the longer side
const RANGES = [1, 16, 255, 65535]; // largest values of pixel formats

// The largest pixel value of the training images; if unknown, the range that fits the mean and scale.
export function largestPixel({ max, mean, scale }) {
  if (max) return max;
  if (!mean) return 1;
  const usual = Math.max(...mean.map((m, c) => m + scale[c]));
  return RANGES.find((range) => range >= usual) || usual;
}

// Convert the RGBA bytes of a picture to pixel values of a file, (C, H, W).
export function pixelsOf(bytes, { height, width, channels }, most) {
  const out = new Float32Array(channels * height * width),
    size = height * width;
  for (let i = 0; i < size; i++) {
    const [r, g, b] = [bytes[4 * i], bytes[4 * i + 1], bytes[4 * i + 2]];
    if (channels < 3) out.fill(((0.299 * r + 0.587 * g + 0.114 * b) / 255) * most, i, i + 1);
    else
      [r, g, b].forEach((v, c) => {
        out[c * size + i] = (v / 255) * most;
      });
  }
  return out;
}

let strokes = 0; // numbers the inputs, because comparing pixels is slow

export function padOf(live, side) {
  const { image } = live.engine,
    { height, width, channels } = image,
    zoom = PAD_SIDE / Math.max(height, width),
    most = largestPixel(image);
  const sheet = h("canvas", { role: "img", "aria-label": "Draw here, or drop an image" });
  sheet.width = width;
  sheet.height = height;
  sheet.style.width = width * zoom + "px";
  sheet.style.height = height * zoom + "px";
  const pen = sheet.getContext("2d", { willReadFrequently: true });
  if (side.trace && side.trace.image) pen.putImageData(filmOf(side.trace.image), 0, 0);
  const status = h("small", { class: "status", role: "status" });
  function send(name) {
    side.input = { pixels: pixelsOf(pen.getImageData(0, 0, width, height).data, image, most), name, number: ++strokes };
    live.ask();
  }
  const colour =
    channels >= 3 ? h("input", { type: "color", value: "#ffffff", "aria-label": "colour of the pen" }) : null;
  let last = null,
    fresh = true; // the first stroke starts a new drawing
  const place = (event) => {
    const box = sheet.getBoundingClientRect();
    return [(event.clientX - box.left) / zoom, (event.clientY - box.top) / zoom];
  };
  function line(from, to) {
    pen.strokeStyle = colour ? colour.value : "#fff";
    pen.lineWidth = Math.max(1, Math.max(height, width) / 12);
    pen.lineCap = pen.lineJoin = "round";
    pen.beginPath();
    pen.moveTo(from[0], from[1]);
    pen.lineTo(to[0] + 0.01, to[1]);
    pen.stroke();
    send("a drawing");
  }
  const clear = () => {
    pen.fillStyle = "#000";
    pen.fillRect(0, 0, width, height);
    fresh = false;
  };
  sheet.addEventListener("pointerdown", (event) => {
    event.preventDefault();
    sheet.setPointerCapture(event.pointerId);
    if (fresh) clear();
    last = place(event);
    line(last, last);
  });
  sheet.addEventListener("pointermove", (event) => {
    if (last) {
      const next = place(event);
      line(last, next);
      last = next;
    }
  });
  for (const name of ["pointerup", "pointercancel"])
    sheet.addEventListener(name, () => {
      last = null;
    });
  async function open(file) {
    try {
      const picture = await createImageBitmap(file);
      clear();
      const scale = Math.min(width / picture.width, height / picture.height),
        w = picture.width * scale,
        high = picture.height * scale;
      pen.imageSmoothingQuality = "high";
      pen.drawImage(picture, (width - w) / 2, (height - high) / 2, w, high);
      put(status);
      send(file.name);
    } catch (error) {
      put(status, "This file is not an image that the browser can read.");
    }
  }
  const chooser = h("input", {
    type: "file",
    accept: "image/*",
    class: "hidden",
    "aria-label": "An image file",
    change: () => {
      if (chooser.files[0]) open(chooser.files[0]);
    },
  });
  const box = h(
    "div",
    { class: "pad" },
    sheet,
    h(
      "div",
      { class: "pad-tools" },
      h(
        "button",
        {
          type: "button",
          class: "quiet",
          click: () => {
            clear();
            send("a drawing");
          },
        },
        "Clear",
      ),
      h(
        "button",
        {
          type: "button",
          class: "quiet",
          click: () => {
            invert();
            send(side.input && side.input.name ? side.input.name : "image");
          },
        },
        "Invert",
      ),
      h("button", { type: "button", class: "quiet", click: () => chooser.click() }, "Open a file"),
      colour,
      chooser,
      h("p", { class: "dim" }, `Draw, or drop an image; it is scaled to ${width} × ${height} pixels.`),
      status,
    ),
  );
  function invert() {
    const image_ = pen.getImageData(0, 0, width, height);
    for (let i = 0; i < image_.data.length; i++) if (i % 4 < 3) image_.data[i] = 255 - image_.data[i];
    pen.putImageData(image_, 0, 0);
    fresh = false;
  }
  box.addEventListener("dragover", (event) => {
    event.preventDefault();
    box.classList.add("over");
  });
  box.addEventListener("dragleave", () => box.classList.remove("over"));
  box.addEventListener("drop", (event) => {
    event.preventDefault();
    box.classList.remove("over");
    if (event.dataTransfer.files[0]) open(event.dataTransfer.files[0]);
  });
  return box;
}
