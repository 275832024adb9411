"""A character-level language model, compared with a plain torch loop: time per step, and loss after the same steps.

    python bench/lm.py --text tinyshakespeare.txt

The model has 4 layers, 4 heads, width 128, and 64 characters of context; a batch has 12 windows; there is no dropout.
Both programs train on the first 90% of the text and take turns. The plain loop uses torch modules, fused causal
attention, AdamW with warm-up and a cosine schedule, and random windows. The speed excludes validation. The loss is the
mean over the last 10% of the text, in windows of 64 without overlap.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LAYERS = 4
HEADS = 4
WIDTH = 128
CONTEXT = 64  # characters
BATCH = 12  # windows
MAX_RATE = 1e-3
MIN_RATE = 1e-4
WARMUP = 100  # steps
CLIP = 1.0


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH, bias=False)
        self.mlp_norm = nn.LayerNorm(WIDTH, bias=False)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        parts = self.qkv(self.attention_norm(x_BTD)).split(WIDTH, dim=-1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        z_BHTE = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(z_BHTE.transpose(1, 2).flatten(2))
        return x_BTD + self.down(F.gelu(self.up(self.mlp_norm(x_BTD))))


class Plain(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * LAYERS) if residual else 0.02)

    def forward(self, ids_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(ids_BT) + self.position(torch.arange(ids_BT.shape[1]))
        return self.norm(self.layers(x_BTD)) @ self.embedding.weight.T


def plain(text: str, steps: int) -> tuple[float, float]:
    """Train with a plain loop; seconds per step, and loss on the last tenth of the text."""
    ids_by_letter = {letter: index for index, letter in enumerate(sorted(set(text)))}
    ids = torch.tensor([ids_by_letter[letter] for letter in text])
    train = ids[: len(ids) * 9 // 10]
    valid = ids[len(ids) * 9 // 10 :]
    torch.manual_seed(1)
    model = Plain(len(ids_by_letter))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=MAX_RATE, betas=(0.9, 0.99))
    began = time.perf_counter()
    for step in range(steps):
        progress = max(0.0, (step - WARMUP) / max(1, steps - WARMUP))
        rate = MAX_RATE * min(1.0, (step + 1) / WARMUP) if step < WARMUP else cosine(progress)
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(len(train) - CONTEXT, (BATCH,))
        window = torch.stack([train[start : start + CONTEXT + 1] for start in starts])
        logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    seconds = (time.perf_counter() - began) / steps
    return seconds, loss_on(valid, model.eval())


def cosine(progress: float) -> float:
    return MIN_RATE + 0.5 * (1 + math.cos(math.pi * progress)) * (MAX_RATE - MIN_RATE)


def ours(path: Path, text: str, steps: int, work: Path) -> tuple[float, float]:
    """The same with `regard train`; seconds per step are from its log."""
    train = work / "train.txt"
    valid = work / "valid.txt"
    cut = len(text) * 9 // 10
    train.write_text(text[:cut], encoding="utf-8")
    valid.write_text(text[cut:], encoding="utf-8")
    budget = ["--steps", steps, "--out", path, "--set", f"validate_every={steps}", "--set", "log_every=100"]
    run(["train", "shakespeare", "--data", train, "--valid", valid, *budget])
    events = [json.loads(line) for line in (path / "log.jsonl").read_text().splitlines()]
    rates = [event["examples_per_second"] for event in events if event["event"] == "train"]
    from regard.run import Run

    loaded = Run.load(path)
    ids = torch.tensor(loaded.codec.source.encode([text[cut:]])[0])
    seconds = BATCH / statistics.harmonic_mean(rates[1:] or rates)
    return seconds, loss_on(ids, lambda window: loaded.model(window, None))


@torch.inference_mode()
def loss_on(ids: Tensor, logits: Callable[[Tensor], Tensor]) -> float:
    count = (len(ids) - 1) // CONTEXT
    inputs, labels = (ids[i : i + count * CONTEXT].view(count, CONTEXT) for i in (0, 1))
    total = 0.0
    for window, label in zip(inputs.split(64), labels.split(64), strict=True):
        total += float(F.cross_entropy(logits(window).flatten(0, 1), label.flatten(), reduction="sum"))
    return total / labels.numel()


def run(command: list[object]) -> None:
    process = subprocess.run([sys.executable, "-m", "regard", *map(str, command)], capture_output=True, text=True)
    if process.returncode:
        sys.exit(process.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    text = arguments.text.read_text(encoding="utf-8")
    torch.set_num_threads(os.cpu_count() or 1)
    results: dict[str, list[tuple[float, float]]] = {"regard": [], "plain loop": []}
    with tempfile.TemporaryDirectory() as work:
        for turn in range(arguments.rounds):
            results["regard"].append(ours(Path(work) / f"run{turn}", text, arguments.steps, Path(work)))
            results["plain loop"].append(plain(text, arguments.steps))
    print(f"{arguments.steps} steps, median of {arguments.rounds}")
    regard_seconds = statistics.median(seconds for seconds, _ in results["regard"])
    for name, rounds in results.items():
        seconds, loss = (statistics.median(column) for column in zip(*rounds, strict=True))
        speed = f"{1000 * seconds:7.1f} ms per step   speed-up of regard {seconds / regard_seconds:.2f}"
        print(f"{name:12} {speed}   loss {loss:.4f}")


if __name__ == "__main__":
    main()
