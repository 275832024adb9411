// What was asked of the model, as parts of the address: inputs, search, silenced heads. What is read is checked.

import { data } from "./core.js";
import { BOUNDS, firstWishes, newSide, searches, silenceKey, STRATEGIES } from "./session.js";

const LONGEST = 4000; // characters of an input

const inBounds = (name, text) => { const [low, high] = BOUNDS[name], n = Number(text); return text !== null && text.trim() !== "" && n >= low && n <= high ? n : null; };
const integer = (n) => (n === null ? null : Math.round(n));

// Ids of target tokens that the vocabulary has.
const tokenIds = (engine, text) => (text || "").split(",").filter((part) => /^\d{1,7}$/.test(part)).map(Number).filter((id) => engine.codec && id < engine.codec.target.size).slice(0, 400);

function writeSide(side, first, name) {
  if (!side || !side.input || side.input.pixels) return []; // an image is too large for an address
  const { source, features } = side.input;
  return [[name, name === "source" && first && source === first.source ? null : source], [name === "source" ? "features" : name + "-features", first && features === first.features && name === "source" ? null : features], [name === "source" ? "forced" : name + "-forced", side.prefix.join(",")]];
}

export function askedParts(live) {
  const { engine, wishes } = live, first = live.sides[0].input, usual = firstWishes(engine);
  const unusual = (name) => (wishes[name] === usual[name] ? null : wishes[name]);
  function write() {
    const [one, two] = live.sides, sampling = wishes.strategy === "sample";
    return [
      ...writeSide(one, first, "source"), ...writeSide(two, null, "compare"), ["hypothesis", one.chosen ? one.chosen + 1 : null],
      ["search", unusual("strategy")], ["beam", wishes.strategy === "beam" ? unusual("beam") : null], ["temperature", sampling ? wishes.temperature : null], ["seed", sampling ? wishes.seed : null],
      ["length", unusual("length")], ["forbidden", wishes.forbid.join(",")], ["silenced", [...engine.silenced].join(",")],
    ];
  }
  function readSide(parts, name, otherwise) {
    const of = (part) => parts.get(name === "source" ? part : `${name}-${part}`), text = parts.get(name);
    if (text === null && !otherwise) return null;
    const side = newSide(text === null && of("features") === null ? otherwise : { source: (text ?? otherwise.source).slice(0, LONGEST), features: (of("features") ?? (otherwise ? otherwise.features : "")).slice(0, LONGEST) });
    if (searches(engine)) side.prefix = tokenIds(engine, of("forced"));
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
