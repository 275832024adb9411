"""The command line: `regard-native generate RUN [FILE]`, `score RUN [PAIRS]` and `pack RUN OUT`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import Field, fields
from typing import Any, NamedTuple, NoReturn

from regard_native import __version__
from regard_native.core import NativeError
from regard_native.hypothesis import Hypothesis, plural
from regard_native.options import HEADS, Options, unknown_option
from regard_native.run import Input, Pair, Run, load

WINDOW = 4096  # lines decoded at a time
READ_BYTES = 1 << 20
MAX_LINE_BYTES = 64 * 2**20
REPORTED = ("error", "too_long", "unsatisfied")  # flags of lines that were not decoded


def main() -> int:
    """Run a command -> its exit code: 0, or 2 after a mistake of the user, reported in one message."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # also ends a search in the core
    try:
        arguments, unknown = _parser().parse_known_args()
        for word in unknown:
            option = word.removeprefix("--").partition("=")[0].replace("-", "_")
            named = word.startswith("--")
            raise NativeError(
                unknown_option(option, arguments.known, _flag) if named else f"{word}: one FILE at a time"
            )
        for lines in arguments.command(arguments):
            sys.stdout.buffer.write("".join(f"{line}\n" for line in lines).encode("utf-8", "replace"))
            sys.stdout.buffer.flush()
        return 0
    except BrokenPipeError:  # the reader of the output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except MemoryError as error:
        _tell(f"error: {error or 'not enough memory'}; lower --max-length, --beam or --nbest")
    except NativeError as error:
        _tell(f"error: {error}")
    except OSError as error:
        _tell(f"error: {error.filename or 'stdin'}: {(error.strerror or str(error)).lower()}")
    return 2


