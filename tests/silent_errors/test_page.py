"""The page on silent errors is made of tests: every row names one that exists, and every test of this folder is in a row."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = (FOLDER.parents[1] / "docs/silent-errors.md").read_text()
LINK = re.compile(r"\[([^\]]+) #(\d+)\]\(https://github\.com/([\w.-]+)/([\w.-]+)/(issues|pull)/(\d+)\)")


def sections() -> dict[str, list[list[str]]]:
    """The file of each section -> its rows: elsewhere, here, test."""
    found = {}
    for section in PAGE.split("\n## ")[1:]:
        (file,) = re.findall(r"^`(tests/silent_errors/\w+\.py)`$", section, re.M)
        rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
        found[file] = rows[1:]
    return found


def names_in(file: Path) -> list[str]:
    nodes = ast.parse(file.read_text()).body
    return [
        node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]


def test_every_row_names_a_test_and_every_test_has_a_row() -> None:
    named = {
        file: Counter(name for row in rows for name in re.findall(r"`(test_\w+)`", row[2]))
        for file, rows in sections().items()
    }
    files = sorted(path for path in FOLDER.glob("test_*.py") if path != Path(__file__))
    assert named == {f"tests/silent_errors/{path.name}": Counter(names_in(path)) for path in files}
    assert all(set(found.values()) == {1} for found in named.values()), "a test in two rows"


def test_every_row_has_a_thread_a_reason_and_a_test() -> None:
    rows = [row for found in sections().values() for row in found]
    assert len(rows) >= 20
    for row in rows:
        assert len(row) == 3 and all(row), row
        assert LINK.search(row[0]) and "`test_" in row[2], row
        assert re.search(r"\b(open|closed|merged)\b", row[0]), f"the state of the thread: {row[0]}"


def test_links_are_what_they_say() -> None:
    links = re.findall(r"\[[^\]]*\]\(https?://[^)]*\)", PAGE)
    assert links and all(LINK.fullmatch(link) for link in links)
    for text, number, owner, name, _, linked in LINK.findall(PAGE):
        assert number == linked, text
        assert re.split(r"[ -]", text)[-1].lower() in name.lower(), f"{text}: {owner}/{name}"


def test_every_docstring_says_how_the_test_fails() -> None:
    for path in FOLDER.glob("test_*.py"):
        for node in ast.parse(path.read_text()).body if path != Path(__file__) else ():
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                assert (ast.get_docstring(node) or "").startswith("Fails "), node.name
