"""The handlers of the endpoints: each converts a validated body into a job, and the results into an answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from aiohttp import web
from pydantic_core import to_json

from regard.decode.request import LENGTH_EXTRA, LENGTH_RATIO, Options, check_streaming
from regard.errors import UserError
from regard.serve import bodies
from regard.serve.completions import Answer, Completions, StreamForm
from regard.serve.queue import Group, Job, QueueFull
from regard.serve.responses import EventStream, Refused, Reply, error_json, json_response
from regard.serve.service import Service
from regard.serve.settings import MAX_CONSTRAINTS, MAX_TEXT, ServeSettings
from regard.serve.translation import (
    html_parts,
    is_language_classifier,
    join_parts,
    line_parts,
    rank_languages,
)
from regard.suggest import closest
from regard.text.chat import Chat

MARKS_PER_INPUT = 10  # tags or line breaks; splitting a text at more of them would delay all requests
MAX_DETECTED = 2000  # characters of a text whose language is detected
PRIVATE = ("characters", "generation", "chat_template")  # facts of a run that are not published
CHAT_LENGTH = 256  # default maximum length of an answer by a chat template, in tokens
ROLES = {"developer": "system"}  # other names of roles in the API of OpenAI
CONSTRAINTS = ("prefix", "require", "require_any", "forbid", "stop", "features")
# Estimated bytes of an answer.
TOKEN_BYTES = 8  # of a possible output token with its score: 48, but outputs usually have a sixth of their limit
TOP_TOKEN_BYTES = 45
LINK_BYTES = 2  # of the alignment of a possible output token with a character of the source: 8, if both are tokens
TEXT_BYTES = 2  # of a possible output token in a text
PAIR_BYTES = 45  # of a character of a scored target, which may be a token
NUMBER_BYTES = 21  # of a vector
LABEL_BYTES = 40
WORK_BYTES = 100  # of an answer, which count as an output token
TRACE_COST = 20  # of recording all attention of one hypothesis, as a multiple of decoding it


class Handlers:
    """The handlers of one service."""

    def __init__(self, service: Service, settings: ServeSettings) -> None:
        self.service = service
        self.settings = settings
        self.draining = False

    # jobs

    def find_run(self, name: str | None, kind: str) -> str:
        """The run of a request: the named run, or the only run with this kind of answers."""
        runs = self.service.runs
        if name is not None:
            if name not in runs:
                raise Refused(404, f"run: no run {name!r:.100}{closest(name, runs)} (runs: {', '.join(runs)})")
            kinds = runs[name]["kinds"]
            if kind not in kinds:
                task = runs[name]["task"]
                raise Refused(422, f"run: {name} has the task {task} and cannot {kind}, only {', '.join(kinds)}")
            return name
        candidates = [each for each, run in runs.items() if kind in run["kinds"]]
        if len(candidates) != 1:
            which = f"which one of {', '.join(candidates)}?" if candidates else f"no run can {kind}"
            raise Refused(422, f"run: {which}")
        return candidates[0]

    def make_job(self, run: str, kind: str, options: dict[str, Any], items: list[Answer], rows: int = 1) -> Job:
        """Make a job; refuse a request that is too much work."""
        if len(items) > self.settings.max_inputs:
            raise Refused(413, f"{len(items)} inputs; at most {self.settings.max_inputs} in one request")
        for item in items:
            texts = [x[name] for x in (options, item) for name in CONSTRAINTS if name in x]
            if texts and (size := len(to_json(texts))) > MAX_CONSTRAINTS:
                names = ", ".join(CONSTRAINTS)
                raise Refused(413, f"{names}: {size} bytes for an input; at most {MAX_CONSTRAINTS}")
        most = self.settings.max_source
        options = {**options, "max_source": min(options.get("max_source", most), most)}
        lengths = [sum(len(text) for text in item.values() if isinstance(text, str)) + 1 for item in items]
        tokens = list(map(partial(_max_output, options), items, lengths))
        answer = self._answer_bytes(run, kind, options, items, tokens)
        if answer > (limit := self.settings.max_answer):
            why = f"{len(items)} inputs with up to {max(tokens):.0f} output tokens, and the options"
            raise Refused(413, f"the answer may have {answer:.0f} bytes ({why}); at most {limit} (--max-answer)")
        work = rows * sum(tokens) + answer / WORK_BYTES
        if work > (limit := self.settings.max_work):
            raise Refused(413, f"inputs times hypotheses times output tokens are {work:.0f}; at most {limit}")
        group = Group(run, kind, to_json(options).decode(), alone=kind == "stream")
        return Job(group, items, [rows * n for n in lengths])

    def _answer_bytes(
        self, run: str, kind: str, options: Answer, items: Sequence[Answer], tokens: Sequence[float]
    ) -> float:
        """The estimated bytes of an answer with at most these numbers of output tokens, without attention."""
        facts = self.service.runs[run]
        if kind == "score":
            return sum(PAIR_BYTES * len(item["target"]) for item in items)
        if kind == "classify":
            return len(items) * LABEL_BYTES * len(facts["labels"])
        if kind == "embed":
            return len(items) * NUMBER_BYTES * int(facts["width"])
        outputs: int = max(options.get("nbest", 1), options.get("alternatives", 0))
        if kind == "translate":
            return sum(tokens) * TEXT_BYTES * outputs
        token_bytes = TOKEN_BYTES + TOP_TOKEN_BYTES * options.get("top_tokens", 0)
        answer: float = sum(tokens) * (outputs * token_bytes + options.get("mbr", 0) * TEXT_BYTES)
        if options.get("alignment"):
            links = sum(count * len(item["source"]) for count, item in zip(tokens, items, strict=True))
            answer += links * outputs * LINK_BYTES
        return answer

    def check_room(self) -> None:
        """Refuse any request if no worker is ready or the queue is full."""
        if not self.service.ready:
            raise Refused(503, "no worker is ready", retry_after=2)
        if self.service.queue.full:
            raise self._busy()

    def submit(self, job: Job) -> None:
        """Submit a job, or refuse the request."""
        try:
            self.service.submit(job)
        except QueueFull:
            raise self._busy() from None

    def _busy(self) -> Refused:
        return Refused(429, "the queue is full; try again later", retry_after=self.service.wait_seconds())

    async def results(self, job: Job, complete: bool = False) -> list[Answer]:
        """The results of a job, in order. Raises if all inputs failed or, with `complete`, if any failed."""
        self.submit(job)
        try:
            await job.wait()
        finally:
            self.service.finish(job)
        results = [job.results[i] for i in range(len(job.inputs))]
        errors = [result for result in results if "error" in result]
        if errors and (complete or len(errors) == len(results)):
            _raise(errors[0])
        return [
            {"source": item["source"], "error": error_json(x["status"], x["error"])} if "error" in x else x
            for item, x in zip(job.inputs, results, strict=True)
        ]

    # endpoints

    async def generate(self, body: bodies.GenerateBody) -> Reply:
        """Decode."""
        run = self.find_run(body.run, "generate")
        items = body.items()
        options = body.options()
        changes = options.model_dump(mode="json", exclude_defaults=True)
        if not body.stream:
            rows = max(options.rows, options.nbest, options.alternatives, TRACE_COST if body.attention else 1)
            changes |= {"attention": self.settings.max_answer // len(items)} if body.attention else {}
            results = await self.results(self.make_job(run, "generate", changes, items, rows))
            return json_response({"run": run, "results": results})
        if body.attention:
            raise Refused(422, "attention: not available with stream")
        if len(items) != 1:
            raise Refused(422, f"stream: requires a single input, not {len(items)}")
        check_streaming(options)
        job = self.make_job(run, "stream", changes, items)
        return self._stream(job, StreamForm(lambda _, x: {"piece": x}, lambda _, x: [{"run": run, "result": x}]))

    async def translate(self, body: bodies.TranslateBody) -> web.Response:
        """Translate, in the form of LibreTranslate."""
        texts = [body.q] if isinstance(body.q, str) else body.q
        run, detected = await self._run_of_pair(body.source.lower(), body.target.lower(), texts)
        as_html = body.format == "html"
        most = MARKS_PER_INPUT * self.settings.max_inputs
        if sum(text.count("<" if as_html else "\n") for text in texts) > most:
            raise Refused(413, f"q: more than {most} {'tags' if as_html else 'lines'}")
        rows = [html_parts(text) if as_html else line_parts(text) for text in texts]
        items = [{"source": part.text} for row in rows for part in row if part.is_input]
        n = body.alternatives + 1
        beam = max(self.settings.beam, n)
        options: dict[str, Any] = {"beam": beam, "nbest": n} if n > 1 else {"beam": beam} if beam > 1 else {}
        job = self.make_job(run, "translate", options, items, beam)
        results = await self.results(job, complete=True) if items else []
        outputs = iter([x["texts"] for x in results])
        joined = [join_parts(row, outputs, as_html) for row in rows]
        answer: Answer = {"translatedText": [row[0] for row in joined]}
        if body.alternatives:
            answer["alternatives"] = [row[1:] for row in joined]
        if detected:
            answer["detectedLanguage"] = [detected] * len(texts)
        if isinstance(body.q, str):
            answer = {name: values[0] for name, values in answer.items()}
        return json_response(answer)

    def _pairs(self) -> dict[tuple[str, str], str]:
        """The language pairs of the runs, from names such as en-de."""
        names = [name for name, run in self.service.runs.items() if run["task"] == "pairs" and "-" in name]
        return {(name.partition("-")[0], name.partition("-")[2]): name for name in names}

    async def _run_of_pair(self, source: str, target: str, texts: list[str]) -> tuple[str, Answer | None]:
        """The run of a pair and the detected source; a run without a pair in its name answers requests without one."""
        auto = source in ("auto", "")
        pairs = self._pairs()
        candidates = {pair: name for pair, name in pairs.items() if target in ("", pair[1].lower())}
        detected = None
        if auto and candidates:
            sources = {pair[0] for pair in candidates}
            detected = next(x for x in await self._detect(texts) if x["language"] in sources)
            if len(sources) > 1 and not detected["confidence"]:
                raise Refused(422, f"source: cannot be detected; give one of {', '.join(sorted(sources))}")
            source = detected["language"].lower()
        runs = [name for pair, name in candidates.items() if pair[0].lower() == source]
        if auto and not target and not pairs:
            runs = [name for name, run in self.service.runs.items() if run["task"] == "pairs"]
        if len(runs) == 1:
            return runs[0], detected
        known = ", ".join(f"{x} to {y}" for x, y in pairs) or "none: a run needs a name such as en-de=DIRECTORY"
        which = f"{source or 'auto'} to {target or 'any language'}"
        raise Refused(422, f"source, target: {'several runs' if runs else 'no run'} for {which} (pairs: {known})")

    async def detect(self, body: bodies.DetectBody) -> web.Response:
        """Detect the language of a text among the source languages, in the form of LibreTranslate."""
        return json_response(await self._detect([body.q] if isinstance(body.q, str) else body.q))

    async def _detect(self, texts: list[str]) -> list[Answer]:
        """The languages of a text with confidence in percent, best first.

        A classifier of languages ranks them, or else the characters in the training data of the runs.
        """
        sources = {pair[0]: name for pair, name in self._pairs().items()}
        text = "\n".join(texts)[:MAX_DETECTED]
        ranked: list[tuple[str, float]] = []
        for name, run in self.service.runs.items():
            if "classify" in run["kinds"] and is_language_classifier(run["labels"], sources):
                (result,) = await self.results(self.make_job(name, "classify", {}, [{"source": text}]))
                ranked = list(result.get("probabilities", {}).items())
        if not ranked:
            counts = {code: self.service.runs[name]["characters"] for code, name in sources.items()}
            ranked = rank_languages(text, {code: row for code, row in counts.items() if row})
        ranked += [(code, 0.0) for code in sources if code not in dict(ranked)]
        if not ranked:
            raise Refused(404, "no run has a source language: a run needs a name such as en-de=DIRECTORY")
        return [{"language": code, "confidence": round(100 * probability, 1)} for code, probability in ranked]

    async def languages(self) -> web.Response:
        """List language pairs, in the form of LibreTranslate."""
        pairs = self._pairs()
        targets = {code: [target for source, target in pairs if source == code] for code, _ in pairs}
        return json_response([{"code": code, "name": code, "targets": targets[code]} for code in targets])

    async def frontend_settings(self) -> web.Response:
        """List settings for user interfaces, in the form of LibreTranslate."""
        target = next((target for _, target in self._pairs()), "")
        keys = self.settings.keys is not None
        languages = {side: {"code": code, "name": code} for side, code in (("source", "auto"), ("target", target))}
        settings = {"apiKeys": keys, "keyRequired": keys, "charLimit": MAX_TEXT, "language": languages}
        unsupported = {"suggestions": False, "filesTranslation": False, "supportedFilesFormat": []}
        return json_response({**settings, **unsupported, "frontendTimeout": 500})

    async def completions(self, body: bodies.CompletionBody) -> Reply:
        """Continue prompts, in the form of OpenAI."""
        run = self._language_model(body.model)
        return await self._complete(run, body, body.prompts, body.options(body.max_tokens or 16, body.logprobs))

    async def chat(self, body: bodies.ChatBody) -> Reply:
        """Answer a chat by the chat template of a run, or continue its messages, in the form of OpenAI."""
        run = self._language_model(body.model)
        facts = self.service.runs[run]
        limit = body.max_completion_tokens or body.max_tokens
        more: Answer = {}
        if facts["generation"]["chat"]:
            messages = [(ROLES.get(message.role, message.role), str(message)) for message in body.messages]
            more["pieces"] = Chat.model_validate(facts["generation"]["chat"]).prompt(messages)
            limit = limit or facts["generation"]["max_length"] or CHAT_LENGTH
        elif facts["chat_template"]:
            advice = "send the prompt in the form of the template to /v1/completions"
            raise Refused(404, f"model: {run} has a chat template that this server cannot apply; {advice}")
        prompt = "\n".join(map(str, body.messages))
        return await self._complete(run, body, [prompt], body.options(limit), **more)

    async def _complete(
        self, run: str, body: bodies.CompletionBody | bodies.ChatBody, prompts: list[str], options: Options, **more: Any
    ) -> Reply:
        changes = options.model_dump(mode="json", exclude_defaults=True)
        form = Completions(run, body, prompts)
        kind = "stream" if body.stream and options.beam == 1 else "generate"
        job = self.make_job(run, kind, changes, [item | more for item in body.items(prompts)], options.rows)
        if body.stream:
            return self._stream(job, form.stream_form())
        return json_response(form.answer(await self.results(job, complete=True)))

    def _language_model(self, name: str) -> str:
        models = [each for each, run in self.service.runs.items() if run["task"] == "lm"]
        if name in models:
            return name
        if not models:
            raise Refused(404, "model: no run is a language model, as /v1/completions needs; use /v1/generate")
        known = f"{closest(name, models)} (models for /v1/completions: {', '.join(models)})"
        raise Refused(404, f"model: no language model {name!r:.100}{known}")

    async def models(self) -> web.Response:
        """List runs with their kinds of answers, in the form of OpenAI."""
        return json_response({"object": "list", "data": [self._model(name) for name in self.service.runs]})

    async def model(self, name: str) -> web.Response:
        """Describe a run, in the form of OpenAI."""
        if name not in self.service.runs:
            known = f"{closest(name, self.service.runs)} (models: {', '.join(self.service.runs)})"
            raise Refused(404, f"model: no run {name!r:.100}{known}")
        return json_response(self._model(name))

    def _model(self, name: str) -> Answer:
        run = {key: value for key, value in self.service.runs[name].items() if key not in PRIVATE}
        return {"id": name, "object": "model", "created": 0, "owned_by": "regard", **run}

    async def score(self, body: bodies.ScoreBody) -> web.Response:
        """Score pairs of source and target."""
        run = self.find_run(body.run, "score")
        items = [pair.model_dump(exclude_none=True) for pair in body.pairs]
        return json_response({"run": run, "results": await self.results(self.make_job(run, "score", {}, items))})

    async def classify(self, body: bodies.ClassifyBody) -> web.Response:
        """Classify texts."""
        run = self.find_run(body.run, "classify")
        items = [{"source": x} if isinstance(x, str) else x.model_dump(exclude_none=True) for x in body.inputs]
        return json_response({"run": run, "results": await self.results(self.make_job(run, "classify", {}, items))})

    async def embed(self, body: bodies.EmbedBody) -> web.Response:
        """Embed texts."""
        run = self.find_run(body.run, "embed")
        job = self.make_job(run, "embed", {"normalize": body.normalize}, [{"source": text} for text in body.inputs])
        return json_response({"run": run, "results": await self.results(job)})

    async def inspect(self, body: bodies.InspectBody) -> web.Response:
        """Show the attention page of one example, as HTML."""
        run = self.find_run(body.run, "inspect")
        item = body.model_dump(exclude_none=True, exclude={"run"})
        (result,) = await self.results(self.make_job(run, "inspect", {}, [item], TRACE_COST))
        if (size := len(result["html"])) > (most := self.settings.max_answer):
            raise Refused(413, f"the page has {size} characters; at most {most} (--max-answer)")
        return json_response({"run": run, **result})

    async def reload(self, body: bodies.ReloadBody) -> web.Response:
        """Reload all runs from their directories; no request is dropped."""
        try:
            await self.service.reload()
        except UserError as error:
            raise Refused(422, f"the runs could not be loaded; the old runs stay: {error}") from None
        return json_response({"runs": list(self.service.runs)})

    async def health(self) -> web.Response:
        """Check whether the server accepts requests, in the form of LibreTranslate."""
        await self.ready()
        return json_response({"status": "ok"})

    async def live(self) -> web.Response:
        """Check whether the server is running."""
        return json_response({"status": "live"})

    async def ready(self) -> web.Response:
        """Check whether the server accepts requests."""
        if self.draining or not self.service.ready:
            raise Refused(503, "draining" if self.draining else "no worker is ready", retry_after=2)
        return json_response({"status": "ready"})

    def _stream(self, job: Job, form: StreamForm) -> EventStream:
        """Submit a job -> its pieces and results as events; an error is an event too."""
        self.submit(job)

        async def events() -> AsyncIterator[Answer]:
            for event in form.first:
                yield event
            ended: set[int] = set()
            while len(ended) < len(job.inputs):
                await job.wait()
                while job.pieces:
                    yield form.piece(*job.pieces.popleft())
                for index in sorted(job.results.keys() - ended):
                    ended.add(index)
                    if "error" in job.results[index]:
                        _raise(job.results[index])
                    for event in form.result(index, job.results[index]):
                        yield event
            for event in form.last([job.results[i] for i in range(len(job.inputs))]):
                yield event

        async def texts() -> AsyncIterator[str]:
            try:
                async for event in events():
                    yield to_json(event).decode()
            except Refused as refused:
                yield to_json({"error": error_json(refused.status, refused.message)}).decode()
            for text in form.end:
                yield text

        return EventStream(texts(), partial(self.service.finish, job))


def _max_output(options: Answer, item: Answer, length: int) -> float:
    """The estimated maximum number of output tokens for a source of `length` characters."""
    tokens: float = max(
        item.get("max_length") or options.get("max_length") or LENGTH_RATIO * length + LENGTH_EXTRA,
        item.get("min_length", 0),
        options.get("min_length", 0),
        length * (options.get("max_ratio") or 0),
        length * options.get("min_ratio", 0),
    )
    return tokens


def _raise(result: Answer) -> None:
    raise Refused(result["status"], result["error"], retry_after=2 if result["status"] == 503 else None)
