"""The command line: `regard-native generate RUN [FILE]`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator
from itertools import islice

from regard_native import __version__
from regard_native.core import NativeError
from regard_native.run import Run, load

WINDOW = 4096  # lines read ahead and sorted by length


def main() -> int:
    """Run a command -> its exit code."""
    for stream in (sys.stdin, sys.stdout):
        stream.reconfigure(encoding="utf-8", errors="replace", newline="\n")  # type: ignore[union-attr]
    options = _parser().parse_args()
    try:
        run = load(options.run, precision=options.precision)
        with (
            sys.stdin
            if options.file == "-"
            else open(options.file, encoding="utf-8", errors="replace", newline="\n") as file
        ):
            for text in _outputs(run, file, options):
                print(text, flush=True)
        return 0
    except (NativeError, OSError, MemoryError) as error:
        if isinstance(error, BrokenPipeError):  # the reader of the output has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        print(f"error: {error or 'not enough memory'}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("regard-native", description="Runs of regard without torch.")
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    generate = verbs.add_parser("generate", help="give the best output for every line of input")
    generate.add_argument("run", metavar="RUN", help="a run directory")
    generate.add_argument("file", metavar="FILE", nargs="?", default="-", help="source lines; - is stdin (default)")
    generate.add_argument("--beam", type=int, default=1, help="beam width; 1 is greedy search (default)")
    generate.add_argument("--nbest", type=int, default=1, help="outputs per line (default: 1)")
    generate.add_argument(
        "--length-penalty", type=float, default=1.0, help="rank by score / length ** PENALTY (default: 1)"
    )
    generate.add_argument("--max-length", type=int, help="maximum output tokens (default: 3 times the source, plus 50)")
    generate.add_argument("--min-length", type=int, default=0, help="minimum output tokens (default: 0)")
    generate.add_argument("--precision", default="fp32", help="fp32 (default), or int8: faster, less exact")
    generate.add_argument("--json", action="store_true", help="print one JSON object per line")
    return parser


def _outputs(run: Run, lines: Iterable[str], options: argparse.Namespace) -> Iterator[str]:
    """The output lines, a window of input at a time."""
    settings = {
        name: getattr(options, name) for name in ("beam", "nbest", "length_penalty", "max_length", "min_length")
    }
    texts = (line.removesuffix("\n").removesuffix("\r") for line in lines)
    first = 1
    while window := list(islice(texts, 1 if first == 1 and sys.stdin.isatty() else WINDOW)):
        inputs = [_example(run, line) for line in window]
        for number, (line, row) in enumerate(zip(inputs, run.generate(inputs, **settings), strict=True), first):
            source = line if isinstance(line, str) else line[0]
            for hypothesis in row:
                for name in hypothesis.flags.keys() & {"empty", "error", "too_long"}:
                    print(f"line {number}: {hypothesis.flags[name]}", file=sys.stderr)
            if options.json:
                yield json.dumps({"source": source, "hypotheses": [h.as_dict() for h in row]}, ensure_ascii=False)
            elif options.nbest > 1:
                yield from (f"{number}\t{h.score:.4f}\t{h.text}" for h in row)
            else:
                yield row[0].text if row else ""
        first += len(window)


def _example(run: Run, line: str) -> str | tuple[str, str]:
    """A line as text, or as text and features where the run has features."""
    if not run.codec.takes_features:
        return line
    source, tab, features = line.partition("\t")
    return (source, features) if tab else source
