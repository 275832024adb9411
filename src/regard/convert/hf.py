"""Hugging Face directories: reading one as a run, and writing a run as one, each proven on samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save

from regard.config import Config, Frame, SpecialIds, Stack, parse
from regard.convert.bert import BERT
from regard.convert.gpt2 import GPT2
from regard.convert.llama import LLAMA
from regard.convert.marian import MARIAN
from regard.convert.proof import Proof, prove
from regard.convert.read import CONFIG, SAFE, open_directory, open_weights
from regard.convert.reformer import REFORMER
from regard.convert.t5 import T5
from regard.convert.table import Family, Fields, Json, Table, check, fill, rules, unfill
from regard.convert.tokenizers import (
    PREPROCESSOR,
    has_text,
    label_names,
    numbers,
    pixels_of,
    read_tokenizers,
    their_labels,
    their_pixels,
    write_tokenizers,
)
from regard.convert.transfo_xl import TRANSFO_XL
from regard.convert.vit import VIT
from regard.errors import UserError, closest
from regard.files import replace_directory, replace_file, write_json
from regard.model import Model, on_meta, uninitialised
from regard.run import Run, weights_of
from regard.text.codec import Codec
from regard.text.tokenizer import Tokenizer

Talk = Callable[[str], None]
RECORD = "converted.json"
READING, WRITING = 1e-4, 1e-5  # the largest difference of outputs, relative to the largest output if that is above 1


@dataclass
class ConversionReport:
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


def from_hf(directory: str | Path, out: str | Path, samples: int, talk: Talk) -> ConversionReport:
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
    report = ConversionReport(source.resolve().name, family.model_type, architecture, 0, None, notes)

    def write(path: Path) -> None:
        model = uninitialised(config).eval()
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
    if family.images:  # there is no text: a codec that knows no token
        return our_config(family, hf, names, SpecialIds(), "end"), Codec(Tokenizer.train("char", []))
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


def to_hf(run: Run, out: str | Path, samples: int, talk: Talk) -> ConversionReport:
    """Write a run as a Hugging Face directory."""
    out = _new(out)
    family, settings, table = their_config(run.config, str(run.path))
    architecture = settings["architectures"][0]
    tensors = {**unfill(weights_of(run.model), table), **family.extra(run.config)}
    if architecture == "BertModel":  # a model without a head has no prefix
        tensors = {name.removeprefix(family.prefix): tensor for name, tensor in tensors.items()}
    report = ConversionReport(run.path.resolve().name, family.model_type, architecture, _size(run.model), None)

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


def _require(report: ConversionReport) -> None:
    if report.proof is not None and not report.proof.holds:
        raise UserError(
            f"{report.source}: the converted model is not the same: its outputs differ from those of transformers"
            f" {report.proof.version} by {report.proof.difference:.3g}, where {report.proof.tolerance:g} is allowed."
            " Nothing was written"
        )


def _write_card(path: Path, name: str, report: ConversionReport) -> None:
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


FAMILIES = {family.model_type: family for family in (MARIAN, BERT, GPT2, T5, LLAMA, TRANSFO_XL, REFORMER, VIT)}
TRAINING = ("dropout", "attention_dropout", "ff_dropout")  # what a finished model does not need


def find_family(hf: Fields) -> Family:
    """The family that a config.json speaks of."""
    kind = hf.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        near = closest(str(kind), FAMILIES)
        raise UserError(f"{hf.where}: model_type {kind!r} is not known{near}\n  known: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[kind]


def find_architecture(hf: Fields, family: Family) -> str:
    """Which of a family's models it is; where nothing is said, the first."""
    named = hf.get("architectures", [])
    if not isinstance(named, list) or not named:
        return family.architectures[0]
    if named[0] not in family.architectures:
        known = ", ".join(family.architectures)
        raise UserError(
            f"{hf.where}: architectures {named[0]!r} is not supported{closest(str(named[0]), family.architectures)}"
            f"\n  supported for {family.model_type}: {known}"
        )
    return str(named[0])


def our_config(family: Family, hf: Fields, names: set[str], ids: SpecialIds, frame: str) -> Config:
    """Their settings as ours."""
    tables = family.ours(hf, names, find_architecture(hf, family), ids)
    ids = tables.pop("ids", ids)
    return parse(Config, {**tables, "ids": ids.model_dump(), "frame": frame}, hf.where)


def their_config(config: Config, where: str) -> tuple[Family, Json, Table]:
    """The family whose settings say all that ours do, those settings, and the table of weights."""
    failed: list[tuple[bool, int, str, list[str]]] = []
    for family in FAMILIES.values():
        lost = _wrong_shape(config, family)
        if lost:
            failed.append((True, len(lost), family.model_type, lost))
            continue
        hf = {"model_type": family.model_type, **family.theirs(config)}
        fields = Fields(hf, family.model_type)
        table = family.table(config, fields)
        lost = _lost(config, family, fields, table)
        if not lost:
            return family, hf, table
        failed.append((False, len(lost), family.model_type, lost))
    _, _, nearest, lost = min(failed)
    raise UserError(
        f"{where}: this model has no counterpart in transformers. Nearest is {nearest}, where these settings have no"
        " place:\n  " + "\n  ".join(lost)
    )


def _wrong_shape(config: Config, family: Family) -> list[str]:
    """Differences so great that no settings can be written."""
    towers = {name: stack for name in ("encoder", "decoder") if (stack := getattr(config, name)) is not None}
    found = [f"{name}.mixer={stack.mixer}" for name, stack in towers.items() if stack.recurrent]
    if tuple(towers) != family.towers:
        found.append(f"{' and '.join(towers)} (there: {' and '.join(family.towers)})")
    if (config.patches is not None) != family.images:
        found.append(f"patches={config.patches}")
    return found


def _lost(config: Config, family: Family, hf: Fields, table: Table) -> list[str]:
    """What is different when the settings that would be written are read again."""
    parameters = weights_of(on_meta(config))
    names = {name for rule in rules(table, parameters) for name in rule.theirs}
    try:
        again = our_config(family, hf, names, config.ids, config.frame)
    except UserError as error:
        return [str(error)]
    before, after = _settings(config), _settings(again)
    # A setting that is idle on one side depends on another, which is then named.
    return [
        f"{key}={before[key]} (there: {after[key]})" for key in before if key in after and before[key] != after[key]
    ]


def _settings(config: Config) -> Json:
    """All settings that shape what a model computes, one by one."""
    found: Json = {}
    for key, value in config.model_dump(exclude={"ids", "frame"}).items():
        stack: Any = getattr(config, key)
        if isinstance(stack, Stack):
            shape = {"kv_heads": stack.kv, "head_width": stack.head, "value_width": stack.value}
            found |= {f"{key}.{name}": x for name, x in (value | shape).items() if name not in _idle(stack)}
        else:
            found[key] = value
    found["start"] = config.start_id
    if config.decoder is None:
        del found["start"]
    if config.output in ("classes", "none"):
        del found["tie_output"]
    if config.patches is not None:  # no token is read
        del found["source_vocab"], found["target_vocab"], found["scale_embeddings"]
    return found


def _idle(stack: Stack) -> set[str]:
    """Settings that do nothing, given the others."""
    idle = set(TRAINING)
    if stack.position not in ("learned", "axial") and stack.score != "location":
        idle.add("max_length")
    if stack.position != "rotary":
        idle.add("rotary")
    if stack.mixer != "lsh":
        idle.add("lsh")
    return idle
