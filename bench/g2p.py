"""Pronunciation from spelling, compared with yoyodyne and Joey NMT: training examples and decoded words per second.

    python bench/g2p.py --data dut_train.tsv --valid dut_dev.tsv --yoyodyne PYTHON --joeynmt PYTHON

All toolkits train the same model size (4+4 layers, width 256, feed-forward 1024, 4 heads, dropout 0.2) with 64 words
per batch. Each toolkit runs through its command line in its own environment. PYTHON is the interpreter of that
environment; without the option, the toolkit is skipped.

Training speed comes from the toolkit's progress reports, starting with the first. Decoding is timed with few and with
many words; the difference excludes start-up and loading. An output has at most as many tokens as the longest
pronunciation in the data. regard is measured in fp32, in bf16, and (if CTranslate2 is installed) trained in bf16 and
decoded in int8.

WER and mean output length are printed too, because the speed of a barely trained model means little: it stops at once
or never. Raise --seconds until the lengths are similar.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BATCH = 64
LAYERS = 4
WIDTH = 256
FF = 1024
HEADS = 4
DROPOUT = 0.2
Pair = tuple[str, str]


@dataclass
class Job:
    """Data and budget, the same for every toolkit."""

    data: Path
    valid: Path
    work: Path  # an empty directory
    seconds: float
    max_length: int  # tokens of the longest pronunciation


@dataclass
class Toolkit:
    """A toolkit: `train` returns examples per second, `decode` the outputs for a file of words."""

    train: Callable[[Job], float]
    decode: Callable[[Job, Path, int], list[str]]
    words: tuple[int, int]  # numbers of words to decode: few, many


# regard


def regard(training: str, *decoding: str) -> Toolkit:
    """regard with a training precision and decoding options."""
    command = [sys.executable, "-m", "regard"]

    def train(job: Job) -> float:
        sizes = {"layers": LAYERS, "width": WIDTH, "ff": FF, "heads": HEADS, "dropout": DROPOUT}
        settings = [f"{key}={value}" for key, value in sizes.items()]
        # No validation, as in the other toolkits.
        settings += [f"batch_examples={BATCH}", "log_every=5", f"validate_every={10**9}", f"precision={training}"]
        files = ["--data", job.data, "--valid", job.valid, "--out", job.work / "run"]
        budget = ["--workers", 2, "--minutes", job.seconds / 60]
        run([*command, "train", "g2p", *files, *budget, *(x for s in settings for x in ("--set", s))])
        events = [json.loads(line) for line in (job.work / "run" / "log.jsonl").read_text().splitlines()]
        rates = [event["examples_per_second"] for event in events if event["event"] == "train"]
        if len(rates) < 2:
            sys.exit("too little time for two reports of progress; raise --seconds")
        # Each report covers the same number of steps, so this is the number of examples divided by the total time.
        return statistics.harmonic_mean(rates[1:])

    def decode(job: Job, words: Path, beam: int) -> list[str]:
        options = ["--beam", beam, "--max-length", job.max_length, "--workers", 2, *decoding]
        return run([*command, "generate", job.work / "run", words, *options]).splitlines()

    return Toolkit(train, decode, (1000, 9000))


# yoyodyne


def yoyodyne(python: str) -> Toolkit:
    command = [python, "-c", "from yoyodyne.cli.main import main; main()"]  # the code of its script `yoyodyne`

    def config(job: Job, beam: int = 1) -> Path:
        encoder = {"attention_heads": HEADS, "embedding_size": WIDTH, "hidden_size": FF, "layers": LAYERS}
        decoder = {"attention_heads": HEADS, "hidden_size": FF, "layers": LAYERS, "dropout": DROPOUT}
        model = {
            "class_path": "yoyodyne.models.TransformerModel",
            "init_args": {
                "embedding_size": WIDTH,
                "beam_width": beam,
                "source_encoder": {
                    "class_path": "yoyodyne.models.modules.TransformerEncoder",
                    "init_args": encoder | {"dropout": DROPOUT},
                },
                **{f"decoder_{key}": value for key, value in decoder.items()},
                "optimizer": {"class_path": "yoyodyne.optimizers.Adam", "init_args": {"lr": 5e-4}},
            },
        }
        path = job.work / f"beam{beam}.yaml"
        data = {
            "model_dir": str(job.work),
            "target_sep": " ",
            "batch_size": BATCH,
            "max_source_length": 2 * job.max_length,
            "max_target_length": job.max_length,
        }
        path.write_text(json.dumps({"model": model, "data": data, "seed_everything": 1}))  # JSON is YAML
        return path

    def train(job: Job) -> float:
        bar = {
            "class_path": "lightning.pytorch.callbacks.TQDMProgressBar",
            "init_args": {"refresh_rate": 1},
        }
        rest = ["--data.train", job.data, "--trainer.callbacks+", json.dumps(bar)]
        minutes, seconds = divmod(round(job.seconds), 60)
        rest += ["--trainer.max_time", f"00:{minutes // 60:02}:{minutes % 60:02}:{seconds:02}"]
        rest += ["--trainer.limit_val_batches", 0, "--trainer.num_sanity_val_steps", 0]
        rest += ["--checkpoint.dirpath", job.work, "--checkpoint.filename", "model"]
        rest += ["--checkpoint.save_on_train_epoch_end", "true"]
        reports = watch([*command, "fit", "--config", config(job), *rest], r"Epoch (\d+).*?\b(\d+)/(\d+) \[")
        return rate((clock, int(epoch) * int(total) + int(done)) for clock, (epoch, done, total) in reports)

    def decode(job: Job, words: Path, beam: int) -> list[str]:
        files = ["--ckpt_path", max(job.work.glob("model*.ckpt"), key=lambda path: path.stat().st_mtime)]
        files += ["--data.predict", words, "--data.target_col", 0, "--prediction.path", job.work / "out"]
        run([*command, "predict", "--config", config(job, beam), *files])
        lines = (job.work / "out").read_text(encoding="utf-8").splitlines()
        return [line.split("\t")[0] for line in lines]  # with a beam, outputs and scores alternate

    return Toolkit(train, decode, (2 * BATCH, 18 * BATCH))


# Joey NMT


def joeynmt(python: str) -> Toolkit:
    command = [python, "-m", "joeynmt"]

    def environment(job: Job) -> dict[str, str]:
        """Add a package that Joey NMT imports without requiring it, and allow pickled checkpoints."""
        stub = job.work / "stub" / "importlib_metadata.py"
        stub.parent.mkdir(exist_ok=True)
        stub.write_text("from importlib.metadata import *\n")
        return {"PYTHONPATH": str(stub.parent), "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}

    def config(job: Job, beam: int = 1) -> Path:
        for name, path in (("train", job.data), ("dev", job.valid)):
            for side, lines in zip(("src", "trg"), zip(*pairs(path), strict=True), strict=True):
                (job.work / f"{name}.{side}").write_text("\n".join(lines) + "\n", encoding="utf-8")
        stack = {
            "type": "transformer",
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "embeddings": {"embedding_dim": WIDTH, "scale": True, "dropout": DROPOUT},
            "hidden_size": WIDTH,
            "ff_size": FF,
            "layer_norm": "pre",  # the defaults differ between encoder and decoder, and training fails with them
            "dropout": DROPOUT,
        }
        table: dict[str, Any] = {
            "name": "g2p",
            "joeynmt_version": "2.3.0",
            "model_dir": str(job.work / "model"),
            "use_cuda": False,
            "random_seed": 1,
            "data": {
                "train": str(job.work / "train"),
                "dev": str(job.work / "dev"),
                "dataset_type": "plain",
                "src": {"lang": "src", "level": "char"},
                "trg": {"lang": "trg", "level": "word"},
            },
            "testing": {"beam_size": beam, "batch_size": BATCH, "max_output_length": job.max_length},
            "training": {
                "optimizer": "adamw",
                "adam_betas": [0.9, 0.98],
                "learning_rate": 5e-4,
                "scheduling": "warmupinversesquareroot",
                "learning_rate_warmup": 400,
                "label_smoothing": 0.1,
                "batch_size": BATCH,
                "batch_type": "sentence",
                "epochs": 1000,
                "logging_freq": 5,
                "validation_freq": 10**9,
                "overwrite": True,
            },
            "model": {"initializer": "xavier_uniform", "encoder": stack, "decoder": stack},
        }
        path = job.work / f"beam{beam}.yaml"
        path.write_text(json.dumps(table))
        return path

    def train(job: Job) -> float:
        order = [*command, "train", config(job), "--skip-test"]
        reports = watch(order, r"Step:\s+(\d+),", job.seconds, environment(job))
        return rate((clock, int(step)) for clock, (step,) in reports)

    def decode(job: Job, words: Path, beam: int) -> list[str]:
        return run([*command, "translate", config(job, beam)], words, environment(job)).splitlines()

    return Toolkit(train, decode, (2 * BATCH, 18 * BATCH))


# Running and timing


def run(command: list[Any], stdin: Path | None = None, environment: dict[str, str] | None = None) -> str:
    """Run a command and return its stdout; print its stderr only if it fails."""
    with open(stdin or os.devnull, "rb") as file:
        process = subprocess.run(
            list(map(str, command)), stdin=file, capture_output=True, env={**os.environ, **(environment or {})}
        )
    if process.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{process.stderr.decode(errors='replace')[-3000:]}")
    return process.stdout.decode()


def watch(
    command: list[Any], report: str, seconds: float | None = None, environment: dict[str, str] | None = None
) -> list[tuple[float, tuple[str, ...]]]:
    """Run a command and collect times and groups of outputs that match `report`; stop `seconds` after the first."""
    reports: list[tuple[float, tuple[str, ...]]] = []
    output: list[str] = []
    with subprocess.Popen(
        list(map(str, command)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(environment or {})},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs ignore SIGINT by default
    ) as process:
        for line in lines_of(process):
            output.append(line)
            if match := re.search(report, line):
                reports.append((time.perf_counter(), match.groups()))
                if seconds is not None and reports[-1][0] - reports[0][0] > seconds:
                    process.send_signal(signal.SIGINT)
                    seconds = None
    if process.returncode or len(reports) < 2:
        sys.exit(f"{' '.join(map(str, command))}\n" + "\n".join(output[-40:]))
    return reports


def lines_of(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Yield the output of a process as it arrives, by lines and updates of a progress bar."""
    assert process.stdout is not None
    rest = b""
    while new := os.read(process.stdout.fileno(), 1 << 16):
        *lines, rest = re.split(rb"[\r\n]+", rest + new)
        yield from (line.decode(errors="replace") for line in lines)


