"""Training throughput, compared with two common loops: torch.nn.Transformer and transformers' MarianMTModel.

    python bench/training.py --source train.de.gz --target train.en.gz --size tiny

Model size, corpus, tokens per batch, dropout (0.1) and label smoothing (0.1) are the same for all contenders. The
rates are tokens of both sides per second, without padding. Contenders take turns, in separate processes; the figures
are medians. `plain` and `marian` are typical loops: one process, all threads, and batches of shuffled examples up to
the token budget. `plain+buckets` and `marian+buckets` use the batches of regard, which shows the effect of batching.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

SIZES = {
    "tiny": {"layers": 4, "width": 128, "heads": 4, "ff": 512},
    "base": {"layers": 6, "width": 512, "heads": 8, "ff": 2048},
}
CONTENDERS = ("regard", "plain", "marian", "plain+buckets", "marian+buckets")
VOCABULARY = 8000


def recipe(arguments: argparse.Namespace, steps: int):
    from regard.recipe import load_recipe

    stack = SIZES[arguments.size] | {"dropout": 0.1, "norm_at": "post"}
    tokens = f"bpe:{VOCABULARY}"
    return load_recipe(
        {
            "preset": "transformer-base",
            "model": {"encoder": stack, "decoder": stack, "share_embeddings": False, "tie_output": False},
            "text": {"source_tokens": tokens, "target_tokens": tokens},
            "data": {"source": arguments.source, "target": arguments.target},
            "train": {
                "steps": steps,
                "batch_tokens": arguments.batch_tokens,
                "warmup": 4000,
                "log_every": max(1, steps // 4),
                "validate_every": 10**9,
                "label_smoothing": 0.1,
                "workers": os.cpu_count(),  # as in longer runs
            },
        }
    )


def ours(arguments: argparse.Namespace) -> float:
    """Tokens per second of a whole `fit`, from its log, without the first quarter."""
    from regard.training.fit import fit
    from regard.training.report import Reporter

    with tempfile.TemporaryDirectory() as out:
        fit(recipe(arguments, arguments.steps), Path(out) / "run", reporter=Reporter())
        log = [json.loads(line) for line in (Path(out) / "run" / "log.jsonl").read_text().splitlines()]
    rates = [event["tokens_per_second"] for event in log if event["event"] == "train"]
    return statistics.median(rates[1:])


def peer_batches(arguments: argparse.Namespace, buckets: bool) -> Iterator[tuple[list[list[int]], list[list[int]]]]:
    import numpy as np

    from regard.data.order import Batches
    from regard.data.prepare import prepare

    with tempfile.TemporaryDirectory() as out:
        corpus = prepare(recipe(arguments, 1), Path(out)).train
        if buckets:
            batches = list(Batches(corpus.source_lengths, corpus.target_lengths, 1, 0, arguments.batch_tokens, None))
        else:
            every = np.arange(len(corpus))
            longest = np.maximum(corpus.source_lengths[every], corpus.target_lengths[every])
            batches = []
            rows: list[int] = []
            widest = 0
            for index in np.random.default_rng(1).permutation(len(corpus)):
                widest = max(widest, int(longest[index]))
                if rows and widest * (len(rows) + 1) > arguments.batch_tokens:
                    batches.append(rows)
                    rows = []
                    widest = int(longest[index])
                rows.append(int(index))
        for rows in batches:
            yield [corpus.source(i).tolist() for i in rows], [corpus.target(i).tolist() for i in rows]


def peer(arguments: argparse.Namespace, name: str, buckets: bool) -> float:
    """Tokens per second of a typical loop."""
    import torch
    from torch import nn

    torch.manual_seed(1)
    loss_of = {"plain": plain, "marian": marian}[name](SIZES[arguments.size])
    model: nn.Module = loss_of.model  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.98))
    model.train()
    tokens = 0
    seconds = 0.0
    warmup = arguments.steps // 4
    for step, (sources, targets) in enumerate(peer_batches(arguments, buckets)):
        if step == arguments.steps:
            break
        began = time.perf_counter()
        source = pad(sources)
        label = pad(targets)
        shifted = torch.cat((torch.full((len(label), 1), 2), label[:, :-1]), dim=1)
        loss = loss_of(source, shifted, label)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step >= warmup:
            seconds += time.perf_counter() - began
            tokens += sum(map(len, sources)) + sum(map(len, targets))
    return tokens / seconds


def pad(rows: list[list[int]]):
    import torch
    from torch.nn.utils.rnn import pad_sequence

    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def plain(size: dict[str, int]) -> Callable:
    """torch.nn.Transformer with embeddings, sinusoids and an LM head."""
    import torch
    from torch import nn

    from regard.nn.position import sinusoid

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            width = size["width"]
            self.source = nn.Embedding(VOCABULARY, width)
            self.target = nn.Embedding(VOCABULARY, width)
            self.core = nn.Transformer(
                width, size["heads"], size["layers"], size["layers"], size["ff"], 0.1, batch_first=True
            )
            self.dropout = nn.Dropout(0.1)
            self.output = nn.Linear(width, VOCABULARY, bias=False)
            self.scale = width**0.5
            self.table = sinusoid(torch.arange(512), width)

        def embed(self, table, ids):
            return self.dropout(table(ids) * self.scale + self.table[: ids.shape[1]])

        def forward(self, source, shifted):
            padding = source == 0
            length = shifted.shape[1]
            future = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
            hidden = self.core(
                self.embed(self.source, source),
                self.embed(self.target, shifted),
                tgt_mask=future,
                tgt_is_causal=True,
                src_key_padding_mask=padding,
                memory_key_padding_mask=padding,
            )
            return self.output(hidden)

    model = Plain()

    def loss(source, shifted, label):
        logits = model(source, shifted).flatten(0, 1)
        return nn.functional.cross_entropy(logits, label.flatten(), ignore_index=0, label_smoothing=0.1)

    loss.model = model  # type: ignore[attr-defined]
    return loss


def marian(size: dict[str, int]) -> Callable:
    """transformers' MarianMTModel with label smoothing in its loss."""
    from torch import nn
    from transformers import MarianConfig, MarianMTModel

    sides = {}
    for side in ("encoder", "decoder"):
        sides |= {
            f"{side}_layers": size["layers"],
            f"{side}_attention_heads": size["heads"],
            f"{side}_ffn_dim": size["ff"],
        }
    model = MarianMTModel(
        MarianConfig(
            vocab_size=VOCABULARY,
            decoder_vocab_size=VOCABULARY,
            share_encoder_decoder_embeddings=False,
            tie_word_embeddings=False,
            d_model=size["width"],
            dropout=0.1,
            activation_function="relu",
            scale_embedding=True,
            pad_token_id=0,
            eos_token_id=3,
            decoder_start_token_id=2,
            max_position_embeddings=512,
            **sides,
        )
    )

    def loss(source, shifted, label):
        logits = model(input_ids=source, attention_mask=(source != 0).long(), decoder_input_ids=shifted).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), label.flatten(), ignore_index=0, label_smoothing=0.1)

    loss.model = model  # type: ignore[attr-defined]
    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", required=True)
    parser.add_argument("--target", required=True)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        name, _, buckets = arguments.contender.partition("+")
        print(ours(arguments) if name == "regard" else peer(arguments, name, bool(buckets)))
        return
    rates: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    for _ in range(arguments.rounds):
        for name in CONTENDERS:
            command = [sys.executable, __file__, *sys.argv[1:], "--contender", name]
            process = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            rates[name].append(float(process.stdout.split()[-1]))
    print(f"{arguments.size}: tokens per second, median of {arguments.rounds} rounds of {arguments.steps} steps")
    regard_rate = statistics.median(rates["regard"])
    for name, values in rates.items():
        rate = statistics.median(values)
        print(f"{name:16} {rate:10,.0f}   speed-up of regard {regard_rate / rate:.2f}")


if __name__ == "__main__":
    main()
