"""Hypotheses that share a cache in a prefix tree decode like hypotheses with separate caches, without copying keys."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from test_one_stack import ROWS, VARIANTS, decoder
from torch import Tensor

from kit.families import BOTH, DECODERS, VOCAB, build, close, left_padded, shrunk
from regard.model import Model
from regard.nn.cache import KV, PrefixTree, State

SOURCES = torch.tensor([[4, 5, 6, 7, 3], [8, 9, 3, 0, 0], [10, 4, 4, 3, 0]])
CPU = torch.device("cpu")


def compare_random_beams(
    model: Model, state: State, generator: torch.Generator, steps: int = 6, width: int = 3
) -> None:
    """Decode random beams of three sentences with and without a tree, and compare; one sentence finishes early."""
    count = 3
    rows = 3
    tree = state.with_prefix_tree(count, CPU)
    tokens_N = torch.randint(4, VOCAB, (rows,), generator=generator)
    for t in range(steps):
        logits_NV, state = model.step(tokens_N, state)
        ours_NV, tree = model.step(tokens_N, tree)
        close(ours_NV, logits_NV)
        assert tree.length == state.length
        remaining_A = torch.tensor([0, 2]) if t == 3 else torch.arange(count)
        parents_AW = torch.randint(rows // count, (len(remaining_A), width), generator=generator)
        rows_N = (remaining_A.unsqueeze(1) * (rows // count) + parents_AW).flatten()
        remaining = remaining_A if t == 3 else None
        state = state.select(rows_N, remaining)
        tree = tree.select(rows_N, remaining)
        count = len(remaining_A)
        rows = len(rows_N)
        tokens_N = torch.randint(4, VOCAB, (rows,), generator=generator)


def memories(name: str) -> list[dict[str, int]]:
    """The memory sizes to test: unlimited, and three tokens where positions are relative."""
    stack = decoder(name).config.decoder
    assert stack is not None
    short = stack.position in ("relative", "rotary", "alibi", "bucket") and stack.residual == "add"
    return [{}, {"memory": 3}] if short else [{}]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("name", "memory"), [(name, m) for name in (*DECODERS, *VARIANTS) for m in memories(name)])
@torch.no_grad()
def test_decoder_with_prefix_tree_equals_separate_caches(name: str, memory: dict[str, int], padded: bool) -> None:
    model = decoder(name, **memory)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        prompt, keep = left_padded(ROWS) if padded else (torch.randint(4, VOCAB, (3, 2), generator=generator), None)
        compare_random_beams(model, model.read(prompt, State(()), keep)[1], generator)
        compare_random_beams(model, State(()), generator)


@pytest.mark.parametrize("name", BOTH)
@torch.no_grad()
def test_encoder_decoder_with_prefix_tree_equals_separate_caches(name: str) -> None:
    model = build(shrunk(name))
    for seed in range(3):
        compare_random_beams(model, model.encode(SOURCES, SOURCES > 0), torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("center", ["step", "predicted"])
@torch.no_grad()
def test_local_cross_attention_with_prefix_tree_equals_separate_caches(center: str) -> None:
    changes = {"decoder": {"cross_window": 1, "cross_center": center, "window": 2}}
    model = build(shrunk("transformer-base", changes=changes))
    compare_random_beams(model, model.encode(SOURCES, SOURCES > 0), torch.Generator().manual_seed(1))


def cache_addresses(state: State) -> list[int]:
    return [x.data_ptr() for memory in state.layers for x in memory]


@torch.inference_mode()
def test_keys_are_not_copied_while_slots_are_free() -> None:
    """In 60 steps the cache is compacted a few times, at growing intervals, to tokens that are part of a prefix."""
    model = build(shrunk("transformer-base"))
    state = model.encode(SOURCES, SOURCES > 0).with_prefix_tree(3, CPU)
    generator = torch.Generator().manual_seed(0)
    compactions = []
    tokens_N = torch.tensor([4, 5, 6])
    for t in range(60):
        _, after = model.step(tokens_N, state)
        if t:
            assert cache_addresses(after) == cache_addresses(state), "extending copied the cache"
        width = len(tokens_N) // 3
        rows_N = (torch.arange(3).unsqueeze(1) * width + torch.randint(width, (3, 4), generator=generator)).flatten()
        state = after.select(rows_N)
        if cache_addresses(state) != cache_addresses(after):
            compactions.append(t)
            assert isinstance(state.layers[0], KV) and state.layers[0].free >= 16
            assert state.tree is not None and state.tree.prefix_AWP.flatten(0, 1).any(0).all(), (
                "tokens outside every prefix remain"
            )
        tokens_N = torch.randint(4, VOCAB, (12,), generator=generator)
    assert len(compactions) <= 15 and compactions[-1] - compactions[-2] > 4
    assert state.tree is not None and state.tree.prefix_AWP.sum(2).eq(60).all()


def test_recurrent_state_is_unchanged_by_with_prefix_tree() -> None:
    state = build(shrunk("rnn-luong")).encode(SOURCES, SOURCES > 0)
    assert state.with_prefix_tree(3, CPU) is state


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data(), st.integers(1, 3), st.integers(1, 3))
def test_tree_stores_the_prefix_of_each_hypothesis(data: st.DataObject, sentences: int, width: int) -> None:
    """Compare with lists of token numbers; the cache may be compacted at any time."""
    none = torch.ones(sentences, 1, 0, dtype=torch.bool)
    tree = PrefixTree(none, torch.zeros(sentences, 0, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long))
    names_AP: Tensor = torch.zeros(sentences, 0, dtype=torch.long)
    paths: list[list[int]] = [[] for _ in range(sentences)]
    for t in range(5):
        each = len(paths) // sentences
        tree = tree.extend(0)
        names_AP = torch.cat((names_AP, t * 10 + torch.arange(each).expand(sentences, -1)), 1)
        paths = [[*path, t * 10 + i % each] for i, path in enumerate(paths)]
        parents = [data.draw(st.integers(0, each - 1)) for _ in range(sentences * width)]
        rows = [i // width * each + parent for i, parent in enumerate(parents)]
        tree = tree.select(torch.tensor(rows), None)
        paths = [paths[row] for row in rows]
        if data.draw(st.booleans()):
            slot_AL, tree = tree.compacted()
            names_AP = names_AP.gather(1, slot_AL)
        for i, path in enumerate(paths):
            prefix_P = tree.prefix_AWP[i // width, i % width]
            assert names_AP[i // width, prefix_P].tolist() == path
            assert tree.pos_AP[i // width, prefix_P].tolist() == list(range(len(path)))
