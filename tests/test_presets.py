"""Presets: parameter counts equal formulas and published counts; presets can be changed."""

from __future__ import annotations

from typing import Any

import pytest

from regard.config import Config, Stack
from regard.errors import UserError
from regard.model import on_meta
from regard.presets import PRESETS, merge, preset
from regard.recipe import assign


def count(config: Config) -> int:
    return sum(parameter.numel() for parameter in on_meta(config).parameters())


def attention(stack: Stack, context: int, *, is_self: bool) -> int:
    """Query, key, value and output matrices with biases, and the additional weights of self-attention."""
    bias = int(stack.bias == "all")
    inner = stack.heads * stack.head
    shared = stack.kv * stack.head
    total = (stack.width + bias) * inner + 2 * (context + bias) * shared + (inner + bias) * stack.width
    if is_self and stack.mixer == "lsh":
        total -= (stack.width + bias) * inner  # queries and keys share a matrix
    if is_self and stack.position == "relative":
        total += 2 * inner + stack.width * inner  # u, v and the matrix over distances
    return total


def stack_parameters(stack: Stack, source: int | None) -> int:
    """The parameters of the layers, positions and norms of a Transformer stack, by formula."""
    bias = int(stack.bias != "none")
    norm = (2 if stack.norm == "layer" else 1) * stack.width
    layer = attention(stack, stack.width, is_self=True) + norm
    layer += 0 if source is None else attention(stack, source, is_self=False) + norm
    layer += (2 if stack.gated else 1) * (stack.width + bias) * stack.ff + (stack.ff + bias) * stack.width + norm
    total = stack.layers * layer
    total += norm * (2 if stack.residual == "reversible" else 1) if stack.norm_at == "pre" else 0
    total += norm if stack.embed_norm else 0
    if stack.axial is not None:
        total += stack.axial.rows * stack.axial.row_width + stack.axial.columns * (stack.width - stack.axial.row_width)
    return total + {"learned": stack.max_length * stack.width, "bucket": 32 * stack.heads}.get(stack.position, 0)


def transformer(config: Config) -> int:
    """The parameters of embeddings, stacks and output layers, by formula."""
    encoder = config.encoder
    decoder = config.decoder
    total = 0
    if encoder is not None:
        total += stack_parameters(encoder, None) + config.token_types * encoder.width
        if config.patches is not None:
            total += (config.patches.channels * config.patches.size**2 + 1) * encoder.width + encoder.width
        else:
            total += config.source_vocab * encoder.width
    if decoder is not None:
        total += stack_parameters(decoder, None if encoder is None else encoder.width)
        total += 0 if config.share_embeddings else config.target_vocab * decoder.width
    top = decoder or encoder
    assert top is not None
    total += (top.width + 1) * top.width if config.pooler else 0
    total += (top.width + 1) * top.width + 2 * top.width if config.output == "transformed" else 0
    if config.output != "none":
        outputs = config.classes or config.target_vocab
        tied = config.tie_output and config.classes is None
        total += (0 if tied else outputs * top.out_width) + (outputs if config.output_bias else 0)
    return total


