"""examples/README.md lists every example, and each command names a file that is there."""

from __future__ import annotations

import re

from tests.examples.running import ROOT

PAGE = (ROOT / "examples/README.md").read_text()
# Parts of others.
SHARED = {"curves.py", "recipe.py", "text.py"}


def test_every_example_is_listed() -> None:
    files = {path.name for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".toml")}
    assert files - SHARED == set(re.findall(r"\]\((\w+\.(?:py|toml))\)", PAGE))


def test_docstrings_start_the_file_that_they_are_in() -> None:
    for path in (ROOT / "examples").rglob("*.py"):
        started = re.findall(r"^    (?:python|torchrun) .*?(examples[/.]\S+)", path.read_text(), re.M)
        names = {name.removesuffix(".py").replace("/", ".") for name in started}
        own = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        # One may also say what to run first.
        assert not names or own in names, path
