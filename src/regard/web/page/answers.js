// @ts-check
// The answer to one input: output with alternatives and hypotheses, predictions of masked tokens, or class
// probabilities.

import { h, put, roving } from "../shared/dom.js";
import { isEnd, isSpecial, percent, plural, visible, word } from "../shared/text.js";
import { MORE } from "./session.js";
import { show } from "./words.js";

export const answerNodes = () => ({
  output: h("div", { class: "output", dir: "auto" }),
  choices: h("div", { class: "alternatives" }),
  before: h("div", { class: "before" }),
  nbest: h("div", {
    class: "nbest",
    role: "group",
    "aria-label": "hypotheses",
  }),
  status: h("p", { class: "status", role: "status" }),
});

export function writeAnswer(live, side, nodes) {
  const { output, choices, before, nbest, status } = nodes,
    { engine } = live;
  for (const node of [choices, before]) put(node);
  put(status, ...statusOf(side));
  if (!side.trace || (side.problem && !side.hypotheses.length)) {
    for (const node of [output, nbest]) put(node);
    return;
  }
  if (engine.decodes) {
    writeHypothesis(live, side, nodes);
    if (side.before)
      put(
        before,
        "before: ",
        h("bdi", {}, side.before.text),
        h("small", {}, ` log-probability ${show(side.before.score)}`),
      );
  } else if (!side.trace.steps.length)
    put(output, h("span", { class: "dim" }, "This model produces vectors and predicts nothing."));
  else if (engine.task === "masked") writeMasked(output, side.trace.steps);
  else writeClasses(output, side.trace.steps[0], side.before && side.before.steps[0]);
}

function statusOf(side) {
  const out = [];
  if (side.problem) out.push(side.problem);
  const unknown = [...new Set(side.unknown)];
  if (unknown.length)
    out.push(
      `${out.length ? " " : ""}Not in the vocabulary: `,
      ...unknown.slice(0, 12).flatMap((token, i) => [i ? ", " : "", h("b", {}, word(token))]),
      unknown.length > 12 ? ` and ${unknown.length - 12} more` : "",
      ".",
    );
  return out;
}

// The output token by token; a click on a token shows its alternatives.
function writeHypothesis(live, side, { output, choices, nbest }) {
  const chosen = side.hypotheses[side.chosen];
  output.classList.toggle("spaced", live.engine.spaced);
  const tokens = chosen.tokens.map((token, t) =>
    tokenButton(token, chosen.scores[t], t < side.prefix.length, () =>
      openAlternatives(live, side, t, choices, tokens),
    ),
  );
  roving(tokens, {});
  put(
    output,
    ...tokens,
    h("small", { class: "score", dir: "ltr" }, `log-probability ${show(chosen.score)}`),
    side.prefix.length ? forcedNote(live, side) : null,
    live.engine.task === "lm" && chosen.limited
      ? h(
          "button",
          {
            class: "quiet",
            type: "button",
            click: () => {
              live.wishes.length += MORE;
              live.ask();
            },
          },
          "more",
        )
      : null,
  );
  const others =
    side.hypotheses.length > 1
      ? side.hypotheses.map((each, i) =>
          h(
            "button",
            {
              type: "button",
              class: "hypothesis",
              "aria-pressed": String(i === side.chosen),
              click: () => live.inspect(side, i),
            },
            h("bdi", {}, each.text.trim() ? each.text : visible(each.text)),
            h(
              "small",
              { title: `${percent(Math.exp(each.score))} for the whole output` },
              percent(Math.exp(each.normalized)),
            ),
          ),
        )
      : [];
  roving(others, { start: side.chosen });
  const order = live.wishes.strategy === "sample" ? "Samples with their" : "Ranked by the";
  put(nbest, others.length ? h("span", { class: "dim" }, `${order} mean probability per token:`) : null, ...others);
}

const forcedNote = (live, side) =>
  h(
    "small",
    { class: "score" },
    `${plural(side.prefix.length, "token")} forced: `,
    h("button", { class: "quiet", type: "button", click: () => live.free(side) }, "restore"),
  );

// The line below a token is fainter, the more probable the token is.
function tokenButton(token, score, forced, open) {
  const p = Math.exp(score),
    special = isSpecial(token);
  // plain text, so that letters join
  const plain = /^[ \p{L}\p{M}\p{N}\p{P}\p{S}]*[\p{L}\p{M}\p{N}\p{P}\p{S}]$/u.test(token);
  const text = isEnd(token) ? "■" : plain || token === "\n" ? token : visible(token);
  return h(
    "span",
    {
      role: "button",
      class: "token" + (special ? " special" : "") + (forced ? " forced" : ""),
      title: `${percent(p)}${forced ? ", forced" : ""}`,
      "aria-label": `${visible(token)}, ${percent(p)}${forced ? ", forced" : ""}. Alternatives`,
      style: { borderBottomColor: `rgba(208,138,60,${(1 - p).toFixed(3)})` },
      click: open,
      keydown: (event) => {
        if (event.key === "Enter" || event.key === " ") {
          event.preventDefault();
          open();
        }
      },
    },
    text,
  );
}

function openAlternatives(live, side, at, choices, tokens) {
  const chosen = side.hypotheses[side.chosen],
    found = live.alternatives(side, at),
    top = Math.max(...found.map((each) => each.probability), 1e-9);
  const close = () => {
    put(choices);
    tokens[at].focus();
  };
  const buttons = found.map(({ id, token, probability }) =>
    h(
      "button",
      {
        type: "button",
        class: "alternative",
        "aria-pressed": String(id === chosen.ids[at]),
        click: () => live.force(side, at, id),
        keydown: (event) => {
          if (event.key === "Escape") close();
        },
      },
      h("span", { class: "fill", style: { width: (100 * probability) / top + "%" } }),
      word(token),
      h("small", {}, percent(probability)),
    ),
  );
  const start = Math.max(
    0,
    found.findIndex(({ id }) => id === chosen.ids[at]),
  );
  roving(buttons, { start });
  put(
    choices,
    h("span", { class: "dim" }, "in place of ", h("b", {}, word(chosen.tokens[at])), ": "),
    ...buttons,
    h("button", { class: "quiet", type: "button", click: close }, "close"),
  );
  buttons[start].focus();
}

function writeMasked(output, steps) {
  put(
    output,
    ...steps
      .filter((step) => !isSpecial(step.token))
      .map((step) => {
        const [token, p] = step.candidates[0],
          same = token === step.token;
        return h(
          "span",
          {
            class: "masked" + (same ? "" : " other"),
            title: `${percent(step.probability)} for ${visible(step.token)}`,
          },
          word(token),
          h("small", {}, percent(p)),
        );
      }),
  );
}

// Bars of class probabilities; lines mark the values before heads were silenced.
function writeClasses(output, step, before) {
  const was = new Map((before ? before.candidates : []).map(([name, p]) => [name, p]));
  put(
    output,
    ...step.candidates.map(([name, p]) =>
      h(
        "div",
        { class: "class-row" },
        h("span", { class: "class-name" }, h("bdi", {}, name)),
        h(
          "span",
          { class: "gauge" },
          h("span", { class: "bar", style: { width: 100 * p + "%" } }),
          was.has(name)
            ? h("span", {
                class: "was",
                style: { left: 100 * was.get(name) + "%" },
                title: `before: ${percent(was.get(name))}`,
              })
            : null,
        ),
        h("small", {}, percent(p)),
      ),
    ),
  );
}
