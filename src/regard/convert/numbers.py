"""Text for a model that came without a tokenizer: the ids themselves, as numbers with spaces between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors

from regard.config import Frame, Ids
from regard.text.foreign import Foreign

FILES = ("*tokenizer*", "*vocab*", "*.spm", "*.model", "merges.txt")


def has_text(directory: Path) -> bool:
    """Whether anything in a directory looks like a tokenizer."""
    return any(any(directory.glob(pattern)) for pattern in FILES)


def numbers(hf: dict[str, Any], frame: Frame) -> Foreign:
    """A tokenizer for text such as `12 7 103`; the frame is none, or the end after it."""
    size = int(hf["vocab_size"])
    pad = _first(hf, size, "pad_token_id", "eos_token_id")
    eos = _first(hf, size, "eos_token_id", "pad_token_id")
    sos = _first(hf, size, "bos_token_id", "decoder_start_token_id", "eos_token_id")
    library = Tokenizer(models.WordLevel({str(index): index for index in range(size)}, unk_token=str(pad)))
    library.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    if frame == "end":  # for whoever reads the tokenizer without us
        library.post_processor = processors.TemplateProcessing(f"$A {eos}", special_tokens=[(str(eos), eos)])
    return Foreign(library.to_str(), Ids(pad=pad, unk=pad, sos=sos, eos=eos), size)


def _first(hf: dict[str, Any], size: int, *keys: str) -> int:
    """The first of these ids that is told and lies within the vocabulary."""
    for key in keys:
        value = hf.get(key)
        for index in value if isinstance(value, list) else [value]:
            if type(index) is int and 0 <= index < size:
                return index
    return 0
