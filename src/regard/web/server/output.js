// @ts-check
// One output: its text, its tokens, and the alternatives for a token.

import { direction } from "../shared/direction.js";
import { h, put } from "../shared/dom.js";
import { isEnd, percent, visible } from "../shared/text.js";
import { bar, number, share, word } from "./format.js";

// The text up to the end of each token, or null where it is unknown. Compared as bytes, because a token may be part
// of a character, which the server writes as \xe4.
export function tokenEnds(text, tokens) {
  const all = new TextEncoder().encode(text),
    ends = [];
  let at = 0;
  for (const token of tokens) {
    let found = null;
    for (const bytes of spellings(token)) {
      let start = at;
      while (start < all.length && all[start] === 32 && bytes[0] !== 32) start++; // tokens are joined by spaces
      if (bytes.length && bytes.every((byte, i) => all[start + i] === byte)) {
        found = start + bytes.length;
        break;
      }
    }
    if (found === null) {
      if (isEnd(token)) found = at;
      else return [...ends, ...Array(tokens.length - ends.length).fill(null)];
    }
    at = found;
    ends.push(at);
  }
  return ends.map((end) =>
    end < all.length && (all[end] & 0xc0) === 0x80 ? null : new TextDecoder().decode(all.slice(0, end)),
  );
}

function spellings(token) {
  const plain = new TextEncoder().encode(token),
    trimmed = new TextEncoder().encode(token.trimStart());
  const parts = token.split(/(\\x[0-9a-f]{2})/).filter((part) => part);
  const raw = parts.flatMap((part) =>
    /^\\x[0-9a-f]{2}$/.test(part) ? [Number.parseInt(part.slice(2), 16)] : [...new TextEncoder().encode(part)],
  );
  return [plain, trimmed, Uint8Array.from(raw)];
}

// Warnings of the server, or nothing.
export function flagNote(flags) {
  const words = Object.entries(flags || {}).map(([name, reason]) => `${name.replaceAll("_", " ")}: ${reason}`);
  return words.length ? h("p", { class: "note" }, words.join("; ")) : null;
}

export class Output {
  // `alternatives(prefix)` requests hypotheses; `choose(prefix, hypothesis)` continues from one of them.
  constructor({ alternatives, choose, forbid, onFocus }) {
    this.alternatives = alternatives;
    this.choose = choose;
    this.forbid = forbid;
    this.onFocus = onFocus;
    this.text = h("output", { class: "text", dir: "auto", "aria-live": "polite", "aria-label": "Output" });
    this.score = h("span", { class: "dim" });
    this.copy = h("button", { type: "button", class: "quiet", click: () => this.copyText() }, "Copy");
    this.tokens = h("div", {
      class: "tokens",
      role: "group",
      "aria-label": "Tokens: choose one to see alternatives",
      keydown: (event) => this.move(event),
    });
    this.panel = h("div", {
      class: "alternatives",
      hidden: true,
      keydown: (event) => {
        if (event.key === "Escape") this.close(true);
      },
    });
    this.flags = h("div", {});
    this.element = h(
      "div",
      {},
      this.text,
      h("p", { class: "row" }, this.score, h("span", { class: "grow" }), this.copy),
      this.flags,
      this.tokens,
      this.panel,
    );
    this.wanted = null; // index of the token to focus once it exists
    this.clear();
  }

  clear() {
    this.hypothesis = null;
    this.text.setAttribute("aria-busy", "false");
    put(this.text);
    put(this.score);
    put(this.flags);
    put(this.tokens);
    this.copy.hidden = true;
    this.close(false);
  }

  start() {
    this.clear();
    this.text.setAttribute("aria-busy", "true");
  }

  piece(piece) {
    this.text.append(piece.text);
    this.tokens.append(this.token(piece.token, piece.score, this.tokens.children.length, false));
    this.tokens.dir = direction(this.text.textContent);
  }

  show(hypothesis) {
    const active = document.activeElement;
    const held = this.tokens.contains(active)
      ? Array.from(this.tokens.children).indexOf(active)
      : active === document.body
        ? this.wanted
        : null;
    this.hypothesis = hypothesis;
    this.before = ["", ...tokenEnds(hypothesis.text, hypothesis.tokens)]; // the text in front of each token
    if (this.text.textContent !== hypothesis.text) put(this.text, hypothesis.text);
    this.text.setAttribute("aria-busy", "false");
    put(
      this.score,
      hypothesis.tokens.length
        ? `score ${number(hypothesis.score)} · probability ${percent(share(hypothesis.score))}`
        : "",
    );
    put(this.flags, flagNote(hypothesis.flags));
    put(
      this.tokens,
      hypothesis.tokens.map((token, i) => this.token(token, hypothesis.token_scores[i], i, this.before[i] !== null)),
    );
    this.tokens.dir = direction(hypothesis.text);
    this.copy.hidden = !hypothesis.text;
    this.close(false);
    this.wanted = null;
    if (held !== null) this.focus(held);
  }

