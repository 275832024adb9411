"""Errors that a user can act on: what is wrong, where, what is allowed, what was probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    from pydantic import BaseModel

# What other toolkits call the settings, options, verbs and values of this one. A word of several lines means the first
# of them that is allowed where it was written. With the name of a stack, as decoder_layers, its rest is looked up too.
SYNONYMS = {
    # the model
    "preset": "arch architecture model model_type model_name",
    "mixer": "rnn_type cell cell_type rnn",
    "layers": "num_layers n_layer n_layers nlayers depth num_hidden_layers",
    "width": "hidden_size hidden_dim hidden_units hidden d_model dim model_dim embed_dim emb_dim embedding_dim "
    "embedding_size n_embd rnn_size word_vec_size",
    "heads": "num_heads n_head n_heads nhead attention_heads num_attention_heads",
    "kv_heads": "num_kv_heads n_kv_heads num_key_value_heads",
    "head_width": "head_dim head_size d_head d_kv",
    "ff": "ffn ffn_dim d_ff ff_size ff_dim ffn_embed_dim intermediate_size dim_feedforward feed_forward mlp_dim "
    "n_inner transformer_ff hidden_ff",
    "activation": "act activation_fn activation_function hidden_act",
    "score": "score_function attention_type attn_type global_attention rescore likelihood perplexity",
    "norm_at": "pre_norm prenorm norm_first normalize_before",
    "norm_eps": "layer_norm_eps layer_norm_epsilon rms_norm_eps",
    "position": "positions pos positional_encoding position_encoding pos_encoding positional_embedding",
    "window": "sliding_window attention_window",
    "dropout": "drop dropout_rate dropout_prob dropout_p hidden_dropout hidden_dropout_prob p_dropout",
    "attention_dropout": "attn_dropout attn_pdrop attention_probs_dropout_prob",
    "input_feeding": "input_feed",
    "tie_output": "tie_weights tie_embeddings tie_word_embeddings weight_tying share_decoder_input_output_embed",
    "share_embeddings": "share_all_embeddings shared_embeddings",
    "classes": "num_classes n_classes num_labels",
    # text and data
    "data": "train train_file train_data training_data traindata dataset corpus input",
    "source": "src train_src source_file text prompt input sentence",
    "target": "tgt trg train_tgt target_file reference references",
    "valid": "dev val validation eval_data valid_data validation_data validation_file dev_data",
    "columns": "cols fields",
    "vocab": "vocab_size vocabulary vocabulary_size num_tokens",
    "source_tokens": "tokenizer tokenization tokenize tokens subword bpe source_tokenizer vocab vocab_size",
    "target_tokens": "target_tokenizer",
    "source_vocab": "vocab vocab_size",
    "shared": "share_vocab shared_vocab joint_vocab joined_dictionary",
    "min_count": "min_freq min_frequency",
    "out": "output output_dir out_dir save save_dir save_model save_to model_dir run_dir dest",
    # training
    "lr": "learning_rate lrate peak_lr max_lr base_lr init_lr",
    "schedule": "scheduler lr_scheduler lr_scheduler_type lr_schedule learning_rate_schedule decay_method",
    "warmup": "warmup_steps num_warmup_steps warmup_updates lr_warmup lr_warmup_steps warmup_ratio",
    "minutes": "time max_time time_limit max_minutes duration",
    "steps": "max_steps num_steps train_steps max_train_steps num_train_steps total_steps max_update max_updates "
    "num_updates max_iters iterations",
    "epochs": "num_epochs n_epochs max_epoch max_epochs num_train_epochs",
    "batch_examples": "batch batch_size bsz train_batch_size per_device_train_batch_size max_sentences",
    "batch_tokens": "batch batch_size eval_batch_size bsz max_tokens tokens_per_batch",
    "accumulate": "accum_count grad_accum gradient_accumulation gradient_accumulation_steps accumulate_grad_batches "
    "update_freq",
    "optimizer": "optim optimiser",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "eps": "epsilon adam_eps adam_epsilon",
    "weight_decay": "wd l2",
    "clip": "grad_clip gradient_clip max_grad_norm clip_norm clip_grad_norm gradient_clip_val",
    "label_smoothing": "smoothing label_smoothing_factor",
    "scheduled_sampling": "teacher_forcing teacher_forcing_ratio",
    "average": "average_checkpoints checkpoint_averaging swa avg merge",
    "ema": "ema_decay moving_average",
    "metric": "metrics monitor metric_for_best_model best_checkpoint_metric early_stopping_metric",
    "patience": "early_stop early_stopping early_stopping_patience",
    "validate_every": "eval_steps eval_every eval_interval valid_every valid_steps validate_interval "
    "val_check_interval save_steps save_every",
    "log_every": "logging_steps log_interval log_steps report_every",
    "seed": "random_seed manual_seed random_state",
    "precision": "dtype torch_dtype fp16 bf16 amp mixed_precision compute_type",
    "device": "gpu cuda accelerator",
    "workers": "num_workers num_processes num_gpus processes jobs n_jobs nproc world_size",
    "threads": "num_threads n_threads",
    "recompute": "gradient_checkpointing activation_checkpointing",
    "context": "block_size seq_len seq_length sequence_length context_length bptt max_seq_length",
    "mask_rate": "mlm_probability mask_prob",
    "span_rate": "noise_density",
    "span_mean": "mean_noise_span_length",
    "from": "start_from pretrained init_from from_pretrained finetune_from restore_file checkpoint model_name_or_path",
    "start_from": "from pretrained init_from from_pretrained finetune_from restore_file checkpoint model_name_or_path",
    "resume": "continue restore resume_from_checkpoint load_checkpoint",
    "parts": "freeze unfreeze trainable",
    "lora": "lora_r lora_rank",
    "lora_on": "target_modules lora_modules lora_target_modules",
    # decoding
    "beam": "beam_size beam_width beams num_beams n_beams",
    "nbest": "n_best num_return_sequences num_hypotheses num_samples",
    "sample": "do_sample sampling random_sampling",
    "temperature": "temp sampling_temperature",
    "top_k": "sampling_topk random_sampling_topk",
    "top_p": "nucleus sampling_topp random_sampling_topp",
    "length_penalty": "lenpen len_penalty length_normalization alpha",
    "max_length": "max_len max_new_tokens max_tokens max_target_length max_output_length max_decoding_length "
    "max_seq_length max_position_embeddings n_positions",
    "min_length": "min_len min_new_tokens",
    "max_source": "max_source_length max_source_positions max_input_length",
    "no_repeat_ngram": "no_repeat_ngram_size block_ngram_repeat",
    "repetition_penalty": "repeat_penalty",
    "groups": "num_beam_groups diverse_beam_groups",
    "diversity": "diversity_penalty diverse_beam_strength",
    "exact": "early_stopping",
    "prefix": "target_prefix",
    "require": "force_words constraints include",
    "forbid": "bad_words exclude suppress",
    "stop": "stop_strings stop_string stop_sequences stop_words until",
    "top_tokens": "logprobs top_logprobs candidates",
    "alignment": "align attention report_align output_attentions",
    "ensemble": "models",
    "engine": "backend",
    "against": "baseline compare",
    "quantization": "quantize precision int8 compute_type",
    # metrics, schemes of tokens, devices
    "perplexity": "ppl",
    "pseudo_perplexity": "ppl perplexity",
    "loss": "ppl perplexity",
    "accuracy": "acc exact_match",
    "bits_per_char": "bpc",
    "bpe": "wordpiece",
    "unigram": "sentencepiece",
    "space": "whitespace",
    "cuda": "gpu",
    # tasks
    "pairs": "translate translation seq2seq sequence_to_sequence transduction",
    "lm": "language_model language_modeling causal_lm clm text text_generation",
    "masked": "mlm masked_lm masked_language_model",
    "span": "span_corruption denoising",
    "classify": "classification classifier text_classification",
    "image": "images vision image_classification",
    # verbs
    "version": "v",
    "train": "fit finetune fine_tune learn tune train_file train_data training_data dataset corpus data input",
    "generate": "predict translate decode infer inference run sample transcribe complete",
    "evaluate": "eval test validate benchmark",
    "inspect": "visualize visualise plot show view attention explain",
    "convert": "export import load_hf",
    "info": "list presets models recipes summary params describe cost",
}


class UserError(Exception):
    """A mistake of the user; the command line prints its message and exits with 2."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: of Python or numpy, of torch on a CPU, or of an accelerator."""
    kinds = {kind.__name__ for kind in type(error).__mro__}  # by name: torch is not imported here
    if kinds & {"MemoryError", "OutOfMemoryError"}:
        return True
    return "RuntimeError" in kinds and any(phrase in str(error) for phrase in _OUT_OF_MEMORY)


