"""Generation settings are imported and exported: suppressed ids, end token, length limit, chat template."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from kit.families import build, shrunk
from kit.hf import V, make, quiet
from kit.toy import call
from regard.convert.hf import CHAT_TEMPLATE, from_hf, to_hf
from regard.errors import UserError
from regard.run import Generation, Run
from regard.text.codec import Codec
from regard.text.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")


def converted(name: str, tmp_path: Path, **settings: Any) -> tuple[regard.api.LoadedRun, list[str]]:
    """A run imported from a directory with these settings in generation_config.json, and the notes."""
    make(name, tmp_path / "hf")
    path = tmp_path / "hf" / "generation_config.json"
    notes: list[str] = []
    present = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(present | settings))
    from_hf(tmp_path / "hf", tmp_path / "run", 2, notes.append)
    return regard.load(tmp_path / "run"), notes


def test_suppressed_ids_and_length_limit_survive_import_and_export(tmp_path):
    settings = {"bad_words_ids": [[V - 1], [3], [4, 5]], "suppress_tokens": [6, 7, V + 3], "max_length": 12}
    run, notes = converted("marian", tmp_path, **settings)
    assert run.generation == Generation(suppressed=(3, 6, 7), max_length=10)
    assert any("more than one token" in note for note in notes)
    answers = [hypotheses[0] for hypotheses in run.generate([f"{i} {i + 1} 9" for i in range(8, 30)])]
    assert {3, 6, 7}.isdisjoint(i for answer in answers for i in answer.ids)
    assert max(len(answer.ids) for answer in answers) == 11  # 10 and the end token
    (longer, *_), *_ = run.generate(["8 9 10"], max_length=20, min_length=15)
    assert len(longer.ids) > 11  # an explicit limit takes precedence
    to_hf(run, tmp_path / "back", 2, quiet)
    back = json.loads((tmp_path / "back" / "generation_config.json").read_text())
    assert back["suppress_tokens"] == run.never_produced() and {3, 6, 7} < set(back["suppress_tokens"])
    assert (back["eos_token_id"], back["decoder_start_token_id"], back["max_length"]) == (0, V - 1, 12)
    from_hf(tmp_path / "back", tmp_path / "again", 2, quiet)
    again = Run.load(tmp_path / "again")
    assert again.generation == run.generation and again.never_produced() == run.never_produced()


def test_the_end_token_of_generation_config_takes_precedence(tmp_path):
    run, _ = converted("gpt2", tmp_path, eos_token_id=5)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == 3 and run.config.ids.eos == 5


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        *(("eos_token_id", value, "must be the id") for value in ("", {"": {}}, False, 1e308, float("inf"), [[3]])),
        ("forced_eos_token_id", {}, "must be the id"),
        ("suppress_tokens", "5", "must be the id"),
        ("bad_words_ids", [5], "must be a list of lists"),
        ("bad_words_ids", [[5.5]], "must be the id"),
        ("max_length", "20", "must be a positive integer"),
        ("max_length", 10**30, "should be less than"),
    ],
)
def test_settings_of_a_wrong_type_are_named_in_the_error(key, value, message, tmp_path):
    with pytest.raises(UserError, match=rf"(?s)generation_config\.json: .*{key}.* {message}"):
        converted("t5", tmp_path, **{key: value})


@pytest.mark.parametrize("beyond", [V, 2**63, 2**64, 10**30, -1])
def test_ids_outside_of_the_vocabulary_are_ignored(beyond, tmp_path):
    keys = ("eos_token_id", "decoder_start_token_id", "pad_token_id", "forced_eos_token_id")
    run, notes = converted("marian", tmp_path, **dict.fromkeys(keys, beyond), suppress_tokens=[5, -2, 2**65])
    assert (run.config.ids.eos, run.config.start_id, run.config.ids.pad) == (0, V - 1, V - 1)  # as in config.json
    assert run.generation.suppressed == (5,)
    assert any("beyond the vocabulary" in note and all(key in note for key in keys) for note in notes) == (beyond != -1)


@pytest.mark.parametrize("name", ["marian", "t5", "gpt2"])
def test_ids_missing_in_generation_config_come_from_config(name, tmp_path):
    """In transformers itself, the start or end token would then be missing."""
    make(name, tmp_path / "hf")
    (tmp_path / "hf" / "generation_config.json").write_text('{"transformers_version": "5.0.0"}')
    assert from_hf(tmp_path / "hf", tmp_path / "run", 6, quiet).proof.outputs == 6
    config = Run.load(tmp_path / "run").config
    hf = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config.ids.eos == hf["eos_token_id"]
    assert config.start_id == hf["bos_token_id" if name == "gpt2" else "decoder_start_token_id"]


def test_bad_words_of_several_tokens_are_dropped_with_a_note(tmp_path):
    """transformers would suppress them; a run does not."""
    run, _ = converted("marian", tmp_path)
    ids = [hypotheses[0].ids for hypotheses in run.generate([f"{i} {i + 1} 9" for i in range(8, 30)])]
    words = [list(pair) for row in ids for pair in pairwise(row[:-1])]
    again, notes = converted("marian", tmp_path / "again", bad_words_ids=words)
    assert words and again.generation == run.generation and f"not kept: {len(words)} of bad_words_ids" in notes[-1]


def test_max_new_tokens_limits_a_language_model(tmp_path):
    run, notes = converted("llama-2", tmp_path, max_new_tokens=7, num_beams=4, top_k=50, length_penalty=0.5)
    assert notes[-1].endswith("num_beams 4 (--beam), length_penalty 0.5 (--length-penalty)")
    assert all(len(answer.ids) <= 7 for (answer, *_) in run.generate(["5 6", "9", "30 2 7"]))
    to_hf(run, tmp_path / "back", 1, quiet)
    assert json.loads((tmp_path / "back" / "generation_config.json").read_text())["max_new_tokens"] == 7


@pytest.mark.parametrize("name", ["marian", "t5-small", "gpt2", "llama-2-7b"])
def test_transformers_generates_the_output_of_the_run_by_default(name, tmp_path):
    """From text to text, with only the files of the exported directory."""
    config = shrunk(name, vocab=16)
    config = shrunk(name, vocab=16, changes={side: {"max_length": 64} for side in config.stacks})
    codec = Codec(Tokenizer.train("char", ["abcdefghijkl"]), frame="end" if config.encoder else "none")
    model = build(config.model_copy(update={"frame": codec.frame}))
    for parameter in model.parameters():
        parameter.mul_(2)  # for outputs that vary
    run = Run(model.config, codec, model, tmp_path / "run", generation=Generation(max_length=20))
    run.save(tmp_path / "run")
    to_hf(run, tmp_path / "hf", 2, quiet)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    theirs = transformers.AutoModelForSeq2SeqLM if config.encoder else transformers.AutoModelForCausalLM
    theirs = theirs.from_pretrained(tmp_path / "hf")
    texts = ["abc", "fedcba", "kkk", "hijklabc"]
    outputs = set()
    for text, (answer, *_) in zip(texts, regard.load(tmp_path / "run").generate(texts), strict=True):
        inputs = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            ids = theirs.generate(inputs.input_ids, attention_mask=inputs.attention_mask)[0]
        ids = ids[1:] if config.encoder else ids[inputs.input_ids.shape[1] :]
        output = tokenizer.decode(ids, skip_special_tokens=True)
        assert output == answer.text
        outputs.add(output)
    assert len(outputs) > 1


@pytest.mark.parametrize("form", ["file", "setting", "several"])
def test_the_chat_template_survives_import_and_export(form, tmp_path):
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    codec = Codec(Tokenizer.train("char", ["abc"]), frame="none")
    model = build(shrunk("gpt2"))
    to_hf(Run(model.config, codec, model, tmp_path / "none"), tmp_path / "hf", 1, quiet)
    if form == "file":
        (tmp_path / "hf" / CHAT_TEMPLATE).write_text(template)
    else:
        path = tmp_path / "hf" / "tokenizer_config.json"
        both = [{"name": "default", "template": template}, {"name": "tools", "template": "x"}]
        settings = {"chat_template": template if form == "setting" else both}
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    notes: list[str] = []
    from_hf(tmp_path / "hf", tmp_path / "run", 1, notes.append)
    assert any("tools" in note for note in notes) == (form == "several")
    to_hf(Run.load(tmp_path / "run"), tmp_path / "back", 1, quiet)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "back").chat_template == template


def test_without_transformers_the_command_line_reports_not_proven(tmp_path, monkeypatch):
    converted("t5", tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    result = call("convert", tmp_path / "run", tmp_path / "out", "--to", "hf")
    assert result.code == 0 and "proven\tno" in result.lines and "not proven" in result.err
    assert "regard has read the written directory again" in result.err
