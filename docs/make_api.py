"""Write docs/api.md: every public name of AutoPTD with its signature and docstring.

PYTHONPATH=. python docs/make_api.py
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import autoptd

PAGE = Path(__file__).parent / "api.md"
FIRST = (
    "parallelize",
    "ParallelModel",
    "Progress",
    "compile",
    "Program",
    "verify",
    "diff",
    "register_rule",
    "Machine",
)


def page() -> str:
    """The text of the page."""
    rest = [name for name in autoptd.__all__ if name not in FIRST]
    lines = ["# Public names", "", "Made from the docstrings by `docs/make_api.py`.", ""]
    for name in (*FIRST, *rest):
        lines += _entry(f"autoptd.{name}", getattr(autoptd, name), 2)
    return "\n".join(lines).rstrip() + "\n"


def _entry(name: str, thing: Any, level: int) -> Iterator[str]:
    yield from (f"{'#' * level} {name}", "")
    if signature := _signature(name.rpartition(".")[2], thing):
        yield from ("```python", signature, "```", "")
    yield from (_text(inspect.getdoc(thing) or ""), "")
    if inspect.isclass(thing) and not issubclass(thing, Exception):
        for member, value in _members(thing).items():
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if not member.startswith("_") and inspect.isfunction(function) and inspect.getdoc(function):
                yield from _entry(f"{name.rpartition('.')[2]}.{member}", value, 3)


def _members(thing: type) -> dict[str, Any]:
    """The members of a class, those of its bases in AutoPTD first."""
    members: dict[str, Any] = {}
    for base in reversed(thing.__mro__):
        if base.__module__.startswith("autoptd."):
            members |= vars(base)
    return members


def _signature(name: str, thing: Any) -> str:
    """`name(...) -> ...`, a line per argument where it is long; "" for anything that cannot be called."""
    if isinstance(thing, property) or (inspect.isclass(thing) and issubclass(thing, Exception)):
        return ""
    try:
        signature = inspect.signature(getattr(thing, "__wrapped__", getattr(thing, "__func__", thing)))
    except (TypeError, ValueError):
        return ""
    parameters = list(signature.parameters.values())
    # An argument may be called `cls` too.
    if isinstance(thing, classmethod) or (parameters and parameters[0].name == "self"):
        parameters = parameters[1:]
    shown = signature.replace(parameters=parameters)
    text = _bare(f"{name}{shown}")
    if len(text) <= 110:
        return text
    arguments, has_star = [], False
    for one in parameters:
        if one.kind is one.KEYWORD_ONLY and not has_star:
            arguments.append("*")
            has_star = True
        arguments.append(_bare(str(one)))
    returned = _bare(str(shown)).rpartition(" -> ")[2]
    inside = "".join(f"    {one},\n" for one in arguments)
    return f"{name}(\n{inside})" + (f" -> {returned}" if " -> " in str(shown) else "")


def _bare(text: str) -> str:
    """Annotations without the quotes that postponed evaluation leaves."""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", text)


def _text(doc: str) -> str:
    """A docstring as Markdown: indented blocks become code."""
    lines: list[str] = []
    is_code = False
    for line in doc.splitlines():
        if line.startswith("    ") and not is_code and (not lines or not lines[-1].strip()):
            lines.append("```python")
            is_code = True
        elif is_code and line.strip() and not line.startswith("    "):
            end = len(lines)
            while not lines[end - 1].strip():
                end -= 1
            lines.insert(end, "```")
            is_code = False
        lines.append(line[4:] if is_code and line.startswith("    ") else line)
    return "\n".join([*lines, *(["```"] if is_code else [])])


if __name__ == "__main__":
    PAGE.write_text(page())
