"""Encoding restores the text, and user input never becomes a special token."""

from __future__ import annotations

import json
import subprocess
import sys
import unicodedata

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import Tokenizer as Library, models, pre_tokenizers

from regard.errors import UserError
from regard.text.tokenizer import SPECIALS, Tokenizer, byte_letters

LOOKALIKES = [
    "< pad >",
    "<pad>",
    " < unk > ",
    "<s>",
    "</s>",
    "[UNK]",
    "< eos >",
    "<|endoftext|>",
    "▁a",
    "Ġa",
    "⁇",
    "\0",
    "\ufeff",
]
CORPUS = ["the cat sat on the mat", "  two  spaces", "naïve café 日本語 🙂", "it's 1999, isn't it?", *LOOKALIKES] * 5
SCHEMES = ["char", "space", "word", "byte", "bpe:300", "unigram:300"]
TRAINED = {scheme: Tokenizer.train(scheme, CORPUS) for scheme in SCHEMES}
texts = st.lists(
    st.sampled_from([*LOOKALIKES, " ", "  ", "\n", "\r", "\u2028", "\x85", "\x0b", "a", "é", "e\u0301"]) | st.text()
).map("".join)


def round_trip(tokenizer: Tokenizer, text: str) -> str:
    return tokenizer.decode(tokenizer.encode([text])[0])


@given(texts)
@settings(deadline=None)
def test_byte_level_schemes_restore_any_text_without_unknown_tokens(text: str) -> None:
    for scheme in ("byte", "bpe:300", "unigram:300"):
        ids = TRAINED[scheme].encode([text])[0]
        assert TRAINED[scheme].decode(ids) == text
        assert TRAINED[scheme].unknown(ids) == 0


@given(texts, st.sampled_from(["char", "word", "space"]))
@settings(deadline=None)
def test_other_schemes_restore_text_without_unknown_tokens(text: str, scheme: str) -> None:
    tokenizer = Tokenizer.train(scheme, [text])
    expected = " ".join(part for part in text.split(" ") if part) if scheme == "space" else text
    assert round_trip(tokenizer, text) == expected
    assert tokenizer.unknown_tokens(text) == []


@given(texts, st.sampled_from(SCHEMES))
@settings(deadline=None)
def test_text_never_becomes_a_special_token(text: str, scheme: str) -> None:
    tokenizer = TRAINED[scheme]
    ids = tokenizer.encode([text])[0]
    assert not {0, 2, 3} & set(ids)
    tokens = tokenizer.unknown_tokens(text)
    assert tokenizer.unknown(ids) == len(tokens)
    assert not set(tokens) & set(SPECIALS)
    assert len(tokenizer.pieces(ids)) == len(ids)


@given(st.lists(texts), st.sampled_from(["char", "space"]))
@settings(deadline=None)
def test_fast_encoding_equals_the_library(batch: list[str], scheme: str) -> None:
    tokenizer = TRAINED[scheme]
    slow = [encoding.ids for encoding in tokenizer._library.encode_batch(batch, add_special_tokens=False)]
    assert tokenizer.encode(batch) == slow


@pytest.mark.parametrize("scheme", SCHEMES)
def test_loaded_tokenizer_equals_the_saved_tokenizer(scheme: str, tmp_path) -> None:
    tokenizer = TRAINED[scheme]
    tokenizer.save(tmp_path / "t.json")
    loaded = Tokenizer.load(tmp_path / "t.json")
    assert (loaded.scheme, loaded.size) == (tokenizer.scheme, tokenizer.size)
    assert loaded.encode(CORPUS) == tokenizer.encode(CORPUS)
    assert loaded.pieces(range(loaded.size)) == tokenizer.pieces(range(tokenizer.size))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_training_is_deterministic(scheme: str) -> None:
    assert Tokenizer.train(scheme, iter(CORPUS)).to_json() == TRAINED[scheme].to_json()


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("size", [260, 261, 280, 5000])
def test_vocabulary_size_includes_all_tokens(kind: str, size: int) -> None:
    tokenizer = Tokenizer.train(f"{kind}:{size}", CORPUS)
    assert tokenizer.size <= size
    assert tokenizer.scheme == f"{kind}:{tokenizer.size}"
    if kind == "bpe" and size < 300:
        assert tokenizer.size == size
    assert round_trip(tokenizer, "any ☃ text") == "any ☃ text"


def test_rare_tokens_are_unknown() -> None:
    tokenizer = Tokenizer.train("char", ["aab", "abc"], min_count=2)
    assert tokenizer.size == 4 + 2
    ids = tokenizer.encode(["cab"])[0]
    assert ids == [1, 4, 5]  # most frequent first
    assert (tokenizer.unknown(ids), tokenizer.unknown_tokens("cab")) == (1, ["c"])
    assert tokenizer.decode(ids) == "⁇ab"
    assert tokenizer.pieces(ids) == ["⁇", "a", "b"]


def test_words_include_the_space_before_them() -> None:
    text = "Don't  stop, ok"
    tokenizer = Tokenizer.train("word", [text, "Don't stop"])
    assert tokenizer.pieces(tokenizer.encode([text])[0]) == ["Don", "'", "t", " ", " stop", ",", " ok"]
    assert round_trip(tokenizer, "Don't go, ok") == "Don't ⁇, ok"


