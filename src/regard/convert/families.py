"""The families that can be read and written, and which of them a model of ours is."""

from __future__ import annotations

from typing import Any

from regard.config import Config, Ids, Stack, parse
from regard.convert.bert import BERT
from regard.convert.family import Family, Fields, Json
from regard.convert.gpt2 import GPT2
from regard.convert.llama import LLAMA
from regard.convert.marian import MARIAN
from regard.convert.reformer import REFORMER
from regard.convert.t5 import T5
from regard.convert.table import Table, rules
from regard.convert.transfo_xl import TRANSFO_XL
from regard.convert.vit import VIT
from regard.errors import UserError, closest
from regard.model import on_meta
from regard.run import weights_of

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


def our_config(family: Family, hf: Fields, names: set[str], ids: Ids, frame: str) -> Config:
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
    if config.patches is not None:  # no symbol is read
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
