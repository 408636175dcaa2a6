"""Phrases that read like a translation, and where they are looked for.

In:  the text of a page or of a Python file. Out: the lines that hold a phrase of `BANNED`, with the phrase to write instead.

`PAGES` and `SOURCES` name what is checked: add a page or a package once it is clean. A sentence in which the word is right
goes into `RIGHT`, as it is written.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Pattern -> what to write instead. Patterns are matched without regard to case; a space is any white space.
BANNED = {
    r"\bbehind\b": "after, downstream of",
    r"\banew\b": "again",
    r"(?<!there\s)\b(?:is|are|was|were) no\b(?! longer)": "is not, has no",
    r"\bof which\b": "a second sentence, or 'whose'",
    r"\bbeside\b": "next to, besides, in addition to, compared with",
    r"\b(?:whoever|whomever|nobody|somebody|anybody)\b": "say who: the rank, the caller",
    r"\bso many\b": "that many, too many",
    r"\bdear(?:er|est)?\b": "expensive",
    r"\btold\b": "reported, listed, passed",
    r"\bsaid\b": "reported, stated",
    r"\bwhat (?:is|are|was|were)\b": "a noun",
    r"\bas (?:it is|they are|it was|they were)\b": "unchanged",
    r"\bof (?:its|their|your|our) own\b": "its own, separate",
    r"\bin the place of\b": "instead of",
    r"\bas ever\b": "as before, as usual",
    r"\bfor ever\b": "forever",
    r"\bgo(?:es)? on (?:with|where)\b": "continue, resume",
    r"\bby turns\b": "alternating",
    r"\ban? [tcdp]-th\b": "1/t",
    r"\b(?:therein|thereof|wherein|whereof|hereof)\b": "in it, of it",
    r"\bmade dearer\b": "priced higher",
}
# Sentences, or the part of one, in which a word of `BANNED` is right.
RIGHT: tuple[str, ...] = ("as one of its own options", "behind a firewall")

# Pages that are checked, or folders with all pages below them, relative to the root of the repository.
PAGES: tuple[str, ...] = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/api.md",
    "docs/architecture.md",
    "docs/benchmarks.md",
    "docs/bring-your-own-model.md",
    "docs/cli.md",
    "docs/compare.md",
    "docs/decisions",
    "docs/faq.md",
    "docs/getting-started.md",
    "docs/glossary.md",
    "docs/howto",
    "docs/models.md",
    "docs/pipeline.md",
    "docs/plan.md",
    "docs/planner.md",
    "docs/real-models.md",
    "docs/silent-errors.md",
    "examples/README.md",
)
# Files, or folders with all that is below them, whose comments and strings are checked, relative to the same.
SOURCES: tuple[str, ...] = (
    "autoptd/api.py",
    "autoptd/codegen",
    "autoptd/compat.py",
    "autoptd/compiler",
    "autoptd/options/elsewhere.py",
    "autoptd/errors.py",
    "autoptd/integrations",
    "autoptd/ir",
    "autoptd/kernels",
    "autoptd/model",
    "autoptd/options",
    "autoptd/passes",
    "autoptd/subject/per_microbatch.py",
    "autoptd/program",
    "autoptd/runtime/__init__.py",
    "autoptd/runtime/checkpoint",
    "autoptd/runtime/checks",
    "autoptd/runtime/folders",
    "autoptd/runtime/measure",
    "autoptd/runtime/ops",
    "autoptd/runtime/params",
    "autoptd/runtime/step",
    "autoptd/runtime/world",
    "autoptd/schedule",
    "autoptd/subject",
    "autoptd/trace",
    "autoptd/verify",
    "autoptd/wings",
    "examples",
)

_FENCED = re.compile(r"^([ \t]*)```.*?^\1```[^\n]*$", re.M | re.S)
_TABLE = re.compile(r"<!-- table: .*?<!-- end of table -->", re.S)
_CODE = re.compile(r"`[^`\n]+`")
_FIELD = re.compile(r"\{[^{}]*\}")
_WORDS = re.compile("|".join(f"({pattern})" for pattern in BANNED).replace(" ", r"\s+"), re.I)


def of_page(text: str) -> list[str]:
    """Return the findings in a Markdown page: not in its code, its outputs and the tables made from results."""
    for pattern in (_FENCED, _TABLE, _CODE):
        text = pattern.sub(_blank, text)
    return list(_findings(text))


def of_source(text: str) -> list[str]:
    """Return the findings in the comments, docstrings and strings of a Python file."""
    lines = [""] * (text.count("\n") + 2)
    prose = (tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in prose:
            # Up to Python 3.11 an f-string is one token, with the names between its braces.
            words = _FIELD.sub("x", token.string) if token.string[:1] in "fF" else token.string
            for number, line in enumerate(words.split("\n"), token.start[0]):
                # A comment may continue in the next line.
                lines[number] += " " + line.removeprefix("#")
    return list(_findings("\n".join(lines[1:])))


def _blank(match: re.Match[str]) -> str:
    """Keep the line breaks, so that findings name the right line."""
    return "\n" * match[0].count("\n") or "x"


def _findings(text: str) -> Iterator[str]:
    sentences = [r"\s+".join(map(re.escape, part.split())) for part in RIGHT]
    right = [match.span() for sentence in sentences for match in re.finditer(sentence, text)]
    remedies = list(BANNED.values())
    for match in _WORDS.finditer(text):
        if not any(start <= match.start() < end for start, end in right):
            line = text.count("\n", 0, match.start()) + 1
            yield f"line {line}: '{' '.join(match[0].split())}': {remedies[(match.lastindex or 1) - 1]}"


def files_of(places: tuple[str, ...], suffix: str) -> list[Path]:
    """Return the files that are named, and those with the suffix below folders that are named."""
    files: set[Path] = set()
    for path in (ROOT / place for place in places):
        files |= set(path.rglob(f"*{suffix}")) if path.is_dir() else {path}
    return sorted(files)
