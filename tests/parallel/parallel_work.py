"""Work functions for the child processes of the tests."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from regard.errors import UserError
from regard.parallel import children
from regard.parallel.children import Template, answer_requests
from regard.parallel.messages import Channel, Message


def echo(channel: Channel, settings: dict[str, Any]) -> None:
    answer_requests(channel, lambda message: Message({**message.header, "word": settings["word"]}, message.parts))


def fail(channel: Channel, settings: dict[str, Any]) -> None:
    def answer(message: Message) -> Message:
        if message.header["mistake"]:
            raise UserError("a mistake")
        return Message({"never": 1 // 0})

    answer_requests(channel, answer)


def die(channel: Channel, settings: dict[str, Any]) -> None:
    channel.receive()
    print("last\nwords", file=sys.stderr)
    sys.exit(3)


def compute(channel: Channel, settings: dict[str, Any]) -> None:
    channel.receive()
    channel.send({"computing": True})
    while True:
        time.sleep(0.01)


def write_to_handle(channel: Channel, settings: dict[str, Any]) -> None:
    channel.receive()
    os.write(channel.handles.popleft(), b"written")


def prepare_nothing(settings: dict[str, Any]) -> Any:
    raise UserError("nothing to prepare")


def parent(how: str) -> None:
    """Start two children, print their process ids, and wait."""
    template = Template(settings={"modules": []}) if how == "template" else None
    processes = []
    for _ in range(2):
        if template is not None:
            child = template.start({"work": "parallel_work:compute", "settings": {}})
        else:
            start: Any = children.fork if how == "fork" else children.spawn
            child = start(compute if how == "fork" else "parallel_work:compute", {})
        child.ask({})
        processes.append(child)
    print(*(child.pid for child in processes), flush=True)
    time.sleep(60)
