"""Imported tokenizers keep their segmentation and ids, and user input never becomes a special token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer as Library, decoders, models, normalizers, pre_tokenizers, processors

from regard.config import SpecialIds, parse
from regard.errors import UserError
from regard.text.codec import Codec, Example, TextConfig, UnknownTokens
from regard.text.tokenizer import HIDDEN, ForeignTokenizer, Tokenizer, byte_letters

NAMES = ["</s>", "<pad>", "<unk>", "<mask>"]
IDS = SpecialIds(pad=1, unk=2, sos=0, eos=0, mask=3)


def word_level() -> Library:
    """Splits only at spaces, so a special token in the text is a separate word."""
    library = Library(models.WordLevel({**{name: i for i, name in enumerate(NAMES)}, "a": 4, "b": 5}, "<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return library


def unigram() -> Library:
    """Splits the whole text into the pieces with the highest total score."""
    library = Library(
        models.Unigram([*((name, 0.0) for name in NAMES), ("▁", -1.0), ("▁a", -2.0), ("b", -2.0)], 2, False)
    )
    library.normalizer = normalizers.Replace(" ", "▁")
    library.decoder = decoders.Metaspace()
    return library


def bpe() -> Library:
    """Merges that could form the special token `</s>`."""
    vocab = {**{name: i for i, name in enumerate(NAMES)}, **{letter: 4 + i for i, letter in enumerate("ab</s>")}}
    vocab |= {"</": 20, "s>": 21, "ab": 22}
    library = Library(models.BPE(vocab, [("<", "/"), ("s", ">"), ("</", "s>"), ("a", "b")], unk_token="<unk>"))
    return library


def word_piece() -> Library:
    """Splits words into a first piece and continuation pieces."""
    vocab = {**{name: i for i, name in enumerate(NAMES)}, "ab": 4, "##a": 5, "a": 6, "<": 7}
    library = Library(models.WordPiece(vocab, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.decoder = decoders.WordPiece()
    return library


KINDS = {"word-level": word_level, "unigram": unigram, "bpe": bpe, "word-piece": word_piece}


def make_foreign(kind: str, marked: bool = True, **options: int) -> ForeignTokenizer:
    library = KINDS[kind]()
    if marked:
        library.add_special_tokens(NAMES)
        library.post_processor = processors.TemplateProcessing("$A </s>", None, [("</s>", 0)])
    library.add_tokens([AddedToken("zz", normalized=False)])
    return ForeignTokenizer(library.to_str(), IDS, **options)


FOREIGN = {(kind, marked): make_foreign(kind, marked) for kind in KINDS for marked in (True, False)}
user_inputs = st.lists(st.sampled_from([*NAMES, " ", "a", "b", "zz", HIDDEN, "<", "\ud800"]), max_size=8).map("".join)


@given(user_inputs, st.sampled_from(list(FOREIGN)))
@settings(deadline=None)
def test_user_input_never_becomes_a_special_token(text: str, key: tuple[str, bool]) -> None:
    tokenizer = FOREIGN[key]
    ids = tokenizer.encode([text])[0]
    assert not {0, 1, 3} & set(ids)
    assert ids.count(2) == tokenizer.unknown(ids) == len(tokenizer.unknown_tokens(text))
    assert len(tokenizer.pieces(ids)) == len(ids)
    tokenizer.decode(ids)


@given(st.lists(st.sampled_from(["a", "b", " ", "ab", "zz"]), max_size=8).map("".join), st.sampled_from(list(KINDS)))
@settings(deadline=None)
def test_ordinary_text_has_the_ids_of_the_library(text: str, kind: str) -> None:
    tokenizer = FOREIGN[kind, True]
    library = Library.from_str(tokenizer.to_json())
    ids = library.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode([text])[0] == ids
    if 2 not in ids:
        assert tokenizer.decode([1, *ids, 0]) == library.decode(ids, skip_special_tokens=True)


def test_bpe_merges_do_not_form_a_special_token() -> None:
    tokenizer = FOREIGN["bpe", True]
    assert tokenizer.pieces(tokenizer.encode(["</s>ab"])[0]) == ["</", "s>", "ab"]


def test_added_tokens_keep_their_ids() -> None:
    tokenizer = FOREIGN["word-level", True]
    assert (tokenizer.scheme, tokenizer.size) == ("foreign", 7)
    assert tokenizer.encode(["a zz b"]) == [[4, 6, 5]]


def test_unknown_tokens_are_decoded_visibly_and_counted() -> None:
    tokenizer = FOREIGN["word-level", True]
    ids = tokenizer.encode(["a <mask> b"])[0]
    assert ids == [4, 2, 5]
    assert tokenizer.decode([*ids, 0]) == "a ⁇ b"
    assert tokenizer.pieces([*ids, 0, 3]) == ["a", "⁇", "b", "</s>", "<mask>"]
    unknown = UnknownTokens()
    unknown.add(tokenizer, ["a <mask> b"], [ids])
    assert unknown.counts == {"<mask>": 1}


def test_end_token_that_is_also_the_unknown_token_is_the_end_token() -> None:
    tokenizer = ForeignTokenizer(word_level().to_str(), SpecialIds(pad=0, unk=0, sos=0, eos=0))
    assert tokenizer.unknown([0, 4]) == 0
    assert tokenizer.decode([4, 0]) == "a"


def test_tokens_outside_the_model_vocabulary_are_unknown_or_dropped() -> None:
    assert make_foreign("word-level", size=5).encode(["a b zz"]) == [[4, 2, 2]]
    truncated = ForeignTokenizer(word_level().to_str(), SpecialIds(pad=0, unk=0, sos=0, eos=0), 5)
    assert truncated.encode(["a b"]) == [[4]]
    with pytest.raises(UserError, match="it has 2 tokens"):
        make_foreign("word-level", size=2)


def test_hidden_tokens_are_matched_last() -> None:
    vocabulary = [("<unk>", 0.0), ("▁", -1.0), ("a", -1.0), (HIDDEN + "xy", 0.0), (HIDDEN + "aa", 0.0)]
    library = Library(models.Unigram(vocabulary, 0, False))
    library.decoder = decoders.Metaspace()
    tokenizer = ForeignTokenizer(library.to_str(), SpecialIds(pad=0, unk=0, sos=1, eos=1))
    tokenizer.ids = SpecialIds(pad=1, unk=0, sos=1, eos=1)
    assert tokenizer.encode(["axya", "aaxyz"]) == [[2, 3, 2], [2, 2, 0]]
    assert tokenizer.pieces([3, 4]) == ["xy", "aa"]
    assert tokenizer.decode([2, 3]) == "axy"


def test_spellings_are_the_bytes_of_tokens_in_text() -> None:
    assert FOREIGN["unigram", True].spellings() == [b"", b"", b"", b"", b" ", b" a", b"b", b"zz"]
    assert FOREIGN["word-piece", True].spellings()[4:7] == [b" ab", b"a", b" a"]
    letters = Library(models.BPE({**{letter: i for i, letter in enumerate(byte_letters())}, "Ġa": 256}, []))
    letters.decoder = decoders.ByteLevel()
    bytewise = ForeignTokenizer(letters.to_str(), SpecialIds(pad=0, unk=0, sos=0, eos=0))
    assert bytewise.spellings()[1:] == [*(bytes([byte]) for byte in range(1, 256)), b" a"]
    assert bytewise.pieces([256, 0xE4]) == [" a", r"\xe4"]
    fallback = Library(models.BPE({"▁a": 0, "<0xE4>": 1, "x": 2}, []))
    fallback.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    assert ForeignTokenizer(fallback.to_str(), SpecialIds(pad=2, unk=2, sos=2, eos=2)).spellings() == [
        b" a",
        b"\xe4",
        b"",
    ]


@pytest.mark.parametrize("shared", [True, False])
def test_loaded_codec_equals_the_saved_codec(shared: bool, tmp_path: Path) -> None:
    codec = Codec(
        make_foreign("word-level"), None if shared else make_foreign("unigram", size=6), frame="start", features=["N"]
    )
    codec.save(tmp_path)
    config = codec.config.model_dump(mode="json")
    assert config["ids"]["mask"] == 3 and config["sizes"] == ([7, 7] if shared else [7, 6])
    loaded = Codec.load(tmp_path, parse(TextConfig, config, "config.json"))
    assert loaded == codec and loaded.shared == shared
    examples = [Example("a zz </s>", features="N")]
    assert loaded.encode_source(examples) == codec.encode_source(examples) == [[0, 7, 4, 6, 2]]
    assert loaded.encode_target(["a b"]) == codec.encode_target(["a b"])


def test_invalid_tokenizer_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with pytest.raises(UserError, match="no such tokenizer"):
        ForeignTokenizer.read(path, IDS)
    state = json.loads(word_level().to_str())
    for text in (
        "",
        "{}",
        "[1]",
        "\0",
        json.dumps({**state, "pre_tokenizer": {"type": "Script"}}),
        json.dumps(state)[:-9],
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=r"t\.json: not a readable tokenizer"):
            ForeignTokenizer.read(path, IDS)
    path.write_text(json.dumps(state))
    with pytest.raises(UserError, match=r"t\.json: it has 6 tokens, too few"):
        ForeignTokenizer.read(path, SpecialIds(pad=6))
    with pytest.raises(UserError, match=r"t\.json: not a tokenizer of ours"):
        Tokenizer.load(path)


def test_both_sides_must_have_the_same_special_ids() -> None:
    with pytest.raises(UserError, match="differently"):
        Codec(make_foreign("word-level"), Tokenizer.train("char", ["ab"]))
    with pytest.raises(UserError, match="differently"):
        Codec(Tokenizer.train("char", ["ab"]), Tokenizer.train("char", ["ab"], mask=True))


@pytest.mark.parametrize("kind", ["word-level", "bpe", "word-piece"])
def test_unknown_token_missing_from_the_vocabulary_is_an_error(kind: str) -> None:
    state = json.loads(KINDS[kind]().to_str())
    state["model"]["unk_token"] = "[UNK]"
    tokenizer = ForeignTokenizer(json.dumps(state), IDS)
    assert tokenizer.encode(["a"])[0]  # text without unknown parts is encoded
    with pytest.raises(UserError, match=r"the tokenizer cannot split this text: .*vocab"):
        tokenizer.encode(["é"])
    with pytest.raises(UserError, match=r"the tokenizer cannot split this text: .*vocab"):
        tokenizer.unknown_tokens("é")
