"""Parsing tokenisation schemes."""

from __future__ import annotations

import pytest

from regard.errors import UserError
from regard.text.tokenizer import parse_scheme


@pytest.mark.parametrize(
    "text", ["char", "nfd", "space", "word", "byte", "auto", "bpe:260", "bpe:8000", "unigram:32000"]
)
def test_scheme_is_parsed_into_kind_and_number(text: str) -> None:
    kind, _, number = text.partition(":")
    assert parse_scheme(text) == (kind, int(number) if number else None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cahr", "did you mean 'char'"),
        ("spaces", "did you mean 'space'"),
        ("bpe", "write it as bpe:8000"),
        ("bpe:", "write it as bpe:8000"),
        ("bpe:abc", "write it as bpe:8000"),
        ("bpe:-5", "write it as bpe:8000"),
        ("bpe:8k", "write it as bpe:8000"),
        ("unigramm:8000", "did you mean 'unigram'"),
        ("bpe:10", "from 260"),
        ("unigram:99999999", "to 1000000"),
        ("char:5", "takes no number"),
        ("", "allowed: char"),
    ],
)
def test_invalid_scheme_is_explained(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        parse_scheme(text, "text.source_tokens")
    assert str(error.value).startswith("text.source_tokens: ")
