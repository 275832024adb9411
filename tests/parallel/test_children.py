"""Child processes: every way to start them, requests, errors, kills, and exit with their parent."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kit.preloaded import new_interpreter
from regard.errors import UserError
from regard.parallel import children, cores
from regard.parallel.children import Child, ChildDied, ChildFault, Template, ordered_map
from regard.parallel.messages import Channel, Message, Unpacker, pack

MODULE = "parallel_work"
Start = Callable[[str], Child]


@pytest.fixture(scope="module", autouse=True)
def _new_interpreters() -> Iterator[None]:
    """Make `spawn` start new interpreters, as it does outside the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(children, "spawn", new_interpreter)
        yield


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    instance = Template(settings={"modules": [MODULE]})
    yield instance
    instance.close()


@pytest.fixture(params=["template", "fork", "spawn", "no fork"])
def start(request: pytest.FixtureRequest, template: Template, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """A function that starts a child for a work function, in each of the supported ways."""
    processes: list[Child] = []

    def start(work: str) -> Child:
        settings = {"word": "é\ud800"}
        if request.param == "fork":
            child = children.fork(resolve_name(f"{MODULE}:{work}"), settings)
        elif request.param == "spawn":
            child = children.spawn(f"{MODULE}:{work}", settings)
        else:
            if request.param == "no fork":
                monkeypatch.setenv(children.NO_FORK, "1")
            child = template.start({"work": f"{MODULE}:{work}", "settings": settings})
        processes.append(child)
        return child

    yield start
    for child in processes:
        child.close()


headers = st.dictionaries(
    st.text(max_size=3), st.integers() | st.text() | st.floats(allow_nan=False) | st.none(), max_size=3
)


@given(st.lists(st.tuples(headers, st.lists(st.binary(max_size=9), max_size=3)), max_size=4), st.integers(1, 30))
def test_messages_arrive_in_pieces_of_any_size(messages: list[Any], size: int) -> None:
    data = b"".join(pack(Message(header, parts)) for header, parts in messages)
    unpacker = Unpacker()
    received = [m for i in range(0, len(data), size) for m in unpacker.feed(data[i : i + size])]
    assert [(m.header, list(m.parts)) for m in received] == messages


def test_child_answers_requests(start: Start) -> None:
    child = start("echo")
    assert child.ask({"x": 1}, [b"a", b""]) == Message({"x": 1, "word": "é\ud800"}, [b"a", b""])
    assert child.ask({}, [bytes(3_000_000)]).parts == [bytes(3_000_000)]
    child.channel.close()
    assert child.wait(10) in (0, 1)


def test_errors_in_a_child_are_raised_in_the_parent(start: Start) -> None:
    child = start("fail")
    with pytest.raises(UserError, match=r"^a mistake$"):
        child.ask({"mistake": True})
    with pytest.raises(ChildFault, match=r"(?s)Traceback.*ZeroDivisionError"):
        child.ask({"mistake": False})
    with pytest.raises(UserError, match=r"^a mistake$"):  # the child continues after errors
        child.ask({"mistake": True})


class Garbage:
    """An object in a cycle, whose destructor writes a message."""

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        print("destroyed", file=sys.stderr)


def collect_garbage(channel: Channel, settings: dict[str, Any]) -> None:
    gc.collect()
    sys.exit("done")


def test_garbage_of_the_parent_is_not_destroyed_in_a_forked_child() -> None:
    gc.disable()
    try:
        Garbage()
        child = children.fork(collect_garbage, {})
        with pytest.raises(ChildDied, match="done") as error:
            child.ask({})
        assert "destroyed" not in str(error.value)
    finally:
        gc.enable()
        child.close()


def test_error_of_a_dead_child_contains_its_last_lines(start: Start) -> None:
    with pytest.raises(ChildDied) as error:
        start("die").ask({})
    assert str(error.value).splitlines() == ["a worker process ended with status 3", "  last", "  words"]


def test_killed_child_is_reported_with_its_signal(start: Start) -> None:
    child = start("echo")
    child.ask({})
    child.kill()
    with pytest.raises(ChildDied, match="killed by signal 9"):
        child.ask({})
    child.kill()  # a second kill has no effect


def test_computing_child_exits_when_its_channel_closes(start: Start) -> None:
    child = start("compute")
    assert child.ask({}).header["computing"]
    child.channel.close()
    assert child.wait(10) == 1


@pytest.mark.parametrize("how", ["template", "fork", "spawn"])
def test_children_exit_when_their_parent_is_killed(how: str, tmp_path: Path) -> None:
    code = f"import parallel_work; parallel_work.parent({how!r})"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=Path(__file__).parent) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert pids and all(is_running(pid) for pid in pids)
        parent.kill()
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    with suppress(ProcessLookupError, FileNotFoundError):
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


def test_error_in_template_preparation_is_raised() -> None:
    template = Template(f"{MODULE}:prepare_nothing")
    with pytest.raises(UserError, match=r"^nothing to prepare$"):
        template.wait()
    template.close()


def test_dead_template_is_reported_and_its_children_are_killed(template: Template) -> None:
    other = Template(settings={"modules": []})
    child = other.start({"work": f"{MODULE}:echo", "settings": {"word": ""}})
    other._process.kill()
    with pytest.raises(ChildDied, match="the template of worker processes was killed by signal 9"):
        other.start({"work": f"{MODULE}:echo", "settings": {}})
    assert child.wait(10) == -signal.SIGKILL
    child.close()
    other.close()


@given(st.lists(st.integers(0, 3), max_size=12), st.integers(1, 3), st.booleans())
def test_ordered_map_keeps_the_order(delays: list[int], workers: int, use_this_process: bool) -> None:
    def work(item: tuple[int, int]) -> int:
        time.sleep(item[1] / 1000)
        return item[0]

    items = list(enumerate(delays))
    assert list(ordered_map([work] * workers, items, work if use_this_process else None)) == list(range(len(items)))


def test_ordered_map_stops_at_the_first_error() -> None:
    stop_calls = []

    def work(item: int) -> int:
        if item == 3:
            raise UserError("three")
        return item

    results = ordered_map([work, work], iter(range(1000)), stop=lambda: stop_calls.append(1))
    with pytest.raises(UserError, match="three"):
        list(results)
    assert stop_calls == [1]


def test_cores_respects_affinity_and_quota(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    count = cores.cores()
    assert 1 <= count <= len(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert cores.cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    monkeypatch.setattr(cores, "CPU_MAX", tmp_path / "cpu.max")
    for text, quota in (("150000 100000\n", 2), ("1000 100000\n", 1), ("max 100000\n", None), ("nonsense", None)):
        (tmp_path / "cpu.max").write_text(text)
        assert cores.cpu_quota() == quota
        assert cores.cores() == min(count, quota or count)


def test_file_handles_are_passed_to_a_child(start: Start) -> None:
    child = start("write_to_handle")
    reader, writer = os.pipe()
    child.channel.send({}, handles=[writer])
    os.close(writer)
    assert os.read(reader, 100) == b"written"
    os.close(reader)
    assert isinstance(child.channel, Channel)
