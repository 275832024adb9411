"""Completions and chat in the form of OpenAI: choices, chunks of a stream, usage."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from regard.serve.bodies import ChatBody, CompletionBody
from regard.serve.responses import Refused

Answer = dict[str, Any]


class StreamForm(NamedTuple):
    """The events of a stream."""

    piece: Callable[[int, Answer], Answer]  # for a piece of an input
    result: Callable[[int, Answer], list[Answer]]  # for the result of an input
    first: Sequence[Answer] = ()
    last: Callable[[Sequence[Answer]], list[Answer]] = lambda results: []  # after all results
    end: Sequence[str] = ()  # also after an error


class Completions:
    """The answers to a request of an OpenAI client."""

    def __init__(self, run: str, body: CompletionBody | ChatBody, prompts: Sequence[str]) -> None:
        self.body = body
        self.prompts = prompts
        self.chat = isinstance(body, ChatBody)
        self.outputs = 1 if body.samples else body.choices  # of an input
        prefix, kind = ("chatcmpl", "chat.completion") if self.chat else ("cmpl", "text_completion")
        kind += ".chunk" if self.chat and body.stream else ""
        self.frame: Answer = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time())}
        self.frame["model"] = run
        self.counts = body.stream_options is not None and bool(body.stream_options.include_usage)

    def answer(self, results: Sequence[Answer]) -> Answer:
        """The answer without a stream."""
        choices = []
        for index, hypothesis in [each for i, result in enumerate(results) for each in self._choices(i, result)]:
            text = self._echo(index) + hypothesis["text"]
            content = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            end = {"logprobs": self._logprobs(hypothesis), "finish_reason": _reason(hypothesis)}
            choices.append({"index": index, **content, **end})
        return {**self.frame, "choices": choices, "usage": self._usage(results)}

    def stream_form(self) -> StreamForm:
        indices = range(len(self.prompts) * self.body.choices)
        first = [self._chunk(i, self._echo(i)) for i in indices] if self.chat or self._echo(0) else []
        if self.chat:
            for chunk in first:
                chunk["choices"][0]["delta"]["role"] = "assistant"
        return StreamForm(self._piece, self._result, first, self._last, ("[DONE]",))

    def _choices(self, index: int, result: Answer) -> list[tuple[int, Answer]]:
        """The hypotheses of an input with the indices of their choices; a prompt that was not continued is refused."""
        flags = result["hypotheses"][0].get("flags", {})
        if reasons := [flags[name] for name in ("too_long", "unsatisfied") if name in flags]:
            raise Refused(422, f"prompt: {reasons[0]}")
        return list(enumerate(result["hypotheses"], index * self.outputs))

    def _echo(self, index: int) -> str:
        echo = isinstance(self.body, CompletionBody) and self.body.echo
        return self.prompts[index // self.body.choices] if echo else ""

    def _chunk(self, index: int, text: str, hypothesis: Answer | None = None, reason: str | None = None) -> Answer:
        content = {"delta": {"content": text}} if self.chat else {"text": text}
        logprobs = self._logprobs(hypothesis) if hypothesis else None
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
        return {**self.frame, "choices": [choice], **({"usage": None} if self.counts else {})}

    def _piece(self, index: int, piece: Answer) -> Answer:
        top = {"top_tokens": [piece["top_tokens"]]} if "top_tokens" in piece else {}
        return self._chunk(index, piece["text"], {"tokens": [piece["token"]], "token_scores": [piece["score"]], **top})

    def _result(self, index: int, result: Answer) -> list[Answer]:
        """The ends of the choices of an input; the best outputs of a beam are sent as a whole."""
        choices = self._choices(index, result)
        whole = [self._chunk(i, h["text"], h) for i, h in choices] if self.outputs > 1 else []
        return whole + [self._chunk(i, "", reason=_reason(h)) for i, h in choices]

    def _last(self, results: Sequence[Answer]) -> list[Answer]:
        return [{**self.frame, "choices": [], "usage": self._usage(results)}] if self.counts else []

    def _usage(self, results: Sequence[Answer]) -> Answer:
        prompt = sum(result["source_tokens"] for result in results[:: self.body.choices // self.outputs])
        output = sum(len(h["tokens"]) for result in results for h in result["hypotheses"])
        return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}

    def _logprobs(self, hypothesis: Answer) -> Answer | None:
        """The scores of tokens, if requested."""
        if not isinstance(self.body, CompletionBody) or self.body.logprobs is None:
            return None
        tokens: Sequence[str] = hypothesis["tokens"]
        offsets = list(accumulate(map(len, tokens[:-1]), initial=0))[: len(tokens)]
        top = [{x["token"]: x["score"] for x in row} for row in hypothesis.get("top_tokens", [])]
        logprobs = {"tokens": tokens, "token_logprobs": hypothesis["token_scores"]}
        return {**logprobs, "top_logprobs": top or None, "text_offset": offsets}


def _reason(hypothesis: Answer) -> str:
    return "length" if "max_length" in hypothesis.get("flags", {}) else "stop"
