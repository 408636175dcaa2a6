"""Words and numbers that pictures and tables share.

bytes_text(16384)             # "16 KiB"
plural(2, "rank")             # "2 ranks"
letter("i_to_r")              # "f": Megatron's name of I -> R
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from xml.sax.saxutils import escape

from autoptd.ir.names import shown

# Shoeybi et al. 2019, section 3.
LETTERS = {"i_to_r": "f", "p_to_i": "g"}


def letter(conversion: str) -> str:
    """Return Megatron's name of a conversion, "" where it has none."""
    return LETTERS.get(conversion, "")


def bytes_text(count: float) -> str:
    """Format bytes with a binary unit and three significant digits at most: `512 B`, `16 KiB`, `1.52 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1000:
            return f"{_three(count)} {unit}"
        count /= 1024
    return f"{_three(count)} TiB"


def count_text(count: float, unit: str = "") -> str:
    """Format a number with a decimal prefix: `640`, `14.7 M`; of a unit `640 FLOP`, `14.7 MFLOP`."""
    for prefix in ("", "k", "M", "G", "T"):
        if count < 1000:
            return f"{_three(count)} {prefix}{unit}".rstrip()
        count /= 1000
    return f"{_three(count)} P{unit}"


def seconds_text(seconds: float) -> str:
    """Format seconds with three significant digits: `31.2 us`, `12.3 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def aligned(rows: Iterable[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """Return a table as lines of text, with columns two blanks apart; the columns `right` are right-aligned."""
    table = list(rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = []
        for k, (cell, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(cell.rjust(width) if k in right else cell.ljust(width))
        lines.append("  ".join(cells).rstrip())
    return lines


def plural(count: int, word: str) -> str:
    """Format a count with its noun: `1 rank`, `4 ranks`, `8 microbatches`."""
    # The nouns of pictures and tables: batches, passes, boxes.
    ending = "es" if word.endswith(("ch", "s", "x")) else "s"
    return f"{count} {word}" if count == 1 else f"{count} {word}{ending}"


def visible(text: str) -> str:
    """Return lines of text in which all characters can be seen: pictures have no others."""
    return "\n".join(map(shown, text.split("\n")))


def xml_text(text: str) -> str:
    """Return a text as XML has it."""
    return escape(visible(text))


def _three(value: float) -> str:
    """Format with three significant digits at most, without trailing zeros."""
    decimals = 0
    if value < 10:
        decimals = 2
    elif value < 100:
        decimals = 1
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
