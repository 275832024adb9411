// @ts-check
// Many lines: pasted or from a file, sent in parts, returned as TSV.

import { constants } from "../shared/constants.js";
import { h, put } from "../shared/dom.js";
import { TYPED } from "../shared/fields.js";
import { plural } from "../shared/text.js";
import { patiently, post } from "./api.js";
import { BEAM, setNumber } from "./format.js";

const USUAL_BEAM = "5";
const FIRST_PART = 10,
  LARGEST_PART = 200; // lines of a request, if the server accepts as many inputs
const PART_SECONDS = 1; // target duration of a request, so that the progress is visible
const SHOWN = 100; // rows of the table
const LARGEST = 50_000_000; // bytes of a file
const ALONE = new Set([413, 422, 504]); // status codes that a smaller request may avoid

// Lines end with \n; a preceding \r is dropped. The last line end is optional.
export const splitLines = (text) =>
  text
    .replace(/\n$/, "")
    .split("\n")
    .map((line) => line.replace(/\r$/, ""));
const oneLine = (text) => text.replace(/[\n\r\t]/g, " ");

// The request of each kind of run, and the columns of its answers.
const KINDS = {
  generate: {
    path: "v1/generate",
    names: ["output", "score", "flags"],
    columns: (x) => [
      x.hypotheses[0].text,
      x.hypotheses[0].score.toFixed(4),
      Object.keys(x.hypotheses[0].flags || {}).join(","),
    ],
  },
  classify: {
    path: "v1/classify",
    names: ["label", "probability", "flags"],
    columns: (x) => [x.label, x.probabilities[x.label].toFixed(4), Object.keys(x.flags || {}).join(",")],
  },
  embed: {
    path: "v1/embed",
    names: ["vector"],
    columns: (x) => [x.vector.map((value) => value.toPrecision(6)).join(" ")],
  },
};

// The number of lines of the next request: about a second of work, at most twice as many as before.
const nextPart = (lines, seconds) =>
  Math.max(1, Math.min(Math.round((lines * PART_SECONDS) / seconds), 2 * lines, LARGEST_PART, constants.max_inputs));

export class Batch {
  constructor(panel, report, remember) {
    this.report = report;
    this.remember = remember; // called when the state changes
    this.file = null;
    this.answers = [];
    this.errors = [];
    this.controller = null;
    this.lines = h("textarea", { ...TYPED, id: "lines", rows: 8, input: () => this.changed() });
    this.picker = h("input", {
      id: "file",
      type: "file",
      accept: ".txt,.tsv,text/plain,text/tab-separated-values",
      change: () => this.read(this.picker.files[0]),
    });
    this.held = h("p", { hidden: true });
    this.beam = h("input", { id: "batch-beam", type: "number", ...BEAM, input: () => this.changed() });
    this.beam.value = USUAL_BEAM;
    this.beamField = h("label", { class: "field", for: "batch-beam" }, h("span", {}, "Beam"), this.beam);
    this.format = h("p", { class: "dim" });
    this.start = h("button", { type: "button", class: "primary", id: "start", click: () => this.run() }, "Start");
    this.stop = h(
      "button",
      { type: "button", class: "quiet", id: "stop", hidden: true, click: () => this.controller.abort() },
      "Stop",
    );
    this.save = h(
      "button",
      { type: "button", class: "quiet", id: "download", hidden: true, click: () => this.download() },
      "Download TSV",
    );
    this.bar = h("progress", { max: 1, value: 0, hidden: true, "aria-label": "Progress" });
    this.state = h("p", { role: "status" });
    this.table = h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Results" });
    const zone = h(
      "section",
      { class: "card drop" },
      h("label", { for: "lines" }, h("h2", {}, "Lines")),
      this.lines,
      this.held,
      h(
        "label",
        { class: "field", for: "file" },
        h("span", {}, "or a text or TSV file, chosen or dropped here"),
        this.picker,
      ),
      h("div", { class: "controls" }, this.beamField),
      this.format,
      h("p", { class: "row" }, this.start, this.stop, this.save),
      this.bar,
      this.state,
    );
    // A file dropped outside the card must not replace the page.
    const dragged = (event, action) => {
      if (event.dataTransfer.types.includes("Files")) {
        event.preventDefault();
        action();
      }
    };
    window.addEventListener("dragover", (event) => dragged(event, () => zone.classList.add("over")));
    window.addEventListener("dragleave", () => zone.classList.remove("over"));
    window.addEventListener("drop", (event) =>
      dragged(event, () => {
        zone.classList.remove("over");
        if (!panel.hidden) this.read(event.dataTransfer.files[0]);
      }),
    );
    put(panel, zone, h("section", { class: "card" }, h("h2", {}, "Results"), this.table));
  }

