// @ts-check
// The overview: one picture of the whole model with this input. Layout and drawing.

import { direction } from "../shared/direction.js";
import { percent } from "../shared/text.js";
import { clamp, data, plane } from "./core.js";
import { ink, textWidth, thumbnailImage } from "./surface.js";
import {
  describeHeads,
  figureLabel,
  headDescription,
  headLabel,
  isMixed,
  rightToLeft,
  shorter,
  tokensOf,
} from "./words.js";

// pixels
const PAD = 14,
  GAP = 10,
  ARROW = 20,
  TITLE = 22,
  LINE = 20,
  SMALL = 10.5,
  SMALL_LINE = 12,
  GUTTER = 56,
  NUMBER = 13,
  GAUGE = 6;
const NARROW_OVERVIEW = 720,
  WIDEST = 760; // of one stack
const THUMB = [46, 84],
  SMALL_THUMB = 60;
const MOST_CHIPS = 60;

// The stacks of a model: names, input tokens, layers with attentions. The last stack predicts.
export function stacksOf() {
  const cross = data.maps.filter((map) => map.kind === "cross");
  const names = ["encoder", "decoder"].filter(
    (name) => name in data.facts || data.maps.some((map) => map.kind === name),
  );
  return names.map((name, i) => {
    const own = data.maps.filter((map) => map.kind === name),
      reads = name === "encoder" ? "source" : "input";
    const numbers = [...new Set([...own, ...(name === "decoder" ? cross : [])].map((map) => map.layer))].sort(
      (a, b) => a - b,
    );
    const layers = numbers.map((number) => ({
      number,
      self: own.find((map) => map.layer === number) || null,
      cross: (name === "decoder" && cross.find((map) => map.layer === number)) || null,
    }));
    return {
      name,
      reads,
      layers,
      fact: data.facts[name] || "",
      predicts: i === names.length - 1,
      walk: data.walks.findIndex((walk) => walk.name === name),
    };
  });
}

const sentenceCase = (text) => text.charAt(0).toUpperCase() + text.slice(1);

// Collects drawing operations: boxes, lines of text, pictures; and spots, which are links.
class Sketch {
  constructor() {
    this.marks = [];
    this.spots = [];
  }
  box(x, y, w, h, style) {
    this.marks.push((surface) => surface.rect(x, y, w, h, style()));
  }
  text(string, x, y, style) {
    this.marks.push((surface) => surface.text(string, x, y, style()));
  }
  line(d, head = null) {
    const style = () => ({ stroke: ink("--faint"), line: 1.2 });
    this.marks.push((surface) => {
      surface.path(d, style());
      if (head)
        surface.path(`M${head[0] - 4} ${head[1] - 5}L${head[0]} ${head[1]}L${head[0] + 4} ${head[1] - 5}`, style());
    });
  }
  arrow(x, from, to) {
    this.line(`M${x} ${from}V${to}`, [x, to]);
  }
  // A line to the right with an arrow head.
  branch(d, [x, y]) {
    this.line(d);
    this.line(`M${x - 5} ${y - 4}L${x} ${y}L${x - 5} ${y + 4}`);
  }
  spot(x, y, w, h, label, leads) {
    this.spots.push({ x, y, w, h, label, ...leads });
  }
}

const soft = () => ({ size: 12.5, fill: ink("--soft") }),
  strong = () => ({ size: 13, fill: ink("--ink"), weight: 600 }),
  faint = () => ({ size: SMALL, fill: ink("--faint") });

function wrap(text, width, size, most) {
  const lines = [];
  for (const piece of text.split(" ")) {
    const last = lines.length - 1,
      longer = last >= 0 ? `${lines[last]} ${piece}` : piece;
    if (last >= 0 && textWidth(longer, size) <= width) lines[last] = longer;
    else lines.push(piece);
  }
  return lines.length > most
    ? [
        ...lines.slice(0, most - 1),
        shorter(lines.slice(most - 1).join(" "), Math.max(3, Math.floor(width / (size * 0.55)))),
      ]
    : lines;
}

