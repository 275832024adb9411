"""Imported tokenizers give the ids and texts of their libraries, except that special tokens in a text stay text."""

from __future__ import annotations

import json
import shutil
import unicodedata
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from tokenizers import Tokenizer as Library, decoders, models, processors

from kit.foreign import CORPUS, FRENCH, PARTS, SPECIALS, make_tokenizer
from regard.config import SpecialIds, parse
from regard.convert.tokenizers import read_sentencepiece, read_tokenizers, write_tokenizers
from regard.errors import UserError
from regard.text.codec import Codec, Example, TextConfig
from regard.text.tokenizer import HIDDEN, Tokenizer

sentencepiece = pytest.importorskip("sentencepiece")
transformers = pytest.importorskip("transformers")

# Texts are composed (NFC): otherwise our normalizer and that of SentencePiece may differ.
texts = st.lists(st.sampled_from(PARTS) | st.text(max_size=4), max_size=8).map(
    lambda parts: unicodedata.normalize("NFC", "".join(parts)).replace(HIDDEN, "")
)
texts_with_specials = st.lists(st.sampled_from([*SPECIALS, *PARTS]), max_size=6).map("".join)
many_examples = settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])


CLASSES = {"bert": "BertTokenizer", "gpt2": "GPT2Tokenizer", "marian": "MarianTokenizer"}
FRAMES = {"bert": "both", "gpt2": "none", "marian": "end", "t5": "end", "llama": "start"}
FORMS = {"t5": ("spiece.model", False), "llama": ("tokenizer.model", True)}


class ImportedTokenizer:
    """A directory and the codec read from it."""

    def __init__(self, kind: str, path: Path) -> None:
        self.kind, self.path = kind, path / kind
        self.config = make_tokenizer(kind, self.path)
        self.codec, self.notes = read_tokenizers(self.path, kind, self.config)

    def ids(self, text: str) -> list[int]:
        return self.codec.encode_source([Example(text)])[0]


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ImportedTokenizer]:
    path = tmp_path_factory.mktemp("tokenizers")
    return {kind: ImportedTokenizer(kind, path) for kind in FRAMES}


