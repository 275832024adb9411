"""Tiny chat models of transformers: a Llama with random weights, a tokenizer and a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
CHATML = f"{{% for m in messages %}}\n{TURN}{{% endfor %}}\n<|im_start|>assistant\n\n"
TEMPLATES = {
    "chatml": CHATML,
    "default system prompt": "{% if messages[0].role != 'system' %}\n<|im_start|>system\nBe kind.<|im_end|>\n"
    "{% endif %}\n" + CHATML,
    "trimmed": "{{ bos_token }}{% for m in messages %}<|head|>{{ m['role'] }}<|/head|>\n\n"
    "{{ m['content'] | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n\n{% endif %}",
    "roles as text": "{% for m in messages %}\n{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}",
    "alternating": "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% if not loop.first %}{{ raise_exception('system') }}{% endif %}{% set ns.system = m.content ~ '\n--\n' %}"
    "{% elif m.role == 'user' %}{{ bos_token }}[Q] {{ ns.system if loop.index0 < 2 else '' }}{{ m.content }} [/Q]"
    "{% elif loop.previtem is not defined or loop.previtem.role != 'user' %}{{ raise_exception('order') }}"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}",
}  # fmt: skip
SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>")
TEXTS = ["Be kind. user assistant system hello world, how are you today? [Q] [/Q] <|user|> 1 2 3 --"] * 3
KINDS = ("bytes", "prepend", "first", "always")


def tokenizer(kind: str) -> Tokenizer:
    """A tokenizer like those of Llama 3 (bytes) and Llama 2 (a space before the text, in one of three ways)."""
    library = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=kind != "bytes", fuse_unk=True))
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "bytes" else [f"<0x{i:02X}>" for i in range(256)]
    if kind == "bytes":
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = decoders.ByteLevel()
    elif kind == "prepend":
        library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        library.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=kind, split=False)
    if kind != "bytes":
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        library.decoder = decoders.Sequence(steps)
    special = [AddedToken(name, special=True, normalized=False) for name in SPECIAL]
    pieces = [AddedToken(name, special=False) for name in alphabet] if kind != "bytes" else []
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[*special, *pieces], initial_alphabet=alphabet if kind == "bytes" else [],
        show_progress=False,
    )  # fmt: skip
    library.train_from_iterator(TEXTS, trainer)
    state = library.to_str()
    if pieces:  # names of bytes are pieces of the model only
        data = json.loads(state)
        data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] in SPECIAL]
        state = json.dumps(data)
    return Tokenizer.from_str(state)


def make_chat_model(path: Path, kind: str, template: str, eos: str = "</s>") -> Any:
    """Save a chat model with transformers -> its tokenizer."""
    import transformers

    library = tokenizer(kind)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, unk_token="<unk>", bos_token="<s>", eos_token=eos, clean_up_tokenization_spaces=False
    )
    fast.chat_template = template
    fast.save_pretrained(path)
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=library.get_vocab_size(), hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, bos_token_id=1,
        eos_token_id=library.token_to_id(eos),
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1))
        model.lm_head.weight[library.token_to_id("<|im_end|>")] *= 4  # ends some answers
    model.save_pretrained(path)
    return transformers.AutoTokenizer.from_pretrained(path)
