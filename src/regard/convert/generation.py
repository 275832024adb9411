"""What generation needs beside the model: generation_config.json read and written, and the chat template kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from regard.config import Config, parse
from regard.convert.family import Fields, Json
from regard.convert.read import GENERATION
from regard.convert.vocabularies import SETTINGS
from regard.decode.preparer import CONTINUATION_LENGTH
from regard.errors import UserError
from regard.files import replace_file
from regard.run import CHAT_TEMPLATE, Generation, Run
from regard.text.tokenizer import read_text

USUAL_LENGTH = 512  # tokens of a decoder, start and end counted, where a run does not limit its outputs
# Settings of theirs for which there is an option of `generate` or `train`, and values that change nothing.
OPTIONS: dict[str, tuple[str, Any]] = {
    "num_beams": ("--beam", 1),
    "do_sample": ("--sample", False),
    "temperature": ("--temperature", 1.0),
    "top_k": ("--top-k", 50),
    "top_p": ("--top-p", 1.0),
    "min_p": ("--min-p", None),
    "length_penalty": ("--length-penalty", 1.0),
    "repetition_penalty": ("--repetition-penalty", 1.0),
    "no_repeat_ngram_size": ("--no-repeat-ngram", 0),
    "min_length": ("--min-length", 0),
    "min_new_tokens": ("--min-length", None),
}
# Read here or with the special tokens, or without an effect on a greedy output.
READ = {
    *("eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id", "forced_eos_token_id"),
    *("suppress_tokens", "bad_words_ids", "max_length", "max_new_tokens"),
    *("transformers_version", "_from_model_config", "early_stopping", "use_cache", "cache_implementation"),
    *("renormalize_logits", "output_attentions", "output_hidden_states", "output_scores", "return_dict_in_generate"),
}


def read_generation(directory: Path, hf: Fields, config: Config, log: Callable[[str], None]) -> Generation:
    """The ids never produced and the usual limit of outputs; older directories have them in config.json."""
    there = Fields.load(directory / GENERATION)
    if there.data:
        kept = [_named(key, value) for key, value in there.data.items() if key not in READ and not _idle(key, value)]
        if kept:
            log(f"not kept, as a run has no such defaults: {', '.join(kept)}")
    else:
        there = hf
    if longer := [row for row in _bad_words(there) if len(row) > 1]:
        log(f"not kept: {len(longer)} of bad_words_ids, which are more than one token long (--forbid PHRASE)")
    special = set(config.ids.model_dump().values())  # which a run never produces, but for the end
    suppressed = sorted(suppressed_ids(there, config) - special)
    return parse(Generation, {"suppressed": suppressed, "max_length": _limit(there, config, log)}, there.where)


def suppressed_ids(there: Fields, config: Config) -> set[int]:
    """The ids of the vocabulary that settings of theirs never produce."""
    single = (row[0] for row in _bad_words(there) if len(row) == 1)
    return {index for index in (*single, *there.token_ids("suppress_tokens")) if index < config.target_vocab}


def _bad_words(there: Fields) -> list[list[int]]:
    words = there.get("bad_words_ids", [])
    if not isinstance(words, list) or not all(isinstance(row, list) for row in words):
        raise UserError(f"{there.where}: bad_words_ids must be a list of lists of ids, not {words!r:.100}")
    rows = [(row, Fields({"bad_words_ids": row}, there.where).token_ids("bad_words_ids")) for row in words]
    return [ids for row, ids in rows if len(ids) == len(row)]


def _idle(key: str, value: Any) -> bool:
    return value is None or value in ([], {}) or (key in OPTIONS and value == OPTIONS[key][1])


def _named(key: str, value: Any) -> str:
    return f"{key} {value!r}" + (f" ({OPTIONS[key][0]})" if key in OPTIONS else "")


def _limit(there: Fields, config: Config, log: Callable[[str], None]) -> int | None:
    """Most output tokens: without the end, and without the start token, which max_length counts too."""
    new, total = (None if there.get(key) is None else there.count(key) for key in ("max_new_tokens", "max_length"))
    if config.encoder is None:
        if total is not None and new is None:
            log(f"not kept: max_length {total}, which counts the prompt too (--max-length limits what is added)")
        return new
    limit = new - 1 if new is not None else total - 2 if total is not None else 0
    return limit if limit > 0 else None


def write_generation(run: Run) -> Json:
    """The generation_config.json of a run with a decoder: what it never produces, where it ends, and how long it is."""
    config, limit = run.config, run.generation.max_length
    settings: Json = {
        "eos_token_id": config.ids.eos,
        "pad_token_id": config.ids.pad,
        "do_sample": False,
    }
    if suppressed := run.never_produced():
        settings["suppress_tokens"] = suppressed
    positions = min(config.top.max_length, config.top.max_positions or config.top.max_length)
    if config.encoder is None:
        limit = limit or CONTINUATION_LENGTH
        # A prompt and as many tokens must fit the positions: else they are the limit of both together.
        length = {"max_length": positions} if 2 * limit > positions else {"max_new_tokens": limit}
        return settings | {"bos_token_id": config.start_id} | length
    return settings | {
        "decoder_start_token_id": config.start_id,
        "forced_eos_token_id": config.ids.eos,  # at the limit, as here
        "max_length": min(USUAL_LENGTH if limit is None else limit + 2, positions),
    }


def read_chat_template(directory: Path, log: Callable[[str], None]) -> str | None:
    """The chat template of a directory; of several, the default one."""
    if (directory / CHAT_TEMPLATE).is_file():
        return read_text(directory / CHAT_TEMPLATE)
    template = Fields.load(directory / SETTINGS).get("chat_template")
    if isinstance(template, list):
        named = {str(x.get("name")): x.get("template") for x in template if isinstance(x, dict)}
        template = named.pop("default", None)
        if named:
            log(f"not kept: the chat templates {', '.join(sorted(named))}; only the default one is")
    return template if isinstance(template, str) else None


def write_chat_template(template: str, directory: Path) -> None:
    """Write a chat template into a run, or a directory of theirs."""
    replace_file(directory / CHAT_TEMPLATE, lambda temporary: temporary.write_bytes(template.encode("utf-8")))
