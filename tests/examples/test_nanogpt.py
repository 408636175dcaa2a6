"""The loop in the manner of nanoGPT: the one-device loop and its port print the same losses, and few lines differ."""

from __future__ import annotations

import difflib
import subprocess
import sys
from pathlib import Path

import pytest

from examples.nanogpt.prepare import prepare
from tests.examples.running import ROOT, numbers_after, run

SIZES = "--n_layer 2 --n_head 2 --n_embd 16 --block_size 16 --batch_size 4 --accumulation 2 --lr 1e-2"
STEPS = "--eval_interval 4 --eval_iters 2 --log_interval 1 --warmup_iters 2 --max_iters"
SINGLE, PARALLEL = "examples.nanogpt.train_single", "examples.nanogpt.train"


def close(found: list[float], expected: list[float]) -> bool:
    return all(abs(a - b) <= 1e-5 for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("mesh", ["--t 2 --p 2", "--d 2"])
def test_losses_are_those_of_one_device(
    mesh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path)
    found = []
    for name, more in ((SINGLE, ""), (PARALLEL, f" --backend local {mesh}")):
        run(name, f"--out {tmp_path} {SIZES} {STEPS} 5{more}", monkeypatch)
        first = numbers_after("loss ", capsys.readouterr().out)
        # Each resumes from its own checkpoint, with the batches that come next.
        run(name, f"--out {tmp_path} {SIZES} {STEPS} 7 --init_from resume{more}", monkeypatch)
        found.append((first, numbers_after("loss ", capsys.readouterr().out)))
    (single, resumed), (parallel, resumed_parallel) = found
    assert len(single) == 5 + 2 * 2 and len(resumed) == 2
    assert close(parallel, single) and close(resumed_parallel, resumed)
    assert single[-1] < single[2]


@pytest.mark.thorough
@pytest.mark.processes
def test_torchrun_prints_the_same_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path)
    run(SINGLE, f"--out {tmp_path} {SIZES} {STEPS} 3", monkeypatch)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command = [*torchrun, "--", PARALLEL, *f"--out {tmp_path} {SIZES} {STEPS} 3 --t 2".split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert close(numbers_after("loss ", done.stdout), numbers_after("loss ", capsys.readouterr().out))


def test_few_lines_differ() -> None:
    """Two pages state how many."""
    texts = [(ROOT / f"{name.replace('.', '/')}.py").read_text().splitlines() for name in (SINGLE, PARALLEL)]
    changes = [line[0] for line in difflib.ndiff(*texts) if line[0] in "+-"]
    removed, added = changes.count("-"), changes.count("+")
    page = (ROOT / "examples/README.md").read_text()
    assert f"{removed} lines removed and {added} added, of {len(texts[0])}" in page
    assert f"{removed} lines go, and {added} come" in (ROOT / "docs/howto/port-a-loop.md").read_text()