// Tokens, optionally with numbers below, wrapped at a width in pixels -> height.
function tokensPart(sketch, tokens, x, y, width, { mirrored = false, under = null } = {}) {
  const high = under ? 34 : 22;
  let left = 0,
    top = y;
  tokens.slice(0, MOST_CHIPS).forEach((token, i) => {
    const text = figureLabel(token),
      w = Math.max(textWidth(text, 13), under ? textWidth(under[i], SMALL) : 0) + 10;
    if (left + w > width && left > 0) {
      left = 0;
      top += high;
    }
    const middle = (mirrored ? x + width - left - w : x + left) + w / 2;
    sketch.text(text, middle, top + 15, () => ({
      size: 13,
      align: "center",
      fill: ink("--ink"),
      direction: direction(token),
    }));
    if (under) sketch.text(under[i], middle, top + 27, () => ({ ...faint(), align: "center" }));
    left += w;
  });
  if (tokens.length > MOST_CHIPS) sketch.text(`… and ${tokens.length - MOST_CHIPS} more`, x, top + high + 12, faint);
  return top + high + (tokens.length > MOST_CHIPS ? 18 : 0) - y;
}

// The heads of one attention as small pictures with descriptions -> height.
function headsPart(sketch, map, x, y, width) {
  const words = describeHeads(data).get(map.name),
    count = map.heads.length,
    mirrored = rightToLeft(map.columns);
  const size = clamp(Math.floor((width + GAP) / Math.min(count, 12)) - GAP, ...THUMB),
    across = Math.max(1, Math.min(count, Math.floor((width + GAP) / (size + GAP))));
  const lines = words.map((each) =>
      wrap(size < SMALL_THUMB && isMixed(each.what) ? each.what : headLabel(each), size + GAP - 2, SMALL, 3),
    ),
    tall = NUMBER + size + GAUGE + Math.max(...lines.map((each) => each.length)) * SMALL_LINE + 8;
  map.heads.forEach((number, index) => {
    const left = x + (index % across) * (size + GAP),
      top = y + Math.floor(index / across) * tall,
      m = plane(map.weights, index);
    sketch.text(String(number + 1), left, top + 9, faint);
    sketch.marks.push((surface) => surface.pixels(thumbnailImage(m, mirrored, 84), left, top + NUMBER, size, size));
    sketch.box(left - 0.5, top + NUMBER - 0.5, size + 1, size + 1, () => ({ stroke: ink("--line") }));
    lines[index].forEach((line, i) => sketch.text(line, left, top + NUMBER + size + GAUGE + 9 + i * SMALL_LINE, faint));
    sketch.spot(left - 3, top, size + 6, tall - 4, headDescription(words[index]), {
      map,
      index,
      gauge: { x: left, y: top + NUMBER + size + 2, w: size },
    });
  });
  return Math.ceil(count / across) * tall;
}

// One attention with its title -> height.
function attentionPart(sketch, map, title, x, y, width) {
  sketch.text(title, x, y + 12, soft);
  sketch.spot(x - 4, y - 2, width + 8, 18, `${title} of layer ${map.layer + 1}: the mean of its heads`, {
    map,
    index: -1,
  });
  return TITLE + headsPart(sketch, map, x, y + TITLE, width);
}

