// Input fields: text that grows with its content, features with completion, chips of tokens.

import { h, put } from "./core.js";
import { visible, word } from "./text.js";

// changed(text) is called at every key press; a composition (of an input method) counts once it has ended.
export function textField(id, text, oneLine, changed) {
  const field = h("textarea", { id, class: "field", rows: 1, dir: "auto", spellcheck: "false", autocomplete: "off", autocapitalize: "off", maxlength: 4000 });
  field.value = text;
  const fit = () => { field.style.height = "auto"; field.style.height = field.scrollHeight + 2 + "px"; };
  field.addEventListener("input", () => {
    if (oneLine && /[\n\r]/.test(field.value)) field.value = field.value.replace(/[\n\r]+/g, " ");
    fit();
    changed(field.value);
  });
  if (oneLine) field.addEventListener("keydown", (event) => { if (event.key === "Enter") event.preventDefault(); });
  requestAnimationFrame(fit);
  window.addEventListener("resize", fit);
  return field;
}

const MOST_OPTIONS = 60;

// Features between separators; the list completes the last one.
export function featureField(id, text, { names, separator }, changed) {
  const list = h("datalist", { id: id + "-names" });
  const field = h("input", { id, class: "field features", type: "text", list: id + "-names", spellcheck: "false", autocomplete: "off", autocapitalize: "off", maxlength: 1000, placeholder: names.slice(0, 3).join(separator) });
  field.value = text;
  function complete() {
    const cut = field.value.lastIndexOf(separator) + 1, before = field.value.slice(0, cut), begun = field.value.slice(cut).trim().toLowerCase();
    const had = new Set(before.split(separator).map((name) => name.trim()));
    const fitting = names.filter((name) => !had.has(name) && name.toLowerCase().startsWith(begun));
    put(list, fitting.slice(0, MOST_OPTIONS).map((name) => h("option", { value: before + name })));
  }
  field.addEventListener("input", () => { complete(); changed(field.value); });
  field.addEventListener("focus", complete);
  return h("span", { class: "with-list" }, field, list);
}

// Tokens as chips that can be removed, and a field to type more. read() -> ids; change(ids); encode(text) -> {ids, unknown}
export function tokenChips(label, hint, { read, change, encode, name }) {
  const chips = h("span", { class: "chips" }), status = h("small", { class: "status" });
  const field = h("input", { type: "text", "aria-label": label, placeholder: hint, dir: "auto", spellcheck: "false", autocomplete: "off", autocapitalize: "off", maxlength: 500 });
  field.addEventListener("change", () => {
    if (!field.value) return;
    const { ids, unknown } = encode(field.value);
    put(status, unknown.length ? `not in the vocabulary: ${unknown.map(visible).join(", ")}` : null);
    if (unknown.length || !ids.length) return;
    field.value = "";
    change([...read(), ...ids]);
  });
  function write() {
    put(chips, read().map((id, i) => h("button", { type: "button", class: "chip-button", "aria-label": `remove ${visible(name(id))}`, click: () => change(read().filter((_, k) => k !== i), i) }, word(name(id)), h("span", { "aria-hidden": "true" }, "×"))));
  }
  write();
  return { node: h("div", { class: "control" }, h("span", {}, label), chips, field, status), write };
}
