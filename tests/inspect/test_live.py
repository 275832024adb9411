"""The script of the live page equals torch: outputs, scores and all numbers of the views."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kit.models import FAMILIES, LITTLE, WORDS, family, letters, picture
from kit.page import opened, same_trace, sharpened
from regard.data.statistics import Statistics
from regard.decode.request import Options
from regard.errors import UserError
from regard.inspect.live import (
    Precision,
    WeightPacker,
    first_trace,
    live_page,
    model_block,
    page_input,
    prove,
    sample_sources,
    with_weights,
    write_live_page,
)
from regard.inspect.trace import Trace, trace, trace_image, trace_text
from regard.model import Model
from regard.presets import preset
from regard.run import Run
from regard.text.codec import Codec, Example
from regard.text.tokenizer import Tokenizer

pytest.importorskip("py_mini_racer")


STACKS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "sinusoid, post": {"position": "sinusoid", "norm_at": "post"},
    "halves": {"position": "sinusoid_halves", "activation": "silu"},
    "learned": {"position": "learned", "max_length": 64, "embed_norm": True},
    "axial": {"position": "axial", "axial": {"rows": 4, "columns": 16, "row_width": 8}},
    "alibi": {"position": "alibi", "activation": "gelu"},
    "bucket": {"position": "bucket", "score": "dot", "norm": "rms", "bias": "none"},
    "gated": {"gated": True, "activation": "gelu_tanh", "bias": "ff"},
    "no position": {"position": "none", "activation": "tanh"},
    "rotary, slowed": {"rotary": {"base": 100.0, "factor": 4.0, "original": 16}},
    "grouped": {"kv_heads": 2},
    "narrow": {"head_width": 6, "value_width": 5, "heads": 3},
    "window": {"window": 2, "cross_window": 1},
    "predicted window": {"cross_window": 2, "cross_center": "predicted"},
    "pruned": {"kept_heads": [[0, 2], [1, 2, 3]], "kept_cross_heads": [[3], [0, 1, 2, 3]], "position": "alibi"},
    "pruned groups": {"kv_heads": 2, "kept_heads": [[0, 2, 3], [1]], "kept_cross_heads": [[0, 1], [2]]},
    **{name: {"score": name} for name in ("general", "cosine", "additive", "concat", "location")},
}
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"bahdanau {s}": ("rnn-bahdanau", {"score": s}) for s in ("additive", "dot", "scaled_dot", "concat")},
    **{f"luong {s}": ("rnn-luong", {"score": s}) for s in ("general", "cosine", "location")},
    "luong local-m": ("rnn-luong", {"cross_window": 1}),
    "luong local-p": ("rnn-luong", {"cross_window": 2, "cross_center": "predicted"}),
}


def pair_run(kind: str) -> Run:
    if kind in RECURRENT:
        name, stack = RECURRENT[kind]
        return sharpened(letters(name, **stack), 1.5, biases=True)
    return sharpened(letters(**STACKS[kind]), 2.0, biases=True)


@pytest.mark.parametrize("kind", [*STACKS, *RECURRENT])
def test_traces_and_outputs_of_pairs_equal_torch(kind: str) -> None:
    run = pair_run(kind)
    example, longer = Example("abcab"), Example("dab ba cab")
    with opened(run, trace(run, example, run.codec.encode_target(["bcd"])[0])) as page:
        for each in (example, longer):
            ids = run.codec.encode_target(["dabba"])[0]
            same_trace(page, trace(run, each, ids), page_input(each), ids)
        for beam in (1, 4):
            options = Options(beam=beam, nbest=min(beam, 3), max_length=12)
            [ours] = list_hypotheses(run, [longer], options)
            strategy = {"strategy": "greedy" if beam == 1 else "beam", "beam": beam, "nbest": min(beam, 3)}
            theirs = page.ask("generate", page_input(longer), {**strategy, "maxLength": 12})["hypotheses"]
            assert [h.text for h in ours] == [h["text"] for h in theirs]
            for a, b in zip(ours, theirs, strict=True):
                assert np.allclose(a.token_scores, b["scores"], atol=1e-4)
                assert math.isclose(a.normalized, b["normalized"], rel_tol=1e-4)
                assert list(a.tokens) == b["tokens"] and list(a.ids) == b["ids"]


def list_hypotheses(run: Run, examples: list[Example], options: Options) -> list[Any]:
    from regard.decode.request import Request
    from regard.decode.torch_engine import TorchEngine

    return TorchEngine(run, options)([Request(x.source, x.features) for x in examples])


@pytest.mark.parametrize("kind", ["lm", "lm-grouped", "lm-distances", "lm-near", "lm-reversible"])
def test_traces_and_outputs_of_language_models_equal_torch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "lm-near", ("xl-tiny", {"decoder": LITTLE | {"memory": 3, "reach": 2}}))
    reversible = LITTLE | {"residual": "reversible", "norm_at": "pre", "position": "rotary"}
    monkeypatch.setitem(FAMILIES, "lm-reversible", ("gpt-tiny", {"decoder": reversible, "tie_output": False}))
    run = sharpened(family(kind), 2.0, biases=True)
    with opened(run, trace_text(run, "abc", more=3)) as page:
        ids = run.codec.target.encode(["bca"])[0]
        same_trace(page, trace(run, Example("ab ba"), ids), {"source": "ab ba"}, ids)
        for beam in (1, 3):
            [ours] = list_hypotheses(run, [Example("cab")], Options(beam=beam, max_length=9))
            strategy = {"strategy": "greedy" if beam == 1 else "beam", "beam": beam, "nbest": 1, "maxLength": 9}
            theirs = page.ask("generate", {"source": "cab"}, strategy)["hypotheses"]
            assert ours[0].text == theirs[0]["text"] and np.allclose(
                ours[0].token_scores, theirs[0]["scores"], atol=1e-4
            )


@pytest.mark.parametrize("kind", ["masked", "classes", "vectors"])
def test_traces_of_encoders_equal_torch(kind: str) -> None:
    run = sharpened(family(kind), 2.0, biases=True)
    with opened(run, trace_text(run, "abc")) as page:
        same_trace(page, trace_text(run, "dab ba"), {"source": "dab ba"}, [])


def test_traces_of_images_equal_torch() -> None:
    run = sharpened(family("image"), 2.0, biases=True)
    with opened(run, trace_image(run, picture())) as page:
        image = picture(5)
        request = {"pixels": image.astype(float).ravel().tolist(), "name": "image"}
        same_trace(page, trace_image(run, image), request, [])


def test_plain_javascript_equals_simd() -> None:
    run = pair_run("rotary")
    result = trace(run, Example("abcab"), run.codec.encode_target(["bcd"])[0])
    with opened(run, result) as fast, opened(run, result, simd=False) as plain:
        assert fast.simd and not plain.simd
        a, b = (page.ask("generate", {"source": "cabba"}, {"strategy": "beam"}) for page in (fast, plain))
        assert [h["text"] for h in a["hypotheses"]] == [h["text"] for h in b["hypotheses"]]
        scores = [[h["score"] for h in x["hypotheses"]] for x in (a, b)]
        assert np.allclose(*scores, atol=1e-4)


@pytest.mark.parametrize("precision", ["int8", "fp16", "fp32"])
def test_stored_weights_and_proof_match_the_page(precision: Precision) -> None:
    run = pair_run("sinusoid, post")
    weights = WeightPacker(precision)
    block = model_block(run, weights)
    stored = with_weights(run, weights.stored)
    for name, x in run.model.named_parameters():
        limit = {"int8": x.abs().max() / 250, "fp16": x.abs().max() / 2000, "fp32": 0.0}[precision]
        assert (dict(stored.model.named_parameters())[name] - x).abs().max() <= limit
    result = first_trace(stored, Example("abcab"))
    assert prove(stored, block, result.page_data(), [Example("abcab")]).difference < 1e-4
    if precision == "int8":
        with pytest.raises(UserError, match="not written: the page would answer"):
            other = sharpened(pair_run("sinusoid, post"), 2.0)
            prove(other, model_block(run, WeightPacker("fp32")), result.page_data(), sample_sources(run, 4))


def test_silenced_heads_equal_ablated_heads() -> None:
    from regard.nn.hooks import patch, without

    run = pair_run("rotary")
    ids = run.codec.encode_target(["bcd"])[0]
    with opened(run, trace(run, Example("abcab"), ids)) as page:
        page.ask("silence", ["decoder.blocks.0.cross/1", "encoder.blocks.1.attention/2"])
        hooks = {"decoder.blocks.0.cross.mixed": without(1), "encoder.blocks.1.attention.mixed": without(2)}
        with patch(run.model, hooks):
            ours = trace(run, Example("abcab"), ids).steps
        theirs = page.ask("trace", {"source": "abcab"}, ids)["steps"]
        assert np.allclose([s.probability for s in ours], [s["probability"] for s in theirs], atol=1e-5)


def example_of(run: Run, kind: str) -> tuple[Trace, dict[str, Any], list[int]]:
    """An example of a task: its trace, and the input and ids for the page."""
    if kind == "image":
        return trace_image(run, picture()), {"pixels": picture().astype(float).ravel().tolist(), "name": "image"}, []
    if kind in FAMILIES:
        ids = run.codec.target.encode(["bca"])[0] if kind.startswith("lm") else []
        return trace(run, Example("dab ba"), ids), {"source": "dab ba"}, ids
    ids = run.codec.encode_target(["bcd"])[0]
    return trace(run, Example("abcab"), ids), {"source": "abcab"}, ids


@pytest.mark.parametrize(
    "kind", ["rotary", "pruned", "bahdanau additive", "lm", "lm-grouped", "classes", "masked", "image"]
)
def test_importance_of_heads_equals_that_of_the_trace(kind: str) -> None:
    run = sharpened(family(kind), 2.0, biases=True) if kind in FAMILIES else pair_run(kind)
    result, request, ids = example_of(run, kind)
    with opened(run, result) as page:
        measured = page.ask("importance", request, ids)
        assert page.ask("trace", request, ids)["steps"][0]["probability"] == pytest.approx(
            result.steps[0].probability, abs=1e-4
        )
    theirs = {(each["map"], each["index"]): each["change"] for each in measured}
    ours = {
        (name, index): change for name, changes in result.importance.items() for index, change in enumerate(changes)
    }
    assert theirs.keys() == ours.keys() and len(measured) == len(ours) > 0
    assert all(theirs[head] == pytest.approx(change, abs=1e-3) for head, change in ours.items())
    assert max(map(abs, ours.values())) > 0.01


def test_model_without_predictions_has_no_explanations() -> None:
    run = family("vectors")
    with opened(run, trace_text(run, "abc")) as page:
        assert page.ask("importance", {"source": "abc"}, []) == []
        assert page.ask("attribution", {"source": "abc"}, []) is None


@pytest.mark.parametrize(
    "kind", ["alibi", "bahdanau additive"]
)  # smooth activations: a step may cross the kink of a ReLU
def test_attribution_equals_gradient_times_input(kind: str) -> None:
    run = pair_run(kind)
    ids = run.codec.encode_target(["bcd"])[0]
    result = trace(run, Example("abcab"), ids)
    assert result.attribution is not None
    with opened(run, result) as page:
        theirs = page.ask("attribution", {"source": "abcab"}, ids)
    assert (theirs["rows"], theirs["columns"]) == ("output", "source")
    assert theirs["values"]["shape"] == [len(ids), len(result.tokens["source"])]
    ours = result.attribution.values_TS.ravel()
    assert np.allclose(theirs["values"]["values"], ours, atol=5e-3, rtol=2e-2)
    assert abs(ours).max() > 0.1


@pytest.mark.parametrize("kind", ["lm", "classes", "masked", "image"])
def test_attribution_of_other_tasks_equals_torch(kind: str) -> None:
    run = sharpened(family(kind), 2.0, biases=True)
    result, request, ids = example_of(run, kind)
    assert result.attribution is not None
    with opened(run, result) as page:
        theirs = page.ask("attribution", request, ids)
    shape = theirs["values"]["shape"]
    assert (result.attribution.rows, result.attribution.columns) == (theirs["rows"], theirs["columns"])
    assert list(result.attribution.values_TS.shape) == shape
    assert np.allclose(theirs["values"]["values"], result.attribution.values_TS.ravel(), atol=5e-3, rtol=2e-2)


def test_prefix_forbidden_and_next_tokens_equal_torch() -> None:
    run = pair_run("rotary")
    ids = run.codec.encode_target(["bcd"])[0]
    with opened(run, trace(run, Example("abcab"), ids)) as page:
        best = page.ask("next", {"source": "abcab"}, ids[:1], {}, 3)
        options = Options(alternatives=3, alternatives_at=1, prefix="b", max_length=12)
        [ours] = list_hypotheses(run, [Example("abcab")], options)
        assert [h.tokens[1] for h in ours] == [x["token"] for x in best]
        prefix = [ids[0], best[1]["id"]]
        hypothesis = page.ask("generate", {"source": "abcab"}, {"prefix": prefix, "maxLength": 12})["hypotheses"][0]
        assert hypothesis["ids"][:2] == prefix and hypothesis["text"] == ours[1].text
        without = page.ask("generate", {"source": "abcab"}, {"prefix": ids[:1], "forbid": [best[0]["id"]]})
        assert best[0]["id"] not in without["hypotheses"][0]["ids"][1:]


def test_sampling_depends_on_the_seed_and_on_probabilities() -> None:
    run = sharpened(family("lm"), 1.5, biases=True)
    with opened(run, trace_text(run, "abc")) as page:

        def draw(seed: int, **options: Any) -> list[list[int]]:
            settings = {"strategy": "sample", "seed": seed, "nbest": 300, "maxLength": 1, **options}
            return [h["ids"] for h in page.ask("generate", {"source": "ab"}, settings)["hypotheses"]]

        assert draw(1) == draw(1) != draw(2)
        assert len({tuple(x) for x in draw(3, topK=2)}) <= 2
        best = page.ask("next", {"source": "ab"}, [], {}, 1)[0]
        share = sum(x[:1] == [best["id"]] for x in draw(4)) / 300
        assert abs(share - best["probability"]) < 4 * math.sqrt(best["probability"] * (1 - best["probability"]) / 300)


def test_invalid_requests_return_the_problem() -> None:
    run = letters(position="learned", max_length=8)
    with opened(run, trace(run, Example("abc"), run.codec.encode_target(["b"])[0])) as page:
        assert "Type something" in page.ask("generate", {"source": "  "}, {})["problem"]
        assert "more than the 7" in page.ask("generate", {"source": "abcabcabcabc"}, {})["problem"]
        assert page.ask("generate", {"source": "axb"}, {})["unknown"] == ["x"]


def with_features() -> Run:
    source, target = Tokenizer.train("char", WORDS), Tokenizer.train("bpe:270", WORDS)
    codec = Codec(source, target, features=("PL", "V", "PST"), columns=("source", "features", "target"))
    torch.manual_seed(5)
    tiny = {"layers": 1, "width": 16, "heads": 2, "ff": 32}
    config = preset("transformer-tiny", source_vocab=codec.source_vocab, target_vocab=codec.target_vocab,
                    changes={"encoder": tiny, "decoder": tiny})  # fmt: skip
    return sharpened(Run(config, codec, Model(config).eval(), Path("runs/features")), 2.0, biases=True)


def test_features_and_two_vocabularies_equal_torch() -> None:
    run = with_features()
    example = Example("dab", features="V;PST")
    ids = run.codec.encode_target(["cab"])[0]
    with opened(run, trace(run, example, ids)) as page:
        other = Example("abba", features="PL; V")
        same_trace(page, trace(run, other, ids), page_input(other), ids)
        assert page.ask("generate", {"source": "ab", "features": "X;V"}, {})["unknown"] == ["X"]
        assert "features" in page.ask("generate", {"source": "ab"}, {})["problem"]


@pytest.mark.parametrize("kind", ["pairs", "lm", "classes", "masked", "image", "features"])
def test_page_is_written_with_a_proof(kind: str, tmp_path: Path) -> None:
    run = {"pairs": letters, "features": with_features}.get(kind, lambda: family(kind))()
    report = write_live_page(run, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text("utf-8")
    assert report.proof is not None and report.proof.holds
    assert report.to_json()["bytes"] == len(text.encode())
    assert 'id="model"' in text and "wasm-unsafe-eval" in text


@pytest.mark.parametrize("kind", ["pairs", "lm", "masked"])
def test_page_begins_with_an_example_of_the_run(kind: str) -> None:
    run = letters() if kind == "pairs" else family(kind)
    sources = [example.source for example in sample_sources(run, 3)]
    examples = tuple(Example(source, target="x" if kind == "pairs" else None) for source in sources[1:])

    def page_of(run: Run, **options: Any) -> tuple[list[str], str]:
        page, _ = live_page(run, samples=1, **options)
        block = json.loads(page.split('id="model">')[1].split("</script>")[0])
        return [example["source"] for example in block["examples"]], page

    shown, page = page_of(dataclasses.replace(run, statistics=Statistics(examples=examples)), title="Letters & more")
    assert shown == sources[1:] and all(source in page for source in shown) and "Letters \\u0026 more" in page
    shown, page = page_of(run)
    assert shown == [] and run.path.resolve().name in page
    shown, _ = page_of(dataclasses.replace(run, statistics=Statistics(examples=examples)), example=Example(sources[0]))
    assert shown == sources


def test_unsupported_and_broken_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="LSH"):
        live_page(family("lm-hashed"))
    run = letters()
    broken = dataclasses.replace(run, weights=Model(run.config).eval())
    with torch.no_grad():
        for x in broken.model.parameters():
            x.fill_(math.nan)
    with pytest.raises(UserError):
        write_live_page(broken, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
