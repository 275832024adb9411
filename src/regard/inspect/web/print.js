// On paper: light colours, and all views one below the other, each as wide as the paper.

import { h } from "./core.js";
import { draw, refresh, shell } from "./tabs.js";

const PAPER = 700; // pixels
let finishPrinting = null; // what makes the page as it was

function startPrinting() {
  if (finishPrinting) return;
  const root = document.documentElement, details = document.querySelector("main > details"), sheets = h("div", { class: "sheets" });
  const before = { theme: root.dataset.theme, open: details.open, top: window.scrollY };
  finishPrinting = () => {
    sheets.remove();
    root.dataset.theme = before.theme;
    root.classList.remove("printing");
    details.open = before.open;
    refresh();
    window.scrollTo(0, before.top);
    finishPrinting = null;
  };
  root.dataset.theme = "light";
  root.classList.add("printing");
  details.open = true;
  shell.panel.after(sheets);
  for (const v of shell.shown) {
    const body = h("div");
    sheets.append(h("section", {}, h("h1", {}, v.title), body));
    draw(v, body, PAPER);
    for (const box of body.querySelectorAll(".scroll")) if (box.scrollWidth > box.clientWidth + 1) box.style.zoom = String(box.clientWidth / box.scrollWidth);
  }
}

export function readyForPaper() {
  window.addEventListener("beforeprint", startPrinting);
  window.addEventListener("afterprint", () => { if (finishPrinting) finishPrinting(); });
}
