"""LSH attention equals its pairwise formula, exact attention, decoding step by step, and transformers' Reformer."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from regard.config import AxialConfig, Config, LshConfig, Stack
from regard.model import Model
from regard.nn.attention import AttentionMask
from regard.nn.cache import State
from regard.nn.lsh import LSHAttention, SortOrder
from regard.nn.position import NO_POSITION


def make(**lsh: object) -> LSHAttention:
    torch.manual_seed(0)
    stack = Stack(
        mixer="lsh", width=12, heads=2, head_width=6, value_width=5, layers=1, bias="ff", lsh=LshConfig(**lsh)
    )
    return LSHAttention(stack, index=3).double()


def positions(length: int) -> Tensor:
    return torch.arange(length).unsqueeze(0)


def keep_mask(length: int, *lengths: int, left: bool = False) -> Tensor:
    keep = torch.arange(length) < torch.tensor(lengths).unsqueeze(1)
    return keep.flip(1) if left else keep


def exact_and_hashed(attention: LSHAttention, x: Tensor, causal: bool, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The outputs of the exact path and of the hashed path."""
    outs = []
    for limit in (x.shape[1], 0):
        monkeypatch.setattr(attention, "compared_keys", limit)
        outs.append(run(attention, x, None, causal))
    return outs


def run(attention: LSHAttention, x: Tensor, keep: Tensor | None = None, causal: bool = True) -> Tensor:
    pos = positions(x.shape[1])
    kv = attention.project_kv(x, pos, NO_POSITION)
    return attention(x, kv, AttentionMask(pos, pos, keep, causal), NO_POSITION)


def by_hand(attention: LSHAttention, x: Tensor, order: SortOrder | None, keep: Tensor | None, causal: bool) -> Tensor:
    """The output (B, H, T, E), computed pair by pair; a pair counts once for every round that compares it."""
    kv = attention.project_kv(x, positions(x.shape[1]), NO_POSITION)
    shared = kv.k_BGSE.tolist()
    values = kv.v_BGSE
    lsh = attention.lsh
    length = x.shape[1]
    out = torch.zeros_like(values)
    for b in range(len(x)):
        for h in range(attention.heads):
            comparisons = {(t, s): 1 for t in range(length) for s in range(length)}
            if order is not None:
                rounds = order.token_XRP[b * attention.heads + h].unflatten(-1, (-1, lsh.chunk)).tolist()
                if not lsh.once:  # all rounds form one ring
                    rounds = [[chunk for each in rounds for chunk in each]]
                comparisons = dict.fromkeys(comparisons, 0)
                for ring in rounds:
                    for n, chunk in enumerate(ring):
                        chunk_indices = range(n - lsh.before, n + lsh.after + 1)
                        keys = [s for m in chunk_indices for s in ring[m % len(ring)]]
                        for pair in ((t, s) for t in chunk for s in keys if t < length and s < length):
                            comparisons[pair] += 1
            for t in range(length):
                q = shared[b][h][t]
                scores = {}
                for s in range(length):
                    if not comparisons[t, s] or s == t or (causal and s > t) or (keep is not None and not keep[b, s]):
                        continue
                    k = shared[b][h][s]
                    size = math.sqrt(sum(a * a for a in k) + 1e-6 * len(k))
                    scores[s] = sum(a * c for a, c in zip(q, k, strict=True)) / size
                scores = scores or {t: 0.0}  # the query itself, if there is no other key
                weights = {s: math.exp(a) * (1 if lsh.once else comparisons[t, s]) for s, a in scores.items()}
                for s, weight in weights.items():
                    out[b, h, t] += weight / sum(weights.values()) * values[b, h, s]
    return out


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("hashes", "chunk", "around", "length"),
    [(1, 4, (1, 0), 20), (2, 3, (1, 0), 25), (3, 2, (1, 1), 23), (2, 4, (0, 0), 18)],
)
@pytest.mark.parametrize("padding", ["none", "right", "left"])
def test_output_equals_softmax_over_compared_pairs(
    once: bool, causal: bool, hashes: int, chunk: int, around: tuple[int, int], length: int, padding: str
) -> None:
    attention = make(hashes=hashes, chunk=chunk, before=around[0], after=around[1], once=once)
    x = torch.randn(2, length, 12, dtype=torch.double)
    keep = None if padding == "none" else keep_mask(length, length, length - 6, left=padding == "left")
    kv = attention.project_kv(x, positions(length), NO_POSITION)
    mask = AttentionMask(positions(length), positions(length), keep, causal)
    order = attention.sort(kv, mask)
    assert order is not None
    expected = by_hand(attention, x, order, keep, causal)
    mixed: list[Tensor] = []
    attention.mixed.register_forward_hook(lambda _m, _i, out: mixed.append(out))
    out = attention(x, kv, mask, NO_POSITION)
    assert "mask_B1TS" not in vars(mask)  # no mask over all pairs was computed
    real = slice(None) if keep is None else keep.unsqueeze(1).expand(-1, 2, -1)
    torch.testing.assert_close(mixed[0][real], expected[real])
    weights: list[Tensor] = []
    attention.weights.register_forward_hook(lambda _m, _i, out: weights.append(out))
    eager = attention(x, kv, mask, NO_POSITION)
    rows = slice(None) if keep is None else keep
    torch.testing.assert_close(eager[rows], out[rows])
    torch.testing.assert_close(weights[0].sum(-1)[real], torch.ones_like(weights[0][..., 0])[real])


