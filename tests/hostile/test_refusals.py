"""What users would expect to work, and does; or is refused in words that say what is wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.errors import PlanError
from autoptd.model.parallel_model import ParallelModel


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor, y: Tensor, scale: float = 1.0) -> Tensor:
        return F.mse_loss(self.down(F.gelu(self.up(x))), y) * scale


def make(example_inputs: Any = None, **mesh: int) -> tuple[Net, ParallelModel]:
    torch.manual_seed(0)
    model = Net().double()
    return model, autoptd.parallelize(model, **mesh, backend="local", example_inputs=example_inputs)


X, Y = torch.randn(8, 8).double(), torch.randn(8, 1).double()


@pytest.mark.parametrize(
    "compiled", [(X, Y), {"x": X, "y": Y}, {"y": Y, "x": X}, None], ids=["args", "xy", "yx", "lazy"]
)
def test_arguments_in_any_order_and_by_any_way(compiled: Any) -> None:
    model, pm = make(compiled, t=2)
    wanted = model(X, Y).item()
    for args, kwargs in (((X, Y), {}), ((X,), {"y": Y}), ((), {"y": Y, "x": X}), ((), {"x": X, "y": Y})):
        assert pm.step(*args, **kwargs).item() == pytest.approx(wanted, rel=1e-12)
        assert pm.eval_step(*args, **kwargs).item() == pytest.approx(wanted, rel=1e-12)
    for args, kwargs in (((X,), {}), ((X, Y, Y), {}), ((X, Y), {"y": Y}), ((X,), {"z": Y}), (([X], Y), {})):
        with pytest.raises(PlanError, match=r"step: .*compiled") as raised:
            pm.step(*args, **kwargs)
        assert "TreeSpec" not in str(raised.value) and "PyTree" not in str(raised.value)
    pm.close()


class MyAdam(torch.optim.AdamW):
    pass


class Quiet(torch.optim.AdamW):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr, weight_decay=0.3)


class Noting(torch.optim.SGD):
    count = 0

    def step(self, closure: Any = None) -> Any:
        type(self).count += 1
        return super().step(closure)


class Trusting(torch.optim.SGD):
    """Scales by the norm of a whole parameter."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad / (p.grad.norm() + 1e-6)
        return super().step(closure)


@pytest.mark.parametrize(
    ("cls", "keywords"),
    [(MyAdam, {"lr": 0.1}), (Quiet, {}), (Noting, {"lr": 0.1}), (torch.optim.Rprop, {"lr": 0.1})],
)
def test_optimizers_that_update_every_element_by_itself(cls: Any, keywords: dict[str, Any]) -> None:
    model, pm = make((X, Y), t=2, d=2)
    ours, theirs = pm.optimizer(cls, **keywords), cls(model.parameters(), **keywords)
    for _ in range(3):
        model(X, Y).backward()
        pm.step(X, Y)
        for one in (ours, theirs):
            one.step()
            one.zero_grad()
    for name, value in pm.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-9, atol=1e-12)
    pm.close()


def test_an_optimizer_that_looks_at_whole_parameters() -> None:
    _, pm = make((X, Y), t=2)
    with pytest.raises(PlanError, match=r"Trusting: derives from SGD and overrides its step"):
        pm.optimizer(Trusting, lr=0.1)
    pm.close()


def test_the_state_dict_of_a_torch_optimizer() -> None:
    model, pm = make((X, Y), t=2)
    opt = pm.optimizer(torch.optim.AdamW, lr=0.1)
    model(X, Y).backward()
    theirs = torch.optim.AdamW(model.parameters(), lr=0.1)
    theirs.step()
    opt.load_state_dict(theirs.state_dict())
    moments, own = opt.state_dict()["state"], theirs.state_dict()["state"]
    for number, (name, _) in enumerate(model.named_parameters()):
        torch.testing.assert_close(moments[name]["exp_avg"], own[number]["exp_avg"], rtol=0, atol=0)
    reverse = torch.optim.AdamW(list(model.parameters())[::-1], lr=0.1)
    reverse.step()
    with pytest.raises(PlanError, match=r"comes from a torch optimizer.* exp_avg of parameter 0 has shape"):
        opt.load_state_dict(reverse.state_dict())
    some = pm.optimizer(torch.optim.AdamW, ["*.weight"], lr=0.1)
    with pytest.raises(PlanError, match=r"group 0 lacks down\.bias, up\.bias, unlike this optimizer's"):
        opt.load_state_dict(some.state_dict())
    with pytest.raises(PlanError, match=r"group 0 was saved with down\.bias, up\.bias"):
        some.load_state_dict(opt.state_dict())
    two = pm.optimizer(torch.optim.AdamW, [{"params": ["up.*"]}, {"params": ["down.*"]}], lr=0.1)
    with pytest.raises(PlanError, match=r"1 groups were saved, this optimizer has 2"):
        two.load_state_dict(opt.state_dict())
    with pytest.raises(PlanError, match=r"\[4\] numbered parameters .*, but this optimizer has \[2, 2\]"):
        two.load_state_dict(theirs.state_dict())
    pm.close()


class Signed(nn.Module):
    """A number of the call whose sign and whose absence of a value decide."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor, c: float = 0.0) -> Tensor:
        return self.a(x).square().mean() * (2 if math.copysign(1, c) > 0 else 3)


@pytest.mark.parametrize(("compiled", "other"), [(0.0, -0.0), (math.nan, 0.0), (1.0, 1)])
def test_numbers_of_a_call_are_the_same_to_the_sign(compiled: float, other: float) -> None:
    x = torch.randn(4, 4)
    pm = autoptd.parallelize(Signed(), d=2, backend="local", example_inputs=(x, compiled))
    pm.step(x, compiled)
    with pytest.raises(PlanError, match="argument 1 is"):
        pm.step(x, other)
    pm.close()
