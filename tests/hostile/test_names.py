"""Modules, parameters and files with names that would end a comment, a string or a statement: trained as on one device."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoptd
from autoptd.codegen import writer
from autoptd.errors import InternalError
from autoptd.program.program import Program
from autoptd.runtime.step.stage import load_stage
from autoptd.runtime.step.standalone import check_stage

LONG = "(" * 60 + "a_path_that_is_longer_than_an_emitted_line" * 2


class Layer(nn.Module):
    def __init__(self, name: str, other: str, inner: int) -> None:
        super().__init__()
        self.name, self.other = name, other
        self.add_module(name, nn.Linear(8, inner))
        self.scales = nn.ParameterDict({other: torch.randn(8, inner) * 0.3})
        self.register_buffer(other, torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(getattr(self, self.name)(x)) @ self.scales[self.other].t()
        return x + y * getattr(self, self.other)


class Net(nn.Module):
    def __init__(self, name: str, other: str, inners: tuple[int, ...] = (16, 32)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.name, self.other = name, other
        self.stacks = nn.ModuleDict({name: nn.ModuleList(Layer(name, other, inner) for inner in inners)})
        self.add_module(other, nn.Linear(8, 8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = getattr(self, self.other)(x)
        for layer in self.stacks[self.name]:  # type: ignore[union-attr]
            x = layer(x)
        return F.mse_loss(x, y)


BATCH = (torch.linspace(-1, 1, 32).view(4, 8), torch.linspace(2, -1, 32).view(4, 8).cos())
AGAIN = {"t": 2, "recompute": "full"}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("run", 'q"""', AGAIN),  # a method of the stage, a docstring
    ("new\nline", "# c", AGAIN),
    (LONG, "x[0](", {"t": 2}),
    ("carriage\r", "nul\0", {"p": 2}),
    ("0", "😀", AGAIN),
    ("batch_sums_0", "back\\slash\\", {"t": 2, "p": 2, "recompute": "full"}),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "other", "asked"), CASES, ids=[ascii(name) for name, _, _ in CASES])
def test_hard_names_train_as_on_one_device(name: str, other: str, asked: dict[str, Any]) -> None:
    autoptd.verify(Net(name, other), example_inputs=BATCH, steps=1, **asked)


def test_names_that_python_takes_for_one_stay_two() -> None:
    """Python reads the ligature as its two letters; both are names of variables here."""
    torch.manual_seed(0)
    model = Two()
    autoptd.verify(model, example_inputs=BATCH, steps=1, t=2)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("fi", "ﬁ"):
            self.add_module(name, nn.Linear(8, 8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        first, second = (module(x) for module in self.children())
        return F.mse_loss(first * 2 + second, y)


class Counts(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.linear = name, nn.Linear(8, 8)
        self.register_buffer(name, torch.zeros(8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mean = self.get_buffer(self.name)
        x = self.linear(x - mean)
        mean.lerp_(x.detach().mean(0), 0.5)
        return F.mse_loss(x, y)


@pytest.mark.one_in(1)
@pytest.mark.parametrize("name", ["\\u0041", 'say "x"', "new\nline"], ids=ascii)
def test_buffers_with_hard_names_are_updated(name: str) -> None:
    autoptd.verify(Counts(name), example_inputs=BATCH, steps=2, t=2)


def test_globs_and_checkpoints_take_hard_names(tmp_path: Path) -> None:
    """A bracket is a glob's, and a colon divides one."""
    name, other = "a:b", "[ab]\x1f"
    plan = {
        "shard": [{"pattern": f"{other}.weight", "dim": None}],
        "keep": [{"pattern": f"stacks.{name}.0.{name}", "way": "whole"}],
    }
    pm = autoptd.parallelize(Net(name, other), t=2, backend="local", example_inputs=BATCH, plan=plan)
    try:
        pm.step(*BATCH)
        optimizer = pm.optimizer(torch.optim.SGD, [{"params": [f"{other}.weight"], "lr": 0.5}], lr=0.1)
        assert [len(group["params"]) for group in optimizer.param_groups] == [2]  # on both ranks
        pm.save(tmp_path / "checkpoint")
        pm.load(tmp_path / "checkpoint")
        pm.program.save(tmp_path)
        assert Program.load(tmp_path).fingerprint() == pm.program.fingerprint()
        stage = load_stage(pm.program.sources["stage_0.py"], str(tmp_path / "stage_0.py"))
        assert not check_stage(stage, tmp_path).wrong
    finally:
        pm.close()


FILE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x, y):
        return (self.up(x) - y).square().mean()
"""


def test_a_file_may_be_called_anything(tmp_path: Path) -> None:
    path = tmp_path / 'new\nline "of" (it).py'
    path.write_text(FILE)
    spec = importlib.util.spec_from_file_location("hard", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    program = autoptd.compile(module.Net(), t=2, example_inputs=BATCH)
    assert '# up  (new\\nline "of" (it).py:11)\n' in program.sources["stage_0.py"]


def test_an_emitted_file_is_compiled_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "shown", lambda text: f"{text}\n  not Python")
    with pytest.raises(InternalError, match=r"stage_0\.py:\d+: is not valid Python"):
        autoptd.compile(Net("a", "b"), t=2, example_inputs=BATCH)
