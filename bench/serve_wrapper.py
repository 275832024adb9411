"""A typical wrapper around CTranslate2, for comparison in bench/serve.py: one translate_batch per FastAPI request.

    python bench/serve_wrapper.py RUN BEAM PORT plain|locked

`plain` answers requests in FastAPI's thread pool, `locked` one at a time.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from contextlib import nullcontext
from pathlib import Path

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from regard.convert.to_ctranslate2 import names_of, open_translator, write_model
from regard.decode.ctranslate2 import PATIENCE
from regard.decode.request import LENGTH_EXTRA, LENGTH_RATIO
from regard.run import Run
from regard.text.codec import Example

path, beam, port, mode = sys.argv[1:]
run = Run.load(path)
with tempfile.TemporaryDirectory() as folder:
    write_model(run, Path(folder))
    translator = open_translator(Path(folder), "int8", os.cpu_count() or 1, 1)
source, target = names_of(run)
ids = {name: index for index, name in enumerate(target)}
lock = threading.Lock() if mode == "locked" else nullcontext()
app = FastAPI()


class Body(BaseModel):
    q: str | list[str]
    source: str = "auto"
    target: str = ""
    alternatives: int = 0


@app.post("/translate")
def translate(body: Body) -> dict[str, object]:
    texts = [body.q] if isinstance(body.q, str) else body.q
    rows = [[source[i] for i in row] for row in run.codec.encode_source([Example(text) for text in texts])]
    limit = LENGTH_RATIO * max(map(len, rows)) + LENGTH_EXTRA  # the limit of regard
    with lock:
        answers = translator.translate_batch(rows, beam_size=int(beam), patience=PATIENCE, max_decoding_length=limit)
    out = [run.codec.decode_target([ids[token] for token in answer.hypotheses[0]]) for answer in answers]
    return {"translatedText": out[0] if isinstance(body.q, str) else out}


if __name__ == "__main__":
    uvicorn.run(app, port=int(port), log_level="error")
