"""Valid requests for a scheme are parsed; errors explain invalid ones."""

from __future__ import annotations

import pytest

from regard.errors import UserError
from regard.text.tokenizer import parse_scheme


@pytest.mark.parametrize(
    "request_", ["char", "nfd", "space", "word", "byte", "auto", "bpe:260", "bpe:8000", "unigram:32000"]
)
def test_a_scheme_is_a_kind_and_a_number(request_: str) -> None:
    kind, _, number = request_.partition(":")
    assert parse_scheme(request_) == (kind, int(number) if number else None)


@pytest.mark.parametrize(
    ("request_", "message"),
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
def test_a_bad_request_is_explained(request_: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        parse_scheme(request_, "text.source_tokens")
    assert str(error.value).startswith("text.source_tokens: ")
