"""Classification: results keep the input order, do not depend on the batch, and too long texts are flagged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kit.decoding import run_of, sources, tokenizer
from regard.config import Config, parse
from regard.decode.encoder_only import classify, classify_ids, classify_images
from regard.errors import UserError
from regard.model import Model
from regard.run import Run
from regard.text.codec import Codec, Example

AXIAL = {"position": "axial", "axial": {"rows": 3, "columns": 4, "row_width": 8}}
LEARNED = {"position": "learned", "max_length": 12}


def classifier(position: dict[str, object]) -> Run:
    codec = Codec(tokenizer("char"), frame="both")
    stack = {"layers": 1, "width": 16, "heads": 2, "ff": 32, "dropout": 0.0, **position}
    vocabs = {"source_vocab": codec.source_vocab, "target_vocab": codec.target_vocab}
    config = parse(Config, {**vocabs, "encoder": stack, "output": "classes", "classes": 3, "frame": "both"}, "test")
    torch.manual_seed(0)
    return Run(config, codec, Model(config).eval(), Path("random"), ("x", "y", "z"))


@pytest.mark.parametrize("position", [AXIAL, LEARNED], ids=["axial", "learned"])
def test_texts_within_the_position_limit_are_classified_and_longer_ones_flagged(position: dict[str, object]) -> None:
    short, full, long = classify(classifier(position), ["a", "abcdefabcd", "abcdefabcde"])
    for answer in (short, full):
        assert answer.label in "xyz" and sum(answer.probabilities.values()) == pytest.approx(1.0) and not answer.flags
        assert answer.probability == max(answer.probabilities.values())
    assert "13 tokens" in long.flags["too_long"] and "the 12 that fit the model's learned" in long.flags["too_long"]
    assert long.label == "" and long.as_dict()["label"] is None


def test_classifications_do_not_depend_on_the_batch_and_keep_the_input_order() -> None:
    run = classifier({"position": "rotary"})
    texts = sources(1, 20)
    batched = classify(run, texts, batch_tokens=40)
    for text, answer in zip(texts, batched, strict=True):
        (single,) = classify(run, [text])
        assert single.label == answer.label and single.probabilities == pytest.approx(answer.probabilities, abs=1e-5)
    assert classify_ids(run, run.codec.encode_source([Example(text) for text in texts]), 40) == batched
    (flagged,) = classify(run, ["abcdef"], max_source=4)
    assert "4 (max_source)" in flagged.flags["too_long"]


def test_classes_without_labels_are_named_by_number() -> None:
    run = classifier(LEARNED)
    run.labels = ()
    assert classify(run, ["abc"])[0].label in ("0", "1", "2")


def test_models_that_are_not_classifiers_of_text_are_refused() -> None:
    with pytest.raises(UserError, match="is not a classifier"):
        classify(run_of("rnn-luong", 0), ["a"])
    with pytest.raises(UserError, match="reads text, not images"):
        classify_images(classifier(LEARNED), torch.zeros(1, 1, 4, 4).numpy())
