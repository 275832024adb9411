"""Config tables: export and import are inverse, and every key that affects the outputs is read or refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from kit.families import shrunk
from kit.hf import make
from regard.config import Config, parse
from regard.convert.family import Family, Fields, read_labels, write_labels
from regard.convert.hf import FAMILIES, identify
from regard.convert.table import expand
from regard.errors import UserError
from regard.model import on_meta
from regard.presets import merge
from regard.weight_files import weights_of

FLAGS = st.booleans()
RATES = st.sampled_from([0.0, 0.1, 0.25])
LENGTHS = st.integers(1, 40)
HEAD_WIDTHS = st.sampled_from([2, 4, 6])
STACK: dict[str, st.SearchStrategy] = {
    "layers": st.integers(1, 4),
    "ff": st.integers(1, 30),
    "activation": st.sampled_from(["relu", "gelu", "gelu_tanh", "silu", "tanh"]),
    "norm_eps": st.sampled_from([1e-12, 1e-5, 0.1]),
    "dropout": RATES,
    "attention_dropout": RATES,
}
HEADS: list[dict[str, Any]] = [
    {"output": "transformed", "output_bias": True},
    {"output": "classes", "classes": 4, "output_bias": True, "pooler": True},
    {"output": "none", "output_bias": False},
    {"output": "none", "output_bias": False, "pooler": True},
]
DEFAULT_LENGTH = {"max_length": 1024}  # for families without a length limit


class Draw:
    """Draws values for the fields that the config table of a family sets."""

    def __init__(self, data: st.DataObject) -> None:
        self.of = data.draw

    def stack(self, *omitted: str, **more: st.SearchStrategy) -> dict[str, Any]:
        return {name: self.of(values) for name, values in (STACK | more).items() if name not in omitted}

    def ids(self, *starts: str) -> dict[str, Any]:
        ids = dict(zip(("pad", "unk", "sos", "eos", "mask"), self.of(st.permutations(range(6))), strict=False))
        return {"ids": ids, "start": self.of(st.sampled_from(starts or ("sos", "eos", "pad")))}

    def flags(self, *names: str) -> dict[str, bool]:
        return {name: self.of(FLAGS) for name in names}

    def bert(self) -> dict[str, Any]:
        types = self.of(st.integers(1, 3))
        head = self.of(st.sampled_from(HEADS))
        return {"encoder": self.stack(max_length=LENGTHS), "token_types": types, **head, **self.ids("sos")}

    def gpt2(self) -> dict[str, Any]:
        return {"decoder": self.stack(max_length=LENGTHS), **self.flags("tie_output"), **self.ids()}

    def llama(self) -> dict[str, Any]:
        stack = self.stack(
            "dropout",
            kv_heads=st.sampled_from([1, 2]),
            head_width=HEAD_WIDTHS,
            bias=st.sampled_from(["all", "ff", "none"]),
            max_length=LENGTHS,
        )
        rotary: dict[str, Any] = {"base": self.of(st.sampled_from([10.0, 500000.0]))}
        if self.of(FLAGS):
            rotary |= {"factor": 8.0, "low": 0.5, "high": self.of(st.sampled_from([3.0, 4.0])), "original": 99}
        return {"decoder": stack | {"rotary": rotary}, **self.flags("tie_output"), **self.ids()}

    def marian(self) -> dict[str, Any]:
        shared = self.stack("layers", "ff", "norm_eps", ff_dropout=RATES, max_length=LENGTHS)
        sizes = [{"layers": self.of(STACK["layers"]), "ff": self.of(STACK["ff"])} for _ in range(2)]
        flags = self.flags("share_embeddings", "scale_embeddings", "output_bias")
        return {"encoder": shared | sizes[0], "decoder": shared | sizes[1], **flags, **self.ids()}

    def t5(self) -> dict[str, Any]:
        shared = self.stack("dropout", "attention_dropout", gated=FLAGS, head_width=HEAD_WIDTHS) | DEFAULT_LENGTH
        shared |= dict.fromkeys(("dropout", "attention_dropout", "ff_dropout"), self.of(RATES))
        if shared["gated"] and shared["activation"] == "gelu":
            shared["activation"] = "gelu_tanh"  # transformers uses the tanh approximation for gated-gelu
        layers = self.of(STACK["layers"])
        return {"encoder": shared, "decoder": shared | {"layers": layers}, **self.flags("tie_output"), **self.ids()}

    def transfo_xl(self) -> dict[str, Any]:
        reach = st.none() | st.integers(1, 9)
        stack = self.stack("activation", "dropout", head_width=HEAD_WIDTHS, memory=st.integers(2, 9), reach=reach)
        stack |= dict.fromkeys(("dropout", "ff_dropout"), self.of(RATES)) | DEFAULT_LENGTH
        stack["window"] = stack["memory"] - 1 if self.of(FLAGS) else None
        return {"decoder": stack, **self.flags("tie_output", "output_bias"), **self.ids()}

    def reformer(self) -> dict[str, Any]:
        stack = self.stack(head_width=HEAD_WIDTHS, max_length=LENGTHS)
        stack["lsh"] = {"buckets": self.of(st.sampled_from([None, 2, 8]))} | {
            name: self.of(st.integers(least, 5))
            for name, least in (("hashes", 1), ("chunk", 1), ("before", 0), ("after", 0))
        }
        axial = {"rows": self.of(LENGTHS), "columns": self.of(LENGTHS), "row_width": self.of(st.integers(1, 11))}
        positions = {"position": "axial", "axial": axial} if self.of(FLAGS) else {"position": "learned", "axial": None}
        return {"decoder": stack | positions, **self.ids()}

    def vit(self) -> dict[str, Any]:
        rows, columns, channels, classes = (self.of(st.integers(1, 4)) for _ in range(4))
        patches = {"height": 2 * rows, "width": 2 * columns, "channels": channels, "size": 2}
        stack = self.stack() | {"max_length": 1 + rows * columns}
        # The model reads no tokens: the vocabulary only holds the default special tokens.
        return {"encoder": stack, "patches": patches, "classes": classes, "source_vocab": 4, "target_vocab": 4}


PRESETS = {
    "bert": "bert-base",
    "gpt2": "gpt2",
    "llama": "llama-3-8b",
    "marian": "marian",
    "t5": "t5-small",
    "transfo-xl": "transformer-xl",
    "reformer": "reformer",
    "vit": "vit-base",
}


def round_trip(family: Family, config: Config) -> Config:
    """Export a config, pass it through JSON, and import it."""
    data = json.loads(json.dumps(family.write(config)))
    table = family.weights(config, Fields(data, "here"))
    names = {name for rule in expand(table, weights_of(on_meta(config))) for name in rule.theirs}
    hf = Fields(data, "here", names, config.ids)
    return family.read(hf, identify(hf)[1], config.frame)


@pytest.mark.parametrize("name", FAMILIES)
@given(data=st.data())
@settings(deadline=None, max_examples=25)
def test_exported_config_is_imported_unchanged(name, data):
    changes = getattr(Draw(data), name.replace("-", "_"))()
    config = parse(Config, merge(shrunk(PRESETS[name]).model_dump(), changes), "drawn")
    assert round_trip(FAMILIES[name], config) == config


# Keys that do not change the outputs of a trained model, or that are read elsewhere (ids by the tokenizer).
NO_EFFECT = {
    *("_name_or_path", "architectures", "model_type", "dtype", "transformers_version"),
    *("output_attentions", "output_hidden_states", "return_dict", "use_cache", "is_encoder_decoder"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "forced_eos_token_id", "id2label", "label2id"),
    *("initializer_range", "initializer_factor", "init_std", "axial_norm_std"),  # initialisation
    *("embd_pdrop", "classifier_dropout", "encoder_layerdrop", "decoder_layerdrop"),  # training
    *("chunk_size_feed_forward", "chunk_size_lm_head", "pretraining_tp", "reorder_and_upcast_attn"),  # speed, memory
    *("problem_type", "is_decoder"),  # of other heads and uses
}
NO_EFFECT_OF = {
    "marian": {"decoder_vocab_size"},  # the embeddings are shared
    "gpt2": {
        *("summary_activation", "summary_first_dropout", "summary_proj_to_labels"),  # of other heads
        *("summary_type", "summary_use_proj"),
    },
    "t5": {"dense_act_fn", "is_gated_act"},  # derived from feed_forward_proj
    "reformer": {
        *("local_attention_probs_dropout_prob", "local_attn_chunk_length", "local_num_chunks_after"),
        *("local_num_chunks_before", "num_hidden_layers", "hash_seed", "tie_word_embeddings"),
    },
    "vit": {"encoder_stride", "pooler_act", "pooler_output_size"},
}
MODEL_NAMES = {"bert": "bert-classes", "llama": "llama-3"}


class RecordingDict(dict):
    """A config.json that records which keys were read."""

    def __init__(self, data: dict[str, Any]) -> None:
        super().__init__(data)
        self.read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


@pytest.mark.parametrize("name", sorted(FAMILIES.keys() - {"transfo-xl"}))
def test_every_key_is_read_refused_or_has_no_effect(name, tmp_path):
    pytest.importorskip("transformers")
    family = FAMILIES[name]
    model = make(MODEL_NAMES.get(name, name), tmp_path / "hf")
    theirs = model.config.to_dict()
    hf = Fields(RecordingDict(theirs), "here")
    config = family.read(hf, type(model).__name__, "end")
    family.weights(config, hf)
    family.aliases(hf)
    assert theirs.keys() - hf.data.read - NO_EFFECT - NO_EFFECT_OF.get(name, set()) == set()
    assert family.write(config).keys() <= theirs.keys()


def test_labels_are_read_from_and_written_to_id2label():
    config = shrunk("vit-base")
    names = [f"name {number}" for number in range(7)]
    hf = Fields({"id2label": {str(n): name for n, name in enumerate(names)}}, "here")
    assert read_labels(hf, config) == tuple(names)
    assert write_labels(tuple(names), config)["id2label"] == hf.data["id2label"]
    assert read_labels(Fields({}, "here"), config)[3] == "LABEL_3"
    with pytest.raises(UserError, match="two classes the same name"):
        read_labels(Fields({"id2label": dict.fromkeys(map(str, range(7)), "x")}, "here"), config)
    with pytest.raises(UserError, match="must be a table"):
        read_labels(Fields({"id2label": [1]}, "here"), config)
    assert write_labels((), shrunk("gpt2")) == {}
