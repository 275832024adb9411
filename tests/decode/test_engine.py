"""The engine interface: requests are tokenised once, and their grouping does not change the outputs."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from kit.decoding import language_model, run_of, same, sources
from kit.toy import call
from regard.decode.engine import Engine
from regard.decode.hypothesis import Hypothesis
from regard.decode.request import Options, Request
from regard.decode.torch_engine import TorchEngine, generate, score
from regard.inspect.prune import prune_heads
from regard.nn import primitives
from regard.nn.primitives import Linear, linears
from regard.run import Run
from regard.text.tokenizer import Tokenizer


def test_grouping_of_prepared_inputs_does_not_change_outputs() -> None:
    texts = ["", *sources(1, 9), "a" * 3000]
    with TorchEngine(run_of("transformer-tiny", 2), Options(beam=3, nbest=2, max_length=9)) as engine:
        inputs = engine.prepare(texts)
        batched = engine.decode(inputs)
        in_parts = [*engine.decode(inputs[:4]), *engine.decode(inputs[4:5]), *engine.decode(inputs[5:])]
        assert all(map(same, batched, in_parts)) and all(map(same, batched, engine(texts)))
        assert engine.decode([]) == []
    assert list(inputs[0].flags) == ["empty"] and list(inputs[-1].flags) == ["too_long"]
    assert [row[0].flags.keys() for row in (batched[0], batched[-1])] == [{"empty"}, {"too_long"}]


def test_flagged_inputs_keep_their_token_ids() -> None:
    engine: Engine = TorchEngine(run_of("rnn-luong", 1), Options(max_source=3))
    unmet, long, unknown = engine.prepare([Request("ab", prefix="ß"), "abcdé", "é"])
    assert unmet.flags and long.flags and not unknown.flags
    assert [engine.preparer.codec.source.unknown(item.sources[0]) for item in (unmet, long, unknown)] == [0, 1, 1]


@pytest.mark.parametrize("run", [run_of("transformer-tiny", 2), language_model("rotary", 1)], ids=["pairs", "lm"])
def test_sources_are_tokenised_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, texts: encoded.extend(texts) or encode(self, texts))
    engine = TorchEngine(run, Options(max_length=3, prefix=""))
    texts = ["fadedfade", "cafecafecafe"]
    inputs = engine.prepare(texts)
    assert encoded == texts
    outputs = [row[0].text for row in engine.decode(inputs)]
    assert sorted(encoded[len(texts) :]) == sorted(outputs)  # outputs are encoded to check their segmentation


def test_generate_command_tokenises_each_line_once(toy, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[str] = []
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, texts: encoded.extend(texts) or encode(self, texts))
    result = call("generate", toy / "run", "-", "--workers", 1, stdin="abcabcab\nßß\n")
    assert result.code == 0 and "1 unknown token, 2 times in 1 line" in result.err
    assert encoded.count("abcabcab") == 1 and encoded.count("ßß") == 1


def test_packed_weights_are_reused_until_the_weights_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are packed at the first call, and again after a change or pruning."""
    monkeypatch.setattr(primitives, "MIN_WORK", 0)
    monkeypatch.setattr(primitives, "MIN_ELEMENTS", 0)
    packed: list[Linear] = []
    pack = primitives._packed_matmul
    monkeypatch.setattr(primitives, "_packed_matmul", lambda linear: packed.append(linear) or pack(linear))
    original = run_of("transformer-tiny", 2)
    texts = sources(1, 4)
    run = Run(original.config, original.codec, deepcopy(original.model), original.path)
    layers = linears(run.model)

    def answers(run: Run) -> list[list[Hypothesis]]:
        list(score(run, [("ab", "cd")]))
        return list(generate(run, texts, Options(beam=2, max_length=5)))

    def check() -> None:
        fresh = Run(run.config, run.codec, deepcopy(run.model), run.path)
        assert all(map(same, answers(run), answers(fresh)))
        packed.clear()

    answers(run)
    assert packed == layers
    answers(run)
    assert packed == layers
    check()
    with torch.no_grad():
        layers[0].weight.mul_(-2)
    answers(run)
    assert packed == layers[:1]
    check()
    run.model = prune_heads(run.model, {"encoder.layers.0.attention": [0]}).eval()
    run.config = run.model.config
    answers(run)
    assert packed == linears(run.model)
    check()
