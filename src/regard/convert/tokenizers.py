"""Tokenizers of Hugging Face directories: read with the marks they use, and written so that other tools read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, processors

from regard.config import Config, Frame, PatchConfig, SpecialIds, parse
from regard.convert.table import Fields
from regard.convert.vocabularies import JSON, SETTINGS, TARGET, Json, OpenedVocabulary, open_vocabulary, read_settings
from regard.data.images import Pixels
from regard.errors import UserError
from regard.files import read_json, write_json
from regard.text.codec import Codec
from regard.text.foreign import ForeignTokenizer
from regard.text.learn import SPECIALS
from regard.text.tokenizer import Tokenizer

# The marks around a text where no file tells them.
FRAMES: dict[str, Frame] = {"bert": "both", "t5": "end", "marian": "end", "llama": "start"}
# How special tokens are usually called; a directory may say otherwise.
NAMES = {
    "pad_token": ("<pad>", "[PAD]"),
    "unk_token": ("<unk>", "[UNK]", "<|endoftext|>"),
    "bos_token": ("<s>", "<|endoftext|>"),
    "eos_token": ("</s>", "<|endoftext|>"),
    "cls_token": ("[CLS]",),
    "sep_token": ("[SEP]",),
    "mask_token": ("[MASK]", "<mask>"),
}
SEGMENTS = ("bert",)  # models that are told the segments of a text


class Tokens(NamedTuple):
    """The tokenizers of a directory, the same object twice if it has one for both sides."""

    source: ForeignTokenizer
    target: ForeignTokenizer
    frame: Frame
    notes: list[str]

    @property
    def ids(self) -> SpecialIds:
        return self.source.ids


def read_tokenizers(directory: Path, model_type: str, hf_config: Json) -> Tokens:
    """Read the tokenizers of a Hugging Face directory, with the ids of their special tokens and the marks they set."""
    settings = read_settings(directory)
    try:
        opened = open_vocabulary(directory, model_type, settings)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{directory}: the settings of its tokenizer cannot be understood: {error!r}") from None
    names = _Names(opened.libraries[0], settings)
    before, after, changed = _marks(opened, names, settings, model_type)
    if max(len(before), len(after)) > 1:
        raise UserError(f"{directory}: its tokenizer sets {before} before a text and {after} after it; we set one each")
    frame: Frame = ("both" if after else "start") if before else ("end" if after else "none")
    notes: list[str] = []
    ids = _ids(directory, names, hf_config, [*before, None][0], [*after, None][0], notes)
    rows = (hf_config.get("vocab_size"), hf_config.get("decoder_vocab_size") or hf_config.get("vocab_size"))
    made = []
    for library, size, row in zip(opened.libraries, opened.sizes, rows, strict=False):
        if row is not None and size > row:
            notes.append(f"the tokenizer has {size} tokens, the model {row}: those numbered higher are unknown")
        state = json.loads(library.to_str())
        if changed:
            state["post_processor"] = _template(frame, ids, library)
        try:
            made.append(
                ForeignTokenizer(json.dumps(state, ensure_ascii=False), ids, size if row is None else min(size, row))
            )
        except UserError as error:
            raise UserError(f"{directory}: {error}") from None
    same = made[0].to_json() == made[-1].to_json()
    return Tokens(made[0], made[0] if same else made[-1], frame, notes)


class _Names:
    """Looks up special tokens by what they are for."""

    def __init__(self, library: Library, settings: Json) -> None:
        self._library, self._settings = library, settings
        added = library.get_added_tokens_decoder()
        self._special = {token.content: index for index, token in added.items() if token.special}

    def find(self, *roles: str) -> int | None:
        """The id of the first of several roles that a token has: the one told, or a special one of a usual name."""
        for role in roles:
            told = self._settings.get(role)
            for name in [told] if isinstance(told, str) else [name for name in NAMES[role] if name in self._special]:
                if (index := self._library.token_to_id(name)) is not None:
                    return int(index)
        return None

    def special(self, index: Any) -> int | None:
        """A number from a model's settings, if a special token has it; some are left over, and a letter's."""
        return index if index in self._special.values() else None

    def unknown(self) -> int | None:
        """The token that the library itself gives for what is unknown."""
        model = json.loads(self._library.to_str())["model"]
        name = model.get("unk_token")
        found: int | None = model.get("unk_id") if name is None else self._library.token_to_id(name)
        return found


def _marks(
    opened: OpenedVocabulary, names: _Names, settings: Json, model_type: str
) -> tuple[list[int], list[int], bool]:
    """The ids set before and after a text, and whether the tokenizer has yet to be told so."""
    asked = [settings.get(key) for key in ("add_bos_token", "add_eos_token")]
    if opened.framed and asked == [None, None]:
        return *_set_marks(opened.libraries[0]), False
    usual = "none" if opened.framed else FRAMES.get(model_type, "none")
    first = usual in ("both", "start") if asked[0] is None else asked[0]
    last = usual in ("both", "end") if asked[1] is None else asked[1]
    sos, eos = names.find("cls_token", "bos_token"), names.find("sep_token", "eos_token")
    return [sos] if first and sos is not None else [], [eos] if last and eos is not None else [], True


def _set_marks(library: Library) -> tuple[list[int], list[int]]:
    """The ids that a tokenizer sets before and after a text by itself."""
    library.no_padding()
    library.no_truncation()
    for text in ("a", *library.get_vocab()):  # any text will do that is not lost on the way
        found = library.encode(text)
        special = found.special_tokens_mask
        if 0 in special:
            return found.ids[: special.index(0)], found.ids[len(special) - special[::-1].index(0) :]
    return [], []


def _ids(
    directory: Path, names: _Names, hf_config: Json, before: int | None, after: int | None, notes: list[str]
) -> SpecialIds:
    """The ids of the special tokens: by the marks, by their names, by the model's settings, or by standing in."""
    ends = hf_config.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    eos = _first(after, names.find("eos_token", "sep_token"), *ends)
    if eos is None:
        raise UserError(
            f"{directory}: neither its tokenizer nor config.json (eos_token_id) tells which token is the end"
        )
    others = [end for end in ends if end not in (None, eos)]
    if others:
        notes.append(
            f"a text ends with {eos}; config.json names {', '.join(map(str, others))} too, which do not end it"
        )
    numbers = {key: names.special(hf_config.get(f"{key}_token_id")) for key in ("decoder_start", "bos", "pad")}
    sos = _first(before, names.find("bos_token", "cls_token"), numbers["decoder_start"], numbers["bos"], eos)
    pad = _first(names.find("pad_token"), numbers["pad"])
    unk = _first(names.unknown(), names.find("unk_token"))
    if pad is None:
        notes.append(f"no token for padding: the end ({eos}) stands in")
    if unk is None:
        notes.append(f"no token for what is unknown: the end ({eos}) stands in")
    return SpecialIds(pad=_first(pad, eos), unk=_first(unk, eos), sos=sos, eos=eos, mask=names.find("mask_token"))


