"""Child processes of the tests are forked from one process that has imported the slowest modules."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any

import torch

from regard.parallel import children
from regard.parallel.children import Child, Template
from regard.parallel.messages import Channel

MODULES = ["torch._dynamo", "torch.distributed.fsdp", "regard.training.fit", "regard.serve.worker"]
new_interpreter = children.spawn
start_child = Template.start  # tests may replace it to count calls


def work_like_new(channel: Channel, settings: dict[str, Any]) -> None:
    """Run the work of a new interpreter in a fork; set the threads as torch would from the environment."""
    os.environ.update(settings["environment"])
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    resolve_name(settings["work"])(channel, settings["settings"])


@contextmanager
def forked_children() -> Iterator[None]:
    """Make `children.spawn` fork a template process, which the first call starts."""
    template: Template | None = None

    def spawn(
        work: str,
        settings: dict[str, Any],
        name: str = "a worker process",
        capture: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> Child:
        nonlocal template
        if template is None:
            children.spawn = new_interpreter
            template = Template(settings={"modules": MODULES})
            children.spawn = spawn
        variables = {**os.environ, **(environment or {})}
        work_settings = {"work": work, "settings": settings, "environment": variables}
        return start_child(template, {"work": f"{__name__}:work_like_new", "settings": work_settings}, name, capture)

    children.spawn = spawn
    try:
        yield
    finally:
        children.spawn = new_interpreter
        if template is not None:
            template.close()
