"""The direction of a text is the direction of its first strong character."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from regard.text.codec import direction

HEBREW = st.characters(min_codepoint=0x5D0, max_codepoint=0x5EA)
ARABIC = st.characters(min_codepoint=0x627, max_codepoint=0x63A)
LATIN = st.sampled_from("abcxyzÄß") | st.characters(min_codepoint=0x4E00, max_codepoint=0x9FA5)
WITHOUT_DIRECTION = st.text(st.sampled_from(" \t\n.,;:!?()[]0123456789٠١٢٣+-%␣\u0301\u200d"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abc", "ltr"),
        ("12 שלום", "rtl"),
        ("كتاب abc", "rtl"),
        ("abc كتاب", "ltr"),
        ("ދިވެހި", "rtl"),  # Thaana
        ("ߒߞߏ", "rtl"),  # N'Ko
        ("𐤀", "rtl"),  # Phoenician, outside the basic plane
        ("𞤀", "rtl"),  # Adlam
        ("\u200fabc", "rtl"),  # after a right-to-left mark
        ("日本", "ltr"),
        ("١٢", "ltr"),  # Arabic digits are weak
        ("1", "ltr"),
        ("", "ltr"),
    ],
)
def test_direction_of_sample_texts(text: str, expected: str) -> None:
    assert direction(text) == expected


@given(before=WITHOUT_DIRECTION, first=HEBREW | ARABIC, rest=st.text())
def test_text_that_starts_with_hebrew_or_arabic_is_right_to_left(before: str, first: str, rest: str) -> None:
    assert direction(before + first + rest) == "rtl"


@given(before=WITHOUT_DIRECTION, first=LATIN, rest=st.text())
def test_text_that_starts_with_latin_or_han_is_left_to_right(before: str, first: str, rest: str) -> None:
    assert direction(before + first + rest) == "ltr"


@given(before=WITHOUT_DIRECTION, text=st.text(st.characters()))
def test_leading_neutral_characters_do_not_change_the_direction(before: str, text: str) -> None:
    assert direction(before + text) == direction(text)
