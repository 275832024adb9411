"""Exported CTranslate2 models give the scores of our model; settings unsupported by CTranslate2 are refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import regard.convert.to_ctranslate2 as to_ct2
from kit.ct2 import LETTERS, random_run, tokenizer, words
from kit.families import BOTH, DECODERS, ENCODERS, build, shrunk
from kit.toy import call
from regard.config import Config
from regard.convert.to_ctranslate2 import largest_difference, misfits, names_of, open_translator, to_ctranslate2
from regard.decode.torch_engine import TorchEngine
from regard.errors import UserError
from regard.run import Run
from regard.text.codec import Codec
from regard.text.tokenizer import Tokenizer

pytest.importorskip("ctranslate2")

POSITIONS = ("none", "sinusoid", "sinusoid_halves", "learned", "rotary", "bucket")
STACKS: dict[str, dict[str, Any]] = {
    **{f"{p}-{at}": {"position": p, "norm_at": at} for p in POSITIONS for at in ("pre", "post")},
    **{act: {"activation": act} for act in ("gelu", "gelu_tanh", "silu", "tanh")},
    "gated": {"gated": True, "activation": "silu", "norm": "rms", "norm_at": "pre", "bias": "none"},
    "rms-post": {"norm": "rms", "bias": "ff"},
    "norm-first": {"embed_norm": True, "position": "learned"},
    "dot": {"score": "dot"},
    "narrow-heads": {"head_width": 6, "position": "rotary", "rotary": {"base": 100.0}},
    "two-kv-heads": {"kv_heads": 2, "position": "rotary"},
    "one-kv-head": {"kv_heads": 1, "head_width": 6},
    "norm-eps": {"norm_eps": 1e-2},
    "odd-width": {"width": 15, "heads": 3},
    "all-heads-kept": {"kept_heads": ((0, 1, 2, 3), (0, 1, 2, 3))},
}
MODELS: dict[str, dict[str, Any]] = {
    **{name: {"encoder": stack} for name, stack in STACKS.items()},
    "different-stacks": {
        "encoder": {"position": "learned", "norm": "rms"},
        "decoder": {"position": "rotary", "norm_at": "pre"},
    },
    "different-widths": {"encoder": {"width": 24, "heads": 3, "layers": 1}, "decoder": {"layers": 3}},
    "shared": {"share_embeddings": True, "codec": Codec(tokenizer()), "spare": 3},
    "untied": {"tie_output": False, "output_bias": True},
    "tied-with-bias": {"output_bias": True, "scale_embeddings": False},
    "starts-with-end": {"start": "eos"},
    "starts-with-padding": {"start": "pad", "codec": Codec(tokenizer(), frame="both")},
}


@pytest.mark.parametrize("name", MODELS)
def test_forced_scores_of_both_models_are_equal(name, tmp_path):
    run = random_run(**MODELS[name])
    report = to_ctranslate2(run, tmp_path / "out", 6)
    assert report.proof.difference < 5e-6 and report.details["int8"] is None
    assert largest_difference(run, tmp_path / "out", 6, "fp32") == report.proof.difference
    other = random_run(**MODELS[name], seed=1)  # other weights give other scores
    assert largest_difference(other, tmp_path / "out", 6, "fp32") > 0.01


@pytest.mark.parametrize("name", [*BOTH, *DECODERS, *ENCODERS])
def test_every_preset_is_exported_or_refused(name, tmp_path):
    config = shrunk(name)
    run = Run(config, Codec(Tokenizer.train("char", [LETTERS[:6]]), frame=config.frame), build(config), Path(name))
    if wrong := misfits(config):
        with pytest.raises(UserError, match="does not support"):
            to_ctranslate2(run, tmp_path / "out", 4)
        assert not (tmp_path / "out").exists()
        assert ("transformer" not in name and "t5" not in name and name != "marian") or "xl" in name, wrong
    else:
        assert to_ctranslate2(run, tmp_path / "out", 4).proof.difference < 5e-6


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "score": ({"score": "additive"}, r"encoder.score=additive \(there: scaled_dot, dot\)"),
    "window": ({"window": 3}, "decoder.window=3"),
    "cross-window": ({"cross_window": 2}, "decoder.cross_window=2"),
    "values": ({"value_width": 3}, "encoder.value_width=3"),
    "alibi": ({"position": "alibi"}, "encoder.position=alibi"),
    "axial": ({"position": "axial", "axial": {"rows": 8, "columns": 9, "row_width": 4}}, "decoder.position=axial"),
    "stretched": ({"position": "rotary", "rotary": {"factor": 2.0}}, "rotary.factor=2"),
    "pruned": ({"kept_heads": ((0, 1), (0, 1, 2, 3))}, "encoder.kept_heads"),
    "cross-pruned": ({"kept_cross_heads": ((0, 1), (0, 1, 2, 3))}, "decoder.kept_cross_heads"),
    "recurrent": ({"mixer": "gru"}, "encoder.mixer=gru"),
    "hashed": ({"mixer": "lsh"}, "decoder.mixer=lsh"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_settings_are_named_in_the_error(name, tmp_path):
    settings, message = REFUSED[name]
    stack = {"layers": 2, "width": 16, "heads": 4, "ff": 24, "max_length": 72, **settings}
    both = Config.model_validate({"source_vocab": 12, "target_vocab": 12, "encoder": stack, "decoder": stack})
    run = Run(both, Codec(tokenizer()), build(both), Path("somewhere"))
    with pytest.raises(UserError, match=f"somewhere(.|\n)*{message}"):
        to_ctranslate2(run, tmp_path / "out", 4)
    assert not list(tmp_path.iterdir())


def test_stacks_with_different_norm_eps_are_refused(tmp_path):
    run = random_run({"norm_eps": 1e-5}, {"norm_eps": 1e-6})
    with pytest.raises(UserError, match=r"encoder\.norm_eps=1e-05"):
        to_ctranslate2(run, tmp_path / "out", 4)


def test_different_scores_stop_the_export(tmp_path, monkeypatch):
    # CTranslate2 scales the attention scores unless queries_scale is set.
    monkeypatch.setattr(to_ct2, "_set_positions", lambda spec, stack: None)
    with pytest.raises(UserError, match="not the same"):
        to_ctranslate2(random_run({"score": "dot", "position": "learned"}), tmp_path / "out", 4)
    assert not list(tmp_path.iterdir())


def test_weights_that_are_not_finite_are_refused(tmp_path):
    run = random_run()
    run.model.decoder.blocks[1].feed_forward.up.weight.data[0, 0] = float("nan")
    with pytest.raises(UserError, match=r"not finite \(decoder.layer.1.ffn.linear_0.weight\)"):
        to_ctranslate2(run, tmp_path / "out", 4)


def test_int8_scores_are_close_and_the_file_is_a_quarter_of_the_size(tmp_path):
    run = random_run({"width": 64, "ff": 256, "position": "rotary"})
    full = to_ctranslate2(run, tmp_path / "fp32", 8, "fp32")
    small = to_ctranslate2(run, tmp_path / "int8", 8, "int8")
    assert full.details["int8"] is None and small.details["int8"] is not None and full.proof == small.proof
    assert full.proof.difference < small.details["int8"] < 0.2 and f"{small.details['int8']:.2g}" in small.summary
    sizes = [(tmp_path / name / "model.bin").stat().st_size for name in ("fp32", "int8")]
    assert 0.2 < sizes[1] / sizes[0] < 0.35


@pytest.mark.parametrize("scheme", ["char", "space", "word", "byte", "bpe:300"])
def test_vocabulary_names_are_unique_and_in_id_order(scheme):
    text = "< pad >  <pad> < 12 > < feature N > äß" * 3
    codec = Codec(Tokenizer.train(scheme, [text]), tokenizer(), features=("N", "PL", "a"))
    run = random_run(codec=codec, spare=4)
    source, target = names_of(run)
    for side, vocab in ((source, run.config.source_vocab), (target, run.config.target_vocab)):
        assert len(set(side)) == len(side) == vocab
    assert target[4:12] == [codec.target.pieces([i])[0] for i in range(4, 12)]
    pieces = set(source[4 : codec.source.size])
    assert pieces.isdisjoint(source[:4]) and pieces.isdisjoint(source[codec.source.size :])


@pytest.mark.parametrize("frame", ["end", "both", "start", "none"])
def test_ctranslate2_translates_pieces_as_our_engine_does(frame, tmp_path):
    run = random_run({"position": "rotary"}, codec=Codec(tokenizer(), tokenizer(), frame=frame), end=2.5)
    to_ctranslate2(run, tmp_path / "out", 4)
    pieces = [list(word) for word in words(20)]
    answers = open_translator(tmp_path / "out", "fp32").translate_batch(
        pieces, beam_size=1, max_decoding_length=200, min_decoding_length=0
    )
    ours = TorchEngine(run)(words(20))
    both = [
        (a.hypotheses[0], list(h.text)) for a, (h,) in zip(answers, ours, strict=True) if "max_length" not in h.flags
    ]
    assert len(both) > 5 and all(theirs == own for theirs, own in both)
    assert len({tuple(own) for _, own in both}) > 3


def test_convert_to_ctranslate2_on_the_command_line(toy, tmp_path):
    result = call("convert", toy / "run", tmp_path / "out", "--to", "ctranslate2")
    assert result.code == 0 and result.lines[0] == "model\tTransformerSpec" and "proven" in result.err
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json", "model.bin", "source_vocabulary.json", "target_vocabulary.json",
    }  # fmt: skip
    again = call("convert", toy / "run", tmp_path / "out", "--to", "ctranslate2")
    assert again.code == 2 and "exists already" in again.err
    order = ["convert", toy / "run", tmp_path / "small", "--to", "ctranslate2", "--quantization", "int8"]
    report = json.loads(call(*order, "--samples", 7, "--json").out)
    assert report["proof"]["samples"] == 7 and report["precision"] == "int8" and 0 < report["int8"] < 0.3
    for wrong, message in (
        (["--to", "ctranslate2", "--quantization", "int4"], "allowed: fp32, int8"),
        (["--to", "ctranslate"], "did you mean 'ctranslate2'?"),
        (["--quantization", "int8"], "belongs to --to ctranslate2"),
    ):
        result = call("convert", toy / "run", tmp_path / "new", *wrong)
        assert result.code == 2 and message in result.err and not (tmp_path / "new").exists()


def test_without_ctranslate2_the_error_names_the_extra(toy, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    result = call("convert", toy / "run", tmp_path / "out", "--to", "ctranslate2")
    assert result.code == 2 and "-e '.[ctranslate2]'" in result.err and not list(tmp_path.iterdir())