@pytest.mark.parametrize("causal", [False, True])
def test_exact_path_equals_the_formula_over_all_pairs(causal: bool) -> None:
    attention = make(chunk=16)
    x = torch.randn(2, 9, 12, dtype=torch.double)
    keep = keep_mask(9, 9, 6)
    mixed: list[Tensor] = []
    attention.mixed.register_forward_hook(lambda _m, _i, out: mixed.append(out))
    run(attention, x, keep, causal)
    real = keep.unsqueeze(1).expand(-1, 2, -1)
    torch.testing.assert_close(mixed[0][real], by_hand(attention, x, None, keep, causal)[real])


@pytest.mark.parametrize("lsh", [{"hashes": 1, "chunk": 16}, {"hashes": 60, "chunk": 8, "once": True}])
@pytest.mark.parametrize("causal", [False, True])
def test_enough_hashes_equal_full_attention(
    lsh: dict[str, object], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One round whose chunk covers the whole sequence, or enough rounds to compare all pairs."""
    attention = make(**lsh)
    x = torch.randn(2, 32, 12, dtype=torch.double)
    exact, hashed = exact_and_hashed(attention, x, causal, monkeypatch)
    torch.testing.assert_close(hashed, exact)


def test_more_hashes_approach_full_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    x = torch.randn(2, 128, 12, dtype=torch.double)
    errors = []
    for hashes in (1, 4, 16, 64):
        attention = make(hashes=hashes, chunk=16, once=True).requires_grad_(False)
        exact, hashed = exact_and_hashed(attention, x, True, monkeypatch)
        errors.append(float((hashed - exact).norm() / exact.norm()))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.01


@pytest.mark.parametrize("once", [False, True])
def test_gradients_equal_finite_differences(once: bool) -> None:
    attention = make(hashes=2, chunk=2, once=once)
    x = torch.randn(1, 11, 12, dtype=torch.double, requires_grad=True)
    keep = keep_mask(11, 10)
    pos = positions(11)
    order = attention.sort(attention.project_kv(x, pos, NO_POSITION), AttentionMask(pos, pos, keep, True))
    assert order is not None

    def attend(x: Tensor) -> Tensor:
        kv = attention.project_kv(x, pos, NO_POSITION)
        return attention(x, kv, AttentionMask(pos, pos, keep, True), NO_POSITION, order)[:, :10]

    assert torch.autograd.gradcheck(attend, x, fast_mode=True)


def test_padding_has_no_gradient_and_no_effect() -> None:
    attention = make(hashes=2, chunk=4, buckets=4)
    keep = keep_mask(30, 30, 19)
    x = torch.randn(2, 30, 12, dtype=torch.double, requires_grad=True)
    out = run(attention, x, keep)
    out[keep].sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()
    assert not x.grad[~keep].any()
    other = torch.where(keep.unsqueeze(-1), x.detach(), torch.randn_like(x) * 100)
    torch.testing.assert_close(run(attention, other, keep)[keep], out[keep])


def test_later_tokens_are_not_attended_to() -> None:
    """Later tokens can change which keys are compared, but their values do not affect earlier tokens."""
    attention = make(hashes=2, chunk=4)
    x = torch.randn(1, 40, 12, dtype=torch.double)
    weights: list[Tensor] = []
    attention.weights.register_forward_hook(lambda _m, _i, out: weights.append(out))
    run(attention, x)
    assert not weights[0].triu(1).any()
    own_weight = weights[0].diagonal(dim1=-2, dim2=-1)
    assert (own_weight[..., 0] == 1).all()
    assert ((own_weight < 1e-300) | (own_weight == 1)).all()


def test_hashing_depends_only_on_the_layer() -> None:
    stack = Stack(mixer="lsh", width=12, heads=2, lsh=LshConfig(chunk=4))
    first = LSHAttention(stack, 0).eval()
    second = LSHAttention(stack, 1).train()
    x = torch.randn(2, 2, 50, 6)
    before = torch.get_rng_state()
    assert torch.equal(first._hash(x, None), first.train()._hash(x, None))
    assert not torch.equal(first._hash(x, None), second._hash(x, None))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("length", "chunk", "expected"), [(64, 16, (8,)), (96, 16, (8,)), (2048, 8, (16, 32)), (512, 8, (8, 16))]
)
def test_buckets_grow_with_the_length(length: int, chunk: int, expected: tuple[int, ...]) -> None:
    attention = make(chunk=chunk)
    assert attention._buckets(length) == expected
    bucket = attention._hash(torch.randn(4, 2, length, 6, dtype=torch.double), None)
    assert (int(bucket.min()), int(bucket.max())) == (0, math.prod(expected) - 1)


def test_bucket_depends_only_on_direction() -> None:
    attention = make(chunk=4)
    x = torch.randn(1, 2, 200, 6, dtype=torch.double)
    assert torch.equal(attention._hash(x, None), attention._hash(x * 7, None))
    opposite = attention._hash(-x, None)
    count = attention._buckets(200)
    assert len(count) == 2
    low = attention._hash(x, None) % count[0]
    high = attention._hash(x, None) // count[0]
    assert torch.equal(opposite % count[0], (low + count[0] // 2) % count[0])
    assert torch.equal(opposite // count[0], (high + count[1] // 2) % count[1])


def language_model(lsh: LshConfig, layers: int = 2, **changes: object) -> Model:
    shape = {"width": 16, "heads": 2, "head_width": 8, "ff": 24, "norm_at": "pre", "norm_eps": 1e-12, "bias": "ff"}
    ends = {"residual": "reversible", "position": "axial", "axial": AxialConfig(rows=16, columns=32, row_width=4)}
    stack = Stack(mixer="lsh", layers=layers, dropout=0.0, lsh=lsh, **(shape | ends | changes))
    tied = stack.residual == "add"
    return Model(Config(source_vocab=40, target_vocab=40, decoder=stack, tie_output=tied, scale_embeddings=False))


@pytest.mark.parametrize("residual", ["add", "reversible"])
def test_decoding_token_by_token_equals_one_pass(residual: str) -> None:
    model = language_model(LshConfig(chunk=8), residual=residual).double().eval()
    tokens = torch.randint(4, 40, (2, 30))
    keep = keep_mask(30, 30, 22, left=True)
    with torch.inference_mode():
        whole = model(tokens, keep)
        _, state = model.read(tokens[:, :25], State(()), keep[:, :25])
        for t in range(25, 30):
            scores, state = model.step(tokens[:, t], state)
            torch.testing.assert_close(scores, whole[:, t])


LAYER_NAMES = {
    "attention.layer_norm": "attention_residual.norm",
    "attention.self_attention.query_key": "attention.query_key",
    "attention.self_attention.value": "attention.value",
    "attention.output.dense": "attention.out",
    "feed_forward.layer_norm": "feed_forward_residual.norm",
    "feed_forward.dense.dense": "feed_forward.up",
    "feed_forward.output.dense": "feed_forward.down",
}


def weight_names(layers: int) -> dict[str, str]:
    """The weights of a model: name in transformers -> name in regard."""
    table = {
        "reformer.embeddings.word_embeddings": "target_embedding",
        "reformer.encoder.layer_norm": "decoder.norm",
        "lm_head.decoder": "output",
    }
    for i in range(layers):
        table |= {f"reformer.encoder.layers.{i}.{a}": f"decoder.blocks.{i}.{b}" for a, b in LAYER_NAMES.items()}
    prefix = "reformer.embeddings.position_embeddings.weights"
    whole = {f"{prefix}.0": "decoder.position.rows.weight", f"{prefix}.1": "decoder.position.columns.weight"}
    parts = {f"{a}.{part}": f"{b}.{part}" for a, b in table.items() for part in ("weight", "bias")}
    return parts | whole


def paired_models(monkeypatch: pytest.MonkeyPatch, lsh: LshConfig, seed: int = 5, layers: int = 2):
    """The models of transformers and regard with the same weights and the same hashes, in double precision."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(seed)
    theirs = transformers.ReformerModelWithLMHead(
        transformers.ReformerConfig(
            vocab_size=40, attn_layers=["lsh"] * layers, hidden_size=16, num_attention_heads=2, attention_head_size=8,
            feed_forward_size=24, axial_pos_shape=(16, 32), axial_pos_embds_dim=(4, 12), hash_seed=seed,
            lsh_attn_chunk_length=lsh.chunk, num_hashes=lsh.hashes, num_buckets=lsh.buckets, is_decoder=True,
            max_position_embeddings=512, hidden_dropout_prob=0.0, initializer_range=0.5, use_cache=False,
        )
    )  # fmt: skip
    theirs = theirs.double().eval()
    draw = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *size, dtype=None, **more: draw(*size, **more).to(dtype))
    ours = language_model(lsh, layers).double().eval()
    table = weight_names(layers)
    state = dict(theirs.state_dict())
    assert not state.pop("lm_head.bias").any()  # transformers never adds it
    shapes = {name: x.shape for name, x in ours.state_dict().items()}
    ours.load_state_dict({table[name]: x.view(shapes[table[name]]) for name, x in state.items()})
    for block in ours.decoder.blocks:
        block.attention.seed = seed
    return theirs, ours


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("lsh", "length", "real_length"),
    [
        (LshConfig(hashes=1, chunk=8), 64, None),
        (LshConfig(hashes=2, chunk=8), 64, None),
        (LshConfig(hashes=4, chunk=8), 512, None),
        (LshConfig(hashes=2, chunk=8), 203, None),  # an incomplete chunk
        (LshConfig(hashes=2, chunk=8, buckets=6), 200, 150),  # padding
        (LshConfig(hashes=1, chunk=8, before=1), 8, None),  # exact
    ],
)
def test_logits_equal_transformers(
    monkeypatch: pytest.MonkeyPatch, lsh: LshConfig, length: int, real_length: int | None
) -> None:
    theirs, ours = paired_models(monkeypatch, lsh)
    tokens = torch.randint(4, 40, (2, length))
    keep = None if real_length is None else keep_mask(length, length, real_length)
    with torch.no_grad():
        expected = theirs(tokens, attention_mask=None if keep is None else keep.long()).logits
        logits = ours(tokens, keep)
    assert expected.std() > 0.5
    rows = slice(None) if keep is None else keep
    torch.testing.assert_close(logits[rows], expected[rows], atol=1e-9, rtol=1e-9)


@pytest.mark.filterwarnings("ignore")
def test_gradients_equal_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = paired_models(monkeypatch, LshConfig(hashes=2, chunk=8))
    tokens = torch.randint(4, 40, (1, 512))  # transformers trains only at the full length
    theirs.train()(tokens).logits.square().sum().backward()
    ours.train()(tokens, None).square().sum().backward()
    table = weight_names(2)
    parameters = dict(ours.named_parameters())
    count = 0
    for name, weight in theirs.named_parameters():
        if name != "lm_head.bias":
            assert weight.grad is not None and weight.grad.any()
            grad = parameters[table[name]].grad
            torch.testing.assert_close(grad, weight.grad.view_as(grad), rtol=1e-8, atol=1e-8)
            count += 1
    assert count == len(parameters)