_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc")


def _bare(word: str) -> str:
    """A name without case and without what joins its parts: --beam-size, beam_size and beamSize are one."""
    return re.sub("[-_.]", "", word.lower())


_MEANINGS: dict[str, list[str]] = {}
for _name, _words in SYNONYMS.items():
    for _word in _words.split():
        _MEANINGS.setdefault(_bare(_word), []).append(_bare(_name))


def synonym(word: str, allowed: Iterable[str]) -> str | None:
    """The allowed word that means the same, or is the same in another spelling."""
    names = {_bare(name): name for name in allowed}
    return next((names[meaning] for meaning in _meanings(word) if meaning in names), None)


def _meanings(word: str) -> list[str]:
    """What a word may mean, as bare names: dec_layers is decoder.layers or, where a stack has no name, layers."""
    found = [_bare(word), *_MEANINGS.get(_bare(word), ())]
    parts = re.split("[-_.]", word.lower())
    for stack in ("encoder", "decoder"):
        if len(rest := [part for part in parts if part not in (stack, stack[:3])]) < len(parts):
            inner = ["".join(rest), *_MEANINGS.get("".join(rest), ())]
            return [*(stack + name for name in inner), *found, *inner]
    return found


def nearest(word: str, allowed: Iterable[str]) -> str | None:
    """The allowed word that is probably meant: a synonym, or one of similar letters."""
    names = list(allowed)
    same = synonym(word, names)
    return same if same is not None else next(iter(difflib.get_close_matches(word, names, n=1, cutoff=0.6)), None)


