// @ts-check
// The page: choice of run and mode.

import { setConstants } from "../shared/constants.js";
import { h, put } from "../shared/dom.js";
import { Address } from "./address.js";
import { get } from "./api.js";
import { Batch } from "./batch.js";
import { Single } from "./single.js";

setConstants(JSON.parse(document.getElementById("constants").textContent));

const byId = (id) => document.getElementById(id);

function report(message) {
  byId("problem").hidden = message === null;
  put(byId("problem"), message);
}

let mode = "single";
function showMode(name) {
  mode = name;
  for (const each of ["single", "batch"]) {
    const on = each === name,
      tab = byId(`tab-${each}`);
    byId(each).hidden = !on;
    tab.setAttribute("aria-selected", String(on));
    tab.tabIndex = on ? 0 : -1;
  }
  report(null);
  address.changed();
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

function describe(run) {
  const millions =
    run.parameters >= 1e6 ? `${(run.parameters / 1e6).toFixed(1)}M` : run.parameters.toLocaleString("en");
  return `${run.task} · ${millions} parameters${run.labels.length ? ` · ${run.labels.length} labels` : ""}`;
}

const choice = /** @type {HTMLSelectElement} */ (byId("run"));
const changed = () => address.changed();
const views = { single: new Single(byId("single"), report, changed), batch: new Batch(byId("batch"), report, changed) };
let runs = [];

function setRun() {
  const run = runs.find((each) => each.id === choice.value);
  put(byId("about"), describe(run));
  for (const view of Object.values(views)) view.setRun(run);
}

// Take over the state of an address. A link may come from a server with other runs.
function restore(parts) {
  const name = parts.get("run");
  if (runs.some((each) => each.id === name)) choice.value = name;
  setRun();
  showMode(parts.get("mode") === "batch" ? "batch" : "single");
  views[mode].restore(parts);
  foreign = name && name !== choice.value ? `This server has no run ${name}, which the link names. ` : "";
}

// What a link does not reproduce.
let foreign = "";
function noteLink(names) {
  const long = names.length ? `Too long for the address, so not part of a link: ${names.join(", ")}.` : "";
  byId("unlinked").hidden = !foreign && !long;
  put(byId("unlinked"), foreign, long);
}

const address = new Address(
  () => [
    ["run", choice.value, "the run"],
    ["mode", mode === "single" ? null : mode, "the mode"],
    ...views[mode].parts(),
  ],
  restore,
  noteLink,
);

try {
  runs = (await get("v1/models")).data;
  put(
    choice,
    runs.map((run) => h("option", { value: run.id }, run.id)),
  );
  choice.addEventListener("change", setRun);
  restore(address.read());
  const field = /** @type {HTMLTextAreaElement} */ (byId(mode === "single" ? "source" : "lines"));
  field.focus();
  field.select(); // so that typing replaces the example
  document.documentElement.dataset.ready = "yes";
} catch (error) {
  report(error.message);
}
