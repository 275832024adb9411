"""The handlers of the endpoints: each converts a validated body into a job, and the results into an answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from aiohttp import web
from pydantic_core import to_json

from regard.decode.request import LENGTH_EXTRA, LENGTH_RATIO, Options, check_streaming
from regard.errors import UserError
from regard.serve import bodies
from regard.serve.queue import Group, Job, QueueFull
from regard.serve.responses import EventStream, Refused, Reply, error_json, json_response
from regard.serve.service import Service
from regard.serve.settings import CONSTRAINT_LIMITS, ServeSettings
from regard.suggest import closest

Answer = dict[str, Any]
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
        for names, one, most in CONSTRAINT_LIMITS:
            common = _characters(options, names)
            counts = [_characters(item, names) for item in items]
            for count, limit, what in (
                (common + max(counts, default=0), one, "an input"),
                (common + sum(counts), most, "a request"),
            ):
                if count > limit:
                    raise Refused(413, f"{', '.join(names)}: {count} characters; at most {limit} for {what}")
        max_source = min(options.get("max_source", self.settings.max_source), self.settings.max_source)
        if max_source != Options.model_fields["max_source"].default:
            options = {**options, "max_source": max_source}
        lengths = [sum(len(text) for text in item.values() if isinstance(text, str)) + 1 for item in items]
        work = rows * sum(map(partial(_max_output, options), items, lengths))
        if work > (limit := self.settings.max_work):
            raise Refused(413, f"inputs times hypotheses times output tokens are {work:.0f}; at most {limit}")
        group = Group(run, kind, to_json(options).decode(), alone=kind == "stream")
        return Job(group, items, [rows * n for n in lengths])

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
            changes |= {"attention": True} if body.attention else {}
            results = await self.results(self.make_job(run, "generate", changes, items, rows))
            return json_response({"run": run, "results": results})
        if body.attention:
            raise Refused(422, "attention: not available with stream")
        if len(items) != 1:
            raise Refused(422, f"stream: requires a single input, not {len(items)}")
        check_streaming(options)
        job = self.make_job(run, "stream", changes, items)
        return self._stream(job, lambda piece: {"piece": piece}, lambda x: {"run": run, "result": x})

    async def translate(self, body: bodies.TranslateBody) -> web.Response:
        """Translate, in the form of LibreTranslate."""
        run = self.find_run(self._run_of_pair(body.source, body.target), "generate")
        texts = [body.q] if isinstance(body.q, str) else body.q
        n = body.alternatives + 1
        beam = max(self.settings.beam, n)
        items = [{"source": text} for text in texts]
        options: dict[str, Any] = {"beam": beam, "nbest": n} if n > 1 else {"beam": beam} if beam > 1 else {}
        results = await self.results(self.make_job(run, "translate", options, items, beam), complete=True)
        outputs = [x["texts"] for x in results]
        answer: Answer = {"translatedText": [row[0] for row in outputs]}
        if body.alternatives:
            answer["alternatives"] = [row[1:] for row in outputs]
        if isinstance(body.q, str):
            answer = {name: values[0] for name, values in answer.items()}
        return json_response(answer)

    def _run_of_pair(self, source: str, target: str) -> str | None:
        """The run of a language pair: the run with the name of the pair, or else the only run with this target."""
        candidates = [name for name, run in self.service.runs.items() if run["task"] == "pairs"]
        if (name := f"{source}-{target}") in candidates:
            return name
        matches = [name for name in candidates if name.partition("-")[2] == target]
        if source == "auto" and len(matches) == 1:
            return matches[0]
        if len(candidates) == 1 and ("-" not in candidates[0] or (source == "auto" and not target)):
            return candidates[0]
        raise Refused(422, f"source, target: no run for {source} to {target} (runs: {', '.join(candidates)})")

    async def languages(self) -> web.Response:
        """List language pairs, in the form of LibreTranslate."""
        runs = self.service.runs.items()
        pairs = [name.split("-", 1) for name, run in runs if "generate" in run["kinds"] and "-" in name]
        targets = {code: [target for source, target in pairs if source == code] for code, _ in pairs}
        return json_response([{"code": code, "name": code, "targets": targets[code]} for code in targets])

    async def completions(self, body: bodies.CompletionBody) -> Reply:
        """Continue prompts, in the form of OpenAI."""
        run = self._language_model(body.model)
        options = body.options()
        changes = options.model_dump(mode="json", exclude_defaults=True)
        items = [{"source": prompt} for prompt in body.prompts]
        frame = {
            "id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": run,
        }  # fmt: skip
        if body.stream:
            if len(items) != 1 or (body.n or 1) != 1:
                raise Refused(422, "stream: requires a single prompt and n = 1")
            job = self.make_job(run, "stream", changes, items)

            def chunk(text: str, reason: str | None) -> Answer:
                return {**frame, "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason}]}

            def last(result: Answer) -> Answer:
                return chunk("", _reason(result["hypotheses"][0]))

            return self._stream(job, lambda piece: chunk(piece["text"], None), last, "[DONE]")
        results = await self.results(self.make_job(run, "generate", changes, items, options.rows), complete=True)
        hypotheses = [(x["source"] if body.echo else "", h) for x in results for h in x["hypotheses"]]
        choices = [
            {
                "index": i,
                "text": echo + h["text"],
                "logprobs": None if body.logprobs is None else _logprobs(h),
                "finish_reason": _reason(h),
            }
            for i, (echo, h) in enumerate(hypotheses)
        ]
        prompt = sum(x["source_tokens"] for x in results)
        output = sum(len(h["tokens"]) for _, h in hypotheses)
        usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
        return json_response({**frame, "choices": choices, "usage": usage})

    def _language_model(self, name: str) -> str:
        models = [each for each, run in self.service.runs.items() if run["task"] == "lm"]
        if name in models:
            return name
        if not models:
            raise Refused(404, "model: no run is a language model; use /v1/generate")
        known = f"{closest(name, models)} (models: {', '.join(models)})"
        raise Refused(404, f"model: no language model {name!r:.100}{known}")

    async def models(self) -> web.Response:
        """List runs with their kinds of answers, in the form of OpenAI."""
        runs = self.service.runs.items()
        rows = [{"id": name, "object": "model", "created": 0, "owned_by": "regard", **run} for name, run in runs]
        return json_response({"object": "list", "data": rows})

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
        return json_response({"run": run, **result})

    async def reload(self, body: bodies.ReloadBody) -> web.Response:
        """Reload all runs from their directories; no request is dropped."""
        try:
            await self.service.reload()
        except UserError as error:
            raise Refused(422, f"the runs could not be loaded; the old runs stay: {error}") from None
        return json_response({"runs": list(self.service.runs)})

    async def live(self) -> web.Response:
        """Check whether the server is running."""
        return json_response({"status": "live"})

    async def ready(self) -> web.Response:
        """Check whether the server accepts requests."""
        if self.draining or not self.service.ready:
            raise Refused(503, "draining" if self.draining else "no worker is ready", retry_after=2)
        return json_response({"status": "ready"})

    def _stream(
        self, job: Job, show: Callable[[Answer], Answer], last: Callable[[Answer], Answer], *closing: str
    ) -> EventStream:
        """Submit a job -> its tokens as events, the last event, and `closing` texts; errors are events too."""
        self.submit(job)

        async def events() -> AsyncIterator[str]:
            try:
                while job.pieces or not job.done:
                    await job.wait()
                    while job.pieces:
                        yield to_json(show(job.pieces.popleft())).decode()
                if "error" in job.results[0]:
                    _raise(job.results[0])
                yield to_json(last(job.results[0])).decode()
            except Refused as refused:
                yield to_json({"error": error_json(refused.status, refused.message)}).decode()
            for text in closing:
                yield text

        return EventStream(events(), partial(self.service.finish, job))


def _characters(values: Answer, names: Sequence[str]) -> int:
    """The characters of the texts with these names, which may be in lists."""
    pending = [values[name] for name in names if name in values]
    count = 0
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            count += len(value)
        else:
            pending += value or ()
    return count


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


def _reason(hypothesis: Answer) -> str:
    return "length" if "max_length" in hypothesis.get("flags", {}) else "stop"


def _logprobs(hypothesis: Answer) -> Answer:
    """The scores of tokens, in the form of OpenAI."""
    tokens: Sequence[str] = hypothesis["tokens"]
    offsets = list(accumulate(map(len, tokens[:-1]), initial=0))[: len(tokens)]
    top = [{x["token"]: x["score"] for x in row} for row in hypothesis.get("top_tokens", [])]
    logprobs = {"tokens": tokens, "token_logprobs": hypothesis["token_scores"]}
    return {**logprobs, "top_logprobs": top or None, "text_offset": offsets}
