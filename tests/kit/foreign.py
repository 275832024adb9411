"""Small tokenizers in the files of other libraries, and texts for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Library, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "the cat sat on the mat and the dog ate the hat",
    "naïve café 日本語 is Japanese, 가나 is Korean",
    "it's 1999, isn't it? Hello World! <pad> [MASK]",
    "hello world: this is a small test of cutting words",
    "Ein kleines Haus am See, the end of the story.",
] * 10
FRENCH = ["le chat est sur la table", "une petite maison près du lac, n'est-ce pas ?", "bonjour le monde"] * 10
SPECIALS = [
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "[PAD]",
    "[UNK]",
    "<s>",
    "</s>",
    "<unk>",
    "<pad>",
    "<|endoftext|>",
    "<extra_id_0>",
]
PARTS = [
    "the",
    "cat",
    " ",
    "  ",
    "e",
    "é",
    "日本",
    "\t",
    "\n",
    ".",
    "'s",
    "Hello",
    "☃",
    "🙂",
    "12",
    "petite",
    "ﬁ",
    "½",
    "\xa0",
]


def spm(path: Path, corpus: list[str], **options: Any) -> None:
    import sentencepiece

    prefix = str(path.with_suffix(""))
    trainer = sentencepiece.SentencePieceTrainer
    trainer.train(sentence_iterator=iter(corpus), model_prefix=prefix, minloglevel=2, **options)
    if path.suffix != ".model":
        Path(f"{prefix}.model").rename(path)
    Path(f"{prefix}.vocab").unlink()


def word_pieces(path: Path) -> None:
    library = Library(models.WordPiece({}, unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer()
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    library.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=150, special_tokens=names, show_progress=False)
    )
    library.model.save(str(path))


def byte_pairs(path: Path) -> None:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    library.model.save(str(path))


def two_sides(path: Path) -> None:
    import sentencepiece

    spm(path / "source.spm", CORPUS, vocab_size=70, hard_vocab_limit=False)
    spm(path / "target.spm", FRENCH, vocab_size=60, hard_vocab_limit=False)
    sides = [
        sentencepiece.SentencePieceProcessor(model_file=str(path / f"{side}.spm")) for side in ("source", "target")
    ]
    pieces = [side.id_to_piece(index) for side in sides for index in range(3, side.get_piece_size())]
    missing = set(pieces[-3:])  # in real vocabularies, too, some pieces have no id
    names = [
        "</s>",
        "<unk>",
        *(piece for piece in dict.fromkeys(pieces[::-1]) if piece not in missing),
        ">>fra<<",
        "<pad>",
    ]
    (path / "vocab.json").write_text(json.dumps({name: index for index, name in enumerate(names)}))


def make_tokenizer(kind: str, path: Path) -> dict[str, Any]:
    """Write the files of a family in their usual form -> the contents of config.json."""
    path.mkdir(parents=True)
    tokenizer_config: dict[str, Any] = {}
    if kind == "bert":
        word_pieces(path)
        tokenizer_config = {"do_lower_case": False}
    elif kind == "gpt2":
        byte_pairs(path)
    elif kind == "t5":
        spm(
            path / "spiece.model",
            CORPUS,
            vocab_size=80,
            hard_vocab_limit=False,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
        )
        return {"decoder_start_token_id": 0}
    elif kind == "llama":
        options = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
        spm(path / "tokenizer.model", CORPUS, vocab_size=380, model_type="bpe", **options)
        tokenizer_config = {"add_bos_token": True, "add_eos_token": False}
    else:
        two_sides(path)
        tokenizer_config = {"source_lang": "eng", "target_lang": "fra"}
        config = {"decoder_start_token_id": len(json.loads((path / "vocab.json").read_text())) - 1}
    if tokenizer_config:
        (path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return config if kind == "marian" else {}