def recurrent(config: Config) -> int:
    """The parameters of a recurrent encoder-decoder, by formula."""
    encoder = config.encoder
    decoder = config.decoder
    assert encoder is not None and decoder is not None
    width = encoder.width
    gates = {"gru": 3, "lstm": 4}[encoder.mixer]

    def cell(inputs: int, states: int) -> int:
        return gates * states * (inputs + states + 2)

    joined = width * (1 + decoder.input_feeding + decoder.attend_first)
    score = {"additive": width * width * 2 + 2 * width, "general": width * width}[decoder.score]
    total = (config.source_vocab + config.target_vocab * (1 if config.tie_output else 2)) * width
    total += encoder.layers * 2 * cell(width, width // 2)
    total += cell(joined, width) + (decoder.layers - 1) * cell(width, width)
    total += decoder.layers * (width + 1) * width  # bridges
    total += score + (2 * width + 1) * width
    return total


@pytest.mark.parametrize("vocab", [None, 3700])
@pytest.mark.parametrize("name", PRESETS)
def test_parameter_counts_equal_the_formulas(name: str, vocab: int | None) -> None:
    config = preset(name, vocab)
    assert count(config) == (recurrent if "rnn" in name else transformer)(config)


VECTORS = {"output": "none", "output_bias": False, "pooler": True}

# Published counts, with their published precision.
PAPERS = [
    ("transformer-base", 37_000, 65e6, 0.03),  # Vaswani et al. 2017, table 3, base; a shared vocabulary of about 37k
    ("transformer-big", 37_000, 213e6, 0.03),  # the same, big
    ("bert-base", None, 110e6, 0.01),  # Devlin et al. 2019, section 3, BERT-base: total parameters = 110M
    ("bert-large", None, 340e6, 0.02),  # the same, BERT-large: 340M
    ("gpt2", None, 117e6, 0.07),  # Radford et al. 2019, table 2: 117M, which the release's notes corrected to 124M
    ("t5-small", None, 60e6, 0.01),  # Raffel et al. 2020, section 3.7, Small: about 60 million
    ("t5-base", None, 220e6, 0.02),  # the same, Base: about 220 million
    ("llama-2-7b", None, 7e9, 0.04),  # Touvron et al. 2023 (Llama 2), table 1
    ("llama-2-70b", None, 70e9, 0.02),  # the same
    ("llama-3-8b", None, 8e9, 0.01),  # Dubey et al. 2024, table 3
    ("vit-base", None, 86e6, 0.01),  # Dosovitskiy et al. 2021, table 1, ViT-Base
    ("transformer-xl", None, 41e6, 0.003),  # Dai et al. 2019, table 2 (enwik8): 12L Transformer-XL
]


@pytest.mark.parametrize(("name", "vocab", "published", "tolerance"), PAPERS, ids=[row[0] for row in PAPERS])
def test_counts_are_close_to_published_counts(name: str, vocab: int | None, published: float, tolerance: float) -> None:
    assert count(preset(name, vocab)) == pytest.approx(published, rel=tolerance)


# Parameters of the released weights, as counted by the class of transformers that loads them.
RELEASES: list[tuple[str, dict[str, Any], int]] = [
    ("bert-base", {}, 109_514_298),  # bert-base-uncased, BertForMaskedLM
    ("bert-base", VECTORS, 109_482_240),  # bert-base-uncased, BertModel
    ("bert-large", VECTORS, 335_141_888),  # bert-large-uncased, BertModel
    ("gpt2", {}, 124_439_808),  # gpt2, GPT2LMHeadModel
    ("t5-small", {}, 60_506_624),  # t5-small, T5ForConditionalGeneration
    ("t5-base", {}, 222_903_552),  # t5-base, T5ForConditionalGeneration
    ("t5-v1.1-small", {}, 76_961_152),  # google/t5-v1_1-small, T5ForConditionalGeneration
    ("llama-2-7b", {}, 6_738_415_616),  # meta-llama/Llama-2-7b-hf, LlamaForCausalLM
    ("llama-2-70b", {}, 68_976_648_192),  # meta-llama/Llama-2-70b-hf, LlamaForCausalLM
    ("llama-3-8b", {}, 8_030_261_248),  # meta-llama/Meta-Llama-3-8B, LlamaForCausalLM
    ("vit-base", {}, 86_567_656),  # google/vit-base-patch16-224, ViTForImageClassification
]


@pytest.mark.parametrize(("name", "changes", "released"), RELEASES)
def test_counts_equal_those_of_released_weights(name: str, changes: dict[str, Any], released: int) -> None:
    assert count(preset(name, changes=changes)) == released


@pytest.mark.parametrize("name", PRESETS)
def test_position_tables_have_a_row_per_position(name: str) -> None:
    """An image has one position per patch and one for the class token."""
    config = preset(name)
    for stack in (config.encoder, config.decoder):
        if stack is not None and config.patches is not None:
            assert stack.max_length == 1 + config.patches.count
        if stack is not None and stack.axial is not None:
            assert stack.max_length == stack.axial.rows * stack.axial.columns


def changed_base(*settings: str) -> Config:
    """transformer-base, changed by `--set` settings."""
    tables: dict[str, Any] = {}
    for setting in settings:
        assign(tables, setting)
    return preset("transformer-base", 37_000, changes=tables["model"])


BASE = preset("transformer-base", 37_000)


@pytest.mark.parametrize("heads", [1, 4, 16, 32])
def test_number_of_heads_does_not_change_the_count(heads: int) -> None:
    """Vaswani et al. 2017, table 3 (A)."""
    config = changed_base(f"heads={heads}")
    assert config.encoder is not None
    assert config.encoder.head == 512 // heads
    assert count(config) == count(BASE)


@pytest.mark.parametrize("width", [16, 32])
def test_narrow_heads_reduce_the_count(width: int) -> None:
    """Table 3 (B): narrower heads reduce the matrices of each of the 18 attentions."""
    config = changed_base(f"head_width={width}")
    removed = 8 * (64 - width)
    assert count(BASE) - count(config) == 18 * (4 * 512 * removed + 3 * removed)


@pytest.mark.parametrize(
    "changes",
    [["layers=2"], ["layers=4"], ["layers=8"], ["width=256"], ["width=1024"], ["ff=1024"], ["ff=4096"]],
)
def test_layers_width_and_ff_change_the_count(changes: list[str]) -> None:
    """Table 3 (C)."""
    config = changed_base(*changes)
    key, value = changes[0].split("=")
    assert getattr(config.encoder, key) == getattr(config.decoder, key) == int(value)
    assert count(config) == transformer(config)
    assert (count(config) > count(BASE)) == (int(value) > getattr(BASE.encoder, key))


def test_dropout_and_label_smoothing_do_not_change_the_count() -> None:
    """Table 3 (D)."""
    tables: dict[str, Any] = {}
    for setting in ("dropout=0.2", "label_smoothing=0.0"):
        assign(tables, setting)
    assert tables["train"] == {"label_smoothing": 0.0}
    config = preset("transformer-base", 37_000, changes=tables["model"])
    assert config.encoder is not None and config.decoder is not None
    assert config.encoder.dropout == config.decoder.dropout == 0.2
    assert count(config) == count(BASE)


def test_learned_positions_add_one_table_per_stack() -> None:
    """Table 3 (E)."""
    assert count(changed_base("position=learned", "model.max_length=512")) - count(BASE) == 2 * 512 * 512


def test_meta_model_may_be_larger_than_memory() -> None:
    wide = {"width": 8192, "heads": 64, "layers": 1, "bias": "none"}
    model = on_meta(Config(source_vocab=100, target_vocab=100, decoder=Stack(**wide)))
    attention = model.decoder.blocks[0].attention
    q_k_v = [*attention.query.parameters(), *attention.key_value.parameters()]
    assert sum(p.numel() for p in q_k_v) == 3 * 8192**2  # 201 million


def test_vocabulary_sizes_override_the_published_ones() -> None:
    both = preset("transformer-base", source_vocab=50, target_vocab=60)
    assert (both.source_vocab, both.target_vocab, both.share_embeddings) == (50, 60, False)
    assert preset("transformer-base", 70).share_embeddings
    assert preset("gpt2").target_vocab == 50257  # the published size by default
    assert preset("gpt2", 70).target_vocab == 70
    with pytest.raises(UserError, match="one vocabulary"):
        preset("transformer-base", source_vocab=50, target_vocab=60, changes={"share_embeddings": True})


def test_vocabulary_of_zero_is_refused() -> None:
    with pytest.raises(UserError, match="source_vocab"):
        preset("transformer-tiny", 0)


def test_unknown_presets_have_a_suggestion() -> None:
    with pytest.raises(UserError, match=r"'transformer-basic'.*did you mean 'transformer-base'"):
        preset("transformer-basic")
    with pytest.raises(
        UserError, match=r"preset transformer-tiny: .*\n.*encoder.layer: no such key; did you mean 'layers'"
    ):
        preset("transformer-tiny", changes={"encoder": {"layer": 3}})


def test_changes_do_not_modify_the_presets() -> None:
    before = repr(PRESETS)
    changes = {"encoder": {"layers": 1}, "decoder": {"layers": 3}, "tie_output": False}
    config = preset("transformer-tiny", 50, changes=changes)
    assert config.encoder is not None and config.decoder is not None
    assert (config.encoder.layers, config.decoder.layers, config.tie_output) == (1, 3, False)
    assert config.encoder.width == 128
    assert repr(PRESETS) == before
    assert changes == {"encoder": {"layers": 1}, "decoder": {"layers": 3}, "tie_output": False}


def test_stack_can_be_removed() -> None:
    config = preset("transformer-tiny", 50, changes={"encoder": None})
    assert config.encoder is None
    assert config.decoder is not None


def test_merge_replaces_values_and_merges_tables() -> None:
    base = {"a": 1, "b": {"c": 2, "d": 3}}
    assert merge(base, {"b": {"c": 4, "e": 5}, "f": 6}) == {"a": 1, "b": {"c": 4, "d": 3, "e": 5}, "f": 6}
    assert merge(base, {"b": None}) == {"a": 1, "b": None}
    assert base == {"a": 1, "b": {"c": 2, "d": 3}}
