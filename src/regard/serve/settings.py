"""Settings of the server, each an option of `regard serve`, and the API keys."""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from regard.config import Count, Value
from regard.decode.request import ENGINE_HELP, EngineChoice, Options, Precision, check_engine
from regard.errors import UserError
from regard.recipe import option

MAX_TEXT = 100_000  # characters of a text
MAX_INPUTS = 10_000  # of a request
MAX_NAME = 100  # characters
MAX_CONSTRAINTS = 10_000  # bytes of constraints and features of an input, in JSON
MIN_KEY = 16  # characters
Seconds = Annotated[float, Field(gt=0, le=86_400)]


class ServeSettings(Value):
    """Options of the server: network, computation, limits and timeouts."""

    # network
    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port to listen on; 0: any free port.", ge=0, le=65_535)
    keys: str | None = option(
        None,
        "File with API keys, one per line; a key in a line 'admin KEY' may also reload runs. (default: no keys)",
        metavar="FILE",
    )
    public: bool = option(False, "Accept requests from other machines without API keys.")
    host_name: tuple[str, ...] = option(
        (), "Name by which clients may reach a server without keys; '*': any name. Repeatable.", metavar="NAME"
    )
    cors: tuple[str, ...] = option((), "Web site whose pages may send requests. Repeatable.", metavar="ORIGIN")
    proxy: tuple[str, ...] = option(
        (), "Trusted proxy, or network of proxies, for X-Forwarded-For. Repeatable.", metavar="ADDRESS"
    )
    access_log: bool = option(False, "Log every request to stderr: client, path, status and time, without texts.")

    # computation
    workers: Count | None = option(None, "Number of batches answered in parallel. (default: one per core)")
    threads: Count = option(1, "Threads of torch or CTranslate2 per worker; more than one helps with large models.")
    nice: Annotated[int, Field(ge=0, le=19, strict=True)] = option(
        10, "Lower the priority of workers by this much. 0: that of other programs; refusals are slower under load."
    )
    engine: EngineChoice = option("auto", f"Engine: {ENGINE_HELP}")
    precision: Precision = option("fp32", "Precision: fp32, bf16 with torch, int8 with native or ctranslate2.")
    beam: Count = option(4, "Beam width of /translate; other requests set their own.")

    # limits
    queue: Count = option(200_000, "Maximum tokens times hypotheses in the queue; further requests are refused (429).")
    max_body: Count = option(1_000_000, "Maximum bytes of a request.")
    max_inputs: Annotated[int, Field(ge=1, le=MAX_INPUTS, strict=True)] = option(2_000, "Maximum inputs of a request.")
    max_source: Count = option(2048, "Maximum tokens of a source; requests may set a lower limit.")
    max_work: Count = option(
        20_000_000, "Maximum inputs times hypotheses times output tokens of a request, plus bytes of the answer / 100."
    )
    max_answer: Count = option(32_000_000, "Maximum bytes of an answer, estimated before the work begins.")

    # timeouts
    deadline: Seconds = option(60.0, "Seconds to answer a request.")
    receive: Seconds = option(15.0, "Seconds for a client to send a request.")
    send: Seconds = option(20.0, "Seconds for a client to read an answer.")
    drain: Seconds = option(30.0, "Seconds to finish requests after a SIGTERM.")

    @field_validator("host_name")
    @classmethod
    def _host_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not re.fullmatch(r"[\w.-]+|\*", name):
                raise ValueError(f"{name!r:.100} is not a name like models.example.org, or '*' for any name")
        return names

    @field_validator("proxy")
    @classmethod
    def _networks(cls, proxies: tuple[str, ...]) -> tuple[str, ...]:
        for text in proxies:
            try:
                ipaddress.ip_network(text, strict=False)
            except ValueError:
                raise ValueError(f"{text!r} is not an address like 10.0.0.1 or a network like 10.0.0.0/8") from None
        return proxies

    def is_own_host(self, header: str) -> bool:
        """Whether a Host header has an address, a local name, or a name of this server."""
        host = re.sub(r":\d*$", "", header).strip("[]").rstrip(".").lower()
        if not host or is_address(host) or host == "localhost" or host.endswith(".localhost"):
            return True
        return "*" in self.host_name or host in map(str.lower, (*self.host_name, self.host, socket.gethostname()))

    def check(self, keys: Keys) -> None:
        """Refuse a public host without keys or `public`, and a precision that the engine lacks."""
        local = self.host == "localhost" or (is_address(self.host) and ipaddress.ip_address(self.host).is_loopback)
        if not local and not keys.any and not self.public:
            advice = "give --keys FILE, or --public to allow this"
            raise UserError(f"--host {self.host}: other machines could use the server without a key; {advice}")
        check_engine(self.engine, Options(precision=self.precision), show="--{}".format)


def is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Keys:
    """API keys; admin keys are in both lists."""

    all: tuple[bytes, ...] = ()
    admin: tuple[bytes, ...] = ()

    @property
    def any(self) -> bool:
        return bool(self.all)

    def allows(self, key: str) -> bool:
        """Whether this is one of the keys; takes constant time."""
        return _among(key, self.all)

    def allows_admin(self, key: str) -> bool:
        return _among(key, self.admin)

    @classmethod
    def load(cls, path: str | None) -> Keys:
        """The keys of a file, one per line; empty lines and lines that begin with # are ignored."""
        if path is None:
            return cls()
        try:
            lines = Path(path).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--keys {path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
        every = []
        admin = []
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            key = words[-1]
            if len(words) > 2 or (len(words) == 2 and words[0] != "admin"):
                raise UserError(f"{path}:{number}: a line must be KEY or admin KEY")
            if len(key) < MIN_KEY or not key.isascii():
                hint = "openssl rand -hex 20 makes one"
                raise UserError(f"{path}:{number}: a key must have at least {MIN_KEY} ASCII characters ({hint})")
            every.append(key.encode())
            if len(words) == 2:
                admin.append(key.encode())
        if not every:
            raise UserError(f"{path}: contains no keys; write one per line")
        return cls(tuple(every), tuple(admin))


def _among(key: str, keys: tuple[bytes, ...]) -> bool:
    data = key.encode("utf-8", "replace")
    equal = [hmac.compare_digest(data, each) for each in keys]  # compare all of them, in constant time
    return any(equal)


def named_runs(runs: list[str]) -> dict[str, str]:
    """Runs by name, from texts NAME=DIRECTORY or DIRECTORY; the default name is the last part of the directory."""
    names: dict[str, str] = {}
    for text in runs:
        name, equals, path = text.partition("=")
        if not equals or os.path.isdir(text):
            name = Path(text).resolve().name
            path = text
        if not re.fullmatch(r"[\w.+-]+", name) or len(name) > MAX_NAME:
            rule = "may have letters, digits and . + - _; give it as NAME=DIRECTORY"
            raise UserError(f"{text}: the name of a run {rule}")
        if name in names:
            raise UserError(f"{text}: another run is also named {name}; give one of them as NAME=DIRECTORY")
        names[name] = path
    return names