def rate(reports: Iterator[tuple[float, int]]) -> float:
    """Examples per second from the first to the last report with progress."""
    clocks: dict[int, float] = {}
    for clock, batches in reports:
        if batches:
            clocks.setdefault(batches, clock)
    if len(clocks) < 2:
        sys.exit("too little time for two reports of progress; raise --seconds")
    (first, began), (last, ended) = min(clocks.items()), max(clocks.items())
    return BATCH * (last - first) / (ended - began)


def pairs(path: Path) -> list[Pair]:
    rows = (line.split("\t") for line in path.read_text(encoding="utf-8").splitlines())
    return [(row[0], row[1]) for row in rows]


def words_per_second(kit: Toolkit, job: Job, beam: int, rounds: int) -> tuple[float, str]:
    """Words per second without start-up, WER, and mean output length."""
    examples = pairs(job.valid)
    random.Random(1).shuffle(examples)
    times: dict[int, list[float]] = {count: [] for count in kit.words}
    outputs: list[str] = []
    for _ in range(rounds):
        for count in kit.words:
            path = job.work / "words"
            sample = (examples * (count // len(examples) + 1))[:count]
            path.write_text("".join(f"{word}\n" for word, _ in sample), encoding="utf-8")
            began = time.perf_counter()
            outputs = kit.decode(job, path, beam)
            times[count].append(time.perf_counter() - began)
            assert len(outputs) == count, f"{count} words gave {len(outputs)} outputs"
    few, many = kit.words
    wrong = sum(output != target for output, (_, target) in zip(outputs, sample, strict=True))
    tokens = sum(len(output.split()) for output in outputs)
    seconds = statistics.median(times[many]) - statistics.median(times[few])
    speed = (many - few) / seconds if seconds > 0 else math.nan  # start-up varied by more than the decoding time
    return speed, f"WER {100 * wrong / many:3.0f}, {tokens / many:4.1f} tokens"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="TSV of words and pronunciations")
    parser.add_argument("--valid", type=Path, required=True, help="TSV to decode")
    parser.add_argument("--yoyodyne", metavar="PYTHON", help="interpreter of an environment with yoyodyne 0.5")
    parser.add_argument("--joeynmt", metavar="PYTHON", help="interpreter of an environment with joeynmt 2.3")
    parser.add_argument("--seconds", type=float, default=60, help="training time per toolkit")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of decoding; 0: only training")
    arguments = parser.parse_args()
    if importlib.util.find_spec("regard") is None:
        sys.exit("install regard first")
    kits = {"regard fp32": regard("fp32"), "regard bf16": regard("bf16", "--precision", "bf16")}
    if importlib.util.find_spec("ctranslate2"):
        kits["regard int8"] = regard("bf16", "--engine", "ctranslate2", "--precision", "int8")
    if arguments.yoyodyne:
        kits["yoyodyne"] = yoyodyne(arguments.yoyodyne)
    if arguments.joeynmt:
        kits["joeynmt"] = joeynmt(arguments.joeynmt)
    data = arguments.data.resolve()
    valid = arguments.valid.resolve()
    max_length = max(len(target.split()) for path in (data, valid) for _, target in pairs(path))
    mean = statistics.mean(len(target.split()) for _, target in pairs(valid))
    print(
        f"{arguments.seconds:.0f} s of training each; 2.0x 3.0x ...: speed-up of each variant of regard;"
        f" pronunciations have {mean:.1f} tokens on average"
    )
    print(f"{'':12}  {'examples/s':>27}  {'words/s greedy':>48}  {'words/s beam 5':>48}")
    ours: list[list[float]] = []
    for name, kit in kits.items():
        with tempfile.TemporaryDirectory() as work:
            job = Job(data, valid, Path(work), arguments.seconds, max_length)
            speeds = [kit.train(job)]
            remarks = [""]
            for beam in (1, 5) if arguments.rounds else ():
                speed, remark = words_per_second(kit, job, beam, arguments.rounds)
                speeds.append(speed)
                remarks.append(f"  {remark}")
        if name.startswith("regard"):
            ours.append(speeds)
        cells = [
            f"{speed:7,.0f} {' '.join(f'{variant[i] / speed:5.1f}x' for variant in ours):20}{remarks[i]}"
            for i, speed in enumerate(speeds)
        ]
        print(f"{name:12}  {cells[0]:>27}  " + "  ".join(f"{cell:>48}" for cell in cells[1:]), flush=True)


if __name__ == "__main__":
    main()
