// @ts-check
// One text: the output appears during decoding and can be steered and inspected.

import { h, put } from "../shared/dom.js";
import { featureField, fit, growingField, TYPED } from "../shared/fields.js";
import { percent, plural, visible } from "../shared/text.js";
import { patiently, post, stream } from "./api.js";
import { bar, BEAM, number, setNumber, share } from "./format.js";
import { Links } from "./links.js";
import { flagNote, Output } from "./output.js";

const DELAY = 200; // milliseconds after the last key
const ALTERNATIVES = 8;
const NO_EXAMPLE = { source: "", features: null };

export class Single {
  constructor(panel, report, remember) {
    this.report = report;
    this.remember = remember; // called when the state changes
    this.panel = panel;
    this.timer = 0;
    this.controller = new AbortController();
    this.source = growingField({ id: "source", rows: 3, input: () => this.changed() });
    this.example = NO_EXAMPLE;
    this.features = "";
    this.prefix = growingField({ id: "prefix", rows: 1, input: () => this.changed() });
    this.require = new Phrases("require", "Contains", () => this.changed(0));
    this.forbid = new Phrases("forbid", "Must not contain", () => this.changed(0));
    this.numbers = {
      beam: numeric("beam", 5, BEAM, () => this.changed()),
      temperature: numeric("temperature", 0, { min: 0, max: 5, step: 0.1 }, () => this.changed()),
      seed: numeric("seed", 1, { min: 0, step: 1 }, () => this.changed()),
      max_length: numeric("max_length", "", { min: 1, step: 1, placeholder: "tokens" }, () => this.changed()),
    };
    this.again = h(
      "button",
      { type: "button", class: "quiet", id: "again", click: () => this.drawAgain() },
      "Draw again",
    );
    this.output = new Output({
      alternatives: (prefix) => this.alternatives(prefix),
      choose: (prefix, hypothesis) => this.choose(prefix, hypothesis),
      forbid: (phrase) => this.forbid.add(phrase),
      onFocus: (index) => this.links.highlight(index),
    });
    this.nbest = h("ol", { id: "nbest" });
    this.links = new Links();
    this.labels = h("div", { id: "labels", "aria-live": "polite" });
    this.state = h("p", { class: "dim", role: "status" });
    this.frame = h("div", {});
    this.attention = h(
      "details",
      { id: "attention", toggle: () => this.inspect() },
      h("summary", {}, "Attention"),
      this.frame,
    );
    this.steering = h(
      "div",
      { class: "steer" },
      field("Begins with", "prefix", this.prefix),
      this.require.element,
      this.forbid.element,
      h(
        "div",
        { class: "controls" },
        field("Beam", "beam", this.numbers.beam),
        field("Temperature", "temperature", this.numbers.temperature),
        field("Seed", "seed", this.numbers.seed),
        field("Maximum length", "max_length", this.numbers.max_length),
      ),
      (this.hint = h("p", { class: "dim" })),
    );
    this.cards = {
      features: h("div", { class: "field" }),
      steering: h("details", { id: "steering" }, h("summary", {}, "Steer"), this.steering),
      output: h("div", {}, this.output.element, this.again),
      nbest: h(
        "section",
        { class: "ranking" },
        h(
          "div",
          { class: "hypothesis dim" },
          h("h2", {}, "n-best"),
          h("span", {}, "per token"),
          h("span", {}, "whole"),
        ),
        this.nbest,
        h(
          "p",
          { class: "dim" },
          "Probabilities of each output: the mean per token, which ranks the list, and of the whole. Choose one to inspect it.",
        ),
      ),
      alignment: h("section", { class: "card" }, h("h2", {}, "Alignment"), this.links.element),
    };
    put(
      panel,
      h(
        "div",
        { class: "pair" },
        h(
          "section",
          { class: "card" },
          h("label", { for: "source" }, h("h2", {}, "Input")),
          this.source,
          this.cards.features,
          this.cards.steering,
        ),
        h(
          "section",
          { class: "card" },
          h("h2", {}, "Output"),
          this.state,
          this.labels,
          this.cards.output,
          this.cards.nbest,
        ),
      ),
      this.cards.alignment,
      this.attention,
    );
  }