def _first(*ids: Any) -> Any:
    """The first that is an id; some files write -1 for none."""
    return next((index for index in ids if type(index) is int and index >= 0), None)


def _template(frame: Frame, ids: SpecialIds, library: Library) -> Json | None:
    """What the library needs to know to set the marks of a frame."""
    sos, eos = ({"id": library.id_to_token(index), "type_id": 0} for index in (ids.sos, ids.eos))
    first = [{"SpecialToken": sos}] if frame in ("both", "start") else []
    last = [{"SpecialToken": eos}] if frame in ("both", "end") else []
    if not first and not last:
        return None
    single = [*first, {"Sequence": {"id": "A", "type_id": 0}}, *last]
    second = [{"Sequence": {"id": "B", "type_id": 1}}, *({"SpecialToken": {**eos, "type_id": 1}} for _ in last)]
    numbers = {mark["id"]: index for mark, index in ((sos, ids.sos), (eos, ids.eos))}
    special = {name: {"id": name, "ids": [index], "tokens": [name]} for name, index in numbers.items()}
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, *second], "special_tokens": special}


def write_tokenizers(codec: Codec, directory: Path, model_type: str) -> list[str]:
    """Write tokenizer.json and its settings for transformers; the target's, if it is another, into a directory below.

    What comes back is to be told to the user.
    """
    if codec.features:
        raise UserError("features are tokens beside the text, for which a Hugging Face tokenizer has no place")
    notes = _write(codec.source, codec.frame, directory, model_type)
    if not codec.shared:
        (directory / TARGET).mkdir(exist_ok=True)
        notes += _write(codec.target, "end", directory / TARGET, model_type)
        notes.append(
            f"two tokenizers: transformers reads the source's from {directory}, the target's from its {TARGET}/"
        )
    if "nfd" in (codec.source.scheme, codec.target.scheme):
        notes.append("transformers does not put letters and marks together again when it decodes")
    return notes


