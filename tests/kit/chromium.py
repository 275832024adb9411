"""A headless Chromium, driven through its debugging pipe: real pages, real clicks, no driver to install.

`browser` is a fixture of all tests: tests/conftest.py imports it.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MAX_SECONDS = 120.0  # for an answer of the browser or a condition of a page, on a busy machine
KEY_CODES = {"Backspace": 8, "Tab": 9, "Enter": 13, "Escape": 27, "ArrowUp": 38, "ArrowDown": 40}
# The browser expects its pipe as files 3 and 4: a Python process renumbers the files, then becomes the browser.
CONNECT = "import os, sys; [os.dup2(int(sys.argv[i]), i + 2) for i in (1, 2)]; os.execv(sys.argv[3], sys.argv[3:])"


def find() -> str | None:
    """The path of an installed browser, if any."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """One browser with one page at a time."""

    def __init__(self, program: str, width: int = 1280, height: int = 900) -> None:
        self._profile = tempfile.mkdtemp(prefix="regard-browser-")
        to_read, self._out = _high_pipe()
        self._in, to_write = _high_pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        options += ["--remote-debugging-pipe", f"--user-data-dir={self._profile}", "--hide-scrollbars"]
        options += [f"--window-size={width},{height}"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", CONNECT, str(to_read), str(to_write), program, *options, "about:blank"],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer = b""
        self._count = 0
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the debugging protocol and wait for the result."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + MAX_SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(self._in, 1 << 20) if ready else b""
            if not piece:
                raise RuntimeError("the browser does not respond")
            self._buffer += piece
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def open(self, page: Path | str, dark: bool = False) -> float:
        """Open a file or an address -> seconds until the page was ready."""
        self.events.clear()
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        began = time.monotonic()
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        self.until("document.documentElement?.dataset.ready === 'yes'")
        return time.monotonic() - began

    def run(self, script: str) -> Any:
        """Evaluate an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    @contextmanager
    def inside(self, session: str) -> Iterator[None]:
        """Send calls to a frame in another process."""
        page_session = self._session
        self._session = session
        yield
        self._session = page_session

    def until(self, condition: str) -> None:
        """Wait until an expression is true in the page."""
        deadline = time.monotonic() + MAX_SECONDS
        while not self.run(condition):
            if time.monotonic() > deadline:
                errors = [event["params"] for event in self.events if event.get("method") == "Runtime.exceptionThrown"]
                raise RuntimeError(f"not true after {MAX_SECONDS:.0f} s: {condition} {errors}")
            time.sleep(0.02)

    def wait_for(self, method: str) -> dict[str, Any]:
        """The parameters of an event, which may have arrived already."""
        while not (events := [event for event in self.events if event.get("method") == method]):
            self.events.append(self._receive())
        details: dict[str, Any] = events[-1]["params"]
        return details

    def spot(self, selector: str, index: int = 0) -> tuple[float, float]:
        """The middle of an element, scrolled into view."""
        box = self.run(
            f"(() => {{ const n = document.querySelectorAll({json.dumps(selector)})[{index}]; if (!n) return null;"
            " n.scrollIntoView({block: 'center', inline: 'center'}); const b = n.getBoundingClientRect();"
            " return [b.left + b.width / 2, b.top + b.height / 2]; })()"
        )
        if box is None:
            raise RuntimeError(f"no {selector} number {index} on the page")
        return box[0], box[1]

    def hover(self, selector: str, index: int = 0, dx: float = 0, dy: float = 0) -> None:
        x, y = self.spot(selector, index)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + dx, y=y + dy)

    def click(self, selector: str, index: int = 0) -> None:
        """A real click: move, press, release."""
        x, y = self.spot(selector, index)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def key(self, name: str) -> None:
        """Press a key; characters are typed."""
        text = {"Enter": "\r"}.get(name, name if len(name) == 1 else None)
        for kind in ("keyDown", "keyUp"):
            extra: dict[str, Any] = {"text": text} if text and kind == "keyDown" else {}
            if name in KEY_CODES:  # required for the default action
                extra["windowsVirtualKeyCode"] = KEY_CODES[name]
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name, **extra)

    def write(self, text: str) -> None:
        """Type a text into the focused element."""
        for character in text:
            self.key(character)

    def resize(self, width: int, height: int = 900) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self, path: Path, full: bool = True) -> None:
        extra: dict[str, Any] = {"captureBeyondViewport": True} if full else {}
        if full:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            extra["clip"] = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 6000), "scale": 1}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **extra)["data"]))

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._profile, ignore_errors=True)


def _high_pipe() -> tuple[int, int]:
    """A pipe whose ends are not 3 and 4, which the browser will use."""
    ends = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]


@pytest.fixture(scope="session")
def running_browser() -> Iterator[Chromium]:
    """One browser for all tests of a process; without one they are skipped."""
    program = find()
    if program is None:
        pytest.skip("no Chromium on this machine (apt-get install chromium)")
    chromium = Chromium(program)
    yield chromium
    chromium.close()


@pytest.fixture
def browser(running_browser: Chromium) -> Chromium:
    """The browser with the window size and media of a desktop."""
    running_browser.resize(1280)
    running_browser.call("Emulation.setEmulatedMedia", media="")
    return running_browser
