"""Statistics of heads: attention patterns, alignment, agreement with links."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regard.decode.alignment import read_links
from regard.decode.cross_attention import alignment_merits
from regard.errors import UserError
from regard.inspect.heads import best_alignment_heads, grids, measure_heads, sum_attention
from regard.inspect.inputs import encode_pairs, pair_batches
from regard.model import Model
from regard.nn.hooks import patch
from regard.run import Run
from regard.text.codec import Example

EXAMPLES = [Example("abcab", "bcdab"), Example("bc", "abcd"), Example("dabcdab", "cab"), Example("a", "b")]


def test_every_head_is_measured(run: Run) -> None:
    heads = measure_heads(run, EXAMPLES)
    recurrent = run.config.decoder is not None and run.config.decoder.recurrent
    assert len(heads) == (1 if recurrent else 24)
    for head in heads:
        assert head.gradient >= 0 and head.ablation is not None
        assert 0 < head.confidence <= 1 + 1e-5 and head.entropy >= -1e-5 and head.distance >= 0
        assert 0 <= head.share <= 1 + 1e-5 and head.what
        assert (head.alignment is None) == (head.kind != "cross")
        json.dumps(head.to_json())
    assert measure_heads(run, EXAMPLES, ablation=False)[0].ablation is None


def steered(model: Model, name: str, offset: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Weights on one key at a fixed offset from the query, clipped to the first and last token."""

    def weights(x_BHTS: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x_BHTS)
        for t in range(x_BHTS.shape[2]):
            out[:, :, t, min(max(t + offset, 0), x_BHTS.shape[3] - 1)] = 1.0
        return out

    return weights


@pytest.mark.parametrize(
    ("kind", "name", "offset", "what"),
    [
        ("encoder", "encoder.blocks.0.attention", -1, "previous token"),
        ("encoder", "encoder.blocks.0.attention", 1, "next token"),
        ("encoder", "encoder.blocks.1.attention", 0, "own token"),
        ("decoder", "decoder.blocks.1.attention", -1, "previous token"),
        ("decoder", "decoder.blocks.1.attention", -2, "token 2 back"),
        ("encoder", "encoder.blocks.0.attention", -99, "first token"),
        ("cross", "decoder.blocks.0.cross", 0, "same position"),
        ("encoder", "encoder.blocks.1.attention", 3, "token 3 ahead"),
        ("cross", "decoder.blocks.0.cross", 2, "position 2 ahead"),
    ],
)
def test_attention_patterns_are_recognised(kind: str, name: str, offset: int, what: str, transformer: Model) -> None:
    pairs = [([4, 5, 6, 7, 8, 9, 4, 3], [5, 6, 7, 8, 9, 5, 6, 3])] * 2
    batches = pair_batches(pairs, transformer.config)
    with patch(transformer, {f"{name}.weights": steered(transformer, name, offset)}):
        sums = sum_attention(transformer, batches)[name]
    assert sums.describe(0)[0] == what
    assert sums.means(0)[0] == pytest.approx(1)
    assert sums.means(0)[1] == pytest.approx(0, abs=1e-4)
    if offset > -9:
        edge = 1 / (8 if kind != "decoder" else 7)
        assert sums.means(0)[2] == pytest.approx(abs(offset), abs=2 * abs(offset) * edge)


def test_large_offsets_are_recognised(transformer: Model) -> None:
    name, tokens = "encoder.blocks.0.attention", [4 + i % 6 for i in range(40)]
    batches = pair_batches([([*tokens, 3], [5, 3])], transformer.config)
    with patch(transformer, {f"{name}.weights": steered(transformer, name, -17)}):
        assert sum_attention(transformer, batches)[name].describe(0) == ("token 17 back", pytest.approx(1))


def test_mixed_head_lists_its_parts(transformer: Model) -> None:
    """Each query puts 40% on the previous token, 30% on the first token, and the rest evenly on all."""
    name = "encoder.blocks.0.attention"

    def mix(x_BHTS: torch.Tensor) -> torch.Tensor:
        out = torch.full_like(x_BHTS, 0.3 / x_BHTS.shape[3])
        for t in range(x_BHTS.shape[2]):
            out[:, :, t, max(0, t - 1)] += 0.4
            out[:, :, t, 0] += 0.3
        return out

    length = 10
    batches = pair_batches([([4, 5, 6, 7, 8, 9, 4, 5, 6, 3], [5, 3])], transformer.config)
    with patch(transformer, {f"{name}.weights": mix}):
        sums = sum_attention(transformer, batches)[name]
    weights_TS = mix(torch.zeros(1, 1, length, length))[0, 0]
    expected = {
        "previous token": float(weights_TS.diagonal(-1).sum()) / length,
        "first token": float(weights_TS[:, 0].sum()) / length,
    }
    assert sums.describe(0)[0] == "mixed"
    assert dict(sums.parts(0)) == pytest.approx(expected, abs=1e-5)
    assert [what for what, _ in sums.parts(0)] == sorted(expected, key=lambda what: -expected[what])


