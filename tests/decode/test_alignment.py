"""Alignment of output tokens with source tokens by cross-attention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kit.decoding import NAMES, run_of, sources, trained
from regard.decode.alignment import check_heads, load_heads, make_alignment, save_heads
from regard.decode.cross_attention import align_weights, choose_heads, cross_attentions, forced_attention, weight_taps
from regard.decode.hypothesis import Alignment
from regard.decode.request import Options
from regard.decode.search import search
from regard.decode.torch_engine import TorchEngine, generate
from regard.errors import UserError
from regard.nn.hooks import record, taps
from regard.run import Run
from regard.text.codec import Example


def align(
    run: Run, sources: list[list[int]], outputs: list[list[int]], heads: list[tuple[int, int]]
) -> list[Alignment]:
    """The alignments of outputs by these heads."""
    weights = align_weights(run.model, sources, outputs, heads)
    return [make_alignment(run.codec, *parts) for parts in zip(sources, outputs, weights, strict=True)]


@pytest.mark.parametrize("name", NAMES)
def test_heads_of_the_config_are_those_of_the_model(name: str) -> None:
    model = run_of(name, 2).model
    counts = {layer: model.attentions()[name].heads for layer, name in cross_attentions(model).items()}
    assert model.config.cross_heads == counts and check_heads(model.config, [])


@pytest.mark.parametrize("name", NAMES)
def test_alignment_has_a_source_distribution_for_every_output_token(name: str) -> None:
    run = run_of(name, 2)
    texts = sources(1, 9)
    rows = list(generate(run, texts, Options(beam=3, nbest=2, alignment=True, max_length=10)))
    rows_without = list(generate(run, texts, Options(beam=3, nbest=2, max_length=10)))
    for text, row, row_without in zip(texts, rows, rows_without, strict=True):
        assert [h.ids for h in row] == [h.ids for h in row_without]
        for h in row:
            assert h.alignment is not None and h.alignment.source == (*text, "<eos>")
            assert h.alignment.soft.shape == (len(h.ids) - 1, len(text) + 1)
            assert h.alignment.soft.sum(1) == pytest.approx(np.ones(len(h.ids) - 1), abs=1e-5)
            assert [t for _, t in h.alignment.hard] == list(range(len(h.ids) - 1))
            assert all(0 <= s < len(text) for s, _ in h.alignment.hard)
    assert not any(tap.watched for tap in taps(run.model).values())


@pytest.mark.parametrize("name", NAMES)
def test_alignment_does_not_depend_on_the_batch(name: str) -> None:
    run = run_of(name, 2)
    texts = sources(3, 5)
    options = Options(alignment=True, max_length=10)
    for text, (batched,) in zip(texts, generate(run, texts, options), strict=True):
        (single,) = next(generate(run, [text], options))
        assert single.alignment.soft == pytest.approx(batched.alignment.soft, abs=1e-5)


@pytest.mark.parametrize("name", ["rnn-luong", "rnn-bahdanau"])
def test_model_that_reverses_text_aligns_backwards(name: str) -> None:
    run = trained(name)
    hits = links = 0
    for text in sources(5, 20, 6):
        text = text.replace("a", "b")
        (h,) = next(generate(run, [text], Options(alignment=True)))
        for source, output in h.alignment.hard:
            hits += abs(source - (len(text) - 1 - output)) <= 1  # the state is read before or after the step
            links += 1
    assert hits / links > 0.8


@pytest.mark.parametrize("name", NAMES)
def test_alignment_rows_equal_the_attention_of_their_steps(name: str) -> None:
    run = run_of(name, 2)
    source = run.codec.encode_source([Example("fade")])[0]
    output = run.codec.encode_target(["cabb"])[0]
    (alignment,) = align(run, [source], [output], heads=[(0, 0)])
    with torch.no_grad(), record(run.model, *weight_taps(run.model, [0]).values()) as recording:
        state = run.model.encode(torch.tensor([source]))
        for index in [run.config.start_id, *output[:-1]]:
            _, state = run.model.step(torch.tensor([index]), state)
    (weights_1HTS,) = recording.values()
    steps = weights_1HTS[0, 0]
    assert alignment.soft == pytest.approx(steps[:-1].numpy(), abs=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_coverage_penalty_sums_attention_over_all_steps(name: str) -> None:
    """The value of a finished output equals the value computed from forced attention."""
    run = run_of(name, 3)
    options = Options(beam=4, nbest=4, coverage_penalty=0.7, alignment_heads=((0, 0),))
    engine = TorchEngine(run, options.model_copy(update={"max_length": 9}))
    inputs = engine.prepare(["fade", "cab", "d"])
    for item, outputs in zip(inputs, search(engine.scorer, inputs, options), strict=True):
        for output in outputs:
            weights_1HTS = forced_attention(run.model, item.sources[:1], [output.ids], [0])[0]
            covered = weights_1HTS[0, 0].sum(0)[:-1].clamp(1e-3, 1.0).log().sum()
            assert output.value == pytest.approx(output.score / len(output.ids) + 0.7 * float(covered), abs=1e-5)


def test_heads_are_chosen_by_sharpness_and_coverage() -> None:
    run = run_of("transformer-tiny", 1)
    pairs = list(zip(sources(1, 30), sources(2, 30), strict=True))
    heads = choose_heads(run, [Example(*pair) for pair in pairs])
    assert 1 <= len(heads) <= 4 and set(heads) <= {(layer, head) for layer in (0, 1) for head in (0, 1)}

    def merit(head: tuple[int, int]) -> float:
        codec = run.codec
        ids = codec.encode_source([Example(s) for s, _ in pairs]), codec.encode_target([t for _, t in pairs])
        soft = [a.soft for a in align(run, *ids, heads=[head])]
        return float(np.mean([(w.max(1).mean()) * np.minimum(w[:, :-1].sum(0), 1).mean() for w in soft]))

    merits = {(layer, head): merit((layer, head)) for layer in (0, 1) for head in (0, 1)}
    assert max(merits, key=lambda head: merits[head]) in heads
    with pytest.raises(UserError, match="needs pairs"):
        choose_heads(run, [Example("", "")])


def test_alignment_heads_are_saved_in_the_run_directory(tmp_path: Path) -> None:
    run = replace(run_of("transformer-tiny", 1), path=tmp_path)
    assert load_heads(tmp_path) == ()
    save_heads(tmp_path, [(0, 1)])
    assert load_heads(tmp_path) == ((0, 1),)
    (default,) = next(generate(run, ["abc"], Options(alignment=True)))
    (selected,) = next(generate(run, ["abc"], Options(alignment=True, alignment_heads=((0, 1),))))
    assert default.alignment.soft == pytest.approx(selected.alignment.soft)
    (tmp_path / "alignment.json").write_text('{"heads": [[0, -1]]}')
    with pytest.raises(UserError, match=r"alignment\.json"):
        list(generate(run, ["abc"], Options(alignment=True)))


def test_selected_alignment_heads_are_averaged() -> None:
    run = run_of("transformer-tiny", 1)
    ids = [run.codec.encode_source([Example("fade")])[0]], [run.codec.encode_target(["cab"])[0]]
    (one,), (two,), (both,) = (align(run, *ids, heads=heads) for heads in ([(0, 0)], [(1, 1)], [(0, 0), (1, 1)]))
    assert both.soft == pytest.approx((one.soft + two.soft) / 2, abs=1e-6)
    with pytest.raises(UserError, match="alignment_heads: there is no layer 8 with a head 1"):
        list(generate(run, ["a"], Options(alignment=True, alignment_heads=((7, 0),))))


@pytest.mark.parametrize("name", NAMES)
def test_coverage_penalty_increases_source_coverage(name: str) -> None:
    run = run_of(name, 3)
    texts = sources(4, 12)
    coverage = []
    for penalty in (0.0, 20.0):
        options = Options(beam=6, coverage_penalty=penalty, alignment=True, max_length=10)
        soft = [row[0].alignment.soft for row in generate(run, texts, options)]
        coverage.append(np.mean([np.minimum(w.sum(0)[:-1], 1).mean() if len(w) else 0.0 for w in soft]))
    assert coverage[1] > coverage[0]