def test_space_scheme_splits_only_at_spaces() -> None:
    tokenizer = Tokenizer.train("space", ["a\u00a0b c\td"])
    assert tokenizer.pieces(tokenizer.encode(["c\td a\u00a0b"])[0]) == ["c\td", "a\u00a0b"]


def test_incomplete_utf8_is_shown_and_decoded() -> None:
    tokenizer = TRAINED["byte"]
    ids = tokenizer.encode(["hä"])[0]
    assert ids == [4 + byte for byte in "hä".encode()]
    assert tokenizer.pieces([2, *ids, 3, 0]) == ["<sos>", "h", r"\xc3", r"\xa4", "<eos>", "<pad>"]
    assert tokenizer.decode(ids[:2]) == "h\N{REPLACEMENT CHARACTER}"
    assert tokenizer.decode([1, *ids]) == "⁇hä"


def test_special_tokens_are_skipped_at_every_position() -> None:
    tokenizer = TRAINED["space"]
    cat, sat = tokenizer.encode(["cat sat"])[0]
    assert tokenizer.decode([2, cat, 0, 3, sat, 3, 0]) == "cat sat"
    assert tokenizer.decode([]) == ""


def test_lone_surrogates_are_encoded_without_error() -> None:
    for tokenizer in TRAINED.values():
        assert len(tokenizer.encode(["a\ud800", "b"])) == 2
        tokenizer.unknown_tokens("a\ud800")


def test_byte_letters_equal_the_alphabet_of_the_library() -> None:
    assert sorted(byte_letters()) == sorted(pre_tokenizers.ByteLevel.alphabet())


def test_foreign_tokenizer_files_are_refused(tmp_path) -> None:
    path = tmp_path / "t.json"
    with pytest.raises(UserError, match="no such tokenizer"):
        Tokenizer.load(path)
    valid = json.loads(TRAINED["char"].to_json())
    word_level = Library(models.WordLevel({"a": 0}, unk_token="a"))
    with_added_token = Library.from_str(TRAINED["char"].to_json())
    with_added_token.add_special_tokens(["<x>"])
    shifted = {
        **valid,
        "model": {**valid["model"], "vocab": {s: (i + 1) % 4 for s, i in list(valid["model"]["vocab"].items())[:4]}},
    }
    foreign_unknown = json.dumps({**valid, "model": {**valid["model"], "unk_token": "[UNK]"}})
    for text in (
        "",
        "{}",
        "\0",
        "[1]",
        json.dumps(shifted),
        foreign_unknown,
        word_level.to_str(),
        with_added_token.to_str(),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=r"t\.json: not a"):
            Tokenizer.load(path)


FORK_SCRIPT = """
import os, sys
from regard.text.tokenizer import threads
from regard.text.tokenizer import Tokenizer
tokenizer = Tokenizer.train("bpe:300", ["hello world"] * 2000)
with threads():
    tokenizer.encode(["hello world"] * 2000)
child = os.fork()
if not child:
    assert len(tokenizer.encode(["hello world"] * 2000)) == 2000
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="needs fork")
def test_fork_after_threads_neither_hangs_nor_warns() -> None:
    process = subprocess.run([sys.executable, "-c", FORK_SCRIPT], capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stderr) == (0, "")


@pytest.mark.parametrize("scheme", [*SCHEMES, "nfd"])
def test_a_mask_is_an_additional_special_token(scheme: str, tmp_path) -> None:
    tokenizer, plain = Tokenizer.train(scheme, CORPUS, mask=True), Tokenizer.train(scheme, CORPUS)
    assert (plain.ids.mask, tokenizer.ids.mask, tokenizer.special) == (None, 4, frozenset(range(5)))
    assert tokenizer.pieces(range(5)) == ["<pad>", "⁇", "<sos>", "<eos>", "<mask>"]
    text = "the cat < mask >"
    ids = tokenizer.encode([text])[0]
    assert 4 not in ids
    if not scheme.startswith(("bpe", "unigram")):  # these learn one token less
        assert [index - 1 if index > 4 else index for index in ids] == plain.encode([text])[0]
    assert tokenizer.decode([2, 4, *ids, 3]) == plain.decode(plain.encode([text])[0])
    tokenizer.save(tmp_path / "t.json")
    assert Tokenizer.load(tmp_path / "t.json").ids == tokenizer.ids
    assert len(tokenizer.spellings()) == tokenizer.size and not any(tokenizer.spellings()[:5])


def test_vocabulary_size_must_leave_room_for_the_mask() -> None:
    assert Tokenizer.train("bpe:261", CORPUS, mask=True).size == 261
    with pytest.raises(UserError, match="use 261 or more"):
        Tokenizer.train("bpe:260", CORPUS, mask=True)


def test_nfd_scheme_decomposes_characters_and_decodes_them_composed() -> None:
    tokenizer = Tokenizer.train("nfd", ["가곡 é", "e"])
    text = unicodedata.normalize("NFC", "곡é가")
    ids = tokenizer.encode([text])[0]
    assert tokenizer.unknown(ids) == 0
    assert len(ids) == len(unicodedata.normalize("NFD", text))
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode([unicodedata.normalize("NFD", text)])[0] == ids
