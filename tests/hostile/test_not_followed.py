"""What ranks would not follow: a state dict with more than parameters and buffers, hooks, tables that are divided by chance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoptd
from autoptd.errors import PlanError, TraceError

X, Y = (torch.randint(0, 16, (8, 6), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(16, 8).double(), nn.Linear(8, 16).double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.emb(x)).mT, y)


class Extra(Net):
    def get_extra_state(self) -> Any:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_a_state_dict_with_more_or_other_names_is_refused() -> None:
    renamed = Net()
    renamed._register_state_dict_hook(
        lambda module, state, prefix, local: state.update(table=state.pop("emb.weight"))
    )
    for model, fact in (
        (Extra(), "has _extra_state in addition"),
        (renamed, "has table .*lacks or changes emb.w"),
    ):
        with pytest.raises(TraceError, match=fact):
            autoptd.parallelize(model, backend="local", example_inputs=(X, Y))


def test_hooks_on_what_the_ranks_hold_are_refused() -> None:
    pm = autoptd.parallelize(Net(), t=2, backend="local", example_inputs=(X, Y))
    for parameter in pm.parameters():
        with pytest.raises(PlanError, match="a hook on a parameter is not called"):
            parameter.register_hook(lambda grad: grad * 2)
        with pytest.raises(PlanError, match="a hook on a parameter is not called"):
            parameter.register_post_accumulate_grad_hook(lambda one: None)
    pm.step(X, Y)
    pm.close()


class Divided(nn.Module):
    """Reads a table that is as long as the batch by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 8).double()

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(table[x]).mT, x)


def test_a_table_as_long_as_the_batch_is_one_clear_error() -> None:
    call = (torch.arange(8)[:, None].expand(8, 6).flip(0), torch.randn(8, 4, dtype=torch.float64))
    with pytest.raises(TraceError, match=r"with 4 rows .*: IndexError.*tensors 0, 1 have 8 rows"):
        autoptd.parallelize(Divided(), num_microbatches=2, backend="local", example_inputs=call)


class TooLarge(nn.Module):
    """Fits where nothing is computed, and not where it is; it has written to a buffer by then."""

    fits = False

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 8)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor and not (self.fits or torch.compiler.is_exporting()):
            self.seen += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB")
        return F.cross_entropy(self.head(x), targets)


def test_a_step_that_does_not_fit_on_the_device_of_the_model() -> None:
    """It is not compared with its trace, and says so: fused, or on more ranks, it may fit."""
    call, model = (torch.randn(8, 4), torch.arange(8)), TooLarge()
    with pytest.warns(UserWarning, match="not compared.* does not fit: CUDA out of memory"):
        pm = autoptd.parallelize(model, num_microbatches=2, backend="local", example_inputs=call)
    model.fits = True
    assert float(pm.step(*call)) == pytest.approx(float(model(*call)), rel=1e-6) and not model.seen.any()
    pm.close()


class Foreach(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("twice", torch.zeros(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        torch._foreach_add_([self.calls, self.twice], 1.0)
        return super().forward(x, y)


def test_one_call_that_changes_several_tensors_is_named() -> None:
    with pytest.raises(TraceError, match=r"_foreach_add_ changes several tensors in one call"):
        autoptd.compile(Foreach(), t=2, example_inputs=(X, Y))
