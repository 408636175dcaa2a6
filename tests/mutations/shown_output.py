"""Of texts with measured numbers, and of how numbers are printed."""

from __future__ import annotations

from tests.mutations import Mutation

MUTATIONS = (
    Mutation(
        "tests/measured.py", r"(?:e[-+]?\d+)?|inf|nan)", r"(?:e-?\d+)?|inf|nan)", "tests/test_measured.py"
    ),
    Mutation("tests/measured.py", "|inf|nan)", ")", "tests/test_measured.py"),
    Mutation(
        "autoptd/wings/viz/words.py",
        '{_three(count)} {prefix}{unit}"',
        '{_three(count)}{prefix}{unit}"',
        "tests/test_measured.py",
    ),
)
