"""Traces of language models, masked language models, text classifiers and image classifiers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kit.models import FAMILIES, LABELS, LANGUAGE, TEXT_ALONE, check_scores, family, picture
from regard.errors import UserError
from regard.inspect.trace import Trace, trace, trace_image
from regard.nn.hooks import record, taps
from regard.run import Run
from regard.text.codec import Example

TEXT = "abcabba"


def make_trace(run: Run, text: str = TEXT) -> Trace:
    return trace(run, Example(text)) if run.config.patches is None else trace_image(run, picture())


@torch.no_grad()
def forward(run: Run, text: str = TEXT) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The output of the model for the same input, and its attention maps."""
    if run.pixels is not None:
        inputs = torch.from_numpy(run.pixels(picture()[None]))
    elif run.config.encoder is None:
        inputs = torch.tensor([[run.config.start_id, *run.codec.target.encode([text])[0][:-1]]])
    else:
        inputs = torch.tensor(run.codec.encode_source([Example(text)]))
    with record(run.model, "*.weights") as maps:
        logits = run.model(inputs, None)[0]
    return logits, dict(maps)


@pytest.mark.parametrize("kind", FAMILIES)
def test_maps_equal_recorded_weights(kind: str) -> None:
    run = family(kind)
    result, (_, maps) = make_trace(run), forward(run)
    assert {f"{m.name}.weights" for m in result.maps} == set(maps) and len(result.maps) == 2
    for m in result.maps:
        assert np.allclose(m.weights_HTS, maps[f"{m.name}.weights"][0].numpy(), atol=1e-6)
        assert m.weights_HTS.shape == (4, len(result.tokens[m.rows]), len(result.tokens[m.columns]))
    assert not result.alignment
    assert not any(tap.watched for tap in taps(run.model).values())


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "lm-hashed"])
def test_softmax_of_walk_scores_equals_the_weights(kind: str) -> None:
    result = make_trace(family(kind))
    check_scores(result)
    last = result.walks[0].layers[-1][-1]
    assert (last.show == "prediction") == (kind.startswith("lm") or kind in ("classes", "image"))


def test_hashed_layers_have_no_walk() -> None:
    assert not make_trace(family("lm-hashed")).walks


@pytest.mark.parametrize("kind", LANGUAGE)
def test_language_model_steps_have_the_probability_of_each_token(kind: str) -> None:
    run = family(kind)
    result, (logits_TV, _) = make_trace(run), forward(run)
    labels = run.codec.target.encode([TEXT])[0]
    assert result.tokens["output"] == tuple(TEXT) and result.tokens["input"][1:] == tuple(TEXT[:-1])
    logp_TV = logits_TV.log_softmax(-1)
    assert [step.probability for step in result.steps] == pytest.approx(
        logp_TV.exp()[range(len(labels)), labels].tolist(), abs=1e-5
    )
    assert result.score == pytest.approx(float(logp_TV[range(len(labels)), labels].sum()), abs=1e-4)


def test_text_and_continuation_are_traced_together() -> None:
    run = family("lm")
    result = trace(run, Example("abc"), run.codec.target.encode(["abba"])[0])
    assert result.texts == {"text": "abc", "continuation": "abba"}
    assert result.steps == make_trace(run).steps and result.tokens == make_trace(run).tokens


@torch.no_grad()
def test_masked_model_predicts_each_token_while_it_is_masked() -> None:
    run = family("masked")
    result = make_trace(run)
    ids = run.codec.encode_source([Example(TEXT)])[0]
    assert [step.token for step in result.steps] == ["<sos>", *TEXT, "<eos>"]
    for position in range(1, len(ids) - 1):
        masked = [run.config.ids.mask if i == position else index for i, index in enumerate(ids)]
        probability_V = run.model(torch.tensor([masked]), None)[0, position].softmax(-1)
        assert result.steps[position].probability == pytest.approx(float(probability_V[ids[position]]), abs=1e-5)
        assert result.lens[-1].steps[position][0].probability == pytest.approx(float(probability_V.max()), abs=1e-5)
    plain_SV = run.model(torch.tensor([ids]), None)[0].softmax(-1)
    assert result.steps[0].probability == pytest.approx(float(plain_SV[0, ids[0]]), abs=1e-5), (
        "special tokens are not masked"
    )
    assert "masked in turn" in result.notes[0].text


@pytest.mark.parametrize("kind", ["classes", "image"])
def test_classifier_has_one_output_step(kind: str) -> None:
    run = family(kind)
    result, (logits_1C, _) = make_trace(run), forward(run)
    probability_C = logits_1C[0].softmax(-1)
    (step,) = result.steps
    assert result.unit == "class" and step.token == result.texts["prediction"] == LABELS[int(probability_C.argmax())]
    assert {c.token: c.probability for c in step.candidates} == pytest.approx(
        dict(zip(LABELS, probability_C.tolist(), strict=True)), abs=1e-5
    )
    assert result.lens[-1].steps[0][0].probability == pytest.approx(float(probability_C.max()), abs=1e-5)


def test_explicit_label_is_the_token_of_the_step() -> None:
    for kind in ("classes", "image"):
        run = family(kind)
        result = (
            trace(run, Example(TEXT, "two")) if kind == "classes" else trace_image(run, picture(), "two", "digits.npz")
        )
        assert result.steps[0].token == "two" and result.texts["label"] == "two"
        assert result.score == pytest.approx(np.log(result.steps[0].probability), abs=1e-4)
    with pytest.raises(UserError, match="did you mean 'three'"):
        trace_image(run, picture(), "tree")


def test_model_without_lm_head_has_no_steps() -> None:
    result = make_trace(family("vectors"))
    assert not result.steps and not result.lens and result.maps and result.walks


def test_distances_in_an_image_are_between_patch_centres() -> None:
    result = make_trace(family("image"))
    assert result.image is not None and result.image.size == 2
    for m in result.maps:
        for head, weights_TS in enumerate(m.weights_HTS):
            total = 0.0
            for t in range(16):
                distances = [2 * np.hypot(t // 4 - s // 4, t % 4 - s % 4) for s in range(16)]
                total += np.dot(weights_TS[1 + t, 1:], distances) / weights_TS[1 + t, 1:].sum()
            assert result.distances[m.name][head] == pytest.approx(total / 16, rel=1e-4)


def test_pixels_are_converted_to_bytes() -> None:
    image = picture() * 15
    result = trace_image(family("image"), image)
    assert result.image is not None and np.array_equal(result.image.pixels_HWC[..., 0], image[0])
    for faint in (picture(), image.astype(np.float32)):
        stretched = trace_image(family("image"), faint).image
        assert stretched is not None and (stretched.pixels_HWC.min(), stretched.pixels_HWC.max()) == (0, 255)


def test_inputs_that_do_not_fit_the_model_are_refused() -> None:
    with pytest.raises(UserError, match="reads images, not text"):
        trace(family("image"), Example("abc"))
    with pytest.raises(UserError, match="reads text, not images"):
        trace_image(family("lm"), picture())
    with pytest.raises(UserError, match=r"the model reads \(1, 8, 8\)"):
        trace_image(family("image"), np.zeros((1, 4, 8)))
    with pytest.raises(UserError, match="no tokens"):
        trace(family("lm"), Example(""))


@pytest.mark.parametrize("kind", TEXT_ALONE)
def test_long_texts_are_truncated_with_a_note(kind: str) -> None:
    result = trace(family(kind), Example("ab" * 30), most=20)
    assert {len(row) for row in result.tokens.values()} == {20}
    assert "first 20" in result.notes[0].text
