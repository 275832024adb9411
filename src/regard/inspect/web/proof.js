// The engine without a document, for a JavaScript engine that regard asks itself: the proof of an export, and tests.

import { makeEngine } from "./engine.js";

let asked = null;

globalThis.loadModel = (block, template, simd) => {
  asked = makeEngine(JSON.parse(block), JSON.parse(template), simd);
  return asked.model.kernel.simd;
};

const plain = (_, value) =>
  ArrayBuffer.isView(value) ? Array.from(value, (v) => (Number.isFinite(v) ? v : null)) : value;

// Call a method of the engine with arguments as JSON -> its answer as JSON.
globalThis.askModel = (method, args) => {
  const given = JSON.parse(args);
  if (method === "silence") {
    asked.silenced.clear();
    given[0].forEach((key) => asked.silenced.add(key));
    return "null";
  }
  if (given[0] && Array.isArray(given[0].pixels)) given[0].pixels = Float32Array.from(given[0].pixels);
  const answer = asked[method](...given);
  return JSON.stringify(method === "importance" ? [...answer].filter(Boolean) : answer, plain);
};
