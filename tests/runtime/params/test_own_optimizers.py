"""Optimizer classes of the user's own: the same as on one device on every mesh, or refused before they step."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoptd
from autoptd.errors import PlanError
from autoptd.model.parallel_model import ParallelModel
from autoptd.runtime.params.trial import check_elementwise

Parameters = Any


class DecayingMatrices(torch.optim.AdamW):
    """Decays matrices only, in its own step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.ndim >= 2:
                    p.mul_(1 - group["lr"] * 0.5)
        return super().step(closure)


class Grouped(torch.optim.AdamW):
    """Makes its own groups: decay for matrices only."""

    def __init__(self, params: Parameters, lr: float = 1e-3, weight_decay: float = 0.5) -> None:
        every: list[nn.Parameter] = []
        for item in params:
            every += item["params"] if isinstance(item, dict) else [item]
        decay, rest = [p for p in every if p.dim() >= 2], [p for p in every if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
        super().__init__(groups, lr=lr)


class LargeOnly(torch.optim.SGD):
    """Leaves out small tensors, by a bound that no tensor of a small trial has."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.9 if p.numel() > 100 else 1.0)
        return super().step(closure)


class ByWidth(torch.optim.SGD):
    """Divides by a width, as muP does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-1.0 / p.shape[-1])


class GroupedBySize(torch.optim.AdamW):
    def __init__(self, params: Parameters, lr: float = 1e-3) -> None:
        every = list(params)
        small, large = [p for p in every if p.numel() < 100], [p for p in every if p.numel() >= 100]
        super().__init__([{"params": small, "lr": lr}, {"params": large, "lr": lr / 10}])


class ByPosition(torch.optim.SGD):
    """A learning rate for each parameter, by its number."""

    def __init__(self, params: Parameters, lr: float = 1e-3) -> None:
        super().__init__([{"params": [p], "lr": lr * 0.9**i} for i, p in enumerate(params)], lr=lr)


class ClippingWhereAsked(torch.optim.SGD):
    """Scales each gradient to a norm of 1, in groups that say so."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"] if group.get("clip") else ():
                p.grad.div_(p.grad.norm())
        return super().step(closure)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 32), nn.Linear(32, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.b(self.a(x).tanh()) * self.scale, y)


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(8, size, generator=generator, dtype=torch.float64) for size in (4, 2))
    return x, y


def parallel(model: nn.Module, **keywords: Any) -> ParallelModel:
    return autoptd.parallelize(copy.deepcopy(model), backend="local", example_inputs=batch(0), **keywords)


def train(pm: Any, step: Any, optimizer: Any, scheduler: Any, seeds: range) -> None:
    for seed in seeds:
        loss = step(*batch(seed))
        if pm is None:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


def make(cls: Any, source: Any, **keywords: Any) -> tuple[Any, Any]:
    is_parallel = isinstance(source, ParallelModel)
    optimizer = source.optimizer(cls, **keywords) if is_parallel else cls(source.parameters(), **keywords)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


MESHES = [
    ({"d": 2, "zero": 1}, {"t": 2}),
    ({"t": 2, "d": 2, "zero": 1}, {"p": 2, "num_microbatches": 2}),
    ({"p": 2, "num_microbatches": 2, "d": 2, "zero": 1}, {"d": 4, "zero": 1}),
    ({"d": 4, "zero": 1, "dp_shard": 2}, {"d": 2}),
]


@pytest.mark.parametrize("cls", [DecayingMatrices, Grouped])
@pytest.mark.parametrize("meshes", MESHES, ids=str)
def test_parity_with_a_checkpoint_moved_to_another_mesh(cls: Any, meshes: Any, tmp_path: Path) -> None:
    model = net()
    want, schedule = make(cls, model, lr=0.05)
    first = parallel(model, **meshes[0])
    opt, sched = make(cls, first, lr=0.05)
    train(None, model, want, schedule, range(3))
    train(first, first.step, opt, sched, range(3))
    first.save(tmp_path / "c", opt, extra={"schedule": sched})
    first.close()
    second = parallel(net(), **meshes[1])
    opt, sched = make(cls, second, lr=0.05)
    second.load(tmp_path / "c", opt, extra={"schedule": sched})
    train(None, model, want, schedule, range(3, 6))
    train(second, second.step, opt, sched, range(3, 6))
    found = second.state_dict()
    for name, x in model.state_dict().items():
        assert torch.allclose(found[name], x, rtol=0, atol=1e-9), name
    again = copy.deepcopy(second.optimizer_state_dict(opt))
    assert [sorted(group["params"]) for group in again["param_groups"]] == (
        [["a.weight", "b.weight"], ["a.bias", "b.bias", "scale"]]
        if cls is Grouped
        else [["a.bias", "a.weight", "b.bias", "b.weight", "scale"]]
    )
    # What torch's own optimizer over the model would load, too.
    second.load_optimizer_state_dict(opt, want.state_dict())
    second.load_optimizer_state_dict(opt, again)
    second.close()


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16"])
@pytest.mark.parametrize("cls", [DecayingMatrices, Grouped])
def test_zero_makes_no_difference_with_masters(cls: Any, precision: str) -> None:
    found = []
    data = [x.bfloat16() if precision == "bf16" else x.float() for x in batch(0)]
    for zero in (0, 1):
        pm = autoptd.parallelize(
            net().float(), d=2, zero=zero, precision=precision, backend="local", example_inputs=tuple(data)
        )
        opt = pm.optimizer(cls, lr=0.05)
        for _ in range(3):
            pm.step(*data)
            opt.step()
            opt.zero_grad()
        found.append(pm.state_dict())
        pm.close()
    for name, x in found[0].items():
        assert torch.equal(x, found[1][name]), name


@pytest.mark.parametrize(
    "cls, mesh, why",
    [
        (
            LargeOnly,
            {"d": 4, "zero": 1},
            r"treats a.weight differently in its shape \(32, 4\) and in the shape \(1, 64\)",
        ),
        (
            LargeOnly,
            {"t": 2},
            r"treats a.weight differently in its shape \(32, 4\) and in the shape \(16, 4\)",
        ),
        (ByWidth, {"d": 2, "zero": 1}, "updated differently from the whole"),
        (GroupedBySize, {"d": 4, "zero": 1}, "puts a.weight, .*, into another group"),
        (GroupedBySize, {"t": 2}, "puts a.weight, .*, into another group"),
        (ByPosition, {"d": 2}, "makes 5 groups from the model's parameters, but 10 from a rank's"),
    ],
)
def test_what_shapes_of_shards_would_change_is_refused(cls: Any, mesh: dict[str, int], why: str) -> None:
    pm = parallel(net(), **mesh)
    with pytest.raises(PlanError, match=why):
        pm.optimizer(cls, lr=0.1)
    pm.close()


def test_whole_tensors_may_be_told_apart_by_size() -> None:
    """Every rank of a replica of its own has the model's shapes."""
    pm, model = parallel(net(), t=1, d=1), net()
    (opt, _), (want, schedule) = make(GroupedBySize, pm, lr=0.1), make(GroupedBySize, model, lr=0.1)
    train(None, model, want, schedule, range(1))
    pm.step(*batch(0))
    opt.step()
    found = pm.state_dict()
    assert all(torch.allclose(found[name], x, rtol=0, atol=1e-12) for name, x in model.state_dict().items())
    pm.close()


