"""`autoptd train --save --resume`: a run in two parts is a run; under torchrun too, ended by a signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from autoptd.wings.cli import main
from autoptd.wings.cli.train import batches, load_tokens
from tests.waits import LONG

ROOT = Path(__file__).parents[3]
GPT = ["examples/gpt.py:make_gpt", "--set", "n_layer=2", "--set", "n_embd=16", "--seq", "8", "--batch", "4"]
LOCAL = ["--t", "2", "--p", "2", "--backend", "local"]


def losses(log: Path) -> dict[int, float]:
    """By step; of one that was run again, the last."""
    return {record["step"]: record["loss"] for record in map(json.loads, log.read_text().splitlines())}


def test_two_parts_are_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(name: str, steps: int, *more: str) -> None:
        log = ["--log", str(tmp_path / f"{name}.jsonl"), "--steps", str(steps)]
        assert main(["train", *GPT, *LOCAL, *log, *more]) == 0

    saving = ["--save", str(tmp_path / "ckpts"), "--save-every", "4", "--keep", "2", "--resume"]
    run("whole", 9)
    run("parts", 5, *saving)
    run("parts", 9, *saving)
    assert losses(tmp_path / "parts.jsonl") == losses(tmp_path / "whole.jsonl")
    assert sorted(path.name for path in (tmp_path / "ckpts").glob("step*"))[-1] == "step-00000009"
    assert len(list((tmp_path / "ckpts").glob("step*"))) == 2
    assert "step-00000005, after step 5" in capsys.readouterr().err
    run("parts", 9, *saving)
    assert "nothing to do: step 9 of 9 is already done" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, told",
    [
        ("--resume", "--resume: needs a directory"),
        ("--save ckpts --save-every 0", "--save-every 0: is below 1"),
        ("--save ckpts --save-every often", "--save-every: 'often' is neither a number nor auto"),
        ("--save ckpts --save-every auto", "every='auto'): how often the run fails is not given"),
        ("--save ckpts --mtbf 3", "every=100 says how often to save"),
    ],
)
def test_what_is_refused(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *GPT, *LOCAL, "--steps", "1", *words.split()]) == 2
    assert told in capsys.readouterr().err


def test_batches_from_any_step() -> None:
    tokens = load_tokens(None)
    whole = [x.tolist() for x, _ in batches(tokens, 2, 8, 6, seed=3)]
    assert [x.tolist() for x, _ in batches(tokens, 2, 8, 6, seed=3, start=4)] == whole[4:]


@pytest.mark.thorough
@pytest.mark.processes
def test_a_signal_to_torchrun_saves_and_the_same_command_goes_on(tmp_path: Path) -> None:
    """With examples/train.py, on another mesh the second time."""

    def start(steps: int, mesh: str) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "4",
            "--",
        ]
        command += ["examples/train.py", *mesh.split(), "--layers", "2", "--hidden", "16", "--heads", "2"]
        command += ["--length", "8", "--batch", "8", "--steps", str(steps), "--out", str(tmp_path / "out")]
        command += [
            "--save",
            str(tmp_path / "ckpts"),
            "--save-every",
            "50",
            "--resume",
            "--log",
            str(tmp_path / "log"),
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, env=env, cwd=ROOT, **pipes)

    first = start(100_000, "--t 2 --p 2")
    deadline = time.monotonic() + LONG
    while not ((tmp_path / "log").exists() and len((tmp_path / "log").read_text().splitlines()) > 60):
        assert time.monotonic() < deadline and first.poll() is None
        time.sleep(0.1)
    first.send_signal(signal.SIGTERM)
    out, _ = first.communicate(timeout=LONG)
    assert "asked to end by a signal: saved" in out, out
    last = max((tmp_path / "ckpts").glob("step*")).name
    assert last in out.rpartition("saved ")[2]
    number = int(last.removeprefix("step-"))
    second = start(number + 5, "--t 2 --d 2")
    out, _ = second.communicate(timeout=LONG)
    assert second.returncode == 0 and f"{last}, after step {number}" in out, out
    assert max(losses(tmp_path / "log")) == number + 5