def _write(tokenizer: Tokenizer, frame: Frame, directory: Path, model_type: str) -> list[str]:
    ids, ours = tokenizer.ids, not isinstance(tokenizer, ForeignTokenizer)
    library = Library.from_str(tokenizer.to_json())
    if ours:
        library.add_special_tokens([name for name in SPECIALS if library.token_to_id(name) is not None])
        joined = {"char": decoders.Fuse, "nfd": decoders.Fuse, "word": decoders.Fuse}
        if tokenizer.scheme != "space":  # which is what the library does by itself
            library.decoder = joined.get(tokenizer.scheme, decoders.ByteLevel)()
    state = json.loads(library.to_str())
    marks = [ids.sos] if frame in ("both", "start") else [], [ids.eos] if frame in ("both", "end") else []
    if ours or _set_marks(library) != marks:
        state["post_processor"] = _template(frame, ids, library)
    roles = {"pad_token": ids.pad, "unk_token": ids.unk, "mask_token": ids.mask}
    roles |= (
        {"cls_token": ids.sos, "sep_token": ids.eos}
        if frame == "both"
        else {"bos_token": ids.sos, "eos_token": ids.eos}
    )
    if ids.sos == ids.pad:  # no token of its own
        roles = {role: index for role, index in roles.items() if index != ids.sos or role == "pad_token"}
    settings: Json = {role: library.id_to_token(index) for role, index in roles.items() if index is not None}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["clean_up_tokenization_spaces"] = False
    kinds = ["token_type_ids"] if model_type in SEGMENTS else []
    settings["model_input_names"] = ["input_ids", *kinds, "attention_mask"]
    if ours and ids.mask is None:  # what a user types is text; to be filled in, a mask must be typed
        settings["split_special_tokens"] = True
    left_out = _keep(state, tokenizer.size)
    write_json(directory / JSON, state)
    write_json(directory / SETTINGS, settings)
    return [f"{directory / JSON}: left out {left_out} tokens that the model has no row for"] if left_out else []


def _keep(state: Json, size: int) -> int:
    """Remove tokens from `size` on, which would be no ids for the model, and say how many those were."""
    model, vocab = state["model"], state["model"]["vocab"]
    if isinstance(vocab, list):
        model["vocab"] = vocab[:size]
    else:
        model["vocab"] = {symbol: index for symbol, index in vocab.items() if index < size}
    if "merges" in model:
        gone = vocab.keys() - model["vocab"].keys()
        model["merges"] = [pair for pair in model["merges"] if not {*pair, "".join(pair)} & gone]
    added = [token for token in state["added_tokens"] if token["id"] < size]
    count = len(vocab) - len(model["vocab"]) + len(state["added_tokens"]) - len(added)
    state["added_tokens"] = added
    return count


PREPROCESSOR = "preprocessor_config.json"


