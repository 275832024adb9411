"""BERT: an encoder that predicts masked tokens, tells classes, or gives vectors."""

from __future__ import annotations

from regard.config import Config, SpecialIds
from regard.convert.table import ACTIVATIONS, Family, Fields, Json, Table, class_count, stack_of, word_for
from regard.convert.tokenizers import their_labels

OUTPUTS: dict[str, Json] = {
    "BertForMaskedLM": {"output": "transformed", "output_bias": True},
    "BertForSequenceClassification": {"output": "classes", "output_bias": True, "pooler": True},
    "BertModel": {"output": "none"},
}


def ours(hf: Fields, names: set[str], architecture: str, ids: SpecialIds) -> Json:
    hf.fixed("position_embedding_type", "absolute")
    hf.fixed("is_decoder", False)
    hf.fixed("add_cross_attention", False)
    hf.fixed("tie_word_embeddings", True)
    hf.fixed("problem_type", None, "single_label_classification")
    config: Json = {
        "source_vocab": hf.count("vocab_size"),
        "target_vocab": hf.count("vocab_size"),
        "encoder": {
            "layers": hf.count("num_hidden_layers"),
            "width": hf.count("hidden_size"),
            "heads": hf.count("num_attention_heads"),
            "ff": hf.count("intermediate_size"),
            "activation": hf.choice("hidden_act", ACTIVATIONS, "gelu"),
            "norm_eps": hf.get("layer_norm_eps", 1e-12),
            "embed_norm": True,
            "position": "learned",
            "max_length": hf.count("max_position_embeddings", 512),
            "dropout": hf.get("hidden_dropout_prob", 0.1),
            "attention_dropout": hf.get("attention_probs_dropout_prob", 0.1),
        },
        "token_types": hf.count("type_vocab_size", 2),
        "scale_embeddings": False,
        "ids": ids,
        **OUTPUTS[architecture],
    }
    if architecture == "BertForSequenceClassification":
        config["classes"] = class_count(hf)
    if architecture == "BertModel":
        config["pooler"] = "bert.pooler.dense.weight" in names
    return config


def theirs(config: Config) -> Json:
    encoder = stack_of(config, "encoder")
    output = {"transformed": "BertForMaskedLM", "classes": "BertForSequenceClassification", "none": "BertModel"}
    return {
        "architectures": [output.get(config.output, "BertForMaskedLM")],
        "vocab_size": config.source_vocab,
        "hidden_size": encoder.width,
        "num_hidden_layers": encoder.layers,
        "num_attention_heads": encoder.heads,
        "intermediate_size": encoder.ff,
        "hidden_act": word_for(encoder.activation),
        "hidden_dropout_prob": encoder.dropout,
        "attention_probs_dropout_prob": encoder.attention_dropout,
        "layer_norm_eps": encoder.norm_eps,
        "max_position_embeddings": encoder.max_length,
        "type_vocab_size": config.token_types or 1,
        "tie_word_embeddings": True,
        "pad_token_id": config.ids.pad,
        "bos_token_id": config.ids.sos,
        "eos_token_id": config.ids.eos,
        **their_labels((), config),
    }


def table(config: Config, hf: Fields) -> Table:
    layer, block = "bert.encoder.layer.{n}.", "encoder.blocks.{n}."
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
        **({"classifier": "output"} if config.output == "classes" else {"cls.predictions": "output"}),
    }


BERT = Family(
    model_type="bert",
    architectures=tuple(OUTPUTS),
    ours=ours,
    theirs=theirs,
    table=table,
    towers=("encoder",),
    prefix="bert.",
    heads=("cls.", "classifier."),
    same=lambda hf: {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    # The last two were trained to tell whether two sentences belong together, beside guessing masked tokens.
    ignored=("bert.embeddings.position_ids", "bert.pooler.dense.*", "cls.seq_relationship.*"),
)