// One layer as a box -> height. `enters`: the origin of the cross-attention.
function layerPart(sketch, stack, { number, self, cross }, x, y, width, enters) {
  const inner = width - 2 * PAD,
    left = x + PAD,
    at = sketch.marks.length,
    title = `Layer ${number + 1}`;
  const lens = lensOf(stack, number, inner - textWidth(title, 13, 600) - 24, 11);
  let top = y + 10;
  sketch.text(title, left, top + 12, strong);
  if (stack.walk >= 0)
    sketch.spot(left - 4, top - 2, textWidth(title, 13, 600) + 8, 18, `${title} of the ${stack.name}, step by step`, {
      walk: stack.walk,
      layer: number,
    });
  if (lens) {
    const wide = textWidth(lens, 11);
    sketch.text(lens, left + inner, top + 12, () => ({ ...faint(), size: 11, align: "right" }));
    sketch.spot(
      left + inner - wide - 4,
      top - 2,
      wide + 8,
      18,
      `Logit lens: after layer ${number + 1} the model would predict ${lens}`,
      { view: "lens" },
    );
  }
  top += TITLE + 2;
  if (self) top += attentionPart(sketch, self, "Self-attention", left, top, inner);
  if (cross) {
    enters.push(top + 8);
    top += attentionPart(sketch, cross, self ? "Cross-attention" : "Attention over the source", left, top, inner);
  }
  const last = self ? "Feed-forward, for each token" : "Recurrent cell: the state after each token";
  sketch.text(last, left, top + 12, soft);
  if (stack.walk >= 0)
    sketch.spot(left - 4, top - 2, inner + 8, 18, `${last}, layer ${number + 1}, step by step`, {
      walk: stack.walk,
      layer: number,
    });
  top += LINE + 4;
  const high = top - y;
  sketch.marks.splice(at, 0, (surface) =>
    surface.rect(x + 0.5, y + 0.5, width - 1, high - 1, { fill: ink("--card"), stroke: ink("--line"), round: 8 }),
  );
  return high;
}

// The predictions after a layer of the top stack, as many as fit.
function lensOf(stack, number, room, size) {
  const found = stack.predicts ? data.lens.find((each) => each.label === `layer ${number + 1}`) : null;
  if (!found) return null;
  const { steps } = found,
    fits = (text) => textWidth(text, size) <= room;
  let text = "→";
  for (let t = 0; t < steps.length; t++) {
    const longer = `${text} ${figureLabel(steps[t][0][0])}`;
    if (t && !fits(t + 1 < steps.length ? `${longer}…` : longer)) return `${text}…`;
    text = longer;
  }
  return text;
}

function plainBox(sketch, title, text, x, y, width, leads) {
  const lines = text ? wrap(text, width - 2 * PAD, 11, 3) : [],
    high = 32 + lines.length * 15;
  sketch.box(x + 0.5, y + 0.5, width - 1, high - 1, () => ({ fill: ink("--card"), stroke: ink("--line"), round: 8 }));
  sketch.text(title, x + PAD, y + 21, strong);
  lines.forEach((line, i) => sketch.text(line, x + PAD, y + 38 + i * 15, () => ({ size: 11, fill: ink("--faint") })));
  if (leads) sketch.spot(x, y, width, high, title, leads);
  return high;
}

function embeddingTitle(stack) {
  const first = stack.walk >= 0 ? data.walks[stack.walk].layers[0][0] : null;
  return first ? sentenceCase(first.title) : "Embedding";
}

// The link target of the embedding: the position encoding of this stack, if it has a picture, else the walk.
function embeddingLeads(stack) {
  const picture = data.positions.findIndex((position) => position.name === stack.name);
  return picture >= 0 ? { view: "position", picture } : stack.walk >= 0 ? { walk: stack.walk, layer: 0 } : null;
}