@pytest.fixture(scope="module")
def theirs(imported: dict[str, ImportedTokenizer]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers recommends installing a package
        return {
            kind: getattr(transformers, name).from_pretrained(imported[kind].path) for kind, name in CLASSES.items()
        }


@given(text=texts, kind=st.sampled_from(sorted(CLASSES)))
@many_examples
def test_ids_and_text_equal_transformers(imported, theirs, text: str, kind: str) -> None:
    assume(not any(name in text for name in SPECIALS))
    ours = imported[kind]
    other = theirs[kind]
    ids = other(text)["input_ids"]
    assert ours.ids(text) == ids
    if not ours.codec.source.unknown(ids):
        assert ours.codec.source.decode(ids) == other.decode(ids, skip_special_tokens=True)
    if kind == "marian":
        assert ours.codec.encode_target([text])[0] == other(text_target=text)["input_ids"]


@given(text=texts, kind=st.sampled_from(sorted(FORMS)))
@many_examples
def test_ids_and_text_equal_sentencepiece(imported, text: str, kind: str) -> None:
    name, before = FORMS[kind]
    ours = imported[kind]
    other = sentencepiece.SentencePieceProcessor(model_file=str(ours.path / name))
    ids = other.encode(text)
    assert ours.ids(text) == ([other.bos_id(), *ids] if before else [*ids, other.eos_id()])
    if other.unk_id() not in ids:
        assert ours.codec.source.decode(ids) == other.decode(ids)


@given(text=st.text("각힣ấệởéザガca ", max_size=6))
@many_examples
def test_decomposed_letters_give_the_ids_of_sentencepiece(imported, text: str) -> None:
    other = sentencepiece.SentencePieceProcessor(model_file=str(imported["t5"].path / "spiece.model"))
    text = unicodedata.normalize("NFD", text)
    assert imported["t5"].ids(text) == [*other.encode(text), other.eos_id()]


def test_ids_of_sentencepiece_models_equal_transformers(imported) -> None:
    pytest.importorskip("google.protobuf")
    theirs = transformers.T5Tokenizer.from_pretrained(imported["t5"].path)
    for text in CORPUS[:5] + FRENCH[:3]:
        assert imported["t5"].ids(text.replace("<pad>", "")) == theirs(text.replace("<pad>", ""))["input_ids"]
    theirs = transformers.LlamaTokenizer.from_pretrained(imported["llama"].path)
    for text in CORPUS[:5] + FRENCH[:3]:
        assert imported["llama"].ids(text) == theirs(text)["input_ids"]


@given(text=texts_with_specials, kind=st.sampled_from(sorted(FRAMES)))
@many_examples
def test_special_tokens_in_a_text_are_encoded_as_text(imported, text: str, kind: str) -> None:
    ours = imported[kind].codec.source
    ids = ours.encode([text])[0]
    assert not set(ids) & (ours.special - {ours.ids.unk})
    assert ours.unknown(ids) == len(ours.unknown_tokens(text))
    assert len(ours.pieces(ids)) == len(ids)


@pytest.mark.parametrize("kind", FRAMES)
def test_frame_and_special_ids_of_each_family(imported, kind: str) -> None:
    ours = imported[kind].codec
    notes = imported[kind].notes
    assert ours.frame == FRAMES[kind]
    names = {role: ours.source._tokens[index] for role, index in ours.ids.model_dump(exclude_none=True).items()}
    end = "<|endoftext|>"
    assert (
        names
        == {
            "bert": {"pad": "[PAD]", "unk": "[UNK]", "sos": "[CLS]", "eos": "[SEP]", "mask": "[MASK]"},
            "gpt2": {"pad": end, "unk": end, "sos": end, "eos": end},
            "t5": {"pad": "<pad>", "unk": "<unk>", "sos": "<pad>", "eos": "</s>"},
            "llama": {"pad": "</s>", "unk": "<unk>", "sos": "<s>", "eos": "</s>"},
            "marian": {"pad": "<pad>", "unk": "<unk>", "sos": "<pad>", "eos": "</s>"},
        }[kind]
    )
    pad_substituted = kind in ("gpt2", "llama")
    assert [note for note in notes if "padding" in note] == notes and bool(notes) == pad_substituted


def test_a_language_code_is_one_token(imported, theirs) -> None:
    text = ">>fra<< the cat"
    assert imported["marian"].ids(text) == theirs["marian"](text)["input_ids"]
    assert imported["marian"].codec.source_pieces(imported["marian"].ids(text))[0] == ">>fra<<"


def test_sentinels_are_the_last_tokens_in_descending_order(imported) -> None:
    tokens = imported["t5"].codec.source
    assert [tokens._tokens[-1], tokens._tokens[-100]] == ["<extra_id_0>", "<extra_id_99>"]


@pytest.mark.parametrize("kind", ["bert", "gpt2", "t5", "llama"])
def test_an_exported_tokenizer_gives_the_same_ids_in_transformers_and_regard(
    imported, kind: str, tmp_path: Path
) -> None:
    ours = imported[kind]
    side = ours.codec.source
    assert write_tokenizers(ours.codec, tmp_path, kind) == []
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in (text.replace("<pad> [MASK]", "") for text in CORPUS[:5] + FRENCH[:3]):
        ids = ours.ids(text)
        assert theirs(text)["input_ids"] == ids
        if not side.unknown(ids):
            assert theirs.decode(ids, skip_special_tokens=True) == side.decode(ids)
    assert (theirs.pad_token_id, theirs.mask_token_id) == (side.ids.pad, side.ids.mask)
    assert ("token_type_ids" in theirs("a")) == (kind == "bert")
    again, _ = read_tokenizers(tmp_path, kind, ours.config)
    assert (again.ids, again.frame) == (ours.codec.ids, ours.codec.frame)
    assert again.source.encode(CORPUS) == side.encode(CORPUS)


def test_marian_sides_are_exported_separately_without_tokens_unknown_to_the_model(imported, tmp_path: Path) -> None:
    tokens = imported["marian"].codec
    notes = write_tokenizers(imported["marian"].codec, tmp_path, "marian")
    assert ["removed" in note for note in notes] == [True, True, False]
    for side, path, corpus in ((tokens.source, tmp_path, CORPUS), (tokens.target, tmp_path / "target", FRENCH)):
        theirs = transformers.AutoTokenizer.from_pretrained(path)
        known = [text for text in set(corpus) if not side.unknown(side.encode([text])[0])]
        assert known
        for text in known:
            ids = [*side.encode([text])[0], side.ids.eos]
            assert theirs(text)["input_ids"] == ids
            assert theirs.decode(ids, skip_special_tokens=True) == side.decode(ids) == text
        assert all(max(theirs(text)["input_ids"]) < side.size for text in CORPUS)
    again, _ = read_tokenizers(tmp_path, "marian", imported["marian"].config)
    assert (again.ids, again.frame, again.source.size) == (tokens.ids, tokens.frame, tokens.source.size)


@pytest.mark.parametrize("scheme", ["char", "space", "word", "byte", "bpe:300", "unigram:300"])
@pytest.mark.parametrize(("frame", "mask"), [("end", False), ("both", True)])
def test_a_trained_tokenizer_gives_the_same_ids_in_transformers(
    scheme: str, frame: Any, mask: bool, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.train(scheme, CORPUS, mask=mask)
    codec = Codec(tokenizer, frame=frame)
    assert write_tokenizers(codec, tmp_path, "bert" if mask else "t5") == []
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in [*CORPUS[:5], "☃ new", *(["< eos >", "a< pad >"] if not mask else [])]:
        ids = codec.encode_source([Example(text)])[0]
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids, skip_special_tokens=True).split() == tokenizer.decode(ids).replace("⁇", "").split()
    assert (theirs.pad_token_id, theirs.unk_token_id, theirs.mask_token_id) == (0, 1, tokenizer.ids.mask)
    again, _ = read_tokenizers(tmp_path, "bert", {"decoder_start_token_id": 2})
    assert (again.ids, again.frame) == (codec.ids, frame)
    assert again.source.encode(CORPUS) == tokenizer.encode(CORPUS)


def test_a_codec_with_features_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="features"):
        write_tokenizers(Codec(Tokenizer.train("char", ["ab"]), features=["N"]), tmp_path, "t5")


