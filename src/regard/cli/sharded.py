"""Output to a file, in shards, written by this machine, by the ranks of torchrun or by Ray actors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import typer

from regard import __version__
from regard.cli.lines import GenerateJob, InputLines, LineAnswerer, add_counts
from regard.cli.options import open_runs, option_name, parse_decoding
from regard.cli.output import message
from regard.decode.request import check_engine
from regard.decode.sharded_output import Answer, ShardDirectory, answer_on_ray
from regard.errors import UserError, plural
from regard.files import measure_file, read_manifest
from regard.parallel.ranks import has_launcher, join_group, process_device, restart_problem
from regard.run import READ

Begin = Callable[[], AbstractContextManager[ShardDirectory]]


def check_output(job: GenerateJob, out: str | None, ray: str | None, stream: bool) -> GenerateJob:
    """Refuse options that exclude each other, and return the job of this process."""
    if out is None:
        if ray is not None:
            raise UserError("--ray: needs --out FILE, the file that the machines write")
        if has_launcher():
            raise UserError("--out: is required with several processes (WORLD_SIZE); otherwise each prints all outputs")
        return job
    if stream:
        raise UserError("--stream: cannot be combined with --out, which writes whole outputs")
    options, engine = parse_decoding(job.options, job.engine)
    check_engine(engine, options, shards=True, show=option_name)
    if ray is not None:
        if has_launcher():
            raise UserError("--ray: Ray starts processes itself; leave out torchrun (WORLD_SIZE)")
        return replace(job, device="cpu", workers=1)  # mistakes are reported here, before actors start
    if has_launcher():
        return replace(job, device=str(process_device(job.device)), workers=job.workers or 1)
    return job


def write_shards(request: GenerateJob, answerer: LineAnswerer, lines: InputLines, out: str, ray: str | None) -> None:
    """Write the missing shards of a job's output, and add the counts of all lines to `lines`."""
    path = Path(out).resolve()
    if "generate" in answerer.run.task.answers:
        request = replace(request, engine=answerer.engine.name)  # the same on all machines, and after a restart
    begin = partial(ShardDirectory.begin, path, request.file, answerer.options.window, _identity(request))
    with ExitStack() as stack:
        if has_launcher():
            directory, rank, ranks = _begin_together(stack, begin, path)
        else:
            directory, rank, ranks = stack.enter_context(begin()), 0, 1
        missing = directory.missing()
        count = len(directory.shards)
        if rank == 0 and len(missing) < count:
            message(f"{out}: {count - len(missing):,} of {plural(count, 'shard')} are done; continuing with the others")
        if ray is not None:  # every machine has the run and the files at the same paths
            job = replace(request, runs=tuple(str(Path(run).resolve()) for run in request.runs), workers=1)
            gpus = int(request.device.startswith("cuda"))
            answer_on_ray(directory, partial(_open_answer, job), ray, request.workers, request.threads or 1, gpus)
        else:
            directory.work(answerer.shard, rank, ranks)
        if rank == 0:
            for counts in directory.join():
                add_counts(lines, counts)


def _begin_together(stack: ExitStack, begin: Begin, path: Path) -> tuple[ShardDirectory, int, int]:
    """The first rank makes the directory of shards, the others open it; an error is reported once."""
    import torch

    directory = None
    error = None
    with join_group(torch.device("cpu")) as group:  # no tensors are sent
        if group.first:
            if warning := restart_problem():
                message(f"warning: {warning}")
            try:
                directory = stack.enter_context(begin())
            except UserError as caught:
                error = caught
        group.wait_for_first()  # it reads the whole input, which may exceed the time limit of a collective
        failed = group.broadcast(error is not None)
        if not failed and directory is None:
            directory = stack.enter_context(ShardDirectory(path))
        group.broadcast(None)  # the first rank removes the directory at the end, after all have opened it
    if error is not None:
        raise error
    if directory is None:
        raise typer.Exit(2)
    return directory, group.rank, group.size


def _open_answer(job: GenerateJob) -> Answer:
    runs = open_runs(job.runs, job.device, job.threads, load=False)
    return LineAnswerer(job, runs, *parse_decoding(job.options, job.engine)).shard


def _identity(request: GenerateJob) -> dict[str, Any]:
    """Everything that the output depends on, except the input."""
    options, engine = parse_decoding(request.options, request.engine)
    return {
        "regard": __version__,
        "runs": [_digest(Path(run)) for run in request.runs],
        "options": options.model_dump(mode="json"),
        "engine": engine,
        "precision": request.options.get("precision", "fp32"),
        "device": request.device.partition(":")[0],
        "file": request.file,
        "jsonl": request.jsonl,
        "json": request.json,
        "prefix_column": request.prefix_column,
    }


def _digest(run: Path) -> str:
    """A hash of the files that a run is loaded from; hashes in the manifest are reused."""
    saved = read_manifest(run).files
    entries = {name: saved.get(name) or measure_file(run / name) for name in sorted(READ) if (run / name).is_file()}
    return hashlib.sha256("".join(f"{name} {entry.sha256}\n" for name, entry in entries.items()).encode()).hexdigest()
