"""regard-native gives the ids, texts and unknown tokens of regard, with learned and with imported tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, strategies as st

from kit.foreign import CORPUS, PARTS, SPECIALS, make_tokenizer
from kit.models import LITTLE
from kit.native_models import load_with_torch
from regard.convert.tokenizers import read_tokenizers
from regard.model import Model
from regard.presets import preset
from regard.run import Run
from regard.text.codec import Codec, Example
from regard.text.tokenizer import HIDDEN, Tokenizer

pytest.importorskip("regard_native")
pytest.importorskip("sentencepiece")

import regard_native
from regard_native.text import Codec as NativeCodec

KINDS = ("bert", "gpt2", "t5", "llama", "marian")
texts = st.lists(st.sampled_from([*SPECIALS, *PARTS]) | st.text(max_size=4), max_size=6).map("".join)


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Codec, NativeCodec]]:
    """A codec of each family, in regard and in regard-native."""
    codecs = {}
    for kind in KINDS:
        path = tmp_path_factory.mktemp("imported") / kind
        codec, _ = read_tokenizers(path, kind, make_tokenizer(kind, path))
        codecs[kind] = codec, native(codec, path)
    return codecs


def native(codec: Codec, path: Path) -> NativeCodec:
    codec.save(path)
    return NativeCodec(path, codec.config.model_dump(mode="json"))


def same(codec: Codec, other: NativeCodec, text: str, features: str | None = None) -> None:
    pair = Example(text, text, features)
    ids = codec.encode_source([pair])[0]
    assert other.encode_source(text, features) == ids
    assert [other.source_piece(index) for index in ids] == codec.source_pieces(ids)
    own = codec.target.encode([text])[0]
    assert other.target.encode(text) == own
    assert other.decode_target(own) == codec.decode_target(own)
    assert [other.target_piece(index) for index in own] == codec.target_pieces(own)
    unknown = codec.unknown_tokens(pair, ids, own)
    assert other.unknown_tokens(text, features, ids, text, own) == unknown


@given(text=texts, kind=st.sampled_from(KINDS))
@example(text=f"{HIDDEN}[CLS]☃", kind="bert")
def test_imported_tokenizers_equal_those_of_regard(imported, text, kind):
    same(*imported[kind], text)


@pytest.mark.parametrize("kind", KINDS)
def test_every_id_has_the_text_of_regard(imported, kind):
    codec, other = imported[kind]
    for index in range(codec.target.size):
        assert other.target_piece(index) == codec.target_pieces([index])[0]
        assert other.decode_target([index]) == codec.decode_target([index])


@pytest.mark.parametrize("scheme", ["char", "nfd", "space", "word", "byte", "bpe:300", "unigram:300"])
@given(texts=st.lists(st.text(max_size=30), max_size=4))
def test_learned_tokenizers_equal_those_of_regard(scheme, texts, tmp_path_factory):
    directory = tmp_path_factory.getbasetemp() / f"codec-{scheme.replace(':', '-')}"
    source, target = Tokenizer.train(scheme, ["abc cab é", "aé 中 ab"]), Tokenizer.train("char", ["abc"])
    codec = Codec(source, target, ("N", "PL"), ("source", "features", "target"))
    directory.mkdir(exist_ok=True)
    other = native(codec, directory)
    for text in texts:
        same(codec, other, text, "N;x; PL")


@pytest.mark.parametrize(
    ("kind", "name"), [("gpt2", "gpt-tiny"), ("llama", "llama-tiny"), ("marian", "transformer-tiny")]
)
def test_a_run_with_an_imported_tokenizer_answers_as_regard_does(imported, kind, name, tmp_path):
    codec, _ = imported[kind]
    towers = ("decoder",) if name != "transformer-tiny" else ("encoder", "decoder")
    changes: dict[str, Any] = {tower: LITTLE for tower in towers} | {"ids": codec.ids.model_dump()}
    torch.manual_seed(1)
    config = preset(name, codec.target_vocab, changes=changes | {"frame": codec.frame})
    run = Run(config, codec, Model(config).eval(), tmp_path)
    run.save(tmp_path)
    prompts = [CORPUS[0], "Hello World!", "☃ le chat"]
    for settings in ({"beam": 2, "nbest": 2, "max_length": 12}, {"sample": True, "nbest": 2, "max_length": 12}):
        ours = regard_native.load(tmp_path).generate(prompts, **settings)
        for row, reference in zip(ours, load_with_torch(tmp_path).generate(prompts, **settings), strict=True):
            assert [(h.text, h.tokens, h.flags) for h in row] == [(h.text, h.tokens, h.flags) for h in reference]
            assert [h.score for h in row] == pytest.approx([h.score for h in reference], abs=1e-3)
