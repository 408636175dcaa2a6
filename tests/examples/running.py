"""Run an example as a user does, in this process."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run(name: str, arguments: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the names that the script defines: `name` is a module, for `python -m`, or a path."""
    monkeypatch.setattr(sys, "argv", [name, *arguments.split()])
    if not name.endswith(".py"):
        return runpy.run_module(name, run_name="__main__")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return runpy.run_path(str(ROOT / name), run_name="__main__")


def numbers_after(words: str, text: str) -> list[float]:
    """Return the numbers that follow these words in a script's output."""
    return [float(number) for number in re.findall(rf"{re.escape(words)}([\d.]+)", text)]
