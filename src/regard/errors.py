"""Errors for the user's mistakes, and helpers for the wording of messages and model cards."""

from __future__ import annotations

import errno
import re

OUT_OF_MEMORY_PHRASES = (
    "can't allocate memory", "cannot allocate memory", "not enough memory", "out of memory", "bad_alloc",
    "can't start new thread", "failed to map segment", "cannot map zero-fill pages",
)  # fmt: skip
# Of the dynamic linker: too small a table, and a directory from which nothing may be executed.
OTHER_CAUSES = ("static tls", "not permitted")
# Characters with a meaning in Markdown, as in GitHub's: an underscore only at the border of a word
_MARKUP = re.compile(r"[\\`*\[\]<>#~&$@]|(?<![^\W_])_|_(?![^\W_])|(?<=www)\.|:(?=//)")


class UserError(Exception):
    """A mistake of the user; the command line prints the message and exits with 2."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out: in Python or numpy, in torch on a CPU, or on an accelerator."""
    names = {kind.__name__ for kind in type(error).__mro__}  # compared by name, because torch is not imported here
    if names & {"MemoryError", "OutOfMemoryError"}:
        return True
    if isinstance(error, OSError) and error.filename is not None:  # its text contains the name
        return error.errno == errno.ENOMEM
    text = str(error).lower()
    if not names & {"RuntimeError", "OSError", "ImportError"} or any(phrase in text for phrase in OTHER_CAUSES):
        return False
    return any(phrase in text for phrase in OUT_OF_MEMORY_PHRASES)


LIBRARIES_HINT = "loading the libraries takes about 700 MB of address space; raise the limit (ulimit -v)"
MEMORY_HINT = "smaller batches (--batch-tokens), fewer processes (--workers) or a smaller model need less"
NO_TORCH = "needs torch, which is not installed (pip install torch); the native engine decodes and scores without it"


def memory_message(error: BaseException) -> str:
    """What to tell a user whose program has run out of memory."""
    lines = str(error).strip().splitlines()
    importing = isinstance(error, ImportError)
    detail = lines[-1 if importing else 0] if lines else type(error).__name__
    return f"not enough memory: {detail}\n  {LIBRARIES_HINT if importing else MEMORY_HINT}"


def lacks_torch(error: BaseException) -> bool:
    """Whether an error means that torch is not installed."""
    return isinstance(error, ModuleNotFoundError) and error.name == "torch"


def missing_extra(what: str, package: str, extra: str) -> UserError:
    """The error for a missing package that belongs to an extra."""
    return UserError(f"{what} needs {package}, which is not installed; in your clone of regard:\n  {install(extra)}")


def install(extra: str) -> str:
    """The command that installs an extra in a clone."""
    return f"pip install -c constraints.txt -e '.[{extra}]'"


def shown_value(value: object) -> str:
    """A value with its type, shortened to 80 characters."""
    text = f"{type(value).__name__} {value!r}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def require_type(value: object, kind: type, what: str) -> None:
    """Raise a UserError unless `value` is a `kind`; `what` names the argument and shows a valid one."""
    if not isinstance(value, kind):
        raise UserError(f"{what}, not {shown_value(value)}")


def plural(count: float, noun: str, form: str = ",") -> str:
    """A count with its noun: 1 batch, 2,000 batches; `form` is the number's format."""
    number = format(count, form)
    if number == "1":
        return f"1 {noun}"
    if noun.endswith("is"):
        return f"{number} {noun[:-2]}es"
    if noun.endswith("ry"):
        return f"{number} {noun[:-1]}ies"
    if noun.endswith(("s", "x", "ch", "sh")) and noun != "epoch":
        return f"{number} {noun}es"
    return f"{number} {noun}s"


def as_markdown(text: str) -> str:
    """A text on one line of Markdown, with every markup escaped."""
    return _MARKUP.sub(r"\\\g<0>", " ".join(text.split()))


def as_code(text: str) -> str:
    """A text as a code span of Markdown."""
    text = " ".join(text.split())
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    pad = " " if text[:1] in ("`", "") or text[-1:] == "`" else ""
    return f"{fence}{pad}{text}{pad}{fence}"