  setRun(run) {
    this.model = run;
    this.kind = KINDS[Object.keys(KINDS).find((name) => run.kinds.includes(name === "generate" ? "stream" : name))];
    this.beamField.hidden = !run.kinds.includes("stream");
    this.start.disabled = !this.kind;
    put(
      this.format,
      run.features
        ? "One input per line: source, tab, features. Further columns are kept."
        : "One input per line. If a line has tabs, the first column is the source; the others are kept.",
    );
    if (!this.kind) put(this.format, "This run cannot process lines.");
    this.changed();
  }

  // The lines and the beam; a link to a file holds its lines.
  parts() {
    return [
      ["beam", this.beam.value === USUAL_BEAM ? null : this.beam.value, "beam"],
      ["lines", this.text || null, this.file ? "the file" : "the lines"],
    ];
  }

  restore(parts) {
    if (!parts.has("lines")) return;
    this.forget();
    this.lines.value = parts.get("lines");
    setNumber(this.beam, parts.get("beam"), USUAL_BEAM);
    this.changed();
  }

  get text() {
    return this.file ? this.file.text : this.lines.value;
  }

  // New input, run or beam: discard the earlier answers.
  changed() {
    this.remember();
    if (this.controller) this.controller.abort();
    this.answers = [];
    this.errors = [];
    put(this.table, h("p", { class: "dim" }, "None yet."));
    this.save.hidden = this.bar.hidden = this.stop.hidden = true;
    this.start.hidden = false;
    put(this.state);
    put(this.start, "Start");
  }

  async read(file) {
    if (!file) return;
    this.report(null);
    if (file.size > LARGEST)
      return this.report(
        `${file.name}: has more than ${LARGEST / 1e6} MB; use regard generate for files of this size.`,
      );
    let text;
    try {
      text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    } catch (error) {
      return this.report(`${file.name}: is not UTF-8 text.`);
    }
    this.file = { name: file.name, text };
    this.lines.hidden = true;
    this.held.hidden = false;
    put(
      this.held,
      h("bdi", { class: "strong" }, file.name),
      ` · ${plural(splitLines(text).length, "line")} `,
      h("button", { type: "button", class: "quiet", click: () => this.forget() }, "Remove"),
    );
    this.changed();
  }

  forget() {
    this.file = null;
    this.picker.value = "";
    this.lines.hidden = false;
    this.held.hidden = true;
    this.changed();
    this.lines.focus();
  }

  input(line) {
    const [source, features] = line.split("\t");
    return this.model.features && features ? { source, features } : this.kind === KINDS.embed ? source : { source };
  }

  async run() {
    const text = this.text;
    this.report(null);
    if (!text.trim()) return this.report("No input: paste lines or choose a file.");
    this.given = splitLines(text);
    this.controller = new AbortController();
    const { signal } = this.controller,
      answers = this.answers;
    this.start.hidden = true;
    this.stop.hidden = this.bar.hidden = false;
    this.stop.focus();
    try {
      const began = performance.now(),
        before = answers.length;
      for (let at = before, lines = FIRST_PART; at < this.given.length; at = answers.length) {
        const sent = performance.now();
        const part = await this.ask(this.given.slice(at, at + lines), signal);
        if (signal.aborted) break;
        this.errors.push(...part.map((x, i) => at + i).filter((i) => part[i - at].error));
        answers.push(...part);
        const now = performance.now();
        lines = nextPart(lines, (now - sent) / 1000);
        this.progress((((now - began) / 1000) * (this.given.length - answers.length)) / (answers.length - before));
      }
    } catch (error) {
      if (error.name !== "AbortError")
        this.report(
          `${error.message} ${plural(answers.length, "line")} of ${this.given.length} are done; Continue goes on from there.`,
        );
    }
    if (this.answers !== answers) return; // the input has changed meanwhile
    const focused = document.activeElement === this.stop;
    this.stop.hidden = true;
    this.start.hidden = answers.length === this.given.length;
    put(this.start, answers.length ? "Continue" : "Start");
    this.progress();
    if (focused) (this.start.hidden ? this.save : this.start).focus();
  }