def _tell(message: str) -> None:
    print(message.encode("utf-8", "replace").decode(), file=sys.stderr)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one message."""

    def error(self, message: str) -> NoReturn:
        raise NativeError(f"{message}\n  {self.prog} --help shows what is allowed")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("regard-native", description="Runs of regard without torch.")
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    options = {each.name: each for each in fields(Options)}
    generate = verbs.add_parser(
        "generate", help="give the best output for every line of input", allow_abbrev=False,
        description="Give the best output for every line of input. With --nbest, an output is a line with the number "
        "of the input line, the score and the text, separated by tabs. --alignment adds a column of links, "
        "source-target, counted from 0.",
    )  # fmt: skip
    _add_arguments(generate, "FILE", "source lines; - is stdin (default)", [*options.values()])
    generate.set_defaults(command=_generate)
    score = verbs.add_parser(
        "score", help="print the log-probability of each target given its source", allow_abbrev=False,
        description="Print the log-probability of each target given its source: one number per line, nan for a line "
        "that cannot be scored. For a language model, a line is a text, or a prompt and its continuation.",
    )  # fmt: skip
    _add_arguments(score, "PAIRS", "sources and targets, separated by tabs", [options["max_source"]])
    score.set_defaults(command=_score)
    pack = verbs.add_parser(
        "pack", help="write a run as one file for C programs", allow_abbrev=False,
        description="Write a run as one file for C programs: the checked model, its limits and its vocabularies.",
    )  # fmt: skip
    pack.add_argument("run", metavar="RUN", help="a run directory")
    pack.add_argument("file", metavar="OUT", help="the new file")
    _add_precision(pack)
    pack.set_defaults(command=_pack, known=["precision"])
    return parser


def _add_arguments(parser: argparse.ArgumentParser, file: str, text: str, options: Sequence[Field[Any]]) -> None:
    parser.add_argument("run", metavar="RUN", help="a run directory")
    parser.add_argument("file", metavar=file, nargs="?", default="-", help=text)
    for each in options:
        kind = str(each.type).removesuffix(" | None")
        words = each.metadata["help"]
        if kind == "bool":
            parser.add_argument(_flag(each.name), action="store_true", default=argparse.SUPPRESS, help=words)
            continue
        if "(default:" not in words and each.default not in ("", (), None):
            words = f"{words} (default: {each.default})"
        types: dict[str, Any] = {"int": int, "float": float, "str": str, HEADS: _heads}
        parser.add_argument(
            _flag(each.name), type=types[kind],
            default=argparse.SUPPRESS, help=words, metavar=each.metadata["metavar"] or kind.upper(),
        )  # fmt: skip
    _add_precision(parser)
    parser.add_argument("--json", action="store_true", help="Print one JSON object per line.")
    parser.set_defaults(known=[*(each.name for each in options), "precision", "json"])


def _add_precision(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--precision", default="fp32", help="fp32 (default), or int8: faster, less exact.")


def _heads(text: str) -> list[tuple[int, int]]:
    """Heads from LAYER.HEAD,LAYER.HEAD,..., counted from 1."""
    pairs = [part.split(".") for part in text.split(",")]
    if not all(len(pair) == 2 and all(x.isdecimal() and int(x) > 0 for x in pair) for pair in pairs):
        raise argparse.ArgumentTypeError(f"{text!r:.80}: write LAYER.HEAD, counted from 1, such as 2.1,2.3")
    return [(int(layer) - 1, int(head) - 1) for layer, head in pairs]


class Line(NamedTuple):
    """A line of input; a bad line has an error."""

    number: int
    text: str
    error: str = ""


def _batches(path: str) -> Iterator[list[Line]]:
    """The lines of a file; from a pipe, the available lines, so that no line waits for the next."""
    if path == "-" and sys.stdin is not None and sys.stdin.isatty():
        _tell("reading standard input; Ctrl-D ends it (or name a file after the run)")
    number = 0
    rest = b""
    if path != "-" and not os.path.exists(path):
        raise NativeError(
            f"{path}: no such file; a text itself goes to standard input: echo {path} | regard-native ..."
        )
    if os.path.isdir(path):
        raise NativeError(f"{path}: is a directory, not a file")
    file = 0 if path == "-" else os.open(path, os.O_RDONLY)
    while block := os.read(file, READ_BYTES):
        *lines, rest = (rest + block).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise NativeError(f"{_shown(path)}:{number + len(lines) + 1}: has more than {MAX_LINE_BYTES // 2**20} MB")
        for start in range(0, len(lines), WINDOW):
            batch = [_line(raw, i) for i, raw in enumerate(lines[start : start + WINDOW], number + 1)]
            number += len(batch)
            yield batch
    if rest:
        yield [_line(rest, number + 1)]


def _line(raw: bytes, number: int) -> Line:
    raw = raw.removesuffix(b"\r")
    if number == 1:
        raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        return Line(number, raw.decode("utf-8"))
    except UnicodeDecodeError:
        return Line(number, "", "invalid UTF-8")


def _shown(path: str) -> str:
    return "stdin" if path == "-" else path


def _generate(arguments: argparse.Namespace) -> Iterator[list[str]]:
    """The outputs of `regard-native generate`, a batch of lines at a time."""
    given = {name: value for name, value in vars(arguments).items() if name in Options.__dataclass_fields__}
    options = Options.of(given, _flag)
    if options.top_tokens and not arguments.json:
        raise NativeError("--top-tokens: plain output does not show them; give --json too")
    run = load(arguments.run, precision=arguments.precision)
    run.generate([], **given)  # refuses options that no input can satisfy
    unknown = 0
    for batch in _batches(arguments.file):
        examples = [_example(run, line) for line in batch]
        good = [example for example in examples if not isinstance(example, Line)]
        rows = iter(run.generate(good, **given))
        shown: list[str] = []
        for line, example in zip(batch, examples, strict=True):
            if isinstance(example, Line):
                row = [Hypothesis("", 0.0, (), (), flags={"error": example.error})]
                source = line.text
            else:
                row = next(rows)
                source = example if isinstance(example, str) else example[0]
            unknown += "unknown" in row[0].flags
            for name in REPORTED:
                if name in row[0].flags:
                    _tell(f"{_shown(arguments.file)}:{line.number}: {row[0].flags[name]}")
            if arguments.json:
                answer = {"source": source, "hypotheses": [h.as_dict() for h in row]}
                if isinstance(example, Line):
                    answer["error"] = f"{_shown(arguments.file)}:{line.number}: {example.error}"
                shown.append(json.dumps(answer, ensure_ascii=False))
            elif options.nbest > 1:
                shown += (f"{line.number}\t{h.score:.4f}\t{_one_line(h.text)}{_links(h)}" for h in row)
            else:
                shown.append(_one_line(row[0].text) + _links(row[0]))
        yield shown
    if unknown:
        _tell(f"{plural(unknown, 'line')} with tokens that are not in the vocabulary; --json names them")


def _one_line(text: str) -> str:
    """A text with spaces for line breaks: one line in, one line out."""
    return text.replace("\n", " ").replace("\r", " ")


def _links(hypothesis: Hypothesis) -> str:
    """The alignment as a further column; empty without an alignment."""
    alignment = hypothesis.alignment
    return "" if alignment is None else f"\t{' '.join(f'{s}-{t}' for s, t in alignment.hard)}"


def _example(run: Run, line: Line) -> Input | Line:
    """A line as an input of `Run.generate`, or a line with an error."""
    if line.error or run.continues:  # a prompt may contain tabs
        return line if line.error else line.text
    names = [name for name in run.codec.columns if name != "target"]
    cells = line.text.split("\t")
    if len(cells) == len(names) + 1 and "target" in run.codec.columns:
        del cells[run.codec.columns.index("target")]
    if not line.text.strip():
        return ("", "") if run.codec.takes_features else ""
    if len(cells) != len(names):
        return line._replace(
            error=f"has {len(cells)} columns; this run reads {' and '.join(names)}, separated by a tab"
        )
    row = dict(zip(names, cells, strict=True))
    return (row["source"], row["features"]) if run.codec.takes_features else row["source"]


def _score(arguments: argparse.Namespace) -> Iterator[list[str]]:
    """The outputs of `regard-native score`, a batch of lines at a time."""
    settings = {"max_source": arguments.max_source} if "max_source" in arguments else {}
    run = load(arguments.run, precision=arguments.precision)
    for batch in _batches(arguments.file):
        pairs = [_pair(run, line) for line in batch]
        good = [pair for pair in pairs if not isinstance(pair, Line)]
        scores = iter(run.score(good, **settings))
        shown = []
        for line, pair in zip(batch, pairs, strict=True):
            scored = None if isinstance(pair, Line) else next(scores)
            problems = [pair.error] if isinstance(pair, Line) else []
            problems += [scored.flags[name] for name in REPORTED if scored and name in scored.flags]
            for problem in problems:
                _tell(f"{_shown(arguments.file)}:{line.number}: {problem}")
            if not arguments.json:
                shown.append(f"{scored.score:.6f}" if scored else "nan")
            elif scored and not isinstance(pair, Line):
                answer = {"line": line.number, "source": pair[0], "target": pair[1], **scored.as_dict()}
                shown.append(json.dumps(answer, ensure_ascii=False))
        yield shown


def _pack(arguments: argparse.Namespace) -> Iterator[list[str]]:
    """Write the file of `regard-native pack`; it replaces an older one when it is complete."""
    parts = load(arguments.run, precision=arguments.precision).packed()
    unfinished = f"{arguments.file}.unfinished"
    with open(unfinished, "wb") as file:
        file.writelines(parts)
    os.replace(unfinished, arguments.file)
    return iter(())


def _pair(run: Run, line: Line) -> Pair | Line:
    """A line as a pair to score, or a line with an error."""
    cells = line.text.split("\t")
    if run.continues and len(cells) == 1:  # a text continues an empty prompt
        cells = ["", *cells]
    names = ["source", "target"] if run.continues else [*run.codec.columns]
    if line.error or not line.text.strip():
        return line if line.error else line._replace(error="the line is empty")
    if len(cells) != len(names):
        return line._replace(error=f"has {len(cells)} columns; needed are {', '.join(names)}, separated by tabs")
    row = dict(zip(names, cells, strict=True))
    pair = row["source"], row["target"]
    return (*pair, row["features"]) if "features" in row else pair
