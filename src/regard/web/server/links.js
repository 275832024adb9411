// @ts-check
// The alignment: source tokens above, output tokens below, and a line per visible weight.

import { direction } from "../shared/direction.js";
import { h, put } from "../shared/dom.js";
import { word } from "./format.js";

const LEAST = 0.05; // smaller weights are not drawn
const HEIGHT = 64;

export class Links {
  constructor() {
    this.svg = h("svg", { "aria-hidden": "true" });
    this.rows = [h("div", { class: "words" }), h("div", { class: "words" })];
    this.inner = h("div", { class: "links" }, this.rows[0], this.svg, this.rows[1]);
    this.element = h(
      "div",
      { class: "scroll", tabindex: 0, role: "group", "aria-label": "Alignment of the output with the source" },
      this.inner,
    );
    this.at = null;
    new ResizeObserver(() => this.draw()).observe(this.inner);
  }

  // A row runs in the direction of its text: single tokens do not show it, since names of features come first.
  show({ source, output }, alignment, tokens) {
    this.soft = alignment.soft;
    this.output = tokens.slice(0, alignment.soft.length);
    for (const [row, text, parts] of [
      [this.rows[0], source, alignment.source],
      [this.rows[1], output, this.output],
    ]) {
      row.dir = direction(text);
      put(
        row,
        parts.map((token) => h("span", { class: "word" }, word(token))),
      );
    }
    this.element.dir = this.rows[0].dir; // the side from which a long text is read
    Array.from(this.rows[1].children, (node, i) => {
      node.addEventListener("mouseenter", () => this.highlight(i));
      node.addEventListener("mouseleave", () => this.highlight(null));
    });
    this.highlight(null);
    this.draw();
  }

  // Show the links of one output token; null: all.
  highlight(index) {
    this.at = index !== null && index < (this.output || []).length ? index : null;
    for (const path of this.svg.children)
      path.classList.toggle(
        "off",
        this.at !== null && /** @type {SVGElement} */ (path).dataset.output !== String(this.at),
      );
    Array.from(this.rows[1].children, (node, i) => node.classList.toggle("on", i === this.at));
    Array.from(this.rows[0].children, (node, i) =>
      node.classList.toggle("on", this.at !== null && this.soft[this.at][i] >= LEAST),
    );
  }

  draw() {
    if (!this.soft || !this.inner.isConnected) return;
    const origin = this.inner.getBoundingClientRect();
    const middle = (node) => {
      const box = node.getBoundingClientRect();
      return box.left + box.width / 2 - origin.left;
    };
    const above = Array.from(this.rows[0].children, middle),
      below = Array.from(this.rows[1].children, middle);
    const paths = this.soft
      .flatMap((row, t) => row.map((weight, s) => ({ weight, s, t })))
      .filter(({ weight }) => weight >= LEAST)
      .map(({ weight, s, t }) => {
        const path = h("path", {
          d: `M${above[s]} 2C${above[s]} ${HEIGHT / 2} ${below[t]} ${HEIGHT / 2} ${below[t]} ${HEIGHT - 2}`,
        });
        path.dataset.output = t;
        path.style.strokeOpacity = weight;
        path.style.strokeWidth = `${0.8 + 2.2 * weight}px`;
        return path;
      });
    put(this.svg, paths);
    this.highlight(this.at);
  }
}
