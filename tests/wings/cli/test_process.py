"""The command as a process of its own: how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SHOW = """
import atexit, gc, sys
from autoptd.__main__ import run
atexit.register(lambda: print("left", gc.isenabled()))
sys.argv = ["autoptd", "show", "examples/gpt.py"]
run()
"""


@pytest.fixture(autouse=True)
def buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes through a pipe is written at the end, as for most users."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)


def test_a_brief_command_leaves_nothing_behind(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHOW],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and lines[0].startswith("examples/gpt.py:make_gpt"), done.stderr
    # All in one breath, without the collector.
    assert lines[-1] == "left False"
    # torch.distributed makes a folder for as long as the process lives.
    assert not list(tmp_path.iterdir())


def test_a_wrong_request_has_its_status() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "autoptd", "show", "gpt2", "--t", "0"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "--t" in done.stderr and not done.stdout


def test_a_reader_that_is_gone_is_no_error() -> None:
    words = [sys.executable, "-m", "autoptd", "show", "--list", "--quiet"]
    running = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert running.stdout is not None
    running.stdout.close()
    assert running.stderr is not None
    assert (running.stderr.read(), running.wait()) == (b"", 1)
