// @ts-check
// The API, drawn from openapi.json: each operation with its fields and an example.

import { setConstants } from "../shared/constants.js";
import { h, put } from "../shared/dom.js";
import { get } from "./api.js";

setConstants(JSON.parse(document.getElementById("constants").textContent));

// Request bodies for the first run that supports them.
const EXAMPLES = {
  "/v1/generate": { kind: "generate", body: { inputs: ["a text", "another one"], beam: 5, nbest: 2 } },
  "/translate": { body: { q: "a text", source: "auto", target: "" } },
  "/detect": { body: { q: "a text" } },
  "/v1/completions": {
    kind: "generate",
    task: "lm",
    field: "model",
    body: { prompt: "Once", max_tokens: 20, seed: 1 },
  },
  "/v1/chat/completions": {
    kind: "generate",
    task: "lm",
    field: "model",
    body: { messages: [{ role: "user", content: "Once" }], max_tokens: 20 },
  },
  "/v1/score": { kind: "score", body: { pairs: [{ source: "a text", target: "a" }] } },
  "/v1/classify": { kind: "classify", body: { inputs: ["a text"] } },
  "/v1/embed": { kind: "embed", body: { inputs: ["a text"] } },
  "/v1/inspect": { kind: "inspect", body: { source: "a text" } },
  "/v1/runs/reload": { body: {} },
};
const HUGE = 2 ** 31 - 1; // larger limits are not worth showing
let schemas = {},
  runs = [];

// The name of a type; objects by schema name.
function typeName(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if ("const" in schema) return JSON.stringify(schema.const);
  const options = schema.anyOf || schema.oneOf;
  if (options) return Array.from(new Set(options.map(typeName))).join(" | ");
  if (schema.type === "array") {
    if (schema.prefixItems) return `[${schema.prefixItems.map(typeName).join(", ")}]`;
    const each = schema.items ? typeName(schema.items) : "anything";
    return `list of ${each.includes(" | ") ? `(${each})` : each}`;
  }
  return schema.type || "anything";
}

function limits(schema) {
  const words = {
    minimum: "at least",
    exclusiveMinimum: "above",
    maximum: "at most",
    exclusiveMaximum: "below",
    maxLength: "at most",
    maxItems: "at most",
    minItems: "at least",
  };
  const units = { maxLength: " characters", maxItems: " items", minItems: " items" };
  return Object.keys(words)
    .filter((key) => key in schema && schema[key] < HUGE)
    .map((key) => `${words[key]} ${schema[key]}${units[key] || ""}`)
    .join(", ");
}

function fields(schema) {
  const required = new Set(schema.required || []);
  const all = Object.entries(schema.properties || {});
  const sorted = [...all.filter(([name]) => required.has(name)), ...all.filter(([name]) => !required.has(name))];
  const rows = sorted.map(([name, each]) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, h("code", {}, name)),
      h("td", {}, h("code", {}, typeName(each)), limits(each) ? h("div", { class: "dim" }, limits(each)) : null),
      h(
        "td",
        { class: "wrap" },
        each.description || "",
        h(
          "span",
          { class: "dim" },
          required.has(name) ? " required" : "default" in each ? ` default ${JSON.stringify(each.default)}` : "",
        ),
      ),
    ),
  );
  return rows.length ? h("table", { class: "api" }, h("tbody", {}, rows)) : h("p", { class: "dim" }, "No fields.");
}

// All schemas referenced by a schema, itself excluded.
function mentioned(schema, found = new Set()) {
  for (const match of JSON.stringify(schema).matchAll(/#\/components\/schemas\/(\w+)/g)) {
    if (!found.has(match[1])) {
      found.add(match[1]);
      mentioned(schemas[match[1]], found);
    }
  }
  return found;
}

function example(path, method) {
  const lines = [`curl ${location.origin}${path}`];
  if (method === "post") {
    const { kind, task, field = "run", body } = EXAMPLES[path];
    const run = runs.find((each) => each.kinds.includes(kind) && (!task || each.task === task));
    const pair = path === "/translate" && runs.find((each) => each.task === "pairs" && each.id.includes("-"));
    const target = pair ? { source: pair.id.split("-")[0], target: pair.id.split("-").slice(1).join("-") } : {};
    lines.push(
      "-H 'Content-Type: application/json'",
      `-d '${JSON.stringify(run ? { [field]: run.id, ...body } : { ...body, ...target })}'`,
    );
  }
  return h("pre", { tabindex: 0 }, lines.join(" \\\n  "));
}

function operation(path, method, each) {
  const reference = each.requestBody ? each.requestBody.content["application/json"].schema.$ref : null;
  const schema = reference ? schemas[reference.split("/").pop()] : null;
  const parts = schema ? Array.from(mentioned(schema)).filter((name) => schemas[name].properties) : [];
  return h(
    "details",
    { class: "card", id: each.operationId },
    h(
      "summary",
      {},
      h("code", { class: "verb" }, method.toUpperCase()),
      " ",
      h("code", {}, path),
      " ",
      h("span", { class: "dim" }, each.summary),
    ),
    example(path, method),
    schema ? [h("h2", {}, "Fields"), fields(schema)] : null,
    parts.map((name) => [
      h("h2", {}, h("code", {}, name)),
      h("p", {}, schemas[name].description || ""),
      fields(schemas[name]),
    ]),
    h(
      "p",
      { class: "dim" },
      "Answers: ",
      Object.entries(each.responses)
        .map(([status, x]) => `${status} ${x.description.replace(/\.$/, "")}`)
        .join(", "),
    ),
  );
}

try {
  const api = await get("openapi.json");
  runs = (await get("v1/models")).data;
  schemas = api.components.schemas;
  put(
    document.getElementById("api"),
    h(
      "p",
      {},
      `${api.info.title} ${api.info.version}. `,
      "Bodies are JSON. Errors have the shape ",
      h("code", {}, '{"error": {"status", "code", "message"}}'),
      ", or ",
      h("code", {}, '{"error": "message"}'),
      " in the endpoints of LibreTranslate. A server with keys requires one in every request: ",
      h("code", {}, "-H 'Authorization: Bearer KEY'"),
      ".",
    ),
    Object.entries(api.paths).flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, each]) => operation(path, method, each)),
    ),
  );
  document.documentElement.dataset.ready = "yes";
} catch (error) {
  put(document.getElementById("api"), h("p", { class: "note", role: "alert" }, error.message));
}