// One stack from its tokens to its last layer -> {bottom, enters}
function stackPart(sketch, stack, x, y, width) {
  const middle = x + width / 2,
    enters = [];
  let top = y;
  sketch.text(sentenceCase(stack.name), x, top + 13, strong);
  wrap(stack.fact, width, 11, 2).forEach((line, i) =>
    sketch.text(line, x, top + 30 + i * 14, () => ({ size: 11, fill: ink("--faint") })),
  );
  top += 24 + Math.min(2, wrap(stack.fact, width, 11, 2).length) * 14 + 8;
  const name = data.tokens[stack.reads] ? stack.reads : "source";
  top += tokensPart(
    sketch,
    data.image ? [`${data.tokens.source.length - 1}\u00a0patches`] : tokensOf(name),
    x,
    top,
    width,
    { mirrored: rightToLeft(name) },
  );
  const arrow = () => {
    sketch.arrow(middle, top + 2, top + ARROW - 2);
    top += ARROW;
  };
  arrow();
  top += plainBox(sketch, embeddingTitle(stack), "", x, top, width, embeddingLeads(stack));
  if (!stack.layers.length) {
    arrow();
    top += plainBox(sketch, "Recurrent layers", stack.fact, x, top, width, null);
  }
  for (const each of stack.layers) {
    arrow();
    top += layerPart(sketch, stack, each, x, top, width, enters);
  }
  return { bottom: top, enters };
}

function predictionPart(sketch, x, y, width) {
  if (!data.steps.length) return 0;
  sketch.arrow(x + width / 2, y + 2, y + ARROW - 2);
  const top = y + ARROW,
    at = sketch.marks.length,
    classes = data.unit === "class";
  sketch.text(
    classes || width < 340 ? "Prediction" : "Prediction, with the probability of each token",
    x + PAD,
    top + 21,
    strong,
  );
  /** @type {[string, number][]} */
  const shown = classes
    ? data.steps[0].candidates.map(([name, p]) => [name, p])
    : data.steps.map((step) => [step.token, step.probability]);
  const high =
    32 +
    tokensPart(
      sketch,
      shown.map(([token]) => token),
      x + PAD - 4,
      top + 28,
      width - 2 * PAD + 8,
      { under: shown.map(([, p]) => percent(p)), mirrored: !classes && rightToLeft("output") },
    ) +
    4;
  sketch.marks.splice(at, 0, (surface) =>
    surface.rect(x + 0.5, top + 0.5, width - 1, high - 1, { fill: ink("--wash"), stroke: ink("--accent"), round: 8 }),
  );
  sketch.spot(x, top, width, high, "Prediction: the output, token by token", { view: "output" });
  return ARROW + high;
}

// The complete layout for a width in pixels: {width, height, marks, spots}
export function overviewLayout(room) {
  const sketch = new Sketch(),
    stacks = stacksOf(),
    beside = stacks.length > 1 && room >= NARROW_OVERVIEW;
  const width = beside ? Math.min(WIDEST, (room - GUTTER) / 2) : Math.min(WIDEST, room);
  let bottom = 0;
  if (beside) {
    const encoder = stackPart(sketch, stacks[0], 0, 0, width),
      x = width + GUTTER,
      decoder = stackPart(sketch, stacks[1], x, 0, width);
    const trunk = width + GUTTER / 2,
      ends = [encoder.bottom + 18, ...decoder.enters];
    sketch.line(`M${width / 2} ${encoder.bottom + 2}V${encoder.bottom + 18}H${trunk}`);
    sketch.line(`M${trunk} ${Math.min(...ends)}V${Math.max(...ends)}`);
    for (const y of decoder.enters) sketch.branch(`M${trunk} ${y}H${x - 2}`, [x - 2, y]);
    bottom = Math.max(encoder.bottom + 20, decoder.bottom + predictionPart(sketch, x, decoder.bottom, width));
    return { ...sketch, width: x + width, height: bottom + 4 };
  }
  stacks.forEach((stack, i) => {
    if (i) {
      const lines = wrap("↓ every cross-attention below reads the encoder's output", width, 12.5, 3);
      lines.forEach((line, k) => sketch.text(line, 0, bottom + 24 + k * 16, soft));
      bottom += 28 + lines.length * 16;
    }
    bottom = stackPart(sketch, stack, 0, bottom, width).bottom;
  });
  bottom += predictionPart(sketch, 0, bottom, width);
  return { ...sketch, width, height: bottom + 4 };
}