  // The answers for lines: columns, or an error. If a part is refused, its two halves are requested.
  async ask(lines, signal) {
    const body = { run: this.model.id, inputs: lines.map((line) => this.input(line)) };
    const beam = Number(this.beam.value) || 1;
    if (this.kind === KINDS.generate && beam > 1) body.beam = beam;
    try {
      const { results } = await patiently(
        () => post(this.kind.path, body, signal),
        signal,
        (seconds) => put(this.state, `The server is busy; trying again in ${plural(seconds, "second")}.`),
      );
      return results.map((x) => (x.error ? { error: x.error.message } : { columns: this.kind.columns(x) }));
    } catch (error) {
      if (!ALONE.has(error.status)) throw error;
      if (lines.length === 1) return [{ error: error.message }];
      const half = Math.ceil(lines.length / 2);
      return [...(await this.ask(lines.slice(0, half), signal)), ...(await this.ask(lines.slice(half), signal))];
    }
  }

  // `left`: estimated seconds until the last line.
  progress(left = 0) {
    const done = this.answers.length,
      failed = this.errors.length;
    this.bar.value = done / this.given.length;
    this.save.hidden = !done;
    put(
      this.state,
      `${done.toLocaleString("en")} of ${plural(this.given.length, "line")}`,
      failed ? ` · ${plural(failed, "error")}` : "",
      left > 100
        ? ` · about ${Math.round(left / 60)} minutes left`
        : left > 2
          ? ` · about ${Math.round(left)} seconds left`
          : "",
    );
    const first = Array.from({ length: Math.min(done, SHOWN) }, (_, i) => i);
    const shown = Array.from(new Set([...this.errors.slice(0, SHOWN), ...first]))
      .slice(0, SHOWN)
      .sort((a, b) => a - b)
      .map((i) => ({ ...this.answers[i], i }));
    put(
      this.table,
      h(
        "table",
        {},
        h(
          "thead",
          {},
          h(
            "tr",
            {},
            ["line", "input", ...this.kind.names].map((name) => h("th", { scope: "col" }, name)),
          ),
        ),
        h(
          "tbody",
          {},
          shown.map((x) =>
            h(
              "tr",
              {},
              h("td", { class: "dim" }, x.i + 1),
              h("td", {}, h("bdi", {}, this.given[x.i].slice(0, 200))),
              x.error
                ? h("td", { class: "error", colspan: this.kind.names.length }, x.error)
                : x.columns.map((column) => h("td", {}, h("bdi", {}, oneLine(column).slice(0, 200)))),
            ),
          ),
        ),
      ),
      done > shown.length
        ? h(
            "p",
            { class: "dim" },
            `${shown.length} of ${done.toLocaleString("en")} are shown, errors first; the file has all.`,
          )
        : null,
    );
  }

  // The input lines with the columns of the answers; the last column holds errors.
  tsv() {
    const blank = this.kind.names.map(() => "");
    return this.answers
      .map(
        (x, i) =>
          [this.given[i], ...(x.columns || blank), x.error || ""]
            .map((column, j) => (j ? oneLine(column) : column))
            .join("\t") + "\n",
      )
      .join("");
  }

  download() {
    const link = h("a", {
      download: (this.file ? this.file.name.replace(/\.\w+$/, "") : "lines") + `.${this.model.id}.tsv`,
    });
    link.href = URL.createObjectURL(new Blob([this.tsv()], { type: "text/tab-separated-values;charset=utf-8" }));
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  }
}
