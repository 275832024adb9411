"""Hugging Face directories: reading one as a run, and writing a run as one, each proven on samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save

from regard.config import Config, Frame, Ids
from regard.convert.families import FAMILIES, find_architecture, find_family, our_config, their_config
from regard.convert.family import Family, Fields
from regard.convert.labels import PREPROCESSOR, label_names, pixels_of, their_labels, their_pixels
from regard.convert.numbers import has_text, numbers
from regard.convert.proof import Proof, prove
from regard.convert.read import CONFIG, SAFE, open_directory, open_weights
from regard.convert.table import check, fill, unfill
from regard.convert.tokens import read_tokenizers, write_tokenizers
from regard.errors import UserError
from regard.files import replace_directory, replace_file, write_json
from regard.model import Model, on_meta, unfilled
from regard.run import Run, weights_of
from regard.text.codec import Codec
from regard.text.tokenizer import Tokenizer

Talk = Callable[[str], None]
RECORD = "converted.json"
READING, WRITING = 1e-4, 1e-5  # the largest difference of outputs, relative to the largest output if that is above 1


@dataclass
class Report:
    """What was converted into what, and how it was proven."""

    source: str
    model_type: str
    architecture: str
    parameters: int
    proof: Proof | None
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def told(self) -> str:
        """The proof in a sentence."""
        if self.proof is None:
            gone = FAMILIES[self.model_type].gone
            return f"not proven: {gone or 'there is no transformers here that has this model (the extra hf has it)'}"
        proof = self.proof
        return (
            f"proven: {proof.samples} random inputs through this model and through transformers {proof.version} differ"
            f" by at most {proof.difference:.2g} (allowed: {proof.tolerance:g})"
        )


def from_hf(directory: str | Path, out: str | Path, samples: int, talk: Talk) -> Report:
    """Read a Hugging Face directory and write it as a run."""
    source, out = Path(directory), _new(out)
    notes: list[str] = []

    def note(message: str) -> None:
        notes.append(message)
        talk(message)

    hf = Fields(open_directory(source, note), str(source / CONFIG))
    family = find_family(hf)
    architecture = find_architecture(hf, family)
    weights = open_weights(source, family, hf, note)
    config, codec = _text(source, family, hf, weights.names(), note)
    table = family.table(config, hf)
    passed = check(weights_of(on_meta(config)), table, weights, family.ignores, str(source))
    if passed:
        note(f"not needed: {_some(passed)}")
    labels, pixels = label_names(hf, config), pixels_of(source, config)
    report = Report(source.resolve().name, family.model_type, architecture, 0, None, notes)

    def write(path: Path) -> None:
        model = unfilled(config).eval()
        fill(weights_of(model), table, weights)
        report.parameters = _size(model)
        Run(config, codec, model, path, labels, pixels).save(path)
        del model  # there is not always room for three of them
        if not family.gone:
            report.proof = prove(Run.load(path).model, source, architecture, samples, READING)
        _require(report)
        write_json(path / RECORD, report.to_json())
        _write_card(path, out.resolve().name, report)

    replace_directory(out, write)
    return report


def _text(source: Path, family: Family, hf: Fields, names: set[str], note: Talk) -> tuple[Config, Codec]:
    """The settings, which need to know the ids of what is not text, and the text."""
    if family.images:  # there is no text: a codec that knows no symbol
        return our_config(family, hf, names, Ids(), "end"), Codec(Tokenizer.train("char", []))
    if has_text(source):
        tokens = read_tokenizers(source, family.model_type, hf.data)
        for message in tokens.notes:
            note(message)
        config = our_config(family, hf, names, tokens.ids, tokens.frame)
        return config, Codec(tokens.source, tokens.target, frame=tokens.frame)
    note("there is no tokenizer: a text is the ids themselves, with spaces between")
    hf.count("vocab_size")
    frame: Frame = "end" if family.towers == ("encoder", "decoder") else "none"
    tokenizer = numbers(hf.data, frame)
    return our_config(family, hf, names, tokenizer.ids, frame), Codec(tokenizer, frame=frame)


def to_hf(run: Run, out: str | Path, samples: int, talk: Talk) -> Report:
    """Write a run as a Hugging Face directory."""
    out = _new(out)
    family, settings, table = their_config(run.config, str(run.path))
    architecture = settings["architectures"][0]
    tensors = {**unfill(weights_of(run.model), table), **family.extra(run.config)}
    if architecture == "BertModel":  # a model without a head has no prefix
        tensors = {name.removeprefix(family.prefix): tensor for name, tensor in tensors.items()}
    report = Report(run.path.resolve().name, family.model_type, architecture, _size(run.model), None)

    def write(path: Path) -> None:
        write_json(path / CONFIG, settings | their_labels(run.labels, run.config) | {"dtype": "float32"})
        data = save({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, {"format": "pt"})
        replace_file(path / SAFE, lambda temporary: temporary.write_bytes(data))
        if run.config.patches is None:
            notes = write_tokenizers(run.codec, path, family.model_type)
            report.notes += [message.replace(str(path), str(out)) for message in notes]  # where it will be
        else:
            write_json(path / PREPROCESSOR, their_pixels(run.pixels, run.config.patches))
        if not family.gone:
            report.proof = prove(run.model, path, architecture, samples, WRITING)
        _require(report)

    replace_directory(out, write)
    for message in report.notes:
        talk(message)
    return report


def _new(out: str | Path) -> Path:
    path = Path(out)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UserError(f"{path}: exists already; name a new directory")
    return path


def _size(model: Model) -> int:
    return sum(parameter.numel() for parameter in weights_of(model).values())


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest


def _require(report: Report) -> None:
    if report.proof is not None and not report.proof.holds:
        raise UserError(
            f"{report.source}: the converted model is not the same: its outputs differ from those of transformers"
            f" {report.proof.version} by {report.proof.difference:.3g}, where {report.proof.tolerance:g} is allowed."
            " Nothing was written"
        )


def _write_card(path: Path, name: str, report: Report) -> None:
    lines = [
        f"# {name}",
        "",
        f"Converted with regard from the Hugging Face directory `{report.source}`: {report.architecture}, "
        f"{report.parameters:,} parameters.",
        "",
        f"{report.told()[0].upper()}{report.told()[1:]}.",
        "",
        *([*(f"- {note}" for note in report.notes), ""] if report.notes else []),
        "The record is in `converted.json`. `regard info` tells what the model costs.",
    ]
    text = "\n".join(lines) + "\n"
    replace_file(path / "README.md", lambda temporary: temporary.write_text(text, encoding="utf-8"))