def test_a_trial_has_the_options_of_each_group() -> None:
    check_elementwise(ClippingWhereAsked, {"lr": 0.1}, [{}])
    with pytest.raises(PlanError, match="halves of a tensor along dim 0"):
        check_elementwise(ClippingWhereAsked, {"lr": 0.1}, [{}, {"clip": True}])


class Counting(torch.optim.SGD):
    """Counts tensors where steps are meant."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.count += 1
                p.mul_(1 - 0.1 / self.count)
        return super().step(closure)


class FirstOnly(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["params"][0].mul_(0.9)
        return super().step(closure)


@pytest.mark.parametrize("cls", [Counting, FirstOnly])
def test_what_depends_on_the_other_tensors_of_a_rank_is_refused(cls: type[torch.optim.Optimizer]) -> None:
    with pytest.raises(PlanError, match="depends on which other tensors are in the group"):
        check_elementwise(cls, {"lr": 0.1})


def test_a_bound_by_the_norm_of_a_tensor_is_seen_where_tensors_are_small() -> None:
    class BoundedByNorm(torch.optim.SGD):
        """As LARS and LAMB do: at the values of a fresh tensor the bound is reached by no step."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad.sign() * 1e-3 * (p.norm() / 1e-3).clamp(max=1.0))

    with pytest.raises(PlanError, match="halves of a tensor along dim 0"):
        check_elementwise(BoundedByNorm, {"lr": 0.1})


def test_a_constructor_is_tried() -> None:
    class ScalesByNorm(torch.optim.SGD):
        def __init__(self, params: Parameters, lr: float) -> None:
            every = list(params)
            super().__init__([{"params": [p], "lr": lr / float(p.detach().norm())} for p in every], lr=lr)

    with pytest.raises(PlanError, match="overrides its constructor: halves"):
        check_elementwise(ScalesByNorm, {"lr": 0.1})


def test_a_step_that_is_skipped_counts_once() -> None:
    """torch runs hooks in its own class's `step` too, from its first instance on."""
    torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    x, y = (value.half() for value in batch(0))
    pm = autoptd.parallelize(net().float(), d=2, precision="fp16", backend="local", example_inputs=(x, y))
    opt = pm.optimizer(DecayingMatrices, lr=0.1)
    pm.step(x, y)
    gradient = opt.param_groups[0]["params"][0].grad
    gradient.fill_(float("inf"))
    for count in (1, 2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            opt.step()
        assert opt.skipped == count and opt.step_was_skipped
        assert opt.param_groups[0]["params"][0].grad is gradient
    pm.close()


def test_hooks_of_a_torch_class_run_once() -> None:
    """Also if there was an instance of the class before, around whose `step` torch runs hooks from then on."""
    torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    pm = parallel(net(), t=2)
    opt, calls = pm.optimizer(torch.optim.AdamW, lr=0.1), []
    opt.register_step_pre_hook(lambda *_: calls.append("before"))
    opt.register_step_post_hook(lambda *_: calls.append("after"))
    pm.step(*batch(0))
    opt.step()
    assert calls == ["before", "after"]
    pm.close()