def label_names(hf: Fields, config: Config) -> tuple[str, ...]:
    """The names of the classes by number; empty where there are no classes."""
    if config.classes is None:
        return ()
    names = hf.get("id2label", {})
    if not isinstance(names, dict):
        raise UserError(f"{hf.where}: id2label must be a table of names, not {names!r}")
    numbered = [str(names.get(str(number), f"LABEL_{number}")) for number in range(config.classes)]
    if len(set(numbered)) < len(numbered):
        raise UserError(f"{hf.where}: id2label gives two classes the same name")
    return tuple(numbered)


def their_labels(labels: tuple[str, ...], config: Config) -> Json:
    """The names as a config.json has them."""
    if config.classes is None:
        return {}
    names = labels or tuple(f"LABEL_{number}" for number in range(config.classes))
    return {
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }


def pixels_of(directory: Path, config: Config) -> Pixels | None:
    """What is taken from every pixel and what it is divided by, where pixels are numbers from 0 to 255."""
    if config.patches is None:
        return None
    path, channels = directory / PREPROCESSOR, config.patches.channels
    data = read_json(path) if path.is_file() else {}
    hf = Fields(data if isinstance(data, dict) else {}, str(path))
    factor = hf.get("rescale_factor", 1 / 255) if hf.flag("do_rescale", True) else 1.0
    mean, scale = [0.0] * channels, [1.0] * channels
    if hf.flag("do_normalize", True):
        mean, scale = (hf.get(key, [0.5] * channels) for key in ("image_mean", "image_std"))
    if not all(isinstance(part, list) and len(part) == channels for part in (mean, scale)):
        raise UserError(f"{path}: image_mean and image_std must have a number for each of {channels} channels")
    if not all(isinstance(x, int | float) for x in (factor, *mean, *scale)) or not all((factor, *scale)):
        raise UserError(f"{path}: rescale_factor, image_mean and image_std must be numbers, and only the mean zero")
    return parse(Pixels, {"mean": [x / factor for x in mean], "scale": [x / factor for x in scale]}, str(path))


def their_pixels(pixels: Pixels | None, patches: PatchConfig) -> Json:
    """The same as a preprocessor_config.json has it."""
    mean = pixels.mean if pixels else (0.0,) * patches.channels
    scale = pixels.scale if pixels else (1.0,) * patches.channels
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": patches.height, "width": patches.width},
        "do_rescale": False,
        "do_normalize": True,
        "image_mean": list(mean),
        "image_std": list(scale),
    }


FILES = ("*tokenizer*", "*vocab*", "*.spm", "*.model", "merges.txt")


def has_text(directory: Path) -> bool:
    """Whether anything in a directory looks like a tokenizer."""
    return any(any(directory.glob(pattern)) for pattern in FILES)


def numbers(hf: dict[str, Any], frame: Frame) -> ForeignTokenizer:
    """A tokenizer for text such as `12 7 103`; the frame is none, or the end after it."""
    size = int(hf["vocab_size"])
    pad = _first_id(hf, size, "pad_token_id", "eos_token_id")
    eos = _first_id(hf, size, "eos_token_id", "pad_token_id")
    sos = _first_id(hf, size, "bos_token_id", "decoder_start_token_id", "eos_token_id")
    library = Library(models.WordLevel({str(index): index for index in range(size)}, unk_token=str(pad)))
    library.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    if frame == "end":  # for whoever reads the tokenizer without us
        library.post_processor = processors.TemplateProcessing(f"$A {eos}", special_tokens=[(str(eos), eos)])
    return ForeignTokenizer(library.to_str(), SpecialIds(pad=pad, unk=pad, sos=sos, eos=eos), size)


def _first_id(hf: dict[str, Any], size: int, *keys: str) -> int:
    """The first of these ids that is told and lies within the vocabulary."""
    for key in keys:
        value = hf.get(key)
        for index in value if isinstance(value, list) else [value]:
            if type(index) is int and 0 <= index < size:
                return index
    return 0
