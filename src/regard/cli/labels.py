"""What `regard generate` does with a run that tells labels: a text or an image in, a label out."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from regard.cli.common import flush, option_name, out, out_json, talk
from regard.errors import UserError

if TYPE_CHECKING:
    from regard.decode.options import Options
    from regard.run import Run

OPTIONS = {"text": ("max_source", "batch_tokens", "window"), "image": ()}  # beside those of how to print and where


def tell_labels(run: Run, file: str, options: Options, told: Collection[str], json: bool) -> None:
    """Print the label of every line, or of every image; `told` are the names of the options that were given."""
    kind = "text" if run.config.patches is None else "image"
    if strange := [option_name(name) for name in told if name not in OPTIONS[kind]]:
        allowed = [option_name(name) for name in (*OPTIONS[kind], "json", "threads", "device")]
        raise UserError(f"{', '.join(strange)}: {run.path} tells labels, for which there are {', '.join(allowed)} only")
    if kind == "image":
        _images(run, file, json)
    else:
        _lines(run, file, options, json)


def _images(run: Run, file: str, json: bool) -> None:
    from regard.data.images import read_images
    from regard.label import classify_images

    for labelled in classify_images(run, read_images(file, labelled=False).images_NCHW):
        if json:
            out_json(labelled.as_dict())
        else:
            out(_line(labelled.label))


def _lines(run: Run, file: str, options: Options, json: bool) -> None:
    from regard.cli.lines import Input
    from regard.label import Labelled, classify
    from regard.text.example import Example

    lines, number = Input(file, run.codec), 0
    for batch in lines.batches(options.window):
        told = [request for request in batch if request.source.strip()]
        examples = [Example(request.source, features=request.features) for request in told]
        found = iter(classify(run, examples, options.batch_tokens, options.max_source))
        for request in batch:
            number += 1
            blank = Labelled("", {}, {"empty": "the text is empty"})
            labelled = next(found) if request.source.strip() else blank
            lines.note(number, labelled.flags)
            if json:
                out_json({"source": request.source, **labelled.as_dict()})
            else:
                out(_line(labelled.label))
        flush()
    for remark in lines.remarks():
        talk(remark)


def _line(label: str) -> str:
    return label.replace("\n", " ").replace("\r", " ")
