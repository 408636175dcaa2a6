"""Stacks without torch's own frames; what is shared between stacks is a line, of one file."""

from __future__ import annotations

from typing import Any

from autoptd.trace.users import UserFrames

SOURCE = "def forward(frames):\n    return frames.extract()\n"


def forward_in(file: str) -> Any:
    names: dict[str, Any] = {}
    exec(compile(SOURCE, file, "exec"), names)
    return names["forward"]


def test_equal_functions_of_two_files_have_their_own_lines() -> None:
    frames, one, other = UserFrames(), forward_in("one.py"), forward_in("other.py")
    # Python takes them for the same code.
    assert one.__code__ == other.__code__
    last = [run(frames).summary()[-1] for run in (one, other, one)]
    assert [(line.filename, line.lineno, line.name) for line in last] == [
        ("one.py", 2, "forward"),
        ("other.py", 2, "forward"),
        ("one.py", 2, "forward"),
    ]
    assert last[0] is last[2]


def test_a_stack_begins_at_its_root() -> None:
    run = forward_in("one.py")
    assert [line.filename for line in run(UserFrames(run.__code__)).summary()] == ["one.py"]
