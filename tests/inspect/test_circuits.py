"""Circuits of language models: logit attribution, QK and OV products, induction heads, rollout, neurons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from kit.models import LITTLE, family
from regard.errors import UserError
from regard.inspect.circuits import attribute, ov, qk, rollout, top_neurons
from regard.inspect.heads import induction_heads, induction_scores, measure_heads
from regard.inspect.prune import prune_heads
from regard.inspect.trace import trace
from regard.model import Model
from regard.nn.hooks import record
from regard.presets import preset
from regard.run import Run
from regard.text.codec import Codec, Example
from regard.text.tokenizer import Tokenizer

WORDS = ["abcdef"]


def lm(preset_name: str = "gpt-tiny", **stack: Any) -> Run:
    """A language model with random weights, biases and gains."""
    tokenizer = Tokenizer.train("char", WORDS)
    torch.manual_seed(3)
    model = Model(preset(preset_name, tokenizer.size, changes={"decoder": LITTLE | stack, "output_bias": True})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return Run(model.config, Codec(tokenizer, frame="none"), model, Path("runs/little"))


@settings(max_examples=20, deadline=None)
@given(
    st.text("abcdef", min_size=1, max_size=8),
    st.sampled_from(["gpt-tiny", "llama-tiny", "xl-tiny"]),
    st.sampled_from(["pre", "post"]),
    st.sampled_from(["layer", "rms"]),
    st.integers(-3, -1),
)
def test_attributions_of_a_logit_sum_to_it(text: str, name: str, norm_at: str, norm: str, position: int) -> None:
    run = lm(name, norm_at=norm_at, norm=norm, bias="all", gated=norm == "rms")
    position = max(position, -len(text))
    for token in (None, "c"):
        result = attribute(run, text, token, position)
        assert result.total == pytest.approx(result.logit, abs=1e-4)
        assert sum(value for _, value in result.table()) == pytest.approx(result.logit, abs=1e-4)


def test_attributions_of_a_pruned_model_sum_to_the_logit() -> None:
    run = lm()
    small = prune_heads(run.model, {"decoder.blocks.0.attention": [0, 2]})
    result = attribute(Run(small.config, run.codec, small, run.path), "abca")
    assert result.total == pytest.approx(result.logit, abs=1e-4)
    assert result.heads_LH[0, 0] == result.heads_LH[0, 2] == 0.0 and result.heads_LH[0, 1] != 0.0


def test_attribution_requires_one_token_and_a_language_model() -> None:
    with pytest.raises(UserError, match="is 2 tokens"):
        attribute(lm(), "abc", "ab")
    for kind in ("masked", "lm-hashed"):
        with pytest.raises(UserError, match="language models"):
            attribute(family(kind), "abc")


@pytest.mark.parametrize("stack", [{}, {"kv_heads": 2}, {"norm_at": "post"}, {"score": "general"}, {"score": "dot"}])
@torch.no_grad()
def test_qk_and_ov_equal_the_first_layer(stack: dict[str, Any]) -> None:
    """Without positions, scores and head contributions to logits depend only on the tokens."""
    run = lm(position="none", layers=1, **stack)
    text = "abcadb"
    ids = [run.config.start_id, *run.codec.target.encode([text])[0]]
    with record(run.model, "*.weights") as maps:
        run.model(torch.tensor([ids]), None)
    weights_HTS = maps["decoder.blocks.0.attention.weights"][0]
    for head in range(4):
        scores_TS = qk(run, 0, head).matrix()[ids][:, ids]
        visible_TS = torch.ones_like(scores_TS).tril().bool()
        expected_TS = scores_TS.masked_fill(~visible_TS, -torch.inf).softmax(-1)
        assert torch.allclose(expected_TS, weights_HTS[head], atol=1e-5)
    if stack.get("norm_at") == "post":
        return
    result = attribute(run, text, "c")
    with record(run.model, "decoder.blocks.0.output") as recording:
        run.model(torch.tensor([ids]), None)
    x_D = recording["decoder.blocks.0.output"][0, -1]
    scale = ((x_D - x_D.mean()).pow(2).mean() + 1e-5).rsqrt()
    token = run.codec.target.encode(["c"])[0][0]
    for head in range(4):
        logit_S = ov(run, 0, head).matrix()[ids, token]
        assert float((weights_HTS[head, -1] * logit_S).sum() * scale) == pytest.approx(
            float(result.heads_LH[0, head]), abs=1e-4
        )


def test_top_of_a_circuit_has_its_largest_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    circuit = ov(lm(), 1, 2)
    matrix_VV = circuit.matrix()
    assert torch.linalg.matrix_rank(matrix_VV) <= 4 and torch.allclose(circuit.row("b"), matrix_VV[5], atol=1e-5)
    expected = [pair.value for pair in circuit.top(7)]
    assert expected == pytest.approx(matrix_VV.flatten().topk(7).values.tolist(), abs=1e-5)
    top = circuit.top(1)[0]
    assert matrix_VV[circuit.names.index(top.row), circuit.names.index(top.column)] == pytest.approx(top.value)
    monkeypatch.setattr("regard.inspect.circuits.MAX_PAIRS", 30)  # computed in pieces
    assert [pair.value for pair in circuit.top(7)] == pytest.approx(expected)
    with pytest.raises(UserError, match="use top"):
        circuit.matrix()
    with pytest.raises(UserError, match="no head 9"):
        qk(lm(), 0, 9)


def induction_run() -> Run:
    """Two hand-made attention layers: one attends to the previous token, one to the successor of an earlier copy.

    A vector consists of the one-hot codes of a token, its position and the previous token.
    """
    tokenizer = Tokenizer.train("char", ["abcdefghijkl"])
    vocab, positions = tokenizer.size, 25
    width = vocab + positions + vocab
    stack = LITTLE | {
        "heads": 1, "width": width, "head_width": positions, "value_width": vocab, "max_length": positions,
        "norm": "rms", "bias": "none", "ff": 4,
    }  # fmt: skip
    config = preset("gpt-tiny", vocab, changes={"decoder": stack, "tie_output": False})
    model = Model(config).eval()
    token, position, before = slice(0, vocab), slice(vocab, vocab + positions), slice(vocab + positions, width)
    decoder: Any = model.decoder
    embedding: Any = model.target_embedding
    output: Any = model.output
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.zero_()
        embedding.weight[:, token] = torch.eye(vocab)
        decoder.position.table.weight[:, position] = torch.eye(positions)
        first, second = decoder.blocks[0].attention, decoder.blocks[1].attention
        first.query.weight[:, position] = 10 * torch.eye(positions).roll(-1, 0)  # position p queries p - 1
        first.key_value.weight[:positions, position] = torch.eye(positions)
        first.key_value.weight[positions:, token] = torch.eye(vocab)
        first.out.weight[before] = torch.eye(vocab)
        second.query.weight[:vocab, token] = 10 * torch.eye(vocab)
        second.key_value.weight[:vocab, before] = torch.eye(vocab)
        second.key_value.weight[positions:, token] = torch.eye(vocab)
        second.out.weight[token] = 4 * torch.eye(vocab)
        output.weight[:, token] = torch.eye(vocab)
    return Run(config, Codec(tokenizer, frame="none"), model, Path("runs/induction"))


def test_constructed_induction_head_is_recognised() -> None:
    run = induction_run()
    scores = induction_scores(run.model)
    assert scores["decoder.blocks.1.attention", 0] > 0.9 and scores["decoder.blocks.0.attention", 0] < 0.1
    heads = measure_heads(run, "abcdefghijklabcdefghijkl" * 4)
    assert [head.what for head in heads] == ["previous token", "induction"]
    assert [head.layer for head in induction_heads(heads)] == [1]
    result = attribute(run, "kdbaikd")  # b follows the earlier d
    assert result.token == "b" and result.table()[0][0] == "layer 2 head 1"
    assert result.total == pytest.approx(result.logit, abs=1e-4)
    top = qk(run, 0, 0).top(1)[0].value, ov(run, 1, 0).top(1)[0]
    assert top[0] == pytest.approx(0.0, abs=1e-5), "the first head ignores tokens"
    assert top[1].row == top[1].column, "the second copies them"


def test_random_model_has_no_induction_heads() -> None:
    run = family("lm")
    assert not induction_heads(measure_heads(run, "abcab" * 20))
    assert all(0 <= score <= 1 for score in induction_scores(run.model).values())


@settings(max_examples=25, deadline=None)
@given(st.text("abcd ", min_size=1, max_size=12), st.sampled_from(["lm", "lm-grouped", "masked", "classes"]))
def test_rollout_shares_sum_to_one(text: str, kind: str) -> None:
    result = rollout(trace(family(kind), Example(text)))
    assert len(result) == 2
    for share_TS in result:
        assert np.allclose(share_TS.sum(-1), 1.0, atol=1e-5) and (share_TS >= 0).all()
        if kind.startswith("lm"):
            assert np.allclose(np.triu(share_TS, 1), 0.0), "no attention to later tokens"


def test_rollout_multiplies_layers() -> None:
    result = trace(family("masked"), Example("abc"))
    first, second = (0.5 * m.weights_HTS.mean(0) + 0.5 * np.eye(5) for m in result.maps)
    assert np.allclose(rollout(result)[1], second @ first, atol=1e-5)
    with pytest.raises(UserError, match="no self-attention"):
        rollout(result, "decoder")


@torch.no_grad()
def test_neurons_have_triggers_and_promoted_tokens() -> None:
    run = family("lm")
    text = "abcab dcba " * 4
    neurons = top_neurons(run, text, 1, count=6, triggers=3)
    assert len(neurons) == 6 and len({neuron.index for neuron in neurons}) == 6
    ids = torch.tensor([[run.config.start_id, *run.codec.target.encode([text])[0]][:-1]])
    with record(run.model, "decoder.blocks.1.feed_forward.neurons") as recording:
        run.model(ids, None)
    value_TF = recording["decoder.blocks.1.feed_forward.neurons"][0]
    decoder: Any = run.model.decoder
    output: Any = run.model.output
    for neuron in neurons:
        best = value_TF[:, neuron.index].topk(3)
        assert [t.value for t in neuron.triggers] == pytest.approx([v for v in best.values.tolist() if v > 0], abs=1e-4)
        position = int(best.indices[0])
        assert neuron.triggers[0].token == run.codec.target_pieces([int(ids[0, position])])[0]
        down_D = decoder.blocks[1].feed_forward.down.weight[:, neuron.index]
        logit_V = ((down_D - down_D.mean()) * decoder.norm.weight) @ output.weight.T
        assert neuron.promotes[0][1] == pytest.approx(float(logit_V.max()), abs=1e-4)
    with pytest.raises(UserError, match="no layer 2"):
        top_neurons(run, text, 2)
