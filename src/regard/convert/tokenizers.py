"""Tokenizers of Hugging Face directories: read with their special tokens, and written for transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, processors

from regard.config import Frame, SpecialIds
from regard.convert.family import Json
from regard.convert.vocabularies import JSON, SETTINGS, TARGET, OpenedVocabulary, open_vocabulary, read_settings
from regard.errors import UserError, plural
from regard.files import write_json
from regard.text.codec import Codec
from regard.text.scheme import SPECIALS
from regard.text.tokenizer import ForeignTokenizer, Tokenizer, library_errors, require_ids

FILES = ("*tokenizer*", "*vocab*", "*.spm", "*.model", "merges.txt")
# The special tokens around a text where no file tells them.
FRAMES: dict[str, Frame] = {"bert": "both", "t5": "end", "marian": "end", "llama": "start"}
# Usual names of special tokens; the settings of a tokenizer may give others.
NAMES = {
    "pad_token": ("<pad>", "[PAD]"),
    "unk_token": ("<unk>", "[UNK]", "<|endoftext|>"),
    "bos_token": ("<s>", "<|endoftext|>"),
    "eos_token": ("</s>", "<|endoftext|>"),
    "cls_token": ("[CLS]",),
    "sep_token": ("[SEP]",),
    "mask_token": ("[MASK]", "<mask>"),
}


def has_tokenizer(directory: Path) -> bool:
    """Whether any file of a directory looks like a tokenizer."""
    return any(any(directory.glob(pattern)) for pattern in FILES)


def read_tokenizers(directory: Path, model_type: str, hf_config: Json) -> tuple[Codec, list[str]]:
    """The tokenizers of a directory, with the special tokens that they add around a text, and notes for the user."""
    settings = read_settings(directory, NAMES)
    with library_errors(f"{directory}: the settings of its tokenizer cannot be understood"):
        return _read(directory, model_type, hf_config, settings)


def _read(directory: Path, model_type: str, hf_config: Json, settings: Json) -> tuple[Codec, list[str]]:
    opened = open_vocabulary(directory, model_type, settings)
    special = _SpecialTokens(opened.libraries[0], settings)
    before, after, changed = _around(opened, special, settings, model_type)
    if max(len(before), len(after)) > 1:
        raise UserError(f"{directory}: its tokenizer sets {before} before a text and {after} after it; we set one each")
    frame: Frame = ("both" if after else "start") if before else ("end" if after else "none")
    notes: list[str] = []
    ids = _special_ids(directory, special, hf_config, before, after, notes)
    vocabs = (hf_config.get("vocab_size"), hf_config.get("decoder_vocab_size") or hf_config.get("vocab_size"))
    tokenizers = []
    for library, size, vocab in zip(opened.libraries, opened.sizes, vocabs, strict=False):
        if vocab is not None and size > vocab:
            notes.append(f"the tokenizer has {size} tokens, the model {vocab}: those numbered higher are unknown")
        state = json.loads(library.to_str())
        if changed:
            state["post_processor"] = _post_processor(frame, ids, library)
        text = json.dumps(state, ensure_ascii=False)
        try:
            tokenizers.append(ForeignTokenizer(text, ids, size if vocab is None else min(size, vocab)))
        except UserError as error:
            raise UserError(f"{directory}: {error}") from None
    source, target = tokenizers[0], tokenizers[-1]
    return Codec(source, None if source.to_json() == target.to_json() else target, frame=frame), notes


class _SpecialTokens:
    """Finds the ids of special tokens by their role."""

    def __init__(self, library: Library, settings: Json) -> None:
        self._library, self._settings = library, settings
        added = library.get_added_tokens_decoder()
        self._special = {token.content: index for index, token in added.items() if token.special}

    def find(self, *roles: str) -> int | None:
        """The first of several roles that a token has: the one of the settings, or a special one of a usual name."""
        for role in roles:
            setting = self._settings.get(role)
            usual = [name for name in NAMES[role] if name in self._special]
            for name in [setting] if isinstance(setting, str) else usual:
                if (index := self._library.token_to_id(name)) is not None:
                    return int(index)
        return None

    def checked(self, index: Any) -> int | None:
        """An id from config.json, if it is that of a special token; some are left over and mean a letter."""
        return index if index in self._special.values() else None

    def unknown(self) -> int | None:
        """The id that the library itself gives for an unknown token."""
        model = json.loads(self._library.to_str())["model"]
        name = model.get("unk_token")
        return model.get("unk_id") if name is None else self._library.token_to_id(name)


def _around(
    opened: OpenedVocabulary, special: _SpecialTokens, settings: Json, model_type: str
) -> tuple[list[int], list[int], bool]:
    """The ids before and after a text, and whether the tokenizer must be changed to add them."""
    wanted = [settings.get(key) for key in ("add_bos_token", "add_eos_token")]
    if opened.framed and wanted == [None, None]:
        return *_added_ids(opened.libraries[0]), False
    usual = "none" if opened.framed else FRAMES.get(model_type, "none")
    first = usual in ("both", "start") if wanted[0] is None else wanted[0]
    last = usual in ("both", "end") if wanted[1] is None else wanted[1]
    sos, eos = special.find("cls_token", "bos_token"), special.find("sep_token", "eos_token")
    return [sos] if first and sos is not None else [], [eos] if last and eos is not None else [], True


def _added_ids(library: Library) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer adds before and after a text."""
    library.no_padding()
    library.no_truncation()
    for text in ("a", *library.get_vocab()):  # any text of which a token is left
        encoding = library.encode(text)
        special = encoding.special_tokens_mask
        if 0 in special:
            return encoding.ids[: special.index(0)], encoding.ids[len(special) - special[::-1].index(0) :]
    return [], []


