"""Decoding speed of the native engine, CTranslate2, torch and transformers for the same run and the same texts.

    python bench/engines.py RUN... FILE

The engines take turns in one process, so that other load disturbs all of them. The native engine and torch are called
through their public interfaces, from text to text. CTranslate2 and transformers read and return tokens: their
tokenisation is not measured. With one thread the CPU time is measured, otherwise the wall-clock time. The figures are
medians in texts per second, and ratios of the fastest rounds, which depend least on other load.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ctranslate2
import regard_native
import torch

import regard
from regard.batch import pad
from regard.convert.hf import to_hf
from regard.convert.to_ctranslate2 import names_of, write_model
from regard.errors import UserError
from regard.text.codec import Example

Engine = Callable[[Sequence[str], int, int], object]  # texts, beam, exact length of the outputs or 0 -> outputs
PAIRS = (
    ("native int8", "ct2 int8"),
    ("native fp32", "ct2 fp32"),
    ("native avx2 int8", "ct2 int8"),
    ("native avx2 fp32", "ct2 fp32"),
    ("native fp32", "torch"),
    ("native fp32", "transformers"),
)


def exactly(length: int) -> dict[str, int]:
    return {"min_length": length, "max_length": length} if length else {}


def native(path: str, precision: str, kernels: str | None, threads: int) -> Engine:
    run = regard_native.load(path, precision=precision, kernels=kernels)
    pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def generate(texts: Sequence[str], beam: int, length: int) -> object:
        if pool is None or len(texts) == 1:
            return run.generate(texts, beam=beam, **exactly(length))
        parts = [texts[i::threads] for i in range(threads)]
        return list(pool.map(lambda part: run.generate(part, beam=beam, **exactly(length)), parts))

    return generate


def ct2(run: regard.Run, precision: str, threads: int) -> Engine:
    with tempfile.TemporaryDirectory() as directory:
        write_model(run, Path(directory))
        compute = {"int8": "int8", "fp32": "float32"}[precision]
        translator = ctranslate2.Translator(directory, compute_type=compute, inter_threads=threads, intra_threads=1)
    names, _ = names_of(run)
    tokens: dict[str, list[str]] = {}

    def generate(texts: Sequence[str], beam: int, length: int) -> object:
        rows = [tokens[text] for text in texts]
        size = -(-len(rows) // threads)
        limits = {"min_decoding_length": length, "max_decoding_length": length or 256}
        return translator.translate_batch(rows, beam_size=beam, max_batch_size=size, **limits)

    def prepared(texts: Sequence[str], beam: int, length: int) -> object:
        missing = [text for text in texts if text not in tokens]
        for text, ids in zip(missing, run.codec.encode_source([Example(text) for text in missing]), strict=True):
            tokens[text] = [names[index] for index in ids]
        return generate(texts, beam, length)

    return prepared


def transformers(run: regard.Run) -> Engine:
    """The run as a model of transformers, if one of its architectures computes the same."""
    from transformers import AutoModelForSeq2SeqLM

    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "hf"
        to_hf(run, out, 1, lambda message: None)
        model = AutoModelForSeq2SeqLM.from_pretrained(out)
    rows: dict[str, list[int]] = {}

    def generate(texts: Sequence[str], beam: int, length: int) -> object:
        for text in texts:
            if text not in rows:
                rows[text] = run.codec.encode_source([Example(text)])[0]
        source_BS, keep_BS = pad([rows[text] for text in texts], run.config.ids.pad)
        keep_BS = torch.ones_like(source_BS, dtype=torch.bool) if keep_BS is None else keep_BS
        limits = {"min_new_tokens": length, "max_new_tokens": length or 256}
        return model.generate(input_ids=source_BS, attention_mask=keep_BS.long(), num_beams=beam, **limits)

    return generate


def open_engines(path: str, names: Sequence[str], threads: int) -> dict[str, Engine]:
    torch.set_num_threads(threads)
    run = regard.load(path)
    engines: dict[str, Engine] = {}
    for name in names:
        family, _, precision = name.rpartition(" ")
        try:
            if family.startswith("native"):
                engines[name] = native(path, precision, family.partition(" ")[2] or None, threads)
            elif family == "ct2":
                engines[name] = ct2(run, precision, threads)
            elif name == "torch":
                engines[name] = lambda texts, beam, length: run.generate(
                    texts, beam=beam, engine="torch", **exactly(length)
                )
            else:
                engines[name] = transformers(run)
        except UserError as error:
            print(f"{name}: skipped: {error}")
    return engines


def measure(
    engines: dict[str, Engine],
    batches: Sequence[Sequence[str]],
    beam: int,
    length: int,
    rounds: int,
    clock: Callable[[], float],
) -> dict[str, list[float]]:
    """Texts per second of each engine in each round."""
    count = sum(map(len, batches))
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for engine in engines.values():
        engine(batches[0], beam, length)  # warm-up
    for _ in range(rounds):
        for name, engine in engines.items():
            began = clock()
            for batch in batches:
                engine(batch, beam, length)
            rates[name].append(count / (clock() - began))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN... FILE", help="trained runs, then texts: the first column of a table"
    )
    default = [
        "native int8",
        "native fp32",
        "native avx2 int8",
        "native avx2 fp32",
        "ct2 int8",
        "ct2 fp32",
        "torch",
        "transformers",
    ]
    parser.add_argument("--engine", choices=default, nargs="+", default=default)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--beam", type=int, nargs="+", default=[1, 5])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--texts", type=int, default=512, help="texts of a round; in batches of 1 an eighth of them")
    parser.add_argument("--length", type=int, default=0, help="exact output tokens, for runs that are not trained")
    parser.add_argument("--rounds", type=int, default=5)
    settings = parser.parse_args()
    *paths, file = settings.runs
    with open(file, encoding="utf-8") as lines:
        texts = [line.rstrip("\n").split("\t")[0] for line in lines][: settings.texts]
    for path in paths:
        for threads in settings.threads:
            engines = open_engines(path, settings.engine, threads)
            clock = time.process_time if threads == 1 else time.perf_counter
            for beam in settings.beam:
                for size in settings.batch:
                    part = texts[: max(1, len(texts) // 8)] if size == 1 else texts
                    batches = [part[i : i + size] for i in range(0, len(part), size)]
                    rates = measure(engines, batches, beam, settings.length, settings.rounds, clock)
                    print(f"{path}  threads {threads}  beam {beam}  batch {size}")
                    for name, values in rates.items():
                        print(f"    {name:18}{statistics.median(values):9.1f} texts/s")
                    for name, other in PAIRS:
                        if name in rates and other in rates:
                            print(f"    {name} / {other}: {max(rates[name]) / max(rates[other]):.2f}", flush=True)


if __name__ == "__main__":
    main()
