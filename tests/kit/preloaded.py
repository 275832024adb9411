"""A process that has imported what takes longest. Child processes of the tests are forked from it, not started anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from regard.parallel import children
from regard.parallel.children import Child, Template

MODULES = ["torch._dynamo", "torch.distributed.fsdp", "regard.training.fit", "regard.serve.worker"]
new_interpreter = children.spawn
start_child = Template.start  # tests may count later calls


@contextmanager
def forked_children() -> Iterator[None]:
    """Let `children.spawn` fork a process that is started once, by the first use."""
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
        return start_child(template, {"work": work, "settings": settings}, name, capture, environment)

    children.spawn = spawn
    try:
        yield
    finally:
        children.spawn = new_interpreter
        if template is not None:
            template.close()
