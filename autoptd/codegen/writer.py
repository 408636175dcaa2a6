"""Collect lines of emitted source: indentation, line breaks, comments, and which operator is on which line.

In: statements and comments. Out: `Writer.lines`, each of at most `WIDTH` columns. User-defined names enter
statements only through `weight_text`, `quoted` and `free_name`; the text of comments and docstrings cannot
terminate them.

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
        """Add a statement, broken into several lines if it is too long.

        `comment` goes after it, or above it if it does not fit; `above` always goes above.
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
            # Map all lines of a broken statement: which of them a traceback names depends on the Python
            # version.
            self.nodes |= dict.fromkeys(range(first, len(self.lines) + 1), node)

    def comment(self, indent: int, text: str) -> None:
        """Add a comment on separate lines."""
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
        """Add a list variable to a method, wrapped."""
        self.lines += [
            f"        {name} = (",
            *(f"            {line}" for line in filled(values, WIDTH - 12)),
            "        )",
        ]

    def bind(self, values: Mapping[str, str]) -> None:
        """Add the first statement of a method, which assigns its variables."""
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
    """Break a statement into lines of at most `width` columns inside its longest brackets, if it has any."""
    pairs = [(start, end) for start, end in _brackets(text) if end > start + 1]
    if len(text) <= width or not pairs:
        return [text]
    start, end = max(pairs, key=lambda pair: pair[1] - pair[0])
    inside = text[start + 1 : end]
    parts = _split(inside)
    # A comma after the only item of `x[item]` would make it a tuple.
    if len(inside) + 4 <= width or len(parts) == 1:
        return [text[: start + 1], f"    {inside}", text[end:]]
    return [text[: start + 1], *(f"    {line}" for line in filled(parts, width - 4)), text[end:]]


def filled(parts: Sequence[str], width: int) -> list[str]:
    """Return parts with a comma after each, as many per line as fit into `width` columns."""
    lines = [""]
    for part in parts:
        # 2: a space and a comma.
        if lines[-1] and len(lines[-1]) + len(part) + 2 > width:
            lines.append("")
        lines[-1] += f" {part}," if lines[-1] else f"{part},"
    return lines


def check_source(file: str, source: str) -> None:
    """Raise InternalError if an emitted file is not valid Python."""
    try:
        compile(source, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        number = getattr(error, "lineno", None) or 1
        line = source.split("\n")[number - 1].strip()
        raise InternalError(f"{file}:{number}", f"is not valid Python ({error}): {shown(line)}") from error


def _depths(text: str) -> Iterator[tuple[int, str, int]]:
    """Yield (index, character, bracket depth after it) for a text, skipping its string literals."""
    # `quote` is the character that ends the current literal; "a\"b" does not end at its second quote.
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
    """Yield the positions where the outermost brackets of a text open and close."""
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
    """Return `w.transformer.h[0].ln_1.weight` for "transformer.h.0.ln_1.weight"; `w["my-emb"].weight` for
    other names.

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
    # ASCII only: Python normalizes other identifiers and would not find the name.
    is_name = part.isascii() and part.isidentifier() and not keyword.iskeyword(part)
    return is_name and not part.startswith("_") and part not in METHODS
