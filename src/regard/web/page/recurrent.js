// @ts-check
// Recurrent stacks with the interface of Transformer: a bidirectional encoder, and a decoder with attention.

import { Attention, sigmoid } from "./attention.js";

// One GRU or LSTM layer in one direction; a state is {h} or {h, c}.
class Cell {
  constructor(weights, name, mixer, suffix = "") {
    const layer = (part) => weights.matrix(`${name}.weight_${part}_l0${suffix}`, `${name}.bias_${part}_l0${suffix}`);
    this.kernel = weights.kernel;
    this.mixer = mixer;
    this.input = layer("ih");
    this.hidden = layer("hh");
    this.width = this.hidden.width;
  }

  get zero() {
    const h = new Float32Array(this.width);
    return this.mixer === "lstm" ? { h, c: new Float32Array(this.width) } : { h };
  }

  // One step for each row -> the new states.
  step(x, states) {
    const rows = states.length,
      D = this.width,
      before = new Float32Array(rows * D);
    states.forEach((state, r) => before.set(state.h, r * D));
    const a = this.kernel.linear(x, rows, this.input),
      b = this.kernel.linear(before, rows, this.hidden),
      gates = a.length / rows;
    return states.map((state, r) => {
      const h = new Float32Array(D),
        at = r * gates,
        both = (gate, i) => a[at + gate * D + i] + b[at + gate * D + i];
      if (this.mixer === "gru") {
        for (let i = 0; i < D; i++) {
          const reset = sigmoid(both(0, i)),
            update = sigmoid(both(1, i)),
            fresh = Math.tanh(a[at + 2 * D + i] + reset * b[at + 2 * D + i]);
          h[i] = (1 - update) * fresh + update * state.h[i];
        }
        return { h };
      }
      const c = new Float32Array(D);
      for (let i = 0; i < D; i++) {
        c[i] = sigmoid(both(1, i)) * state.c[i] + sigmoid(both(0, i)) * Math.tanh(both(2, i));
        h[i] = sigmoid(both(3, i)) * Math.tanh(c[i]);
      }
      return { h, c };
    });
  }
}

export class RecurrentEncoder {
  constructor(weights, name, stack) {
    this.width = stack.width;
    this.attentions = [];
    this.blocks = Array.from({ length: stack.layers }, (_, i) =>
      ["", "_reverse"].map((suffix) => new Cell(weights, `${name}.blocks.${i}`, stack.mixer, suffix)),
    );
  }

  // The vector of a token is the concatenated states of both directions; `final` are the last states of each
  // layer.
  encode(x, rows) {
    const final = [],
      half = this.width / 2;
    for (const directions of this.blocks) {
      const out = new Float32Array(rows * this.width),
        last = new Float32Array(this.width),
        wide = x.length / rows;
      directions.forEach((cell, d) => {
        let states = [cell.zero];
        for (let k = 0; k < rows; k++) {
          const r = d ? rows - 1 - k : k;
          states = cell.step(x.subarray(r * wide, (r + 1) * wide), states);
          out.set(states[0].h, r * this.width + d * half);
        }
        last.set(states[0].h, d * half);
      });
      final.push(last);
      x = out;
    }
    return { states: x, rows, final };
  }
}

const joined = (rows, ...parts) => {
  const widths = parts.map((part) => part.length / rows),
    wide = widths.reduce((a, b) => a + b, 0),
    out = new Float32Array(rows * wide);
  for (let r = 0; r < rows; r++)
    parts.reduce((at, part, i) => {
      out.set(part.subarray(r * widths[i], (r + 1) * widths[i]), r * wide + at);
      return at + widths[i];
    }, 0);
  return out;
};
const stacked = (vectors) => {
  const out = new Float32Array(vectors.length * vectors[0].length);
  vectors.forEach((v, r) => out.set(v, r * v.length));
  return out;
};

export class RecurrentDecoder {
  constructor(weights, name, stack) {
    this.kernel = weights.kernel;
    this.name = name;
    this.stack = stack;
    this.cells = Array.from(
      { length: stack.layers },
      (_, i) => new Cell(weights, `${name}.blocks.${i}.cell`, stack.mixer),
    );
    this.bridges = this.cells.map((_, i) => weights.linear(`${name}.bridges.${i}`));
    this.combine = weights.linear(`${name}.combine`);
    this.cross = new Attention(weights, `${name}.blocks.${stack.layers - 1}.cross`, stack, {
      project: false,
      cross: true,
    });
    this.window = stack.cross_center === "step" && stack.cross_window ? stack.cross_window : Infinity;
  }

  get attentions() {
    return [this.cross];
  }

  // The encoder's last states through a bridge.
  start(encoded) {
    const finals = encoded.final || [encoded.states.subarray(0, this.stack.width)],
      source = { k: [], v: [] };
    const cells = this.bridges.map((bridge, i) => {
      const h = this.kernel.linear(finals[Math.min(i, finals.length - 1)], 1, bridge).map(Math.tanh);
      return this.stack.mixer === "lstm" ? { h, c: new Float32Array(h.length) } : { h };
    });
    this.cross.addKeys(encoded.states, encoded.rows, null, null, new Array(encoded.rows).fill(source));
    return { length: 0, cells, fed: new Float32Array(this.stack.width), source };
  }

  read(x, rows, state, options) {
    const wide = x.length / rows,
      out = [];
    for (let r = 0; r < rows; r++) {
      const next = this.step(x.subarray(r * wide, (r + 1) * wide), [state], options);
      out.push(next.x);
      [state] = next.states;
    }
    return { x: stacked(out), state };
  }

  step(x, states, { silenced, record }) {
    const rows = states.length,
      { attend_first: first, input_feeding: feeding } = this.stack;
    const attend = (query) =>
      this.cross.attend(
        query,
        rows,
        states.map((s) => s.length),
        null,
        states.map((s) => s.source),
        (r, keys) => {
          const p = states[r].length,
            end = Math.min(keys, p + this.window + 1);
          return [Math.min(end, Math.max(0, p - this.window)), end];
        },
        silenced,
        record,
      );
    if (record) record.keep(`${this.name}:embedding`, x);
    let context = null,
      input = x;
    if (first) {
      context = attend(stacked(states.map((s) => s.cells[s.cells.length - 1].h)));
      input = joined(rows, input, context);
    }
    if (feeding) input = joined(rows, input, stacked(states.map((s) => s.fed)));
    const cells = states.map(() => []);
    this.cells.forEach((cell, i) => {
      const next = cell.step(
        input,
        states.map((s) => s.cells[i]),
      );
      next.forEach((state, r) => cells[r].push(state));
      input = stacked(next.map((state) => state.h));
      if (record) record.keep(`${this.name}.blocks.${i}:out`, input);
    });
    context = context || attend(input);
    const both = joined(rows, context, input),
      out = this.kernel.linear(both, rows, this.combine).map(Math.tanh),
      D = this.stack.width;
    if (record) record.keepAll(this.name, { context, state: input, attentional: out });
    return {
      x: out,
      states: states.map((state, r) => ({
        ...state,
        length: state.length + 1,
        cells: cells[r],
        fed: out.slice(r * D, (r + 1) * D),
      })),
    };
  }
}