@pytest.mark.parametrize("kind", FRAMES)
def test_an_imported_codec_is_saved_and_loaded_unchanged(imported, kind: str, tmp_path: Path) -> None:
    codec = imported[kind].codec
    codec.save(tmp_path)
    loaded = Codec.load(tmp_path, parse(TextConfig, codec.config.model_dump(mode="json"), "config.json"))
    assert loaded == codec
    examples = [Example(text) for text in CORPUS[:5]]
    assert loaded.encode_source(examples) == codec.encode_source(examples)
    assert loaded.encode_target(FRENCH) == codec.encode_target(FRENCH)


def test_padding_and_truncation_of_a_tokenizer_file_do_not_change_its_frame(imported, tmp_path: Path) -> None:
    library = Library.from_str(imported["bert"].codec.source.to_json())
    library.enable_padding(length=16)
    library.enable_truncation(4)
    library.save(str(tmp_path / "tokenizer.json"))
    codec, _ = read_tokenizers(tmp_path, "bert", {})
    assert (codec.frame, codec.ids) == ("both", imported["bert"].codec.ids)
    assert codec.source.encode(CORPUS) == imported["bert"].codec.source.encode(CORPUS)


def test_tokenizer_config_overrides_the_frame_of_tokenizer_json(imported, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(imported["llama"].codec.source.to_json())
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false, "add_eos_token": true}')
    codec, _ = read_tokenizers(tmp_path, "llama", {})
    assert codec.frame == "end"
    exported_ids = Library.from_str(codec.source.to_json()).encode("the cat").ids
    assert exported_ids == [*codec.source.encode(["the cat"])[0], codec.ids.eos]


def test_named_special_tokens_take_precedence_over_ids_of_the_config(imported, tmp_path: Path) -> None:
    shutil.copytree(imported["llama"].path, tmp_path, dirs_exist_ok=True)
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": {"content": "<unk>"}, "eos_token": "<s>"}')
    codec, notes = read_tokenizers(tmp_path, "llama", {"eos_token_id": [2, 1, 7], "pad_token_id": -1})
    assert codec.ids == SpecialIds(pad=0, unk=0, sos=1, eos=1)
    assert [note for note in notes if "2, 7" in note] == notes != []


