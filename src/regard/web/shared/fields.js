// @ts-check
// Input fields: text that grows with its content, and features with completion.

import { h, put } from "./dom.js";

/** Attributes of a field for text of any language. */
export const TYPED = { dir: "auto", spellcheck: "false", autocomplete: "off", autocapitalize: "off" };

/** Make a text field as high as its content. @param {HTMLTextAreaElement} field */
export function fit(field) {
  if (!field.offsetParent) return; // not shown, so it has no size
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + field.offsetHeight - field.clientHeight}px`;
}

/** A text field that grows with its content. @param {Record<string, unknown>} props */
export function growingField(props) {
  const field = h("textarea", { ...TYPED, ...props });
  const resize = () => fit(field);
  field.addEventListener("input", resize);
  window.addEventListener("resize", resize);
  requestAnimationFrame(resize);
  return field;
}

const MOST_OPTIONS = 60;

/**
 * A field for features between separators, with a list that completes the last one.
 * @param {{id: string, class?: string}} props
 * @param {string} text
 * @param {{names: string[], separator: string}} features
 * @param {(text: string) => void} changed
 */
export function featureField(props, text, { names, separator }, changed) {
  const list = h("datalist", { id: `${props.id}-names` });
  const placeholder = names.slice(0, 3).join(separator);
  const field = h("input", { ...TYPED, ...props, type: "text", list: list.id, maxlength: 1000, placeholder });
  field.value = text;
  function complete() {
    const cut = field.value.lastIndexOf(separator) + 1,
      before = field.value.slice(0, cut),
      begun = field.value.slice(cut).trim().toLowerCase();
    const had = new Set(before.split(separator).map((name) => name.trim()));
    const fitting = names.filter((name) => !had.has(name) && name.toLowerCase().startsWith(begun));
    put(
      list,
      fitting.slice(0, MOST_OPTIONS).map((name) => h("option", { value: before + name })),
    );
  }
  field.addEventListener("input", () => {
    complete();
    changed(field.value);
  });
  field.addEventListener("focus", complete);
  return h("span", { class: "with-list" }, field, list);
}
