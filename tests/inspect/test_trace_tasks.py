"""Traces of models other than encoder-decoders: language models, masked models, classes, images."""

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


def traced(run: Run, text: str = TEXT) -> Trace:
    return trace(run, Example(text)) if run.config.patches is None else trace_image(run, picture())


@torch.no_grad()
def raw(run: Run, text: str = TEXT) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
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
def test_maps_are_what_a_recording_sees(kind: str) -> None:
    run = family(kind)
    found, (_, maps) = traced(run), raw(run)
    assert {f"{m.name}.weights" for m in found.maps} == set(maps) and len(found.maps) == 2
    for m in found.maps:
        assert np.allclose(m.weights_HTS, maps[f"{m.name}.weights"][0].numpy(), atol=1e-6)
        assert m.weights_HTS.shape == (4, len(found.tokens[m.rows]), len(found.tokens[m.columns]))
    assert not found.alignment
    assert not any(tap.watched for tap in taps(run.model).values())


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "lm-hashed"])
def test_the_scores_of_the_walk_give_the_weights(kind: str) -> None:
    found = traced(family(kind))
    check_scores(found)
    last = found.walks[0].layers[-1][-1]
    assert (last.show == "prediction") == (kind.startswith("lm") or kind in ("classes", "image"))


def test_hashed_layers_have_no_walk() -> None:
    assert not traced(family("lm-hashed")).walks


@pytest.mark.parametrize("kind", LANGUAGE)
def test_a_language_model_gives_the_probability_of_each_token(kind: str) -> None:
    run = family(kind)
    found, (logits_TV, _) = traced(run), raw(run)
    labels = run.codec.target.encode([TEXT])[0]
    assert found.tokens["output"] == tuple(TEXT) and found.tokens["input"][1:] == tuple(TEXT[:-1])
    logp_TV = logits_TV.log_softmax(-1)
    assert [step.probability for step in found.steps] == pytest.approx(
        logp_TV.exp()[range(len(labels)), labels].tolist(), abs=1e-5
    )
    assert found.score == pytest.approx(float(logp_TV[range(len(labels)), labels].sum()), abs=1e-4)


def test_a_continuation_is_read_along() -> None:
    run = family("lm")
    found = trace(run, Example("abc"), run.codec.target.encode(["abba"])[0])
    assert found.texts == {"text": "abc", "continuation": "abba"}
    assert found.steps == traced(run).steps and found.tokens == traced(run).tokens


@torch.no_grad()
def test_a_masked_model_predicts_each_token_while_it_is_masked() -> None:
    run = family("masked")
    found = traced(run)
    ids = run.codec.encode_source([Example(TEXT)])[0]
    assert [step.token for step in found.steps] == ["<sos>", *TEXT, "<eos>"]
    for position in range(1, len(ids) - 1):
        masked = [run.config.ids.mask if i == position else index for i, index in enumerate(ids)]
        probability_V = run.model(torch.tensor([masked]), None)[0, position].softmax(-1)
        assert found.steps[position].probability == pytest.approx(float(probability_V[ids[position]]), abs=1e-5)
        assert found.lens[-1].steps[position][0].probability == pytest.approx(float(probability_V.max()), abs=1e-5)
    plain_SV = run.model(torch.tensor([ids]), None)[0].softmax(-1)
    assert found.steps[0].probability == pytest.approx(float(plain_SV[0, ids[0]]), abs=1e-5), (
        "special tokens are not masked"
    )
    assert "masked in turn" in found.notes[0].text


@pytest.mark.parametrize("kind", ["classes", "image"])
def test_a_classifier_has_one_output_step(kind: str) -> None:
    run = family(kind)
    found, (logits_1C, _) = traced(run), raw(run)
    probability_C = logits_1C[0].softmax(-1)
    (step,) = found.steps
    assert found.unit == "class" and step.token == found.texts["prediction"] == LABELS[int(probability_C.argmax())]
    assert {c.token: c.probability for c in step.candidates} == pytest.approx(
        dict(zip(LABELS, probability_C.tolist(), strict=True)), abs=1e-5
    )
    assert found.lens[-1].steps[0][0].probability == pytest.approx(float(probability_C.max()), abs=1e-5)


def test_a_given_label_is_the_label_of_the_step() -> None:
    for kind in ("classes", "image"):
        run = family(kind)
        found = (
            trace(run, Example(TEXT, "two")) if kind == "classes" else trace_image(run, picture(), "two", "digits.npz")
        )
        assert found.steps[0].token == "two" and found.texts["label"] == "two"
        assert found.score == pytest.approx(np.log(found.steps[0].probability), abs=1e-4)
    with pytest.raises(UserError, match="did you mean 'three'"):
        trace_image(run, picture(), "tree")


def test_a_model_without_an_lm_head_has_no_steps() -> None:
    found = traced(family("vectors"))
    assert not found.steps and not found.lens and found.maps and found.walks


def test_distances_in_an_image_are_between_centres_of_patches() -> None:
    found = traced(family("image"))
    assert found.image is not None and found.image.size == 2
    for m in found.maps:
        for head, weights_TS in enumerate(m.weights_HTS):
            total = 0.0
            for t in range(16):
                far = [2 * np.hypot(t // 4 - s // 4, t % 4 - s % 4) for s in range(16)]
                total += np.dot(weights_TS[1 + t, 1:], far) / weights_TS[1 + t, 1:].sum()
            assert found.distances[m.name][head] == pytest.approx(total / 16, rel=1e-4)


def test_pixels_are_shown_as_bytes() -> None:
    image = picture() * 15
    found = trace_image(family("image"), image)
    assert found.image is not None and np.array_equal(found.image.pixels_HWC[..., 0], image[0])
    for faint in (picture(), image.astype(np.float32)):
        stretched = trace_image(family("image"), faint).image
        assert stretched is not None and (stretched.pixels_HWC.min(), stretched.pixels_HWC.max()) == (0, 255)


def test_what_does_not_fit_the_model() -> None:
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
    found = trace(family(kind), Example("ab" * 30), most=20)
    assert {len(row) for row in found.tokens.values()} == {20}
    assert "first 20" in found.notes[0].text
