"""Traces of encoder-decoders equal the model: steps, logit lens, maps, walks and alignment."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kit.models import check_scores, letters, tiny
from regard.decode.alignment import alignment_quality
from regard.errors import UserError
from regard.inspect.trace import Trace, trace, trace_pair
from regard.nn.hooks import record, taps
from regard.run import Run
from regard.text.codec import Codec, Example
from regard.text.tokenizer import Tokenizer

TEXT, OUTPUT = "abcab", "bcd"


def make_trace(run: Run, source: str = TEXT, output: str = OUTPUT, **options: Any) -> Trace:
    return trace(run, Example(source), run.codec.encode_target([output])[0], **options)


def logits(run: Run, source: str = TEXT, output: str = OUTPUT) -> torch.Tensor:
    labels = run.codec.encode_target([output])[0]
    inputs = torch.tensor([[run.config.start_id, *labels[:-1]]])
    with torch.no_grad():
        out: torch.Tensor = run.model(torch.tensor(run.codec.encode_source([Example(source)])), None, inputs)[0]
    return out


def test_steps_have_the_probabilities_of_the_model(run: Run) -> None:
    result = make_trace(run)
    logp_TV = logits(run).log_softmax(-1)
    labels = run.codec.encode_target([OUTPUT])[0]
    assert result.tokens["output"] == ("b", "c", "d", "<eos>")
    assert result.tokens["input"] == ("<sos>", "b", "c", "d")
    for t, step in enumerate(result.steps):
        assert step.probability == pytest.approx(float(logp_TV[t, labels[t]].exp()), abs=1e-5)
        assert step.candidates[0].probability == pytest.approx(float(logp_TV[t].max().exp()), abs=1e-5)
        assert 0 <= step.entropy <= np.log2(run.config.target_vocab) + 1e-5
        for candidate in step.candidates:
            assert candidate.probability == pytest.approx(np.exp(candidate.logit - step.normaliser), rel=1e-4)
    assert result.score == pytest.approx(float(logp_TV[range(4), labels].sum()), abs=1e-4)


def test_last_layer_of_the_lens_equals_the_candidates_of_the_model(run: Run) -> None:
    result = make_trace(run)
    last = [[c.token for c in step[:3]] for step in result.lens[-1].steps]
    assert last == [[c.token for c in step.candidates[:3]] for step in result.steps]
    assert run.config.decoder is not None
    assert len(result.lens) == run.config.decoder.layers + run.config.decoder.recurrent


def test_maps_equal_recorded_weights(run: Run) -> None:
    result = make_trace(run)
    labels = run.codec.encode_target([OUTPUT])[0]
    with record(run.model, "*.weights") as maps, torch.no_grad():
        run.model(
            torch.tensor(run.codec.encode_source([Example(TEXT)])),
            None,
            torch.tensor([[run.config.start_id, *labels[:-1]]]),
        )
    assert {f"{m.name}.weights" for m in result.maps} == set(maps)
    for m in result.maps:
        assert np.allclose(m.weights_HTS, maps[f"{m.name}.weights"][0].numpy(), atol=1e-6)
        assert m.weights_HTS.shape[1:] == (len(result.tokens[m.rows]), len(result.tokens[m.columns]))
    assert not any(tap.watched for tap in taps(run.model).values())
    assert not any(module._forward_hooks for module in run.model.modules())


@pytest.mark.parametrize("position", ["sinusoid", "learned", "rotary", "alibi", "bucket", "none"])
@pytest.mark.parametrize("score", ["scaled_dot", "general", "additive", "cosine", "concat", "location"])
def test_softmax_of_walk_scores_equals_the_weights(position: str, score: str, make_letters: Callable[..., Run]) -> None:
    """For every position encoding and attention score."""
    check_scores(make_trace(make_letters(position=position, score=score)))


@pytest.mark.parametrize("name", ["rnn-bahdanau", "rnn-luong"])
def test_softmax_of_recurrent_scores_equals_the_weights(name: str, make_letters: Callable[..., Run]) -> None:
    check_scores(make_trace(make_letters(name)))
    check_scores(make_trace(make_letters(name, cross_window=2)))


def test_softmax_of_scores_of_grouped_and_pruned_heads_equals_the_weights(make_letters: Callable[..., Run]) -> None:
    kept_heads = ((0, 3), (1, 2, 3))
    run = make_letters(kv_heads=2, kept_heads=kept_heads, position="alibi", window=2)
    result = make_trace(run)
    check_scores(result)
    assert [m.heads for m in result.maps if m.kind == "encoder"] == list(kept_heads)


@pytest.mark.parametrize("norm_at", ["pre", "post"])
def test_each_card_of_the_walk_is_computed_from_the_previous_one(
    norm_at: str, make_letters: Callable[..., Run]
) -> None:
    run = make_letters(norm_at=norm_at)
    result = make_trace(run)
    decoder = next(walk for walk in result.walks if walk.name == "decoder")
    assert run.config.decoder is not None
    previous = None
    for cards in decoder.layers:
        first = {v.label: v.first for card in cards[:1] for v in card.vectors}
        if previous is not None:
            assert np.allclose(first["x"], previous, atol=1e-5)
        elif "position" in first:
            assert np.allclose(first["embedding"] + first["position"], first["x"], atol=1e-5)
        for card in cards:
            vectors = {v.label: v.first for v in card.vectors}
            if card.title.startswith("Add"):
                assert np.allclose(vectors["x"] + vectors["o"], vectors["x + o"], atol=1e-5)
                previous = vectors["norm" if norm_at == "post" else "x + o"]
            if card.show == "sum":
                weights = next(m.weights_HTS for m in result.maps if card.scores and m.name == card.scores.map)
                assert card.scores is not None
                assert np.allclose(weights @ card.scores.values.first, card.vectors[0].first, atol=1e-5)
    assert decoder.layers[-1][-1].show == "prediction"


def test_cards_of_a_recurrent_step_are_consistent(make_letters: Callable[..., Run]) -> None:
    for name in ("rnn-bahdanau", "rnn-luong"):
        run = make_letters(name)
        result = make_trace(run)
        (cards,) = result.walks[0].layers
        context = next(card for card in cards if card.show == "sum")
        assert context.scores is not None
        weights = result.maps[0].weights_HTS
        assert np.allclose(weights @ context.scores.values.first, context.vectors[0].first, atol=1e-5)
        last = next(card for card in cards if card.title == "Concatenation").vectors[-1].first
        assert np.allclose(last, cards[-1].vectors[0].first, atol=1e-5)


def test_title_is_the_name_of_the_run_or_of_the_directory_around_it(transformer_run: Run) -> None:
    for path, title in (("runs/g2p", "g2p"), ("runs/g2p/", "g2p"), ("runs/demo/run", "demo"), ("/", "model")):
        assert make_trace(replace(transformer_run, path=Path(path))).title == title


def test_long_texts_are_truncated_with_a_note(transformer_run: Run) -> None:
    result = make_trace(transformer_run, "ab" * 30, "c" * 40, most=20)
    assert len(result.tokens["source"]) == len(result.tokens["output"]) == 20
    assert "61 tokens" in result.notes[0].text and "first 20" in result.notes[0].text
    assert "41 tokens" in result.notes[1].text
    assert not make_trace(transformer_run).notes


def test_trace_ends_with_eos_only_if_the_target_does(transformer_run: Run) -> None:
    ids = transformer_run.codec.encode_target(["bc"])[0]
    assert trace(transformer_run, Example(TEXT), ids).tokens["output"] == ("b", "c", "<eos>")
    assert trace(transformer_run, Example(TEXT), ids[:-1]).tokens["output"] == ("b", "c")


@torch.no_grad()
def test_truncated_output_has_no_eos_and_a_note(transformer_run: Run) -> None:
    complete = trace_pair(transformer_run, Example(TEXT), OUTPUT)
    assert complete.tokens["output"][-1] == "<eos>" and not complete.notes
    model = transformer_run.model

    def never_end(module: torch.nn.Module, args: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(-1, torch.tensor([transformer_run.config.ids.eos]), -1e4)

    assert model.output is not None
    handle = model.output.register_forward_hook(never_end)
    result = trace_pair(transformer_run, Example(TEXT))
    handle.remove()
    assert "<eos>" not in result.tokens["output"] and len(result.tokens["output"]) == len(result.steps) > 5
    (note,) = result.notes
    assert note.kind == "limit" and note.text.startswith("The output ended at the limit of")


def hebrew_run() -> Run:
    tokenizer = Tokenizer.train("char", ["שלום"])
    codec = Codec(tokenizer, tokenizer, features=("V", "PST"), columns=("source", "features", "target"))
    return Run((model := tiny(vocab=codec.target_vocab)).config, codec, model, Path("runs/hebrew"))


def test_trace_contains_text_direction_and_features() -> None:
    run = hebrew_run()
    result = trace(run, Example("שלום", None, "V;PST"), run.codec.encode_target(["ש"])[0])
    assert result.tokens["source"][:3] == ("V", "PST", "ש")
    assert result.directions == {"source": "rtl", "input": "rtl", "output": "rtl"}
    assert result.texts == {"source": "שלום", "features": "V;PST", "output": "ש"}
    assert result.matrix().right_to_left
    assert set(make_trace(letters()).directions.values()) == {"ltr"}


@pytest.mark.parametrize("bias", ["all", "ff", "none"])
@pytest.mark.parametrize("gated", [True, False])
def test_formulas_contain_the_biases_of_the_model(bias: str, gated: bool, make_letters: Callable[..., Run]) -> None:
    """The formulas of a layer have as many biases as its linear maps; keys and values count as two maps."""
    run = make_letters(bias=bias, gated=gated)
    decoder = next(walk for walk in make_trace(run).walks if walk.name == "decoder")
    assert run.model.decoder is not None
    for block, cards in zip(run.model.decoder.blocks, decoder.layers, strict=True):
        names = [name for name, _ in block.named_parameters() if name.endswith(".bias") and "norm" not in name]
        count = sum(2 if "key_value" in name else 1 for name in names)
        formulas = " ".join(card.formula for card in cards if card.show != "prediction")
        assert len(re.findall(r"\+ b_", formulas)) == count


def test_formulas_of_recurrent_models_contain_biases(make_letters: Callable[..., Run]) -> None:
    (cards,) = make_trace(make_letters("rnn-bahdanau")).walks[0].layers
    formulas = {card.title: card.formula for card in cards}
    assert "U k_s + b)" in formulas["scores, mask, softmax"] and formulas["Concatenation"].endswith("+ b)")


def test_head_formula_contains_only_unpruned_heads(make_letters: Callable[..., Run]) -> None:
    run = make_letters(kept_heads=((0, 3), (1, 2, 3)), kept_cross_heads=((2,), (0, 1, 2, 3)))
    for walk in make_trace(run).walks:
        stack = run.config.stacks[walk.name]
        assert stack.kept_heads is not None
        for indices, cards in zip(stack.kept_heads, walk.layers, strict=True):
            card = next(card for card in cards if card.show == "heads")
            assert card.formula.startswith(f"o_t = [{' ; '.join(f'z^{{{head + 1}}}_t' for head in indices)}] W_O")


def test_alignment_is_the_mean_of_the_selected_heads(transformer_run: Run) -> None:
    result = make_trace(transformer_run, heads=[(0, 1), (1, 3)])
    name, weights = next(iter(result.alignment.items()))
    assert name == "alignment heads 1.2, 2.4"
    expected = (result.find("cross", 0).weights_HTS[1] + result.find("cross", 1).weights_HTS[3]) / 2
    assert np.allclose(weights, expected)


def test_sharp_diagonal_has_the_best_alignment_quality() -> None:
    diagonal, flat, stuck = np.eye(5), np.full((5, 5), 0.2), np.eye(5)[[0] * 5]
    assert alignment_quality(diagonal) == 1.0
    assert alignment_quality(flat) < 0.3 and alignment_quality(stuck) < 0.3


def test_unknown_layer_is_refused(transformer_run: Run) -> None:
    with pytest.raises(UserError, match="no cross attention in layer 8; this model has cross layer 1"):
        make_trace(transformer_run).find("cross", 7)


def test_model_in_training_mode_is_traced_in_eval_mode(transformer_run: Run) -> None:
    expected = make_trace(transformer_run).score
    transformer_run.model.train()
    assert make_trace(transformer_run).score == pytest.approx(expected)
    assert transformer_run.model.training
    transformer_run.model.eval()


@pytest.mark.parametrize("position", ["sinusoid", "learned", "rotary", "alibi", "bucket", "none"])
def test_every_position_encoding_has_a_heatmap(position: str, make_letters: Callable[..., Run]) -> None:
    result = make_trace(make_letters(position=position))
    assert [picture.name for picture in result.positions] == ([] if position == "none" else ["encoder", "decoder"])
    for picture in result.positions:
        assert np.isfinite(picture.values_RC).all()
        if picture.rows == "head":
            assert picture.first_column + picture.values_RC.shape[1] - 1 == (
                0 if picture.name == "decoder" else -picture.first_column
            )
