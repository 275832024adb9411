"""A codec encodes examples as ids and decodes them."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from regard.config import parse
from regard.errors import UserError
from regard.text import codec as module
from regard.text.codec import Codec, Example, TextConfig, UnknownTokens, split_features
from regard.text.tokenizer import Tokenizer

CHAR = Tokenizer.train("char", ["Abmachungen"])
SPACE = Tokenizer.train("space", ["a b c"])
FEATURES = ("ACC(PL)", "N")


def make(shared: bool = False) -> Codec:
    return Codec(CHAR, CHAR if shared else SPACE, FEATURES, ("source", "features", "target"), ";")


def test_source_ids_start_with_features_and_end_with_the_end_token() -> None:
    codec = make()
    [row] = codec.encode_source([Example("Ab", features="N; ACC(PL);;")])
    assert row == [CHAR.size + 1, CHAR.size, *CHAR.encode(["Ab"])[0], 3]
    assert codec.source_pieces(row) == ["N", "ACC(PL)", "A", "b", "<eos>"]
    assert max(row) < codec.source_vocab
    assert codec.encode_source([Example("Ab"), Example("Ab", features="")]) == [row[2:]] * 2


@pytest.mark.parametrize(
    ("frame", "before", "after"), [("end", [], [3]), ("both", [2], [3]), ("start", [2], []), ("none", [], [])]
)
def test_frame_surrounds_the_source_and_its_features(frame, before, after, tmp_path) -> None:
    codec = Codec(CHAR, SPACE, FEATURES, frame=frame)
    (a,) = CHAR.encode(["Ab"])
    assert codec.encode_source([Example("Ab")]) == [[*before, *a, *after]]
    assert codec.encode_source([Example("Ab", features="N")]) == [[*before, CHAR.size + 1, *a, *after]]
    assert codec.encode_target(["a"]) == [[*SPACE.encode(["a"])[0], 3]]
    codec.save(tmp_path)
    assert Codec.load(tmp_path, parse(TextConfig, codec.config.model_dump(mode="json"), "config.json")) == codec


def test_codec_with_one_tokenizer_shares_it() -> None:
    codec = Codec(CHAR, frame="none")
    assert codec.shared and codec.target is CHAR
    assert codec.config.source_tokens == codec.config.target_tokens == "char"


def test_padding_rows_of_the_vocabulary_have_a_piece() -> None:
    assert make(shared=True).target_pieces([CHAR.size + 2]) == [f"<{CHAR.size + 2}>"]


def test_configuration_of_earlier_versions_is_read() -> None:
    old = {"source_tokens": "char", "target_tokens": "space", "shared": False, "features": [], "feature_separator": ";"}
    config = parse(TextConfig, old, "config.json")
    assert (config.frame, config.ids, config.sizes) == ("end", None, None)


def test_targets_end_with_the_end_token_and_are_restored() -> None:
    codec = make()
    [row] = codec.encode_target(["c a"])
    assert row[-1] == 3
    assert codec.decode_target(row) == "c a"
    assert codec.target_pieces(row) == ["c", "a", "<eos>"]
    assert codec.target_vocab == SPACE.size


def test_shared_vocabulary_has_one_size_and_features_are_not_decoded() -> None:
    codec = make(shared=True)
    assert codec.shared
    assert codec.source_vocab == codec.target_vocab == CHAR.size + 2
    [row] = codec.encode_target(["Ab"])
    assert codec.decode_target([codec.target_vocab - 1, *row]) == "Ab"
    assert codec.target_pieces([codec.target_vocab - 1]) == ["N"]


def test_unknown_tokens_and_features_are_counted() -> None:
    codec = make()
    examples = [Example("Abx", features="N;V"), Example("xx"), Example("Ab", features="N")]
    rows = codec.encode_source(examples)
    assert [row.count(1) for row in rows] == [2, 2, 0]
    unknown = UnknownTokens()
    codec.note_unknown(examples, unknown)
    assert (unknown.counts, unknown.total, unknown.texts) == ({"x": 3, "V": 1}, 4, 2)
    assert unknown.summary() == "2 unknown tokens, 4 times in 2 lines: 'x' 3x, 'V' 1x"


@pytest.mark.parametrize("shared", [False, True])
def test_loaded_codec_equals_the_saved_codec(shared: bool, tmp_path) -> None:
    codec = make(shared)
    codec.save(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == (["tokenizer.json"] if shared else ["source.tokenizer.json", "target.tokenizer.json"])
    loaded = Codec.load(tmp_path, parse(TextConfig, codec.config.model_dump(mode="json"), "config.json"))
    assert loaded.config == codec.config
    assert loaded.shared == shared
    example = Example("Abc", "a b", "N;X")
    assert loaded.encode_source([example]) == codec.encode_source([example])
    assert loaded.encode_target(["a b"]) == codec.encode_target(["a b"])


def test_missing_tokenizer_file_is_an_error(tmp_path) -> None:
    with pytest.raises(UserError, match=r"target\.tokenizer\.json"):
        make().save(tmp_path)
        (tmp_path / "target.tokenizer.json").unlink()
        Codec.load(tmp_path, make().config)


@given(st.text(), st.sampled_from([";", " ", "|", "++"]))
def test_features_are_never_empty_or_padded(text: str, separator: str) -> None:
    names = split_features(text, separator)
    assert all(name and name == name.strip() and separator not in name for name in names)
    assert split_features(separator.join(names), separator) == names


def test_unknown_tokens_beyond_the_limit_are_counted_in_the_total(monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_DISTINCT", 2)
    tokenizer = Tokenizer.train("char", ["ab"])
    texts = ["axb", "ab", "yxz", "x"]
    report = UnknownTokens()
    assert (bool(report), report.summary()) == (False, "")
    report.add(tokenizer, texts, tokenizer.encode(texts))
    assert (report.total, report.texts) == (5, 3)
    assert report.counts == {"x": 3, "y": 1}  # the total includes z, which exceeds the limit


def test_summary_of_unknown_tokens_is_short_and_shows_code_points() -> None:
    report = UnknownTokens()
    report.count(["\u0430", "\u0430", *"bcdefghij", "w" * 100])
    message = report.summary()
    assert message.startswith("11 unknown tokens, 12 times in 1 line: 'а' (U+0430) 2x, 'b' 1x, ")
    assert message.endswith(" and 3 more")
    assert len(message) < 200
    assert report.summary(1, noun="label").startswith("11 unknown labels, 12 times in 1 line: ")
