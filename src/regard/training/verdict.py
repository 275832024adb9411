"""What to tell about a run that has ended: it still improves fast, its outputs degenerate, it is at chance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.data.plain import Stream
from regard.decode.generate import generate
from regard.decode.hypothesis import DEGENERATE, MANY_DEGENERATE, Hypothesis
from regard.decode.options import Options
from regard.metrics import LOWER_IS_BETTER
from regard.recipe import Train
from regard.run import Run
from regard.text.codec import Example

LAST_PART = 0.25  # of the run
FAST = 0.1  # improvement of the metric within it, as a share of its value
CHANCE = 2.0  # percent by which a classifier must beat the most frequent label
JUDGED = 100  # examples that are decoded to look at the outputs
HARDLY = 0.05  # the share by which the loss of a language model must be below that of the frequencies of tokens
WINDOWS = 64  # of a text from which tokens are counted
WINDOW = 1 << 14  # tokens


def still_improving(events: Sequence[dict[str, Any]], train: Train) -> str | None:
    """A remark if the metric improved much in the last part of the run, up to its very end; `events` are the log's."""
    name = train.metric
    values = [(event["step"], event[name]) for event in events if event["event"] == "valid" and event[name] is not None]
    if len(values) < 2:
        return None
    last_step, last = values[-1]
    before = [value for step, value in values if step <= (1 - LAST_PART) * last_step]
    lower = name in LOWER_IS_BETTER
    if not before or last != (min if lower else max)(value for _, value in values):
        return None
    earlier = before[-1]
    change = (earlier - last) / earlier if lower and earlier else (last - earlier) / last if last else 0.0
    if change < FAST:
        return None
    key = next((key for key in ("minutes", "steps", "epochs") if getattr(train, key) is not None), "minutes")
    how = f"{earlier:.4g} to {last:.4g} in the last quarter"
    return f"{name} was still improving fast ({how}); continue with --resume --{key} {2 * getattr(train, key):g}"


def judge_outputs(run: Run, examples: Sequence[Example], limit: int) -> str | None:
    """A remark if many outputs for some of these examples degenerate, none longer than `limit` tokens."""
    some = list(examples[:: max(1, len(examples) // JUDGED)])[:JUDGED]
    outputs = [best for best, *_ in generate(run, some, Options(max_length=limit))]
    return degenerate(outputs, [example.target or "" for example in some])


def degenerate(outputs: Sequence[Hypothesis], references: Sequence[str]) -> str | None:
    """A remark if many outputs repeat tokens, do not end, or are all the same where the references are not."""
    total = len(outputs)
    if not total:
        return None
    flagged = sum(any(flag in output.flags for flag in (*DEGENERATE, "max_length")) for output in outputs)
    if flagged > MANY_DEGENERATE * total:
        return (
            f"{flagged} of {total} outputs repeat tokens or do not end as they should: the model has not learned the "
            "task; give it more time or data"
        )
    (text, same), expected = Counter(output.text for output in outputs).most_common(1)[0], Counter(references)
    if same > max(2, MANY_DEGENERATE * total) and same > 3 * max(expected.values()):
        return f"{same} of {total} outputs are {text[:40]!r}: the model ignores its input; give it more time or data"
    return None


def at_chance(accuracy: float, labels: Sequence[Any]) -> str | None:
    """A remark if a classifier is hardly better than the most frequent of the labels, which are those to predict."""
    label, times = Counter(labels).most_common(1)[0]
    share = 100 * times / len(labels)
    if accuracy > share + CHANCE or len(set(labels)) == 1:
        return None
    always = f"the answer {label!r} to everything is right in {share:.1f} %"
    return f"the model is hardly better than chance ({always}); give it more time or data"


def no_better_than_frequencies(loss: float, train: Stream, valid: Stream) -> str | None:
    """A remark if a model of plain text predicts tokens hardly better than how often they come in the training text.

    Its greedy outputs tell less: those of a good language model repeat themselves too.
    """
    seen, new = _some_tokens(train), _some_tokens(valid)
    counts = np.bincount(seen, minlength=int(new.max()) + 1) + 1  # one more each: none has probability zero
    frequencies = float(-np.log(counts[new] / counts.sum()).mean())
    if loss < max((1 - HARDLY) * frequencies, HARDLY):  # of a text that is the same token everywhere both are zero
        return None
    how = f"its loss is {loss:.2f}, that of the frequencies of tokens {frequencies:.2f}"
    return f"the model predicts hardly better than one that does not read the text ({how}); give it more time or data"


def _some_tokens(stream: Stream) -> NDArray[np.int64]:
    """Tokens from windows that are evenly spread over a text, or all of a short one."""
    if len(stream) <= WINDOWS * WINDOW:
        return stream.windows(np.zeros(1, np.int64), len(stream)).ravel()
    return stream.windows(np.arange(WINDOWS) * ((len(stream) - WINDOW) // (WINDOWS - 1)), WINDOW).ravel()