  // `run` as /v1/models describes it.
  setRun(run) {
    this.run = run;
    this.generates = run.kinds.includes("stream"); // a masked language model fills all masks at once
    this.cards.steering.hidden = this.cards.output.hidden = !this.generates;
    this.attention.hidden = !run.kinds.includes("inspect");
    const usual = run.task === "lm" ? { temperature: "0.8", max_length: "40" } : {};
    this.usual = { beam: "5", temperature: "0", seed: "1", max_length: "", ...usual };
    const typed = this.source.value !== this.example.source;
    this.example = (run.task === "masked" ? [] : run.examples)[0] ?? NO_EXAMPLE; // they have no masks
    const kept = ["beam", "seed"].map((name) => [name, this.numbers[name].value]);
    const changed = kept.filter(([name, value]) => value !== this.usual[name]);
    this.restore(new URLSearchParams(typed ? [...changed, ["source", this.source.value]] : changed));
    this.source.placeholder =
      run.task === "lm"
        ? "A text to continue"
        : run.kinds.includes("classify")
          ? "A text to classify"
          : run.task === "masked"
            ? "A text with <mask>"
            : "A source text";
  }

  // The input, also if it is empty, and the options that differ from the usual ones.
  parts() {
    const numbers = Object.entries(this.numbers).filter(([name, field]) => field.value !== this.usual[name]);
    return [
      ...numbers.map(([name, field]) => [name, field.value, name]),
      ["features", this.features || null, "the features"],
      ["prefix", this.prefix.value || null, "Begins with"],
      ...this.require.items.map((phrase) => ["require", phrase, "Contains"]),
      ...this.forbid.items.map((phrase) => ["forbid", phrase, "Must not contain"]),
      ["source", this.source.value, "the input"],
    ];
  }

  // Take over the state of an address.
  restore(parts) {
    for (const [name, field] of Object.entries(this.numbers)) setNumber(field, parts.get(name), this.usual[name]);
    const usual = parts.has("source") ? "" : (this.example.features ?? "");
    this.features = this.run.features ? (parts.get("features") ?? usual) : "";
    this.cards.features.hidden = !this.run.features;
    if (this.run.features) this.offerFeatures();
    this.source.value = parts.get("source") ?? this.example.source;
    this.prefix.value = parts.get("prefix") ?? "";
    this.require.set(parts.getAll("require"));
    this.forbid.set(parts.getAll("forbid"));
    if (["prefix", "require", "forbid", ...Object.keys(this.numbers)].some((name) => parts.has(name)))
      this.cards.steering.open = true;
    fit(this.source);
    fit(this.prefix);
    this.clear();
    this.changed(0);
  }

  offerFeatures() {
    const { feature_names: names, feature_separator: separator } = this.run;
    const changed = (text) => {
      this.features = text;
      this.changed();
    };
    put(
      this.cards.features,
      h("label", { for: "features" }, "Features"),
      featureField({ id: "features" }, this.features, { names, separator }, changed),
    );
  }

  changed(delay = DELAY) {
    clearTimeout(this.timer);
    this.controller.abort();
    this.panel.dataset.state = "busy";
    this.remember();
    this.timer = setTimeout(() => this.decode(), delay);
  }

  get beam() {
    return Number(this.numbers.beam.value) || 1;
  }

  get sampling() {
    return Number(this.numbers.temperature.value) > 0;
  }

  // The common part of all requests for this input.
  request() {
    const inputs = { source: this.source.value };
    if (this.run.features && this.features) inputs.features = this.features;
    if (this.prefix.value) inputs.prefix = this.prefix.value;
    if (this.require.items.length) inputs.require = this.require.items;
    if (this.forbid.items.length) inputs.forbid = this.forbid.items;
    const body = { run: this.run.id, inputs };
    if (this.numbers.max_length.value) body.max_length = Number(this.numbers.max_length.value);
    if (this.run.task !== "lm") body.alignment = true; // a language model has no source to align with
    return body;
  }

  strategy() {
    return this.sampling
      ? { sample: true, temperature: Number(this.numbers.temperature.value), seed: Number(this.numbers.seed.value) }
      : {};
  }

  async decode() {
    this.controller.abort();
    this.controller = new AbortController();
    const signal = this.controller.signal;
    this.report(null);
    this.again.hidden = !this.sampling;
    put(
      this.hint,
      this.sampling
        ? "Tokens are sampled; the same seed gives the same output."
        : "Greedy search while you type, then beam search; a temperature above 0 samples instead.",
    );
    if (!this.source.value.trim()) {
      this.clear();
      this.panel.dataset.state = "idle";
      return;
    }
    put(this.state, "…");
    try {
      if (this.generates) await this.generate(signal);
      else if (this.run.kinds.includes("classify")) await this.classify(signal);
      else if (this.run.kinds.includes("generate")) await this.fill(signal);
      else
        put(
          this.labels,
          h(
            "p",
            { class: "dim" },
            this.run.kinds.includes("embed")
              ? "This run produces vectors: see Many lines. Its attention is below."
              : "This run cannot process a typed text.",
          ),
        );
      if (signal.aborted) return;
      put(this.state);
      this.inspect();
    } catch (error) {
      if (error.name === "AbortError" || signal.aborted) return;
      this.clear();
      this.report(error.message);
    }
    this.panel.dataset.state = "idle";
  }

