"""Small models of transformers with random weights, saved by transformers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

V = 40
BERT = dict(
    vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
    max_position_embeddings=30,
)  # fmt: skip
T5 = dict(vocab_size=V, d_model=16, d_kv=5, d_ff=24, num_layers=2, num_heads=3, decoder_start_token_id=0)
LLAMA = dict(
    vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=16,
)  # fmt: skip
REFORMER = dict(
    vocab_size=V, hidden_size=16, attn_layers=["lsh", "lsh"], num_attention_heads=2, attention_head_size=6,
    feed_forward_size=24, max_position_embeddings=64, lsh_attn_chunk_length=16, is_decoder=True, num_hashes=2,
)  # fmt: skip
VIT = dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=8, patch_size=4,
    num_channels=3,
)  # fmt: skip


def quiet(message: str) -> None:
    """A log that discards its messages."""


def marian(t: Any, **changes: Any) -> Any:
    sizes = {f"{side}_{key}": value for side in ("encoder", "decoder")
             for key, value in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 24))}  # fmt: skip
    ids = dict(pad_token_id=V - 1, eos_token_id=0, decoder_start_token_id=V - 1)
    options = dict(vocab_size=V, d_model=16, activation_function="swish", scale_embedding=True) | sizes | ids | changes
    model = t.MarianMTModel(t.MarianConfig(**options))
    model.final_logits_bias.normal_()
    return model


def untied_t5(t: Any) -> Any:
    model = t.T5ForConditionalGeneration(t.T5Config(**T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False))
    model.lm_head.weight = torch.nn.Parameter(torch.empty(V, 16))
    return model


MODELS: dict[str, Callable[[Any], Any]] = {
    "marian": marian,
    "marian-two-vocabularies": lambda t: marian(t, share_encoder_decoder_embeddings=False, decoder_vocab_size=V + 3),
    "bert-vectors": lambda t: t.BertModel(t.BertConfig(**BERT)),
    "bert-masked": lambda t: t.BertForMaskedLM(t.BertConfig(**BERT, hidden_act="gelu_new", layer_norm_eps=1e-6)),
    "bert-classes": lambda t: t.BertForSequenceClassification(t.BertConfig(**BERT, num_labels=5)),
    "gpt2": lambda t: t.GPT2LMHeadModel(
        t.GPT2Config(vocab_size=V, n_embd=16, n_layer=2, n_head=2, n_positions=30, bos_token_id=3, eos_token_id=3)
    ),
    "t5": lambda t: t.T5ForConditionalGeneration(t.T5Config(**T5, num_decoder_layers=1)),
    "t5-1.1": untied_t5,
    "llama-2": lambda t: t.LlamaForCausalLM(t.LlamaConfig(**LLAMA)),
    "llama-3": lambda t: t.LlamaForCausalLM(
        t.LlamaConfig(**LLAMA, head_dim=6, tie_word_embeddings=True, rope_parameters=LLAMA3)
    ),
    "reformer": lambda t: t.ReformerModelWithLMHead(
        t.ReformerConfig(**REFORMER, axial_pos_shape=(4, 16), axial_pos_embds_dim=(6, 10), num_buckets=[2, 4])
    ),
    "reformer-learned": lambda t: t.ReformerModelWithLMHead(t.ReformerConfig(**REFORMER, axial_pos_embds=False)),
    "vit": lambda t: t.ViTForImageClassification(t.ViTConfig(**VIT, num_labels=5)),
}


def make(name: str, path: Path, **save: Any) -> Any:
    """Make a model whose weights all affect the outputs, save it in `path`, and return it."""
    import transformers

    torch.manual_seed(3)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        transformers.utils.logging.disable_progress_bar()
        model = MODELS[name](transformers).eval()
        for key, parameter in model.named_parameters():
            # Sinusoidal positions are not weights, and transformers does not use the lm_head.bias of a Reformer.
            if "embed_positions" not in key and key != "lm_head.bias":
                parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1 and "bias" not in key))
        model.save_pretrained(path, **save)
    return model
