// @ts-check
// The page: choice of run and mode.

import { setConstants } from "../shared/constants.js";
import { h, put } from "../shared/dom.js";
import { get } from "./api.js";
import { Batch } from "./batch.js";
import { Single } from "./single.js";

setConstants(JSON.parse(document.getElementById("constants").textContent));

const byId = (id) => document.getElementById(id);

function report(message) {
  byId("problem").hidden = message === null;
  put(byId("problem"), message);
}

function showMode(name) {
  for (const each of ["single", "batch"]) {
    const on = each === name,
      tab = byId(`tab-${each}`);
    byId(each).hidden = !on;
    tab.setAttribute("aria-selected", String(on));
    tab.tabIndex = on ? 0 : -1;
  }
  report(null);
}

for (const [name, other] of [
  ["single", "batch"],
  ["batch", "single"],
]) {
  byId(`tab-${name}`).addEventListener("click", () => showMode(name));
  byId(`tab-${name}`).addEventListener("keydown", (event) => {
    if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
    event.preventDefault();
    showMode(other);
    byId(`tab-${other}`).focus();
  });
}

const views = [new Single(byId("single"), report), new Batch(byId("batch"), report)];

function describe(run) {
  const millions =
    run.parameters >= 1e6 ? `${(run.parameters / 1e6).toFixed(1)}M` : run.parameters.toLocaleString("en");
  return `${run.task} · ${millions} parameters${run.labels.length ? ` · ${run.labels.length} labels` : ""}`;
}

try {
  const runs = (await get("v1/models")).data,
    choice = /** @type {HTMLSelectElement} */ (byId("run"));
  const setRun = () => {
    const run = runs.find((each) => each.id === choice.value);
    put(byId("about"), describe(run));
    for (const view of views) view.setRun(run);
  };
  put(
    choice,
    runs.map((run) => h("option", { value: run.id }, run.id)),
  );
  choice.addEventListener("change", setRun);
  setRun();
  byId("source").focus();
  document.documentElement.dataset.ready = "yes";
} catch (error) {
  report(error.message);
}