  clear() {
    this.output.clear();
    put(this.labels);
    put(this.state);
    put(this.frame);
    this.cards.nbest.hidden = this.cards.alignment.hidden = true;
  }

  // The answer of the server, waiting while it is busy.
  async ask(call) {
    let waited = false;
    const answer = await patiently(call, this.controller.signal, (seconds) => {
      waited = true;
      put(this.state, `The server is busy; trying again in ${plural(seconds, "second")}.`);
    });
    if (waited) put(this.state);
    return answer;
  }

  async generate(signal) {
    put(this.labels);
    this.output.start();
    const body = { ...this.request(), ...this.strategy() };
    this.text = this.source.value;
    const first = await this.ask(() =>
      stream("v1/generate", body, signal, (piece) => {
        if (!signal.aborted) this.output.piece(piece);
      }),
    );
    if (signal.aborted) return;
    this.nbest.style.minHeight = `${this.nbest.offsetHeight}px`; // keep the layout stable while the beam search runs
    this.show(first.hypotheses);
    this.cards.nbest.hidden = this.sampling || this.beam < 2;
    if (this.cards.nbest.hidden) return;
    const answer = await this.ask(() =>
      post("v1/generate", { ...this.request(), beam: this.beam, nbest: this.beam }, signal),
    );
    if (signal.aborted) return;
    this.show(answer.results[0].hypotheses);
    this.nbest.style.minHeight = "";
  }

  show(hypotheses) {
    this.hypotheses = hypotheses;
    put(
      this.nbest,
      hypotheses.map((each, i) =>
        h(
          "li",
          {},
          h(
            "button",
            {
              type: "button",
              class: "hypothesis",
              "aria-pressed": i === 0,
              click: () => {
                this.select(i);
                this.inspect();
              },
            },
            h("span", { class: "whole", dir: "auto" }, each.text || "∅"),
            [each.normalized, each.score].map((score) =>
              h("span", { title: `log-probability ${number(score)}` }, percent(share(score))),
            ),
          ),
        ),
      ),
    );
    if (this.output.at === null) this.select(0);
    else this.mark(hypotheses.findIndex((each) => each.text === this.output.hypothesis.text)); // the user is inspecting its tokens
  }

  mark(index) {
    Array.from(this.nbest.querySelectorAll("button"), (node, i) =>
      node.setAttribute("aria-pressed", String(i === index)),
    );
  }

  select(index) {
    const hypothesis = this.hypotheses[index];
    this.mark(index);
    this.output.show(hypothesis);
    this.cards.alignment.hidden = !(hypothesis.alignment && hypothesis.alignment.soft.length);
    if (!this.cards.alignment.hidden)
      this.links.show({ source: this.text, output: hypothesis.text }, hypothesis.alignment, hypothesis.tokens);
  }

  async alternatives(prefix) {
    const body = this.request();
    delete body.alignment;
    if (prefix) body.inputs.prefix = prefix;
    else delete body.inputs.prefix;
    const answer = await this.ask(() =>
      post("v1/generate", { ...body, alternatives: ALTERNATIVES, beam: this.beam }, this.controller.signal),
    );
    return answer.results[0].hypotheses;
  }

  choose(prefix, hypothesis) {
    if (prefix === null) {
      // no prefix can express the end of the output, but this hypothesis already has it
      this.output.close(false);
      this.show([hypothesis]);
      this.inspect();
      return;
    }
    this.prefix.value = prefix;
    fit(this.prefix);
    this.cards.steering.open = true;
    this.changed(0);
  }

  drawAgain() {
    this.numbers.seed.value = String(Number(this.numbers.seed.value) + 1);
    this.changed(0);
  }