def _special_ids(
    directory: Path, special: _SpecialTokens, hf_config: Json, before: list[int], after: list[int], notes: list[str]
) -> SpecialIds:
    """The ids of the special tokens: those around a text, by name, by config.json, or else that of the end token."""
    ends = hf_config.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    eos = _first_id(*after, special.find("eos_token", "sep_token"), *ends)
    if eos is None:
        raise UserError(
            f"{directory}: neither its tokenizer nor config.json (eos_token_id) tells which token is the end"
        )
    others = ", ".join(str(end) for end in ends if end not in (None, eos))
    if others:
        notes.append(f"a text ends with {eos}; config.json names {others} too, which do not end it")
    start, bos, pad = (special.checked(hf_config.get(f"{key}_token_id")) for key in ("decoder_start", "bos", "pad"))
    sos = _first_id(*before, special.find("bos_token", "cls_token"), start, bos, eos)
    pad = _first_id(special.find("pad_token"), pad)
    unk = _first_id(special.unknown(), special.find("unk_token"))
    if pad is None:
        notes.append(f"no token for padding: the end ({eos}) stands in")
    if unk is None:
        notes.append(f"no token for what is unknown: the end ({eos}) stands in")
    mask = special.find("mask_token")
    return SpecialIds(pad=_first_id(pad, eos), unk=_first_id(unk, eos), sos=sos, eos=eos, mask=mask)


def _first_id(*ids: Any) -> Any:
    """The first that is an id; some files write -1 for none."""
    return next((index for index in ids if type(index) is int and index >= 0), None)


def _post_processor(frame: Frame, ids: SpecialIds, library: Library) -> Json | None:
    """The library's post-processor that adds the special tokens around a text, or around a pair of texts."""
    before, after = ids.around(frame)
    if not before and not after:
        return None
    names = {index: library.id_to_token(index) for index in (ids.sos, ids.eos)}

    def special(index: int, type_id: int = 0) -> Json:
        return {"SpecialToken": {"id": names[index], "type_id": type_id}}

    single = [*map(special, before), {"Sequence": {"id": "A", "type_id": 0}}, *map(special, after)]
    second = [{"Sequence": {"id": "B", "type_id": 1}}, *(special(index, 1) for index in after)]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *second],
        "special_tokens": {name: {"id": name, "ids": [index], "tokens": [name]} for index, name in names.items()},
    }


