// @ts-check
// The engine without a document. regard runs it in a JavaScript engine of its own, to prove a page and in tests.

import { Engine, makeEngine } from "./engine.js";

/** @type {Engine} */
let engine;

globalThis.loadModel = (block, template, simd) => {
  engine = makeEngine(JSON.parse(block), JSON.parse(template), simd);
  return engine.model.kernel.simd;
};

const plain = (_, value) =>
  ArrayBuffer.isView(value)
    ? Array.from(/** @type {Float32Array} */ (value), (v) => (Number.isFinite(v) ? v : null))
    : value;

// Call a method of the engine; arguments and result are JSON.
globalThis.askModel = (method, args) => {
  const values = JSON.parse(args);
  if (method === "silence") {
    engine.silenced.clear();
    values[0].forEach((key) => engine.silenced.add(key));
    return "null";
  }
  if (values[0] && Array.isArray(values[0].pixels)) values[0].pixels = Float32Array.from(values[0].pixels);
  const answer = engine[method](...values);
  return JSON.stringify(method === "importance" ? [...answer].filter(Boolean) : answer, plain);
};
