"""Damaged, modified or malicious Hugging Face directories."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random

import pytest

from kit import hf
from kit.chat import TEMPLATES, make_chat_model
from kit.foreign import make_tokenizer
from kit.fuzz import attack
from kit.hf import make, quiet
from regard.convert.hf import from_hf

pytest.importorskip("transformers")
SEED = 13
# Model -> family of its tokenizer files, or none.
MODELS = {
    "marian": "marian", "bert-masked": "bert", "bert-classes": "bert", "gpt2": "gpt2", "t5": "t5", "llama-2": "llama",
    "llama-3": "", "reformer": "", "vit": "", "bert-vectors": "",
}  # fmt: skip


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("hf")
    texts = tmp_path_factory.mktemp("texts")
    pad = make_tokenizer("marian", texts / "marian")["decoder_start_token_id"]
    changes = {"vocab_size": pad + 1, "pad_token_id": pad, "decoder_start_token_id": pad}
    for name, kind in MODELS.items():
        with pytest.MonkeyPatch.context() as patch:  # give the model the vocabulary size of its tokenizer
            patch.setitem(hf.MODELS, "marian", lambda t: hf.marian(t, **changes))
            make(name, place / name)
        if kind:
            if not (texts / kind).exists():
                make_tokenizer(kind, texts / kind)
            shutil.copytree(texts / kind, place / name, dirs_exist_ok=True)
    make("gpt2", place / "parts", max_shard_size="8kB")
    make_chat_model(place / "chat", "first", TEMPLATES["trimmed"])
    for base in place.iterdir():
        from_hf(base, texts / "runs" / base.name, 1, quiet)  # load lazy imports before forking the children
    return sorted(place.iterdir())


def check(bases: list[Path], place: Path, cases: range) -> None:
    def convert(path: Path, draw: Random) -> None:
        shutil.rmtree(place / "run", ignore_errors=True)
        from_hf(path, place / "run", 1, quiet)

    faults, counts = attack(bases, place, cases, SEED, convert)
    print(counts)
    assert not faults, f"{len(faults)} faults\n" + "\n".join(faults)
    assert counts["refused"] > len(cases) / 3


def test_mutated_directories_are_converted_or_refused(bases: list[Path], tmp_path: Path) -> None:
    check(bases, tmp_path, range(40))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 2000, 250))
def test_many_mutated_directories_are_converted_or_refused(bases: list[Path], tmp_path: Path, start: int) -> None:
    check(bases, tmp_path, range(start, start + 250))