def write_tokenizers(codec: Codec, directory: Path, model_type: str) -> list[str]:
    """Write the tokenizers for transformers, a target's own into a directory below -> notes for the user."""
    if codec.features:
        raise UserError("features are tokens beside the text, for which a Hugging Face tokenizer has no place")
    notes = _write(codec.source, codec.frame, directory, model_type)
    if not codec.shared:
        (directory / TARGET).mkdir(exist_ok=True)
        notes += _write(codec.target, "end", directory / TARGET, model_type)
        notes += [f"two tokenizers: transformers reads the source's from {directory}, the target's from its {TARGET}/"]
    if "nfd" in (codec.source.scheme, codec.target.scheme):
        notes.append("transformers does not put letters and marks together again when it decodes")
    return notes


def _write(tokenizer: Tokenizer, frame: Frame, directory: Path, model_type: str) -> list[str]:
    ids, ours = tokenizer.ids, not isinstance(tokenizer, ForeignTokenizer)
    library = Library.from_str(tokenizer.to_json())
    if ours:
        library.add_special_tokens([name for name in SPECIALS if library.token_to_id(name) is not None])
        if tokenizer.scheme != "space":  # which is the library's own way
            library.decoder = decoders.Fuse() if tokenizer.scheme in ("char", "nfd", "word") else decoders.ByteLevel()
    state = json.loads(library.to_str())
    if ours or _added_ids(library) != ids.around(frame):
        state["post_processor"] = _post_processor(frame, ids, library)
    first, last = ("cls_token", "sep_token") if frame == "both" else ("bos_token", "eos_token")
    roles = {"pad_token": ids.pad, "unk_token": ids.unk, "mask_token": ids.mask, first: ids.sos, last: ids.eos}
    if ids.sos == ids.pad:  # no token of its own
        roles = {role: index for role, index in roles.items() if index != ids.sos or role == "pad_token"}
    token_types = ["token_type_ids"] if model_type == "bert" else []
    settings: Json = {
        **{role: library.id_to_token(index) for role, index in roles.items() if index is not None},
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", *token_types, "attention_mask"],
    }
    if ours and ids.mask is None:  # a special token typed by a user is text; only a mask token must be typed
        settings["split_special_tokens"] = True
    removed = _remove_tokens(state, tokenizer.size)
    write_json(directory / JSON, state)
    write_json(directory / SETTINGS, settings)
    return [f"{directory / JSON}: left out {plural(removed, 'token')} that the model has no row for"] if removed else []


def _remove_tokens(state: Json, size: int) -> int:
    """Remove tokens with ids from `size` on, which the model does not have -> how many."""
    model, vocab = state["model"], state["model"]["vocab"]
    if isinstance(vocab, list):
        model["vocab"] = vocab[:size]
    else:
        model["vocab"] = {token: index for token, index in vocab.items() if index < size}
    if "merges" in model:
        removed = vocab.keys() - model["vocab"].keys()
        model["merges"] = [pair for pair in model["merges"] if not {*pair, "".join(pair)} & removed]
    added = [token for token in state["added_tokens"] if token["id"] < size]
    count = len(vocab) - len(model["vocab"]) + len(state["added_tokens"]) - len(added)
    state["added_tokens"] = added
    return count


def id_tokenizer(hf_config: Json, size: int, frame: Frame) -> ForeignTokenizer:
    """A tokenizer for texts of ids with white space between them, such as `12 7 103`; the frame is none, or end."""

    def first(*roles: str) -> int:
        """The id of the first of these roles that has one within the vocabulary."""
        values = (hf_config.get(f"{role}_token_id") for role in roles)
        ids = (index for value in values for index in (value if isinstance(value, list) else [value]))
        return next((index for index in ids if type(index) is int and 0 <= index < size), 0)

    require_ids([size - 1])
    pad, eos, sos = first("pad", "eos"), first("eos", "pad"), first("bos", "decoder_start", "eos")
    library = Library(models.WordLevel({str(index): index for index in range(size)}, unk_token=str(pad)))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # at line ends too
    if frame == "end":  # for other programs that read the tokenizer
        library.post_processor = processors.TemplateProcessing(f"$A {eos}", special_tokens=[(str(eos), eos)])
    return ForeignTokenizer(library.to_str(), SpecialIds(pad=pad, unk=pad, sos=sos, eos=eos), size)
