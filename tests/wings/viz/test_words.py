"""Texts of the user's in pictures."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from autoptd.wings.viz.dot import _quoted
from autoptd.wings.viz.words import xml_text
from tests.fuzz.features import HARD_NAMES


def test_a_picture_takes_any_name() -> None:
    """XML has no control characters, and what is written as UTF-8 no halves of a character."""
    for name in (*HARD_NAMES, "nul\0", "\x1f", "\ud800"):
        text = f"two lines of\n{name}"
        assert ET.fromstring(f"<text>{xml_text(text)}</text>").text
        assert _quoted(text).encode().isascii() or name == "日本 😀 ﬁ"
    assert xml_text("a < b\nh.0") == "a &lt; b\nh.0"
