"""What generation needs beside the model: generation_config.json read and written, and the chat template kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from regard.config import Config
from regard.convert.family import Fields, Json
from regard.convert.read import GENERATION
from regard.convert.vocabularies import SETTINGS
from regard.decode.preparer import CONTINUATION_LENGTH
from regard.files import read_json, replace_file
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
    path = directory / GENERATION
    given = read_json(path) if path.is_file() else {}
    there = Fields(given, str(path)) if isinstance(given, dict) and given else hf
    if there is not hf:
        kept = [_named(key, value) for key, value in given.items() if key not in READ and not _idle(key, value)]
        if kept:
            log(f"not kept, as a run has no such defaults: {', '.join(kept)}")
    words = there.get("bad_words_ids", [])
    rows = [row for row in words if isinstance(row, list)] if isinstance(words, list) else []
    if longer := [row for row in rows if len(row) > 1]:
        log(f"not kept: {len(longer)} of bad_words_ids, which are more than one token long (--forbid PHRASE)")
    single = [row[0] for row in rows if len(row) == 1]
    listed = there.get("suppress_tokens", [])
    ids = {*single, *(listed if isinstance(listed, list) else [])}
    special = set(config.ids.model_dump().values())  # which a run never produces, but for the end
    suppressed = sorted(i for i in ids if type(i) is int and 0 <= i < config.target_vocab and i not in special)
    return Generation(suppressed=tuple(suppressed), max_length=_limit(there, config, log))


def _idle(key: str, value: Any) -> bool:
    return value is None or value in ([], {}) or (key in OPTIONS and value == OPTIONS[key][1])


def _named(key: str, value: Any) -> str:
    return f"{key} {value!r}" + (f" ({OPTIONS[key][0]})" if key in OPTIONS else "")


def _limit(there: Fields, config: Config, log: Callable[[str], None]) -> int | None:
    """Most output tokens: without the end, and without the start token, which max_length counts too."""
    new, total = there.get("max_new_tokens"), there.get("max_length")
    if config.encoder is None:
        if type(new) is int and new > 0:
            return new
        if type(total) is int:
            log(f"not kept: max_length {total}, which counts the prompt too (--max-length limits what is added)")
        return None
    limit = new - 1 if type(new) is int else total - 2 if type(total) is int else None
    return limit if limit is not None and limit > 0 else None


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
    settings = read_json(directory / SETTINGS) if (directory / SETTINGS).is_file() else {}
    template = settings.get("chat_template") if isinstance(settings, dict) else None
    if isinstance(template, list):
        named = {str(x.get("name")): x.get("template") for x in template if isinstance(x, dict)}
        template = named.pop("default", None)
        if named:
            log(f"not kept: the chat templates {', '.join(sorted(named))}; only the default one is")
    return template if isinstance(template, str) else None


def write_chat_template(template: str, directory: Path) -> None:
    """Write a chat template into a run, or a directory of theirs."""
    replace_file(directory / CHAT_TEMPLATE, lambda temporary: temporary.write_bytes(template.encode("utf-8")))
