"""Training on long texts: memory and time of a step with LSH attention and reversible layers, or with full attention.

    python bench/long.py

Each contender trains a causal language model of the same shape on one sequence of random tokens, in a new process per
length:

- `hashed`: LSH attention with reversible layers;
- `full`: the same model with ordinary attention and residuals;
- `peer`: ReformerModelWithLMHead of transformers with the settings of `hashed`.

Memory is the peak of the process minus its memory before the first step. Time is that of the fastest step after the
first; work is the CPU time of this step over all threads.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable

SHAPE = {"layers": 4, "width": 256, "heads": 4, "ff": 1024}
HASHES = 2
CHUNK = 64
VOCABULARY = 256
CONTENDERS = ("hashed", "full", "peer")


def ours(length: int, hashed: bool) -> tuple[Callable[[], None], int]:
    """A training step of regard, and the number of parameters."""
    import torch

    from regard.batch import Batch
    from regard.config import AxialConfig, Config, LshConfig, Stack
    from regard.loss import Objective
    from regard.model import Model

    axial = AxialConfig(rows=length // CHUNK, columns=CHUNK, row_width=SHAPE["width"] // 4)
    shape = SHAPE | {"norm_at": "pre", "bias": "ff", "position": "axial", "axial": axial, "dropout": 0.0}
    if hashed:
        shape |= {"mixer": "lsh", "lsh": LshConfig(hashes=HASHES, chunk=CHUNK), "residual": "reversible"}
    config = Config(source_vocab=VOCABULARY, target_vocab=VOCABULARY, decoder=Stack(**shape), tie_output=False)
    objective = Objective(Model(config)).train()
    optimizer = torch.optim.AdamW(objective.parameters(), lr=1e-4)
    tokens = torch.randint(4, VOCABULARY, (1, length + 1))
    batch = Batch(tokens[:, :0], None, tokens[:, :-1], tokens[:, 1:], None, length, length)

    def step() -> None:
        (objective(batch).smoothed / length).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, sum(weight.numel() for weight in objective.parameters())


def peer(length: int) -> tuple[Callable[[], None], int]:
    """The same for transformers."""
    import torch
    from transformers import ReformerConfig, ReformerModelWithLMHead

    config = ReformerConfig(
        vocab_size=VOCABULARY,
        attn_layers=["lsh"] * SHAPE["layers"],
        hidden_size=SHAPE["width"],
        num_attention_heads=SHAPE["heads"],
        attention_head_size=SHAPE["width"] // SHAPE["heads"],
        feed_forward_size=SHAPE["ff"],
        axial_pos_shape=(length // CHUNK, CHUNK),
        axial_pos_embds_dim=(SHAPE["width"] // 4, SHAPE["width"] * 3 // 4),
        lsh_attn_chunk_length=CHUNK,
        num_hashes=HASHES,
        is_decoder=True,
        max_position_embeddings=length,
        hidden_dropout_prob=0.0,
        use_cache=False,
    )
    model = ReformerModelWithLMHead(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(4, VOCABULARY, (1, length))

    def step() -> None:
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, sum(weight.numel() for weight in model.parameters())


def measure(contender: str, length: int, steps: int) -> dict[str, float]:
    """Memory and time of one contender. Needs a new process, because a process does not return all of its memory."""
    step, parameters = peer(length) if contender == "peer" else ours(length, contender == "hashed")
    with open("/proc/self/statm") as file:
        before = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        cpu_began = time.process_time()
        step()
        times.append((time.perf_counter() - began, time.process_time() - cpu_began))
    seconds, work = min(times[1:] or times)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"bytes": peak - before, "seconds": seconds, "work": work, "parameters": parameters}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--layers", type=int, default=SHAPE["layers"])
    parser.add_argument("--threads", type=int, help="threads per process; with 1, work varies least on a busy machine")
    parser.add_argument("--child", nargs=2, metavar=("CONTENDER", "LENGTH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    SHAPE["layers"] = arguments.layers
    if arguments.child:
        if arguments.threads:
            import torch

            torch.set_num_threads(arguments.threads)
        contender, length = arguments.child
        print(json.dumps(measure(contender, int(length), arguments.steps)))
        return
    print("tokens  contender  parameters  memory MB  kB/token  time s  work s  memory:hashed  time:hashed  work:hashed")
    # By default glibc keeps freed blocks of up to 32 MB, which would count as memory of a step.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    for length in arguments.lengths:
        results: dict[str, dict[str, float]] = {}
        for contender in arguments.contenders:
            command = [sys.executable, __file__, *sys.argv[1:], "--child", contender, str(length)]
            output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
            result = json.loads(output.splitlines()[-1])
            results[contender] = result
            hashed = results.get("hashed", result)
            print(
                f"{length:7d}  {contender:9s}  {result['parameters']:10d}  {result['bytes'] / 2**20:9.0f}"
                f"  {result['bytes'] / 1024 / length:9.1f}  {result['seconds']:6.2f}  {result['work']:6.2f}"
                f"  {result['bytes'] / hashed['bytes']:13.2f}  {result['seconds'] / hashed['seconds']:11.2f}"
                f"  {result['work'] / hashed['work']:11.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
