"""Display in notebooks: short reprs, and HTML that escapes all text."""

from __future__ import annotations

import copy
import pickle
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

import regard
from regard import config
from regard.decode.encoder_only import Classification
from regard.decode.hypothesis import Alignment, Hypothesis
from regard.decode.scoring import Scored
from regard.evaluate.confusions import ConfusedExample, Confusion
from regard.evaluate.evaluator import Evaluation, Outputs
from regard.inspect.circuits import Attribution, Circuit
from regard.inspect.trace import AttentionMap, AttentionMatrix
from regard.metrics import Measurement
from regard.notebook import MAX_ROWS, Results
from regard.recipe import Data, Text, Train
from regard.training.checkpoint import Best, Progress
from regard.training.fit import TrainingReport

EVIL = '<script>alert("&amp;")</script>\'"><img src=x onerror=alert(1)>'
ALLOWED_TAGS = {"table", "caption", "thead", "tbody", "tr", "th", "td", "p", "pre"}


class Reader(HTMLParser):
    """Collects tags, attributes and text, and checks that tags are closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


ALIGNMENT = Alignment(np.array([[0.5, 0.5]]), (EVIL, "<eos>"), (EVIL,))
HYPOTHESIS = Hypothesis(EVIL, -1.5, (EVIL, "<eos>"), (-1.0, -0.5), -0.75, (), ALIGNMENT, flags={"x": EVIL})
CONFUSION = Confusion(EVIL, None, 3, ConfusedExample("x.tsv:1", EVIL, EVIL, ""))
RESULTS = [
    HYPOTHESIS,
    ALIGNMENT,
    Scored(-1.5, (EVIL,), (-1.5,), {"x": EVIL}),
    Classification(EVIL, {EVIL: 0.75, "b": 0.25}),
    Evaluation(3, {EVIL: Measurement(12.5, 10.0, 15.0, EVIL)}, None, {EVIL: Measurement(1.0)}, {EVIL: 0.25}),
    Evaluation(3, {"per": Measurement(12.5)}, confusions=[CONFUSION]),
    Outputs([EVIL, "b"], [(EVIL, "a"), ("b",)], flags={0: "x" * 200}),
    Attribution(EVIL, 1.0, torch.zeros(1, 2), torch.ones(1), 0.5, -0.5),
    Circuit(torch.ones(300, 1), torch.ones(300, 1), (EVIL,) * 300),
    AttentionMap(EVIL, "cross", 0, np.zeros((2, 3, 4)), "output", "source", (0, 1)),
    AttentionMatrix(np.eye(1), ((EVIL,), (EVIL,)), ("output", "source")),
    TrainingReport(EVIL, Progress(step=7, best=Best(step=5, value=1.5, scores={})), "loss", 1000),  # type: ignore[arg-type]
    Results([Results([HYPOTHESIS, HYPOTHESIS])], [EVIL]),
    Results([Scored(-1.0, (EVIL,), (-1.0,))], [EVIL]),
    regard.Recipe(data={"train": EVIL}),
]


@pytest.mark.parametrize("result", RESULTS, ids=lambda result: type(result).__name__)
def test_html_escapes_text(result):
    page = Reader(result._repr_html_())
    assert page.tags <= ALLOWED_TAGS and page.attributes <= {"style"}
    if not isinstance(result, regard.Recipe):  # shown as TOML, which escapes quotes
        assert EVIL in page.text


@pytest.mark.parametrize("result", RESULTS[:-3], ids=lambda result: type(result).__name__)
def test_repr_fits_one_line(result):
    assert len(repr(result)) < 200 and "\n" not in repr(result) and "array(" not in repr(result)
    assert repr(result).startswith(type(result).__name__)


def test_run_and_its_results_have_repr_and_html(toy):
    run = regard.load(toy / "run")
    assert repr(run) == f"LoadedRun({str(toy / 'run')!r}, task pairs, {run.model.size:,} parameters)"
    page = Reader(run._repr_html_()).text
    for part in (str(run.path), "pairs: source to target", "1 layer, width 32", f"{run.model.size:,}", "char to space"):
        assert part in page
    results = run.generate(["abc", "fed"], beam=3, nbest=2)
    page = Reader(results._repr_html_()).text
    for source, hypotheses in zip(["abc", "fed"], results, strict=True):
        assert page.count(source) == 1
        for hypothesis in hypotheses:
            assert hypothesis.text in page and f"{hypothesis.score:.3f}" in page
            assert hypothesis.text in Reader(hypotheses._repr_html_()).text
            tokens = Reader(hypothesis._repr_html_()).text
            assert all(f"{score:.3f}" in tokens for score in hypothesis.token_scores)
    assert isinstance(results, list) and results == [list(row) for row in results] == copy.copy(results)
    assert pickle.loads(pickle.dumps(results)) == results
    assert "abc → AH B K" in Reader(run.score([("abc", "AH B K")])._repr_html_()).text
    trace = run.attention("abc")
    assert repr(trace).startswith("Trace('abc' -> ") and len(repr(trace)) < 120
    assert repr(trace.matrix()).startswith("AttentionMatrix(") and "<table>" in trace.matrix()._repr_html_()
    assert repr(run.evaluate(toy / "test.tsv", bootstrap=0, metrics=["wer"])).startswith("Evaluation(40 examples: wer ")


def test_evaluation_and_confusions_are_tables():
    page = Reader(Evaluation(3, {"per": Measurement(12.5)}, confusions=[CONFUSION])._repr_html_()).text
    assert "most frequent confusions" in page and "∅" in page and f"x.tsv:1 {EVIL[:39]}…" in page
    assert "confusions" not in Evaluation(3, {"per": Measurement(12.5)}, confusions=[])._repr_html_()
    outputs = Outputs(["a", "b"], [("A", "AA"), ("B",)])
    assert repr(outputs) == "Outputs(2 texts for 2 examples)"
    page = Reader(outputs._repr_html_()).text
    assert all(text in page for text in ("a", "b", "A\nAA", "B"))


def test_circuit_table_starts_with_the_largest_entry(monkeypatch):
    circuit = Circuit(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]]), ("x", "y"))
    assert repr(circuit) == "Circuit(2 tokens, rank 1 or less)"
    assert Reader(circuit._repr_html_()).text.endswith("rowcolumnvalueyy8.000yx6.000xy4.000xx3.000")
    monkeypatch.setattr("regard.inspect.circuits.MAX_PAIRS", 3)
    assert "top() finds the largest entries" in circuit._repr_html_() and "8.000" not in circuit._repr_html_()
    attribution = Attribution("a", 1.25, torch.tensor([[0.5, -2.0]]), torch.tensor([2.5]), 0.25, 0.0)
    assert repr(attribution) == "Attribution('a', logit 1.250, 1 layer of 2 heads)"
    rows = "layer 1 feed-forward2.500layer 1 head 2-2.000layer 1 head 10.500embedding0.250bias0.000"
    assert Reader(attribution._repr_html_()).text == f"logit 1.250 of apartlogit{rows}"


def test_attribute_of_an_item_suggests_indexing():
    results = Results([Results([HYPOTHESIS])], ["a"])
    with pytest.raises(AttributeError, match=r"one list of hypotheses per input; write results\[0\]\[0\]\.text"):
        _ = results.text
    with pytest.raises(AttributeError, match=r"a list; write results\[0\]\.text"):
        _ = results[0].text
    for other in (results, Results(), Results([Results()])):
        with pytest.raises(AttributeError, match="'Results' object has no attribute 'txt'"):
            _ = other.txt
        assert repr(copy.deepcopy(other)) == repr(other)


def test_repr_of_a_request_omits_defaults():
    assert repr(regard.Request("abc")) == "Request(source='abc')"
    request = regard.Request("abc", prefix="K", require=["a"], max_length=3)
    assert repr(request) == "Request(source='abc', prefix='K', require=(('a',),), max_length=3)"
    assert eval(repr(request), {"Request": regard.Request}) == request


def test_html_of_a_long_list_is_truncated():
    scored = Scored(-1.0, ("a",), (-1.0,))
    page = Reader(Results([scored] * (MAX_ROWS + 3))._repr_html_()).text
    assert page.count("-1.000") == MAX_ROWS and "and 3 more" in page
    assert "more" not in Reader(Results([scored] * MAX_ROWS)._repr_html_()).text


@pytest.mark.parametrize(
    "value",
    [
        regard.Options(beam=5, require=("a",)),
        regard.Stack(layers=3),
        regard.preset("transformer-tiny"),
        regard.preset("vit-tiny"),
        regard.Recipe(task="lm", data={"train": "a"}, train={"lr": 1e-4}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_repr_of_a_value_omits_defaults(value):
    names = {
        **vars(config),
        "Recipe": regard.Recipe,
        "Data": Data,
        "Text": Text,
        "Train": Train,
        "Options": regard.Options,
    }
    assert eval(repr(value), names) == value
    assert repr(regard.Options(beam=5)) == "Options(beam=5)"
