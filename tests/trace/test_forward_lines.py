"""The line of the innermost forward of the user, of its own file."""

from __future__ import annotations

from typing import Any

from autoptd.trace.users import ForwardLines

SOURCE = "def forward(lines, inner=None):\n    return inner(lines) if inner else lines.innermost()\n"


def forward_in(file: str) -> Any:
    names: dict[str, Any] = {}
    exec(compile(SOURCE, file, "exec"), names)
    return names["forward"]


def test_equal_functions_of_two_files_have_their_own_lines() -> None:
    lines, one, other = ForwardLines(forward_in.__code__), forward_in("one.py"), forward_in("other.py")
    # Python takes them for the same code.
    assert one.__code__ == other.__code__
    assert [run(lines)[0] for run in (one, other, one)] == ["one.py:2", "other.py:2", "one.py:2"]


def test_it_is_the_innermost_one_inside_the_root() -> None:
    one, other = forward_in("one.py"), forward_in("other.py")
    assert ForwardLines(forward_in.__code__).innermost() == ("", "")
    assert one(ForwardLines(forward_in.__code__), other)[0] == "other.py:2"
    outer = ForwardLines(test_it_is_the_innermost_one_inside_the_root.__code__)
    assert outer.innermost() == ("", "")
