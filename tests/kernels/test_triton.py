"""Runs `triton_forms.py` in a process of its own, and compiles the kernels for a GPU that need not be there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from autoptd.compat import interpreter_fault
from tests.kernels.compare import cotangent

HERE = Path(__file__).parent


def run(file: str, tmp_path: Path, chosen: str = "", **environment: str) -> None:
    pytest.importorskip("triton")
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        # Kernels need nothing of what the other tests share: the compiler is not imported.
        [
            sys.executable,
            *"-m pytest -q -p no:cacheprovider --noconftest -m".split(),
            chosen,
            str(HERE / file),
        ],
        cwd=HERE.parents[1],
        env=kept | environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.parametrize("chosen", ["not thorough", pytest.param("thorough", marks=pytest.mark.thorough)])
def test_triton_forms_in_the_interpreter(chosen: str, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("on the GPU itself: below")
    pytest.importorskip("triton")
    if fault := interpreter_fault():
        pytest.skip(fault)
    run("triton_forms.py", tmp_path, chosen, TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_triton_forms(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    run("triton_forms.py", tmp_path)


def test_cotangents_are_where_the_results_are() -> None:
    assert cotangent(torch.empty(2, 3, dtype=torch.bfloat16, device="meta"), seed=0).device.type == "meta"


@pytest.mark.thorough
def test_triton_kernels_compile(tmp_path: Path) -> None:
    run("triton_compile.py", tmp_path)


def test_triton_launches(tmp_path: Path) -> None:
    run("triton_launch.py", tmp_path)
