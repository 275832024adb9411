"""Conversion from and to Hugging Face directories, proven on sample inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from regard.config import Config, Frame
from regard.convert.bert import BERT
from regard.convert.chat_template import with_ids
from regard.convert.family import RESOLVED, Family, Fields, Json, read_labels, write_labels
from regard.convert.gpt2 import GPT2
from regard.convert.llama import LLAMA
from regard.convert.marian import MARIAN
from regard.convert.proof import ConversionReport, Proof, compare_models, prove, require_new, write_reported
from regard.convert.read import (
    CONFIG,
    GENERATION,
    SAFE,
    Checkpoint,
    copy_chat_template,
    open_directory,
    open_weights,
    read_generation,
    reduce_chat_template,
    write_generation,
)
from regard.convert.reformer import REFORMER
from regard.convert.t5 import T5
from regard.convert.table import Table, check_weights, expand, export_weights, import_weights
from regard.convert.tokenizers import has_tokenizer, id_tokenizer, read_tokenizers, write_tokenizers
from regard.convert.transfo_xl import TRANSFO_XL
from regard.convert.vit import IMAGE_PROCESSOR, VIT, image_processor, read_image_processor
from regard.errors import UserError, as_code, as_markdown, install, plural
from regard.files import replace_file, update_manifest, write_json
from regard.model import Model, allocate, on_meta
from regard.run import CHAT_TEMPLATE, Generation, Run
from regard.suggest import closest
from regard.tasks import BOTH
from regard.text.chat import Chat
from regard.text.codec import Codec
from regard.text.tokenizer import Tokenizer
from regard.weight_files import require_layers, weights_of

FAMILIES = {family.model_type: family for family in (MARIAN, BERT, GPT2, T5, LLAMA, TRANSFO_XL, REFORMER, VIT)}
RECORD = "converted.json"


@dataclass(frozen=True)
class OpenedModel:
    """A Hugging Face directory whose weights fit its config.json."""

    family: Family
    architecture: str
    hf: Fields
    config: Config
    codec: Codec
    table: Table
    checkpoint: Checkpoint
    chat: Chat | None

    def load(self) -> Model:
        model = allocate(on_meta(self.config)).eval()
        import_weights(weights_of(model), self.table, self.checkpoint.tensor)
        return model


def open_model(source: Path, note: Callable[[str], None]) -> OpenedModel:
    """Read a directory, except for the values of its weights."""
    hf = Fields(open_directory(source, note), str(source / CONFIG))
    family, architecture = identify(hf)
    checkpoint = open_weights(source, family, hf, note)
    codec, chat = _read_text(source, family, hf, note)
    config = family.read(Fields(hf.data, hf.where, checkpoint.shapes.keys(), codec.ids), architecture, codec.frame)
    require_layers(config, len(checkpoint.shapes), str(source))
    table = family.weights(config, hf)
    ignored = check_weights(weights_of(on_meta(config)), table, checkpoint.shapes, family.ignores, str(source))
    if ignored:
        rest = f" and {len(ignored) - 3} more" if len(ignored) > 3 else ""
        note(f"not needed: {', '.join(ignored[:3])}{rest}")
    return OpenedModel(family, architecture, hf, config, codec, table, checkpoint, chat)


def from_hf(directory: str | Path, out: str | Path, samples: int, log: Callable[[str], None]) -> ConversionReport:
    """Convert a Hugging Face directory to a run."""
    source = Path(directory)
    out = require_new(out)
    notes: list[str] = []

    def note(message: str) -> None:
        notes.append(message)
        log(message)

    theirs = open_model(source, note)
    config = theirs.config
    family = theirs.family
    labels = read_labels(theirs.hf, config)
    pixels = None if config.patches is None else read_image_processor(source, config.patches)
    generation = Generation() if config.decoder is None else read_generation(source, theirs.hf, config, note)
    generation = generation.model_copy(update={"chat": theirs.chat})

    def write(path: Path) -> ConversionReport:
        Run(config, theirs.codec, theirs.load(), path, labels, pixels, generation=generation).save(path)
        if copy_chat_template(source, path, note):
            update_manifest(path, [CHAT_TEMPLATE])
        run = Run.load(path)  # the saved model has been freed: memory may not hold three models
        export = partial(their_tensors, family, theirs.architecture, theirs.table)
        proof = None
        if not family.unproven:
            proof = prove(run, run.model, export, source, theirs.architecture, samples, write_generation(run))
        report = _report(source.resolve().name, family, theirs.architecture, run.model.size, proof, notes, None)
        write_json(path / RECORD, report.to_json())
        _write_model_card(path, out.resolve().name, report)
        return report

    return write_reported(out, write)


def _read_text(source: Path, family: Family, hf: Fields, note: Callable[[str], None]) -> tuple[Codec, Chat | None]:
    """Read the tokenizers and the chat template; a model for images has a tokenizer without tokens."""
    if family.reads_images:
        return Codec(Tokenizer.train("char", [])), None
    if has_tokenizer(source):
        try:
            chat = reduce_chat_template(source) if family.stacks == ("decoder",) else None
            codec, messages = read_tokenizers(source, family.model_type, hf.data, chat)
            chat = chat and with_ids(chat, codec)
        except UserError as error:
            codec, messages = read_tokenizers(source, family.model_type, hf.data)
            note(f"the chat template is kept, but `regard serve` cannot apply it: {error}")
            chat = None
        for message in messages:
            note(message)
        return codec, chat
    note("no tokenizer: texts are token ids, separated by white space")
    frame: Frame = "end" if family.stacks == BOTH else "none"
    return Codec(id_tokenizer(hf.data, hf.count("vocab_size"), frame), frame=frame), None


def their_tensors(family: Family, architecture: str, table: Table, model: Model) -> dict[str, Tensor]:
    """Convert the weights of our model to their tensors."""
    tensors = {**export_weights(weights_of(model), table), **family.extra(model.config)}
    if architecture == "BertModel":  # tensor names of a model without a head have no prefix
        tensors = {name.removeprefix(family.prefix): tensor for name, tensor in tensors.items()}
    return tensors


def to_hf(run: Run, out: str | Path, samples: int, log: Callable[[str], None]) -> ConversionReport:
    """Convert a run to a Hugging Face directory."""
    out = require_new(out)
    family, settings, table = their_config(run.config, str(run.path))
    architecture = settings["architectures"][0]
    name = run.path.resolve().name
    export = partial(their_tensors, family, architecture, table)

    def write(path: Path) -> ConversionReport:
        write_json(path / CONFIG, settings | write_labels(run.labels, run.config) | {"dtype": "float32"})
        data = save({name: x.contiguous().cpu() for name, x in export(run.model).items()}, {"format": "pt"})
        replace_file(path / SAFE, lambda temporary: temporary.write_bytes(data))
        notes: list[str] = []
        if run.config.patches is None:
            notes = [note.replace(str(path), str(out)) for note in write_tokenizers(run.codec, path, family.model_type)]
        else:
            write_json(path / IMAGE_PROCESSOR, image_processor(run.pixels, run.config.patches))
        if run.config.decoder is not None:
            write_json(path / GENERATION, write_generation(run))
        copy_chat_template(run.path, path, notes.append)
        again = compare_models(run.model, open_model(path, lambda _: None).load(), samples)
        again.require(name, "outputs", "the written directory, read again,")
        proof = None
        if not family.unproven:
            proof = prove(run, allocate(on_meta(run.config)).eval(), export, path, architecture, samples)
        return _report(name, family, architecture, run.model.size, proof, notes, again)

    report = write_reported(out, write)
    for message in report.details["notes"]:
        log(message)
    return report


def _report(
    name: str, family: Family, architecture: str, size: int, proof: Proof | None, notes: list[str], again: Proof | None
) -> ConversionReport:
    """The report of a conversion; a failed proof is an error. `again` compares the written directory with the run."""
    if proof is None:
        why = family.unproven or f"transformers with this model is not installed: {install('hf')}"
        summary = f"not proven: {why}"
        if again is not None:
            gap = f"outputs for {again.samples} random inputs differ by at most {again.difference:.2g}"
            summary += f". regard has read the written directory again: {gap}"
    else:
        proof.require(name, "outputs", f"transformers {proof.version}")
        longest = f" and one of {plural(proof.tokens, 'token')}" if proof.tokens else ""
        summary = (
            f"proven: the outputs of this model and of transformers {proof.version} for"
            f" {plural(proof.samples, 'random input')}{longest}, with these weights and with random weights,"
            f" differ by at most {proof.difference:.2g} (allowed: {proof.tolerance:g})"
        )
        if proof.outputs:
            summary += f"; greedy search gives {plural(proof.outputs, 'equal output')}"
    details: Json = {"model_type": family.model_type, "notes": notes}
    if again is not None:
        details["read_again"] = again.difference
    return ConversionReport(name, architecture, size, proof, summary, details)


def _write_model_card(path: Path, name: str, report: ConversionReport) -> None:
    paragraphs = [
        f"# {as_markdown(name)}",
        f"Converted with regard from the Hugging Face directory {as_code(report.source)}: {report.architecture}, "
        f"{report.parameters:,} parameters.",
        f"{report.summary[0].upper()}{report.summary[1:]}.",
        "\n".join(f"- {as_markdown(note)}" for note in report.details["notes"]),
        f"The record is in `{RECORD}`. `regard info` shows the cost of the model.",
    ]
    text = "\n\n".join(filter(None, paragraphs)) + "\n"
    replace_file(path / "README.md", lambda temporary: temporary.write_text(text, encoding="utf-8"))


def identify(hf: Fields) -> tuple[Family, str]:
    """The family and architecture of a config.json; without `architectures`, the first of the family."""
    model_type = hf.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        supported = f"{closest(str(model_type), FAMILIES)}\n  known: {', '.join(sorted(FAMILIES))}"
        raise UserError(f"{hf.where}: model_type {model_type!r:.100} is not known{supported}")
    family = FAMILIES[model_type]
    known = list(family.architectures)
    names = hf.get("architectures", [])
    name = names[0] if isinstance(names, list) and names else known[0]
    if name not in known:
        supported = f"{closest(str(name), known)}\n  supported for {model_type}: {', '.join(known)}"
        raise UserError(f"{hf.where}: architectures {name!r:.100} is not supported{supported}")
    return family, name


def their_config(config: Config, where: str) -> tuple[Family, Json, Table]:
    """The family that can express our config, its config.json and its weight table."""
    failed: list[tuple[bool, int, str, list[str]]] = []
    for family in FAMILIES.values():
        misfits = _wrong_stacks(config, family)
        other_stacks = bool(misfits)
        if not other_stacks:
            hf = Fields(family.write(config), family.model_type)
            table = family.weights(config, hf)
            misfits = _changed_fields(config, family, hf, table)
            if not misfits:
                return family, hf.data, table
        failed.append((other_stacks, len(misfits), family.model_type, misfits))
    _, _, nearest, misfits = min(failed)
    raise UserError(
        f"{where}: this model has no counterpart in transformers. The nearest is {nearest}, which cannot express these"
        " settings:\n  " + "\n  ".join(misfits)
    )


def _wrong_stacks(config: Config, family: Family) -> list[str]:
    """Differences that prevent writing a config.json at all."""
    stacks = config.stacks
    misfits = [f"{name}.mixer={stack.mixer}" for name, stack in stacks.items() if stack.recurrent]
    if tuple(stacks) != family.stacks:
        misfits.append(f"{' and '.join(stacks)} (there: {' and '.join(family.stacks)})")
    if (config.patches is not None) != family.reads_images:
        misfits.append(f"patches={config.patches}")
    return misfits


def _changed_fields(config: Config, family: Family, hf: Fields, table: Table) -> list[str]:
    """The fields that change when the written config.json is read again."""
    names = {name for rule in expand(table, weights_of(on_meta(config))) for name in rule.theirs}
    try:
        again = family.read(Fields(hf.data, hf.where, names, config.ids), hf.data["architectures"][0], config.frame)
    except UserError as error:
        return [str(error)]
    before = effective_fields(config)
    after = effective_fields(again)
    # A field without an effect on one side depends on another field, which is listed instead.
    changed = [key for key in before if key in after and before[key] != after[key]]
    return [f"{key}={before[key]} (there: {after[key]})" for key in changed]


def effective_fields(config: Config) -> Json:
    """All fields that affect the output of a model, by dotted path."""
    fields: Json = config.model_dump(exclude={"ids", "frame", "start", "encoder", "decoder"})
    for name, stack in config.stacks.items():
        values = stack.model_dump() | {key: getattr(stack, meaning) for key, meaning in RESOLVED.items()}
        used = dict.fromkeys(("dropout", "attention_dropout", "ff_dropout"), False)  # only in training
        used |= {"rotary": stack.position == "rotary", "lsh": stack.mixer == "lsh"}
        used["max_length"] = stack.position in ("learned", "axial") or stack.score == "location"
        fields |= {f"{name}.{key}": value for key, value in values.items() if used.get(key, True)}
    if "decoder" in config.stacks:
        fields["start"] = config.start_id
    if not config.predicts_tokens:
        del fields["tie_output"]
    if config.patches is not None:  # the model reads no tokens
        del fields["source_vocab"], fields["target_vocab"], fields["scale_embeddings"]
    return fields
