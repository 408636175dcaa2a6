"""Of what is shown: measured numbers, pictures, the doctor's findings."""

from __future__ import annotations

from tests.mutations import Mutation

MUTATIONS = (
    Mutation(
        "tests/measured.py", r"(?:e[-+]?\d+)?|inf|nan)", r"(?:e-?\d+)?|inf|nan)", "tests/test_measured.py"
    ),
    Mutation("tests/measured.py", "|inf|nan)", ")", "tests/test_measured.py"),
    Mutation(
        "autoptd/wings/words.py",
        '{_three(count)} {prefix}{unit}"',
        '{_three(count)}{prefix}{unit}"',
        "tests/test_measured.py",
    ),
    Mutation(
        "autoptd/wings/viz/graph_svg.py",
        "    if line.bar:\n",
        "    if False:\n",
        "tests/wings/viz/test_picture.py",
    ),
    Mutation(
        "autoptd/wings/doctor/checks.py",
        "if is_alike and torch.equal(got, right):",
        "if is_alike:",
        "tests/wings/doctor/test_checks.py",
    ),
)
