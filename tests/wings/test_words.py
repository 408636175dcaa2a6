"""Texts of the user's in pictures."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from autoptd.wings.viz.graphviz import _quoted
from autoptd.wings.words import aligned, xml_text
from tests.fuzz.features import HARD_NAMES


def test_a_picture_takes_any_name() -> None:
    """XML has no control characters, and what is written as UTF-8 no halves of a character."""
    for name in (*HARD_NAMES, "nul\0", "\x1f", "\ud800"):
        text = f"two lines of\n{name}"
        assert ET.fromstring(f"<text>{xml_text(text)}</text>").text
        assert _quoted(text).encode().isascii() or name == "日本 😀 ﬁ"
    assert xml_text("a < b\nh.0") == "a &lt; b\nh.0"


def test_a_table_is_plain_text_with_columns_two_blanks_apart() -> None:
    rows = [("", "seconds", "plan"), ("1", "0.5", "t=2"), ("10", "12.25", "")]
    assert aligned(rows, right={1}) == ["    seconds  plan", "1       0.5  t=2", "10    12.25"]
    assert aligned([]) == []
