"""A compiled program on disk: it is read back whole, and runs without the model being traced again."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

import autoptd
from autoptd.ir import machine
from autoptd.options import Options
from autoptd.trace.record import Recorder
from tests.forks import CONTEXT
from tests.parity.models import batch, gpt, separate, uneven
from tests.waits import LONG

FILES = [
    "stage_0.py",
    "stage_3.py",
    "program.json",
    "plan.json",
    "schedule.txt",
    "schedule.svg",
    "graph.dot",
    "graph.svg",
    "stages.svg",
    "trace.json",
]


def test_runs_from_disk_without_tracing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, targets = batch()
    targets = uneven(targets)
    model = separate().double()
    wanted = model(ids, targets)["loss"]
    wanted.backward()
    program = autoptd.compile(model, t=2, p=2, d=2, example_inputs=(ids, targets))
    program.save(tmp_path)
    monkeypatch.setattr(Recorder, "record", lambda *args, **kwargs: pytest.fail("traced"))
    loaded = autoptd.Program.load(tmp_path)
    assert loaded == program and loaded.fingerprint() == program.fingerprint()
    pm = autoptd.ParallelModel(loaded, Options(t=2, p=2, d=2, backend="local"), model.state_dict())
    try:
        torch.testing.assert_close(pm.step(ids, targets), wanted.detach(), rtol=1e-12, atol=0)
        for name, gradient in pm.gradients().items():
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-9, atol=1e-14)
    finally:
        pm.close()


def test_show_leaves_everything_that_the_readme_names(tmp_path: Path) -> None:
    pm = autoptd.parallelize(gpt(), p=2, v=2, backend="local", example_inputs=batch())
    pm.show(tmp_path)
    pm.close()
    missing = [
        name for name in [*FILES, "collectives.md", "passes/04_local.txt"] if not (tmp_path / name).exists()
    ]
    assert not missing


def compile_into(folder: Path) -> None:
    autoptd.compile(gpt(2), t=2, p=2, example_inputs=batch()).save(folder)


def test_compiling_again_in_another_process_gives_the_same_bytes(tmp_path: Path) -> None:
    # The server that it is forked from has another hash seed.
    other = CONTEXT.Process(target=compile_into, args=(tmp_path / "a",))
    other.start()
    other.join(LONG)
    assert other.exitcode == 0
    with mock.patch.object(machine, "DEFAULT", machine.Machine()):  # not that of the tests
        compile_into(tmp_path / "b")
    for file in sorted((tmp_path / "a").glob("*.*")):
        if file.suffix != ".pt":
            assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes(), file.name