def test_tokens_beyond_the_vocabulary_size_become_unknown(imported) -> None:
    full = imported["t5"].codec.source
    codec, notes = read_tokenizers(imported["t5"].path, "t5", {"vocab_size": 40})
    assert codec.source.size == 40 and "tokens with higher ids" in notes[0]
    expected = [[index if index < 40 else full.ids.unk for index in row] for row in full.encode(CORPUS)]
    assert codec.source.encode(CORPUS) == expected
    assert len(codec.source.unknown_tokens(CORPUS[0])) == codec.source.unknown(expected[0]) > 0
    with pytest.raises(UserError, match="too few"):
        read_tokenizers(imported["t5"].path, "t5", {"vocab_size": 2})


def test_several_special_tokens_before_a_text_are_refused(imported, tmp_path: Path) -> None:
    library = Library.from_str(imported["bert"].codec.source.to_json())
    library.post_processor = processors.TemplateProcessing("[CLS] [CLS] $A", None, [("[CLS]", 2)])
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"\[2, 2\] before"):
        read_tokenizers(tmp_path, "bert", {})


def test_invalid_files_are_named_in_the_error(imported, tmp_path: Path) -> None:
    (tmp_path / "vocab.pkl").write_bytes(b"")
    with pytest.raises(UserError, match=r"(?s)tokenizer\.json, vocab\.txt.*found: vocab\.pkl"):
        read_tokenizers(tmp_path, "bert", {})
    data = (imported["t5"].path / "spiece.model").read_bytes()
    for broken in (b"", b"\xff" * 20, data[:-1], data[: len(data) // 2], b"{}", b"\x0a"):
        (tmp_path / "spiece.model").write_bytes(broken)
        with pytest.raises(UserError, match=r"spiece\.model: "):
            read_sentencepiece(tmp_path / "spiece.model")
    for name, text in (("tokenizer.json", "{}"), ("tokenizer_config.json", "[]"), ("tokenizer_config.json", "{")):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=name):
            read_tokenizers(tmp_path, "t5", {})
        (tmp_path / name).unlink()
    (tmp_path / "spiece.model").write_bytes(data)
    for setting in ({"extra_ids": "many"}, {"added_tokens_decoder": {"x": {}}}, {"added_tokens_decoder": [1]}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(setting))
        with pytest.raises(UserError, match="are invalid"):
            read_tokenizers(tmp_path, "t5", {})
    wrong = {"add_eos_token": {"": {}}, "add_bos_token": "yes", "eos_token": 1, "pad_token": {"": {}}, "unk_token": []}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in wrong.items():
            (tmp_path / name).write_text(json.dumps({key: value}))
            with pytest.raises(UserError, match=rf"{name}: {key} must be (true or false|the name of a token), not"):
                read_tokenizers(tmp_path, "t5", {})
        (tmp_path / name).unlink()
    (tmp_path / "spiece.model").unlink()
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "</s>": 2}')
    for merges in ("#version: 0.2\na b\n", "a\n", "a c\n"):
        (tmp_path / "merges.txt").write_text(merges)
        with pytest.raises(UserError, match=r"merges\.txt:"):
            read_tokenizers(tmp_path, "gpt2", {})
    (tmp_path / "merges.txt").write_text("")
    (tmp_path / "added_tokens.json").write_text('{"<new>": 7}')
    with pytest.raises(UserError, match="'<new>' cannot have the id 7"):
        read_tokenizers(tmp_path, "gpt2", {})
    (tmp_path / "added_tokens.json").write_text('{"<new>": 3}')
    assert read_tokenizers(tmp_path, "gpt2", {"eos_token_id": 2})[0].source.encode(["a<new>b"]) == [[0, 3, 1]]


def test_a_missing_end_token_is_an_error(tmp_path: Path) -> None:
    library = Library(models.WordLevel({"a": 0}, unk_token="a"))
    library.decoder = decoders.Fuse()
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="defines the end token"):
        read_tokenizers(tmp_path, "gpt2", {})
    assert read_tokenizers(tmp_path, "gpt2", {"eos_token_id": 0})[0].ids == SpecialIds(pad=0, unk=0, sos=0, eos=0)