  token(token, score, index, able) {
    const p = share(score);
    const made = h(
      "button",
      {
        type: "button",
        class: "token",
        tabindex: index ? -1 : 0,
        disabled: !able,
        "aria-label": `${isEnd(token) ? "end" : visible(token)}, ${percent(p)}`,
        title: able ? `${percent(p)}: choose to see alternatives` : percent(p),
        click: () => this.open(index),
        focus: () => this.onFocus(index),
        mouseenter: () => this.onFocus(index),
        mouseleave: () => this.onFocus(null),
        blur: () => this.onFocus(null),
      },
      word(token),
      bar(p),
    );
    return made;
  }

  // Tab reaches one token; arrow keys reach the others.
  focus(index) {
    const all = /** @type {HTMLElement[]} */ (Array.from(this.tokens.children)),
      node = all[Math.max(0, Math.min(index, all.length - 1))];
    if (!node) return;
    for (const each of all) each.tabIndex = each === node ? 0 : -1;
    node.focus({ preventScroll: true });
  }

  move(event) {
    const at = Array.from(this.tokens.children).indexOf(document.activeElement),
      count = this.tokens.children.length;
    const right = this.tokens.dir === "rtl" ? -1 : 1;
    const next = { ArrowRight: at + right, ArrowLeft: at - right, Home: 0, End: count - 1 }[event.key];
    if (event.key === "Escape") this.close(true);
    if (next === undefined || at < 0) return;
    event.preventDefault();
    this.focus((next + count) % count);
  }

  async copyText() {
    try {
      await navigator.clipboard.writeText(this.hypothesis.text);
      put(this.copy, "Copied");
    } catch (error) {
      // without permission or a secure context, select the text for manual copying
      getSelection().selectAllChildren(this.text);
      put(this.copy, "Marked");
    }
    setTimeout(() => put(this.copy, "Copy"), 1500);
  }

  close(refocus) {
    const at = this.at;
    this.at = null;
    const active = /** @type {HTMLElement} */ (document.activeElement);
    if (this.panel.contains(active)) active.blur(); // otherwise it keeps the focus for a while
    this.panel.hidden = true;
    for (const node of this.tokens.children) node.removeAttribute("aria-expanded");
    if (refocus && at !== null && at !== undefined) this.focus(at);
  }

  async open(index) {
    const again = this.at === index;
    this.close(false);
    if (again || !this.hypothesis) return;
    this.at = index;
    const prefix = this.before[index],
      token = this.hypothesis.tokens[index],
      hypothesis = this.hypothesis;
    this.tokens.children[index].setAttribute("aria-expanded", "true");
    this.panel.hidden = false;
    put(this.panel, h("p", { class: "dim" }, "…"));
    let found;
    try {
      found = await this.alternatives(prefix);
    } catch (error) {
      if (error.name !== "AbortError" && this.at === index)
        put(this.panel, h("p", { class: "note", role: "alert" }, error.message));
      return;
    }
    if (this.at !== index || this.hypothesis !== hypothesis) return;
    const rows = found.map((each) => this.alternative(each, prefix, index, token));
    const forbid = isEnd(token)
      ? null
      : h(
          "button",
          { type: "button", class: "quiet", click: () => this.forbid(token.trim() || token) },
          "Forbid ",
          h("bdi", {}, visible(token.trim() || token)),
        );
    put(
      this.panel,
      h(
        "p",
        { class: "row" },
        h("span", {}, prefix ? ["After ", h("bdi", { class: "strong" }, prefix)] : "At the start"),
        h("span", { class: "grow" }),
        forbid,
        h("button", { type: "button", class: "quiet", click: () => this.close(true) }, "Close"),
      ),
      h("ol", {}, rows),
    );
    /** @type {HTMLElement | null} */
    const first = this.panel.querySelector("ol button");
    if (first && (this.tokens.contains(document.activeElement) || document.activeElement === document.body))
      first.focus({ preventScroll: true });
  }

  alternative(each, prefix, index, current) {
    const ends = tokenEnds(each.text, each.tokens);
    // the server may tokenize the prefix differently
    const at = Math.min(
      ends.findLastIndex((end) => end !== null && end.length <= prefix.length) + 1,
      each.tokens.length - 1,
    );
    const token = each.tokens[at],
      p = share(each.token_scores[at]),
      start = ends.slice(at).find((end) => end !== null) ?? each.text;
    return h(
      "li",
      {},
      h(
        "button",
        {
          type: "button",
          class: "alternative",
          "aria-current": token === current ? "true" : null,
          click: () => {
            this.wanted = index + 1;
            this.choose(isEnd(token) ? null : start, each);
          },
        },
        h("span", { class: "strong" }, word(token)),
        h("span", { class: "dim" }, percent(p)),
        bar(p),
        h("span", { class: "whole", dir: "auto" }, h("b", {}, start), each.text.slice(start.length)),
      ),
    );
  }
}
