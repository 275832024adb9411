"""Child processes: started in every way, asked, killed, and gone with their parent."""

from __future__ import annotations

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

HERE = "parallel_work"
Start = Callable[[str], Child]


@pytest.fixture(scope="module", autouse=True)
def _new_interpreters() -> Iterator[None]:
    """`spawn` starts interpreters here, as it does for users."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(children, "spawn", new_interpreter)
        yield


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    made = Template(settings={"modules": [HERE]})
    yield made
    made.close()


@pytest.fixture(params=["template", "fork", "spawn", "no fork"])
def start(request: pytest.FixtureRequest, template: Template, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a child that does the work of this name, in every way there is."""
    started: list[Child] = []

    def start(work: str) -> Child:
        settings = {"word": "é\ud800"}
        if request.param == "fork":
            child = children.fork(resolve_name(f"{HERE}:{work}"), settings)
        elif request.param == "spawn":
            child = children.spawn(f"{HERE}:{work}", settings)
        else:
            if request.param == "no fork":
                monkeypatch.setenv(children.NO_FORK, "1")
            child = template.start({"work": f"{HERE}:{work}", "settings": settings})
        started.append(child)
        return child

    yield start
    for child in started:
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


def test_a_child_answers(start: Start) -> None:
    child = start("echo")
    assert child.ask({"x": 1}, [b"a", b""]) == Message({"x": 1, "word": "é\ud800"}, [b"a", b""])
    assert child.ask({}, [bytes(3_000_000)]).parts == [bytes(3_000_000)]
    child.channel.close()
    assert child.wait(10) in (0, 1)


def test_errors_of_a_child_are_raised(start: Start) -> None:
    child = start("fail")
    with pytest.raises(UserError, match=r"^a mistake$"):
        child.ask({"mistake": True})
    with pytest.raises(ChildFault, match=r"(?s)Traceback.*ZeroDivisionError"):
        child.ask({"mistake": False})
    with pytest.raises(UserError, match=r"^a mistake$"):  # it goes on
        child.ask({"mistake": True})


def test_the_last_lines_of_a_child_that_died_are_in_the_error(start: Start) -> None:
    with pytest.raises(ChildDied) as error:
        start("die").ask({})
    assert str(error.value).splitlines() == ["a worker process ended with status 3", "  last", "  words"]


def test_a_killed_child_is_named(start: Start) -> None:
    child = start("echo")
    child.ask({})
    child.kill()
    with pytest.raises(ChildDied, match="killed by signal 9"):
        child.ask({})
    child.kill()  # does nothing more


def test_a_child_that_computes_ends_with_its_channel(start: Start) -> None:
    child = start("compute")
    assert child.ask({}).header["computing"]
    child.channel.close()
    assert child.wait(10) == 1


@pytest.mark.parametrize("how", ["template", "fork", "spawn"])
def test_children_end_with_a_killed_parent(how: str, tmp_path: Path) -> None:
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


def test_a_template_whose_preparation_fails_says_so() -> None:
    template = Template(f"{HERE}:prepare_nothing")
    with pytest.raises(UserError, match=r"^nothing to prepare$"):
        template.wait()
    template.close()


def test_a_template_that_dies_is_named(template: Template) -> None:
    other = Template(settings={"modules": []})
    child = other.start({"work": f"{HERE}:echo", "settings": {"word": ""}})
    other._process.kill()
    with pytest.raises(ChildDied, match="the template of worker processes was killed by signal 9"):
        other.start({"work": f"{HERE}:echo", "settings": {}})
    assert child.wait(10) == -signal.SIGKILL
    child.close()
    other.close()


@given(st.lists(st.integers(0, 3), max_size=12), st.integers(1, 3), st.booleans())
def test_results_come_in_order(delays: list[int], workers: int, here: bool) -> None:
    def work(item: tuple[int, int]) -> int:
        time.sleep(item[1] / 1000)
        return item[0]

    items = list(enumerate(delays))
    assert list(ordered_map([work] * workers, items, work if here else None)) == list(range(len(items)))


def test_an_item_that_fails_ends_the_map() -> None:
    stopped = []

    def work(item: int) -> int:
        if item == 3:
            raise UserError("three")
        return item

    results = ordered_map([work, work], iter(range(1000)), stop=lambda: stopped.append(1))
    with pytest.raises(UserError, match="three"):
        list(results)
    assert stopped == [1]


def test_cores_respect_affinity_and_quota(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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


def test_handles_are_passed(start: Start) -> None:
    child = start("write_to_handle")
    reader, writer = os.pipe()
    child.channel.send({}, handles=[writer])
    os.close(writer)
    assert os.read(reader, 100) == b"written"
    os.close(reader)
    assert isinstance(child.channel, Channel)
