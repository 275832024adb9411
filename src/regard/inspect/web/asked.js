// What was asked of the model, as parts of the address: inputs, search, silenced heads. What is read is checked.

import { data } from "./core.js";
import { BOUNDS, firstWishes, newSide, searches, silenceKey, STRATEGIES } from "./session.js";

const LONGEST = 4000; // characters of an input

const inBounds = (name, text) => { const [low, high] = BOUNDS[name], n = Number(text); return text !== null && text.trim() !== "" && n >= low && n <= high ? n : null; };
const integer = (n) => (n === null ? null : Math.round(n));

// Ids of target tokens that the vocabulary has.
const tokenIds = (engine, text) => (text || "").split(",").filter((part) => /^\d{1,7}$/.test(part)).map(Number).filter((id) => engine.codec && id < engine.codec.target.size).slice(0, 400);

// The parts of one input are named after it, but for the first: source, features, forced; compare, compare-features, compare-forced.
const partOf = (name, part) => (name === "source" ? part : `${name}-${part}`);

function writeSide(side, name, first) {
  if (!side || !side.input || side.input.pixels) return []; // an image is too large for an address
  const changed = (part) => (first && side.input[part] === first[part] ? null : side.input[part]);
  return [[name, changed("source")], [partOf(name, "features"), changed("features")], [partOf(name, "forced"), side.prefix.join(",")]];
}

export function askedParts(live) {
  const { engine, wishes } = live, first = live.sides[0].input, usual = firstWishes(engine);
  const unusual = (name) => (wishes[name] === usual[name] ? null : wishes[name]);
  function write() {
    const [one, two] = live.sides, sampling = wishes.strategy === "sample";
    return [
      ...writeSide(one, "source", first), ...writeSide(two, "compare", null), ["hypothesis", one.chosen ? one.chosen + 1 : null],
      ["search", unusual("strategy")], ["beam", wishes.strategy === "beam" ? unusual("beam") : null], ["temperature", sampling ? wishes.temperature : null], ["seed", sampling ? wishes.seed : null],
      ["length", unusual("length")], ["forbidden", wishes.forbid.join(",")], ["silenced", [...engine.silenced].join(",")],
    ];
  }
  // The input of this name; if the address has none, the usual one.
  function readSide(parts, name, usualInput) {
    const text = parts.get(name), features = parts.get(partOf(name, "features"));
    if (text === null && !usualInput) return null;
    const { source, features: usualFeatures } = usualInput || { source: "", features: "" };
    const side = newSide({ source: (text ?? source).slice(0, LONGEST), features: (features ?? usualFeatures).slice(0, LONGEST) });
    if (searches(engine)) side.prefix = tokenIds(engine, parts.get(partOf(name, "forced")));
    return side;
  }
  function read(parts) {
    if (engine.task !== "image") live.sides = [readSide(parts, "source", first), readSide(parts, "compare", null)].filter(Boolean);
    Object.assign(wishes, firstWishes(engine));
    if (STRATEGIES.includes(parts.get("search"))) wishes.strategy = parts.get("search");
    for (const name of ["beam", "seed", "length"]) wishes[name] = integer(inBounds(name, parts.get(name))) ?? wishes[name];
    wishes.temperature = inBounds("temperature", parts.get("temperature")) ?? wishes.temperature;
    wishes.forbid = searches(engine) ? tokenIds(engine, parts.get("forbidden")) : [];
    const known = new Set(data.maps.flatMap((map) => map.heads.map((_, index) => silenceKey(map, index))));
    engine.silenced.clear();
    for (const key of (parts.get("silenced") || "").split(",")) if (known.has(key)) engine.silenced.add(key);
    live.wanted = integer(inBounds("beam", parts.get("hypothesis"))); // of the first answer
    live.bar.rebuild();
    live.ask();
  }
  return { write, read };
}
