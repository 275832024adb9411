"""Settings of the server, each an option of `regard serve`, and the API keys."""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from regard.config import Count, Value
from regard.decode.request import EngineName, Options, Precision, check_engine
from regard.errors import UserError
from regard.recipe import option

MAX_TEXT = 100_000  # characters of one text
MAX_INPUTS = 10_000  # of one request
Seconds = Annotated[float, Field(gt=0, le=86_400)]
LONGEST_NAME = 100


class ServeSettings(Value):
    """How the server listens, what it takes on, and when it gives up."""

    # where it listens
    host: str = option("127.0.0.1", "The address to listen on.")
    port: int = option(8000, "The port to listen on; 0: any that is free.", ge=0, le=65_535)
    keys: str | None = option(
        None,
        "API keys, one per line; a line 'admin KEY' may also reload runs. Without it there are none.",
        metavar="FILE",
    )
    public: bool = option(False, "Listen to other machines without API keys.")
    cors: tuple[str, ...] = option((), "A web site whose pages may ask this server. Repeatable.", metavar="ORIGIN")
    proxy: tuple[str, ...] = option(
        (), "A proxy, or a network of them, whose X-Forwarded-For is believed. Repeatable.", metavar="ADDRESS"
    )
    access_log: bool = option(False, "Write a line for every request to stderr: who, what, status, time; no text.")

    # how it computes
    workers: Count | None = option(None, "Batches that are answered at once. (default: one for each core)")
    threads: Count = option(1, "Of each worker; more pay off for large models.")
    engine: EngineName = option("torch", "torch or ctranslate2.")
    precision: Precision = option("fp32", "fp32 or bf16; int8 with the engine ctranslate2.")
    beam: Count = option(4, "Of /translate; other requests name their own.")

    # what it takes on
    queue: Count = option(200_000, "Most tokens times hypotheses that wait; beyond, requests are refused (429).")
    max_body: Count = option(1_000_000, "Most bytes of a request.")
    max_inputs: Count = option(2_000, "Most inputs of a request.")
    max_work: Count = option(20_000_000, "Most inputs times hypotheses times output tokens of a request.")

    # when it gives up
    deadline: Seconds = option(60.0, "Seconds that a request may take.")
    receive: Seconds = option(15.0, "Seconds that a client may take to send a request.")
    send: Seconds = option(20.0, "Seconds that a client may take to read an answer.")
    drain: Seconds = option(30.0, "Seconds that requests have to finish after a SIGTERM.")

    @field_validator("max_inputs")
    @classmethod
    def _inputs(cls, count: int) -> int:
        if count > MAX_INPUTS:
            raise ValueError(f"at most {MAX_INPUTS}")
        return count

    @field_validator("proxy")
    @classmethod
    def _networks(cls, proxies: tuple[str, ...]) -> tuple[str, ...]:
        for text in proxies:
            try:
                ipaddress.ip_network(text, strict=False)
            except ValueError:
                raise ValueError(f"{text!r} is not an address like 10.0.0.1 nor a network like 10.0.0.0/8") from None
        return proxies

    def check(self, keys: Keys) -> None:
        """Refuse to listen to other machines without keys, unless told to."""
        local = self.host == "localhost" or (is_address(self.host) and ipaddress.ip_address(self.host).is_loopback)
        if not local and not keys.any and not self.public:
            raise UserError(
                f"--host {self.host}: other machines could use the server without a key; give --keys FILE, or --public"
                " if that is meant"
            )
        check_engine(self.engine, Options(precision=self.precision), show="--{}".format)


def is_address(text: str) -> bool:
    """Whether a text is an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class Keys:
    """API keys, and which of them may administer the server."""

    all: tuple[bytes, ...] = ()
    admin: tuple[bytes, ...] = ()

    @property
    def any(self) -> bool:
        return bool(self.all)

    def allows(self, key: str) -> bool:
        """Whether a key is known; the time it takes does not tell how much of it is right."""
        return _among(key, self.all)

    def allows_admin(self, key: str) -> bool:
        return _among(key, self.admin)

    @classmethod
    def load(cls, path: str | None) -> Keys:
        """The keys of a file, one per line; an empty line or one that begins with # says nothing."""
        if path is None:
            return cls()
        try:
            lines = Path(path).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--keys {path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
        everyone, admin = [], []
        for number, line in enumerate(lines, 1):
            words = line.split()
            if not words or words[0].startswith("#"):
                continue
            key = words[-1]
            if len(words) > 2 or (len(words) == 2 and words[0] != "admin"):
                raise UserError(f"{path}:{number}: a line is KEY, or admin KEY")
            if len(key) < 16 or not key.isascii():
                raise UserError(
                    f"{path}:{number}: a key has 16 or more ASCII characters (openssl rand -hex 20 makes one)"
                )
            everyone.append(key.encode())
            if len(words) == 2:
                admin.append(key.encode())
        if not everyone:
            raise UserError(f"{path}: has no key; write one per line")
        return cls(tuple(everyone), tuple(admin))


def _among(key: str, keys: tuple[bytes, ...]) -> bool:
    given, found = key.encode("utf-8", "replace"), False
    for each in keys:
        found |= hmac.compare_digest(given, each)
    return found


def named_runs(runs: list[str]) -> dict[str, str]:
    """Runs by name: `NAME=DIRECTORY`, or a directory, whose last part is the name then."""
    names: dict[str, str] = {}
    for text in runs:
        name, equals, path = text.partition("=")
        if not equals or os.path.isdir(text):
            name, path = Path(text).resolve().name, text
        if not re.fullmatch(r"[\w.+-]+", name) or len(name) > LONGEST_NAME:
            raise UserError(f"{text}: a run is named by letters, digits and . + - _: give it as NAME=DIRECTORY")
        if name in names:
            raise UserError(f"{text}: another run is called {name} too; give one of them as NAME=DIRECTORY")
        names[name] = path
    return names
