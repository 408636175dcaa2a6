"""Collect lines of emitted source: indentation, line breaks, comments, and which operator is on which line.

In: statements and comments. Out: `Writer.lines`, each of at most `WIDTH` columns. Names of the user's get into statements
by `weight_text`, `quoted` and `free_name` alone; what comments and docstrings say cannot end them.

    writer.add(2, "x = F.gelu(x)", "[2, 64, 96]", above="column: 256 = 2 x 128", node=node)
"""

from __future__ import annotations

import keyword
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from autoptd.errors import InternalError
from autoptd.ir.names import METHODS, in_docstring, quoted, shown

# Columns of an emitted line.
WIDTH = 110
OPEN, CLOSE = "([{", ")]}"


@dataclass
class Writer:
    """Lines of source, and the operator on each line (counted from 1)."""

    lines: list[str] = field(default_factory=list)
    nodes: dict[int, Node] = field(default_factory=dict)

    def add(
        self, indent: int, text: str, comment: str = "", *, above: str = "", node: Node | None = None
    ) -> None:
        """Add a statement, in several lines where it is too long for one.

        `comment` goes after it, or above where it does not fit; `above` always goes above.
        """
        pad, comment = " " * (4 * indent), shown(comment)
        if comment and len(f"{pad}{text}  # {comment}") > WIDTH:
            above = f"{above}  {comment}" if above else comment
            comment = ""
        if above:
            self.comment(indent, above)
        first = len(self.lines) + 1
        self.lines += [pad + line for line in broken(text, WIDTH - len(pad))]
        if comment:
            self.lines[-1] += f"  # {comment}"
        if node is not None:
            # All lines of a broken statement: which of them a traceback names depends on Python.
            self.nodes |= dict.fromkeys(range(first, len(self.lines) + 1), node)

    def comment(self, indent: int, text: str) -> None:
        """Add a comment on lines of its own."""
        head = " " * (4 * indent) + "# "
        further = head + "  "
        self.lines += textwrap.wrap(
            shown(text),
            WIDTH,
            initial_indent=head,
            subsequent_indent=further,
            break_long_words=False,
            break_on_hyphens=False,
        )

    def docstring(self, text: str) -> None:
        """Add the docstring of a method."""
        self.lines.append(f'        """{in_docstring(text)}"""')

    def add_list(self, name: str, values: Sequence[str]) -> None:
        """Add a variable of a method that is a list of values, wrapped."""
        self.lines += [
            f"        {name} = (",
            *(f"            {line}" for line in filled(values, WIDTH - 12)),
            "        )",
        ]

    def bind(self, values: Mapping[str, str]) -> None:
        """Add the first statement of a method: variables and what they stand for."""
        if values:
            self.add(2, f"{', '.join(values)} = {', '.join(values.values())}")

    def extend(self, other: Writer) -> None:
        """Append the lines of another writer."""
        self.nodes |= {len(self.lines) + number: node for number, node in other.nodes.items()}
        self.lines += other.lines

    def gap(self) -> None:
        """Add a blank line, but not a second one, nor at the start of a block."""
        if self.lines and self.lines[-1] and not self.lines[-1].endswith(":"):
            self.lines.append("")


def broken(text: str, width: int) -> list[str]:
    """Break a statement into lines of at most `width` columns, within its longest brackets; one without stays whole."""
    pairs = [(start, end) for start, end in _brackets(text) if end > start + 1]
    if len(text) <= width or not pairs:
        return [text]
    start, end = max(pairs, key=lambda pair: pair[1] - pair[0])
    inside = text[start + 1 : end]
    parts = _split(inside)
    # A comma behind the only item of `x[item]` would make it a tuple.
    if len(inside) + 4 <= width or len(parts) == 1:
        return [text[: start + 1], f"    {inside}", text[end:]]
    return [text[: start + 1], *(f"    {line}" for line in filled(parts, width - 4)), text[end:]]


def filled(parts: Sequence[str], width: int) -> list[str]:
    """Return parts with a comma behind each, as many on a line as `width` columns hold."""
    lines = [""]
    for part in parts:
        # 2: a blank and a comma.
        if lines[-1] and len(lines[-1]) + len(part) + 2 > width:
            lines.append("")
        lines[-1] += f" {part}," if lines[-1] else f"{part},"
    return lines


def check_source(file: str, source: str) -> None:
    """Raise InternalError where an emitted file is no Python."""
    try:
        compile(source, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        number = getattr(error, "lineno", None) or 1
        line = source.split("\n")[number - 1].strip()
        raise InternalError(f"{file}:{number}", f"is no Python ({error}): {shown(line)}") from error


def _depths(text: str) -> Iterator[tuple[int, str, int]]:
    """Yield (index, character, depth of brackets after it) of a text, without its string literals."""
    # `quote` is the character that ends the literal in which we are; "a\"b" does not end at its second quote.
    depth, quote, escaped = 0, "", False
    for i, letter in enumerate(text):
        if quote:
            if letter == quote and not escaped:
                quote = ""
            escaped = letter == "\\" and not escaped
            continue
        if letter in "\"'":
            quote, escaped = letter, False
            continue
        depth += (letter in OPEN) - (letter in CLOSE)
        yield i, letter, depth


def _brackets(text: str) -> Iterator[tuple[int, int]]:
    """Yield where the outermost brackets of a text open and close."""
    start = 0
    for i, letter, depth in _depths(text):
        if letter in OPEN and depth == 1:
            start = i
        elif letter in CLOSE and depth == 0:
            yield start, i


def _split(text: str) -> list[str]:
    """Split a text at its outermost commas."""
    cuts = [i for i, letter, depth in _depths(text) if letter == "," and depth == 0]
    starts, ends = [0, *(i + 1 for i in cuts)], [*cuts, len(text)]
    parts = [text[start:end].strip() for start, end in zip(starts, ends, strict=True)]
    return [part for part in parts if part]


def weight_text(root: str, name: str) -> str:
    """Return `w.transformer.h[0].ln_1.weight` for "transformer.h.0.ln_1.weight"; `w["my-emb"].weight` for other names.

    The empty name is the root itself: a layer may be a single parameter in a list.
    """
    text = root
    for part in name.split(".") if name else ():
        if is_attribute(part):
            text += f".{part}"
        # "007" is a name, not a number of a list.
        elif part.isdecimal() and str(int(part)) == part:
            text += f"[{part}]"
        else:
            text += f"[{quoted(part)}]"
    return text


def is_attribute(part: str) -> bool:
    """Tell whether a part of a name can be written as an attribute."""
    # Not other alphabets: Python normalises identifiers, and would not find the name.
    is_name = part.isascii() and part.isidentifier() and not keyword.iskeyword(part)
    return is_name and not part.startswith("_") and part not in METHODS