def closest(word: str, allowed: Iterable[str]) -> str:
    """`; did you mean 'x'?` with the allowed word that is probably meant, or an empty string."""
    near = nearest(word, allowed)
    return f"; did you mean {near!r}?" if near is not None else ""


def one_of(what: str, word: str, allowed: Iterable[str]) -> UserError:
    """The error for a word that is not allowed."""
    names = sorted(allowed)
    return UserError(f"{what}: {word!r} is not known{closest(word, names)}\n  allowed: {', '.join(names)}")


def missing_extra(what: str, package: str, extra: str) -> UserError:
    """The error for a package that only an extra installs."""
    return UserError(f"{what} needs {package}, which is not installed; in your clone of regard:\n  {install(extra)}")


def install(extra: str) -> str:
    """The command that installs an extra, as it is run in a clone."""
    return f"pip install -c constraints.txt -e '.[{extra}]'"


def shown_value(value: object) -> str:
    """A value with its type, shortened."""
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def require_type(value: object, kind: type, what: str) -> None:
    """Require an argument of this type; `what` says which and how to get one."""
    if not isinstance(value, kind):
        raise UserError(f"{what}, not {shown_value(value)}")


def plural(count: float, noun: str, form: str = ",") -> str:
    """A count with its noun: 1 batch, 2,000 batches. `form` is the format of the number."""
    number = format(count, form)
    if number == "1":
        return f"1 {noun}"
    if noun.endswith("is"):
        return f"{number} {noun[:-2]}es"
    if noun.endswith("ry"):
        return f"{number} {noun[:-1]}ies"
    hissing = noun.endswith(("s", "x", "ch", "sh")) and noun != "epoch"
    return f"{number} {noun}{'es' if hissing else 's'}"


def explain(kind: type[BaseModel], item: dict[str, Any]) -> str:
    """A mistake that pydantic found in a value of this kind, as a line that names its key."""
    path = [str(part) for part in item["loc"]]
    key = ".".join(path)
    if item["type"] == "value_error":
        return f"{key}: {item['ctx']['error']}" if key else str(item["ctx"]["error"])
    if item["type"] == "extra_forbidden":
        for part in path[:-1]:
            kind = _tables(kind).get(part, kind)
        return f"{key}: no such key{_probable_key(kind, path[-1])} (known: {', '.join(sorted(kind.model_fields))})"
    if item["type"] == "missing":
        return f"{key}: is required"
    try:
        given = repr(item["input"])[:80]
    except (ValueError, RecursionError):  # Python shows no number of more than 4,300 digits
        given = f"this {type(item['input']).__name__}"
    if item["type"] in ("model_type", "dict_type"):
        return f"{key or 'it'} must be a table of keys and values, not {given}"
    if item["type"] == "literal_error" and isinstance(item["input"], str):
        allowed = re.findall(r"'([^']*)'", item["ctx"]["expected"])
        return f"{key}: {given} is not known{closest(item['input'], allowed)} (allowed: {', '.join(allowed)})"
    return f"{key}: {item['msg'][0].lower()}{item['msg'][1:]}, not {given}"


def _probable_key(kind: type[BaseModel], word: str) -> str:
    """A suggestion from the keys of a table or, failing that, from those of the tables in it."""
    inner = {name: table.model_fields for name, table in _tables(kind).items()}
    if one := synonym(word, [*kind.model_fields, *(f"{name}.{key}" for name in inner for key in inner[name])]):
        return f"; did you mean {one!r}?"
    near = nearest(word, [key for fields in inner.values() for key in fields])
    keys = " and ".join(f"'{name}.{near}'" for name, fields in inner.items() if near in fields)
    return closest(word, kind.model_fields) or (f"; did you mean {keys}?" if keys else "")


def _tables(kind: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The fields that are values themselves, with their types."""
    types = {name: (field.annotation, *get_args(field.annotation)) for name, field in kind.model_fields.items()}
    return {n: t for n, each in types.items() for t in each if hasattr(t, "model_fields")}
