"""Docs and sources are written as an engineer would say it: no phrases that read like a translation."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.style import prose


def _name(path: Path) -> str:
    return str(path.relative_to(prose.ROOT))


@pytest.mark.parametrize("page", prose.files_of(prose.PAGES, ".md"), ids=_name)
def test_a_page_reads_like_english(page: Path) -> None:
    assert prose.of_page(page.read_text()) == []


def test_sources_read_like_english() -> None:
    found = {_name(file): prose.of_source(file.read_text()) for file in prose.files_of(prose.SOURCES, ".py")}
    assert {file: lines for file, lines in found.items() if lines} == {}


def test_phrases_are_found_in_prose_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    page = "One.\nTwo stands\nbehind it, `beside` it.\n\n```text\nanew\n```\n\nThere is no third.\n"
    assert prose.of_page(page) == ["line 3: 'behind': after, downstream of"]
    assert prose.of_page("It is\nno path.") == ["line 1: 'is no': is not, has no"]
    source = 'behind = 1  # of\n# which\nx = f"told {behind} said"\n'
    assert [line.split("'")[1] for line in prose.of_source(source)] == ["of which", "told", "said"]
    monkeypatch.setattr(prose, "RIGHT", ("Two stands behind",))
    assert prose.of_page(page) == []


def test_every_exception_is_used() -> None:
    files = [*prose.files_of(prose.PAGES, ".md"), *prose.files_of(prose.SOURCES, ".py")]
    texts = [" ".join(file.read_text().split()) for file in files]
    assert [part for part in prose.RIGHT if not any(" ".join(part.split()) in text for text in texts)] == []
