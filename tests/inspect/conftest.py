"""Small models for the tests of inspection."""

from __future__ import annotations

from typing import Any

import pytest

from kit.models import TINY, letters, tiny
from regard.model import Model
from regard.run import Run


@pytest.fixture(params=list(TINY))
def model(request: pytest.FixtureRequest) -> Model:
    return tiny(request.param)


@pytest.fixture(params=list(TINY))
def run(request: pytest.FixtureRequest) -> Run:
    return letters(request.param)


@pytest.fixture
def transformer() -> Model:
    return tiny()


@pytest.fixture
def make_tiny() -> Any:
    return tiny


@pytest.fixture
def make_letters() -> Any:
    return letters


@pytest.fixture
def transformer_run() -> Run:
    return letters()
