"""BERT: an encoder for masked language modelling, classification or embeddings."""

from __future__ import annotations

from regard.config import Config
from regard.convert.family import ENCODER_KEYS, Family, Fields, Key
from regard.convert.table import Table


def _weights(config: Config, hf: Fields) -> Table:
    layer = "bert.encoder.layer.{n}."
    block = "encoder.blocks.{n}."
    return {
        "bert.embeddings.word_embeddings": "source_embedding",
        "bert.embeddings.position_embeddings": "encoder.position.table",
        "bert.embeddings.token_type_embeddings": "token_type_embedding",
        "bert.embeddings.LayerNorm": "encoder.embed_norm",
        f"{layer}attention.self.query": f"{block}attention.query",
        (f"{layer}attention.self.key", f"{layer}attention.self.value"): f"{block}attention.key_value",
        f"{layer}attention.output.dense": f"{block}attention.out",
        f"{layer}attention.output.LayerNorm": f"{block}attention_residual.norm",
        f"{layer}intermediate.dense": f"{block}feed_forward.up",
        f"{layer}output.dense": f"{block}feed_forward.down",
        f"{layer}output.LayerNorm": f"{block}feed_forward_residual.norm",
        "bert.pooler.dense": "pooler",
        "cls.predictions.transform.dense": "transform.dense",
        "cls.predictions.transform.LayerNorm": "transform.norm",
        "classifier" if config.output == "classes" else "cls.predictions": "output",
    }


BERT = Family(
    model_type="bert",
    architectures={
        "BertForMaskedLM": {"output": "transformed", "output_bias": True, "pooler": False},
        "BertForSequenceClassification": {"output": "classes", "output_bias": True, "pooler": True},
        "BertModel": {"output": "none"},
    },
    config=(
        Key.fixed("position_embedding_type", "absolute", write=False),
        Key.fixed("is_decoder", False, write=False),
        Key.fixed("add_cross_attention", False, write=False),
        Key.fixed("tie_word_embeddings", True),
        Key.fixed("problem_type", None, "single_label_classification", write=False),
        Key.count("vocab_size", "source_vocab", "target_vocab"),
        *ENCODER_KEYS,
        Key.count("max_position_embeddings", "encoder.max_length", default=512),
        Key.value("hidden_dropout_prob", "encoder.dropout", default=0.1),
        Key.value("attention_probs_dropout_prob", "encoder.attention_dropout", default=0.1),
        Key.of(
            "type_vocab_size",
            "token_types",
            read=lambda hf: hf.count("type_vocab_size", 2),
            write=lambda types: types or 1,
        ),
        Key.stored("bert.pooler.dense.weight", "pooler"),
        Key.written("bos_token_id", lambda config: config.ids.sos),
        Key.written("eos_token_id", lambda config: config.ids.eos),
        Key.written("pad_token_id", lambda config: config.ids.pad),
    ),
    constants={"encoder": {"embed_norm": True, "position": "learned"}, "scale_embeddings": False},
    weights=_weights,
    prefix="bert.",
    unprefixed=("cls.", "classifier."),
    aliases=lambda hf: {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    # The last two belong to next sentence prediction, a second training objective of BERT.
    ignored=("bert.embeddings.position_ids", "bert.pooler.dense.*", "cls.seq_relationship.*"),
)