  async classify(signal) {
    const input = { source: this.source.value };
    if (this.run.features && this.features) input.features = this.features;
    const answer = await this.ask(() => post("v1/classify", { run: this.run.id, inputs: [input] }, signal));
    if (signal.aborted) return;
    const { label, probabilities, flags } = answer.results[0];
    put(
      this.labels,
      h("p", { class: "text" }, h("bdi", {}, label)),
      flagNote(flags),
      h(
        "table",
        {},
        h(
          "tbody",
          {},
          Object.entries(probabilities).map(([name, p]) =>
            h(
              "tr",
              {},
              h("th", { scope: "row" }, h("bdi", {}, name)),
              h("td", {}, percent(p)),
              h("td", { class: "wide" }, bar(p)),
            ),
          ),
        ),
      ),
    );
  }

  async fill(signal) {
    const answer = await this.ask(() =>
      post("v1/generate", { run: this.run.id, inputs: [{ source: this.source.value }], top_tokens: 5 }, signal),
    );
    if (signal.aborted) return;
    const { text, flags, top_tokens: masks = [] } = answer.results[0].hypotheses[0];
    put(
      this.labels,
      h("p", { class: "text", dir: "auto" }, text),
      flagNote(flags),
      masks.map((tokens, i) =>
        h(
          "table",
          {},
          h("caption", {}, `mask ${i + 1}`),
          h(
            "tbody",
            {},
            tokens.map(({ token, probability: p }) =>
              h(
                "tr",
                {},
                h("th", { scope: "row" }, h("bdi", {}, token)),
                h("td", {}, percent(p)),
                h("td", { class: "wide" }, bar(p)),
              ),
            ),
          ),
        ),
      ),
    );
  }

  // The attention page of the shown output, in a frame that can run only its own script.
  async inspect() {
    if (!this.attention.open || this.attention.hidden || !this.source.value.trim()) return;
    const signal = this.controller.signal;
    const body = { run: this.run.id, source: this.source.value };
    if (this.run.features && this.features) body.features = this.features;
    if (this.generates && this.output.hypothesis) body.target = this.output.hypothesis.text;
    if (this.generates && !body.target) {
      put(this.frame);
      return;
    }
    const key = JSON.stringify(body);
    const shown = /** @type {HTMLElement | null} */ (this.frame.firstElementChild);
    if (shown && shown.dataset.key === key) return;
    try {
      const { html } = await this.ask(() => post("v1/inspect", body, signal));
      if (signal.aborted) return;
      const frame = this.frame.querySelector("iframe") || h("iframe", { sandbox: "allow-scripts", title: "Attention" });
      frame.dataset.key = key;
      frame.srcdoc = html;
      if (!frame.isConnected) put(this.frame, frame); // reusing the frame keeps its view
    } catch (error) {
      if (error.name !== "AbortError" && !signal.aborted)
        put(this.frame, h("p", { class: "note", role: "alert" }, error.message));
    }
  }
}

const field = (label, id, input) => h("label", { class: "field", for: id }, h("span", {}, label), input);

function numeric(id, value, limits, changed) {
  const made = h("input", {
    id,
    type: "number",
    ...limits,
    input: () => {
      if (made.checkValidity()) changed();
    },
  });
  made.value = value;
  return made;
}

// A list of phrases to add and remove.
class Phrases {
  constructor(id, label, changed) {
    this.items = [];
    this.changed = changed;
    this.list = h("span", { class: "chips" });
    this.input = h("input", {
      ...TYPED,
      id,
      type: "text",
      placeholder: "a phrase, then Enter",
      keydown: (event) => {
        if (event.key === "Enter" && this.input.value) {
          event.preventDefault();
          this.add(this.input.value);
          this.input.value = "";
        }
      },
      change: () => {
        if (this.input.value) {
          this.add(this.input.value);
          this.input.value = "";
        }
      },
    });
    this.element = h("div", { class: "field" }, h("label", { for: id }, label), h("div", {}, this.list, this.input));
  }

  set(items) {
    this.items = Array.from(new Set(items));
    this.fill();
  }

  add(phrase) {
    if (this.items.includes(phrase)) return;
    this.items.push(phrase);
    this.fill();
    this.element.closest("details").open = true;
    this.changed();
  }

  fill() {
    put(
      this.list,
      this.items.map((phrase) =>
        h(
          "button",
          {
            type: "button",
            class: "chip",
            "aria-label": `Remove ${phrase}`,
            click: () => {
              this.items = this.items.filter((each) => each !== phrase);
              this.fill();
              this.input.focus();
              this.changed();
            },
          },
          h("bdi", {}, visible(phrase)),
          " ×",
        ),
      ),
    );
  }
}
