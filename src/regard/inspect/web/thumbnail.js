// A small picture of one head: where the picture has fewer points than the matrix, the largest weight of each wins.

import { colour } from "./colours.js";
import { canvasSurface } from "./surface.js";

const MOST = 168; // points of a side

export function thumbnailImage(m, mirrored, pixels = MOST) {
  const T = m.T, S = m.S, high = Math.min(T, pixels), wide = Math.min(S, pixels);
  const image = new ImageData(wide, high), largest = new Float32Array(wide * high);
  for (let t = 0; t < T; t++) {
    const y = Math.floor((t * high) / T);
    for (let s = 0; s < S; s++) {
      const i = y * wide + Math.floor(((mirrored ? S - 1 - s : s) * wide) / S), v = m.data[t * S + s];
      if (v > largest[i]) largest[i] = v;
    }
  }
  for (let i = 0; i < largest.length; i++) {
    const rgb = colour(largest[i] / (m.max || 1));
    image.data[4 * i] = rgb[0]; image.data[4 * i + 1] = rgb[1]; image.data[4 * i + 2] = rgb[2]; image.data[4 * i + 3] = 255;
  }
  return image;
}

export function thumbnail(m, size, mirrored) {
  const surface = canvasSurface(size, size);
  surface.pixels(thumbnailImage(m, mirrored, Math.min(surface.node.width, MOST)), 0, 0, size, size);
  return surface.node;
}
