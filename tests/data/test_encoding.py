"""Encoding with cached words gives the ids of the tokenizer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from regard.data import encode as encoding
from regard.data.encode import TextEncoder, dtype_for
from regard.text.tokenizer import Tokenizer

TEXTS = ["the cat sat on the mat", "don't we'll it's 42 times (or 43)", "Ünïcode: 文字 と かな", "a-b_c d.e,f"]
TOKENIZERS = {
    scheme: Tokenizer.train(scheme, TEXTS * 9)
    for scheme in ("char", "nfd", "space", "word", "byte", "bpe:300", "unigram:290")
}
words = st.sampled_from(
    ["the", "cat", "don't", "'s", "'", "42", "(or", "文字", "\u0301", "_", "x" * 50, "ß"]
) | st.text(max_size=4)
rare = ["  ", "", "\t", "\u00a0", "\u3000", "\u2028", "\x0b", "\x1c", "\x85", "\u180e", "\ufeff", " \n", "\n "]
spaces = st.sampled_from([" "] * 8 + ["\n"] * 3 + rare)
texts = st.lists(st.tuples(words, spaces)).map(lambda parts: "".join(word + space for word, space in parts))


@pytest.mark.parametrize("scheme", TOKENIZERS)
@given(data=st.lists(st.lists(texts, max_size=6), max_size=3), cache_size=st.sampled_from([0, 5, 1000]))
@settings(deadline=None, max_examples=150)
def test_encoded_bytes_equal_the_ids_of_the_tokenizer(scheme: str, data: list[list[str]], cache_size: int) -> None:
    tokenizer = TOKENIZERS[scheme]
    dtype = dtype_for(tokenizer.size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "MAX_CACHED_WORDS", cache_size)
        encoder = TextEncoder(tokenizer, dtype)
        for batch in [*data, *data]:
            rows = [np.frombuffer(row, dtype).tolist() for row in encoder.encode(batch)]
            assert rows == tokenizer.encode(batch)