def test_uniform_attention_is_recognised(transformer: Model) -> None:
    batches = pair_batches([([4, 5, 6, 7, 8, 9, 4, 3], [5, 3])], transformer.config)
    with patch(transformer, {"encoder.blocks.0.attention.weights": lambda x: torch.full_like(x, 1 / x.shape[-1])}):
        sums = sum_attention(transformer, batches)["encoder.blocks.0.attention"]
    assert sums.describe(1) == ("everything evenly", pytest.approx(1))
    assert sums.means(0)[1] == pytest.approx(3)


def test_padding_does_not_change_the_statistics(transformer: Model) -> None:
    pairs = [([4, 5, 3], [5, 3]), ([4, 5, 6, 7, 8, 9, 4, 3], [5, 6, 7, 8, 3])]
    batched = sum_attention(transformer, pair_batches(pairs, transformer.config, 1000))
    single = sum_attention(transformer, pair_batches(pairs, transformer.config, 1))
    for name, sums in batched.items():
        assert sums.queries == single[name].queries
        assert torch.allclose(sums.sums_3H[1], single[name].sums_3H[1], atol=1e-4)
        assert torch.allclose(sums.sums_3H[2], single[name].sums_3H[2], atol=1e-4)
        for what, (weight_H, count) in sums.targets.items():
            other_H, other = single[name].targets.get(what, (torch.zeros_like(weight_H), 0))
            assert count == other and torch.allclose(weight_H, other_H, atol=1e-4), what


def diagonal(model: Model) -> dict[str, Any]:
    """Weights that align one to one in the third head of the second layer; other heads attend to the end."""

    def weights(x_BHTS: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x_BHTS)
        out[..., -1] = 1.0
        size = min(x_BHTS.shape[2:])
        out[:, 2] = 0.0
        out[:, 2, range(size), range(size)] = 1.0
        out[:, 2, size:, -1] = 1.0
        return out

    return {"decoder.blocks.1.cross.weights": weights}


def test_alignment_head_is_recognised_without_and_with_links(make_letters: Callable[..., Run]) -> None:
    run = make_letters()
    examples = [Example("abcd", "abcd"), Example("dcba", "abcd")]
    with patch(run.model, diagonal(run.model)):
        heads = measure_heads(run, examples, ablation=False)
        links = [[(i, i) for i in range(4)], [(i, i) for i in range(2)] + [(3, 2)]]
        linked_heads = measure_heads(run, examples, ablation=False, links=links)
    for statistics, merit in ((heads, 1.0), (linked_heads, 6 / 7)):
        (best,) = best_alignment_heads(statistics)
        assert (best.name, best.index, best.what) == ("decoder.blocks.1.cross", 2, "alignment")
        assert best.alignment == pytest.approx(merit)


def test_agreement_equals_the_share_of_linked_tokens(make_letters: Callable[..., Run]) -> None:
    run = make_letters()
    examples = [Example("abcd", "abcd"), Example("ab", "ab")]
    pairs = encode_pairs(run, examples)
    with patch(run.model, diagonal(run.model)):
        merits = alignment_merits(run.model, pairs, [[(0, 0), (3, 1)], [(1, 1), (0, 9)]])
    assert merits["decoder.blocks.1.cross", 2] == pytest.approx(2 / 3)


def test_links_are_read_and_checked(tmp_path: Path, make_letters: Callable[..., Run]) -> None:
    path = tmp_path / "links"
    path.write_text("0-0 1-2\n\n3-1\n")
    assert read_links(path) == [[(0, 0), (1, 2)], [], [(3, 1)]]
    path.write_text("0-0 1:2\n")
    with pytest.raises(UserError, match=r"links:1: '1:2' is not a link"):
        read_links(path)
    with pytest.raises(UserError, match="no such file"):
        read_links(tmp_path / "none")
    with pytest.raises(UserError, match="3 lines of links for 1 pairs"):
        measure_heads(make_letters(), [Example("a", "b")], links=[[], [], []])
    with pytest.raises(UserError, match="no link lies within its pair"):
        measure_heads(make_letters(), [Example("a", "b")], links=[[(0, 7)]])


def test_grids_have_a_cell_for_every_head(make_letters: Callable[..., Run]) -> None:
    run = make_letters(kept_heads=((0, 2), (1,)))
    heads = measure_heads(run, EXAMPLES, ablation=False)
    cells = grids(heads, lambda head: head.gradient)
    assert list(cells) == ["encoder", "decoder", "cross"] and cells["encoder"].shape == (2, 3)
    assert np.isnan(cells["encoder"]).sum() == 3
    assert cells["encoder"][0, 2] == next(h.gradient for h in heads if h.kind == "encoder" and h.head == 2)
