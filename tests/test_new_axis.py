"""A new mesh axis is a row of a table: a copy of the package that the patch of docs/decisions adds one to trains with it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PATCH = ROOT / "docs/decisions/new-mesh-axis.patch"
SCRIPT = """
import autoptd
from tests.parity.models import batch, gpt
assert {copy!r} in autoptd.__file__
for mesh in ({{"e": 2}}, {{"t": 2, "p": 2, "d": 2, "e": 2}}, {{"d": 2, "e": 2, "order": "dp-ep-tp-pp"}}):
    print(autoptd.verify(gpt(4), example_inputs=batch(8), steps=2, **mesh))
program = autoptd.compile(gpt(4), t=2, e=2, d=2, example_inputs=batch(8))
assert program.plan["mesh"] == {{"t": 2, "p": 1, "d": 2, "e": 2, "v": 1}}
assert "over ep x dp, then tp" in program.sources["stage_0.py"]
"""


def test_the_patch_touches_few_files() -> None:
    assert len(re.findall(r"^diff --git", PATCH.read_text(), re.M)) <= 8


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("git") is None, reason="the patch is applied by git")
def test_a_copy_with_the_axis_trains_as_one_device(tmp_path: Path) -> None:
    for package in ("autoptd", "tests", "examples"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "apply", str(PATCH)], cwd=tmp_path, check=True)
    (tmp_path / "train.py").write_text(SCRIPT.format(copy=str(tmp_path)))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("equal to 1e-09") == 3
