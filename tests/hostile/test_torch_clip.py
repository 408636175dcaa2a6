"""What torch does to a rank's parameters as if they were the model's is refused, whatever way it comes; the rest goes on
working."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import autoptd
from autoptd.errors import PlanError, RuntimeFault
from autoptd.model.parallel_model import ParallelModel

Use = Callable[[ParallelModel, Any], Any]


def make(**mesh: int) -> ParallelModel:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 1)).double()
    x = torch.randn(8, 16).double()
    return autoptd.parallelize(
        model, **mesh, backend="local", loss_fn=lambda out, y: (out - y).pow(2).mean(),
        example_inputs={"input": x, "targets": x[:, :1]},
    )  # fmt: skip


def step(pm: ParallelModel, seed: int = 1) -> float:
    torch.manual_seed(seed)
    x = torch.randn(8, 16).double()
    return float(pm.step(input=x, targets=x[:, :1]))


@pytest.fixture(params=[{}, {"t": 2, "d": 2}, {"p": 2}], ids=str)
def pm(request: pytest.FixtureRequest) -> Iterator[ParallelModel]:
    made = make(**request.param)
    yield made
    made.close()


def grads(pm: ParallelModel) -> list[torch.Tensor]:
    return [p.grad for p in pm.parameters() if p.grad is not None]


CLIPS: dict[str, Use] = {
    "norm": lambda pm, opt: nn.utils.clip_grad_norm_(pm.parameters(), 1.0),
    "loop": lambda pm, opt: nn.utils.clip_grad_norm_(pm.parameters(), 1.0, foreach=False),
    "one": lambda pm, opt: nn.utils.clip_grad_norm_(next(pm.parameters()), 1.0),
    "value": lambda pm, opt: nn.utils.clip_grad_value_(pm.parameters(), 1.0),
    "given norm": lambda pm, opt: nn.utils.clip_grads_with_norm_(pm.parameters(), 1.0, torch.ones(())),
    "total": lambda pm, opt: nn.utils.get_total_norm(grads(pm)),
    "of the optimizer": lambda pm, opt: nn.utils.clip_grad_norm_(opt.param_groups[0]["params"], 1.0),
    "of a rank": lambda pm, opt: nn.utils.clip_grad_norm_(pm.rank_parameters(0).values(), 1.0),
    "foreach": lambda pm, opt: torch._foreach_norm(grads(pm)),
    "vector": lambda pm, opt: torch.linalg.vector_norm(grads(pm)[0]),
    "linalg": lambda pm, opt: torch.linalg.norm(grads(pm)[0]),
    "method": lambda pm, opt: grads(pm)[0].norm(),
    "by hand": lambda pm, opt: grads(pm)[0].data.norm(2),
    "detached": lambda pm, opt: torch.norm(grads(pm)[0].detach().float()),
    "stacked": lambda pm, opt: torch.stack([g.detach().norm() for g in grads(pm)]),
    "parameter": lambda pm, opt: next(pm.parameters()).norm(),
}


@pytest.mark.parametrize("use", CLIPS.values(), ids=CLIPS)
def test_clips_and_norms(pm: ParallelModel, use: Use) -> None:
    opt = pm.optimizer(torch.optim.SGD, lr=0.1)
    for _ in range(2):  # guarded again after a step
        step(pm)
        with pytest.raises(PlanError, match=r"pm\.clip_grad_norm_"):
            use(pm, opt)
        opt.step()
        opt.zero_grad()


def test_norms_by_hand() -> None:
    pm = make(t=2)
    step(pm)
    uses: list[Callable[[], Any]] = [
        lambda: sum(g.pow(2).sum() for g in grads(pm)),
        lambda: torch.sum(grads(pm)[0].detach() ** 2),
        lambda: (grads(pm)[0] * grads(pm)[0]).mean(),
        lambda: next(pm.parameters()).square().sum(),
    ]
    for use in uses:
        with pytest.raises(PlanError, match=r"a norm of a (gradient|parameter) covers .*pm\.clip_grad_norm_"):
            use()
    p = next(pm.parameters())
    assert p.grad is not None
    for x in (p.grad.square(), p.pow(2).sum(-1, keepdim=True), (p * p.grad).sum(), p.grad.square().sum(0)):
        assert torch.isfinite(x).all()
    assert type(pickle.loads(pickle.dumps(p.grad.square()))) is type(p.grad.square() + 1) is torch.Tensor
    pm.close()


def test_the_clip_by_value_that_is_named(pm: ParallelModel) -> None:
    step(pm)
    with pytest.raises(PlanError, match=r"pm\.clip_grad_value_\(clip_value\)"):
        nn.utils.clip_grad_value_(pm.parameters(), 1e-3)
    once = pm.gradients()
    pm.clip_grad_value_(1e-3)
    assert all(torch.equal(x, once[name].clamp(-1e-3, 1e-3)) for name, x in pm.gradients().items())
    for value in (-1.0, float("nan"), "a"):
        with pytest.raises(PlanError, match="is not a valid bound"):
            pm.clip_grad_value_(value)


def test_a_norm_that_is_not_finite_is_an_error_where_asked_for(pm: ParallelModel) -> None:
    step(pm)
    once = pm.clip_grad_norm_(1e-3, error_if_nonfinite=True)
    assert once > 1e-3 and pm.clip_grad_norm_(1.0, error_if_nonfinite=True) == pytest.approx(1e-3, rel=1e-2)
    for parameter in pm.parameters():
        assert parameter.grad is not None
        parameter.grad.add_(torch.inf)
    with pytest.raises(RuntimeFault, match="clip_grad_norm_: the norm of all gradients is inf"):
        pm.clip_grad_norm_(1.0, error_if_nonfinite=True)
    # As they were, not inf * 0; and the ranks go on.
    assert all(x.isinf().all() for x in pm.gradients().values()) and step(pm) > 0


class Other(torch.optim.Optimizer):
    """Somebody's own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


OPTIMIZERS: dict[str, Use] = {
    "AdamW": lambda pm, opt: torch.optim.AdamW(pm.parameters(), lr=0.1),
    "groups": lambda pm, opt: torch.optim.SGD([{"params": list(pm.parameters())}], lr=0.1),
    "named": lambda pm, opt: torch.optim.SGD(pm.named_parameters(), lr=0.1),
    "a group more": lambda pm, opt: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).add_param_group(
        {"params": list(pm.parameters())}
    ),
    "own": lambda pm, opt: Other(pm.parameters()),
    "differentiable": lambda pm, opt: torch.optim.SGD(pm.parameters(), lr=0.1, differentiable=True).step(),
}


@pytest.mark.parametrize("use", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_raw_optimizers(pm: ParallelModel, use: Use) -> None:
    step(pm)
    with pytest.raises(PlanError, match=r"pm\.optimizer"):
        use(pm, None)


def test_a_gradient_scaler(pm: ParallelModel) -> None:
    opt, scaler = pm.optimizer(torch.optim.AdamW, lr=0.1), torch.amp.GradScaler("cpu")
    for use in (scaler.unscale_, scaler.step):
        scaler.scale(torch.ones(()))  # as a training loop does: a scale is made
        step(pm)
        with pytest.raises(PlanError, match=r'GradScaler.*infinities.*precision="fp16"'):
            use(opt)


def test_what_users_do_otherwise_goes_on_working(pm: ParallelModel) -> None:
    step(pm)
    for name, p in pm.named_parameters():
        assert isinstance(p, nn.Parameter) and name in repr((name, p)) and hash(p)
        assert p.grad is not None and p.grad.shape == p.shape
        for x in (
            p + 1,
            p.detach(),
            p.data,
            p.grad.abs(),
            p.grad.sum(),
            p * p.grad,
            p.grad.clone(),
            torch.ones_like(p),
        ):
            assert isinstance(x, torch.Tensor) and torch.isfinite(x).all()
        assert type(p.detach()) is type(p + 1) is type(p.grad + 1) is torch.Tensor
        twin, loaded = copy.deepcopy(p), pickle.loads(pickle.dumps(p))
        assert torch.equal(twin, p) and torch.equal(loaded, p) and twin.requires_grad
        file = io.BytesIO()
        torch.save({"p": p, "grad": p.grad}, file)
        file.seek(0)
        saved = torch.load(file)
        assert type(saved["grad"]) is torch.Tensor and torch.equal(saved["grad"], p.grad)
        assert type(copy.deepcopy(p.grad)) is torch.Tensor
        with torch.no_grad():
            p.grad.mul_(2.0).clamp_(-1, 1)
    assert all(type(x) is torch.Tensor for x in (*pm.state_dict().values(), *pm.gradients().values()))


@pytest.mark.parametrize("keywords", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_our_optimizers_step_with_torchs_own_classes(keywords: dict[str, Any]) -> None:
    pm, seen = make(t=2), []
    opt = pm.optimizer(torch.optim.AdamW, lr=0.1, **keywords)
    opt.register_step_pre_hook(lambda opt, *_: seen.extend(type(p) for p in opt.param_groups[0]["params"]))
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1)
    for _ in range(2):
        step(pm)
        pm.clip_grad_norm_(1.0)
        opt.step()
        opt.zero_grad(set_to_none=False)
        scheduler.step()
    assert set(seen) == {nn.Parameter}
    saved = opt.state_dict()
    opt.load_state_dict(copy.deepcopy(saved))
    again = pickle.loads(pickle.dumps(saved))
    assert all(type(x) is torch.Tensor for record in again["state"].values() for x in record.values())
    pm.close()


@pytest.mark.parametrize("mesh", [{"d": 2}, {"t": 2}])
def test_copies_that_drift_apart(mesh: dict[str, int]) -> None:
    pm = make(**mesh)
    opt = pm.optimizer(torch.optim.SGD, lr=0.1)
    step(pm)
    pm.rank_parameters(1)["2.weight"].grad.mul_(0.5)
    opt.step()
    with pytest.raises(RuntimeFault, match=r"step 2: .*2\.weight differs between ranks 0, 1.*pm\.clip"):
        step(pm)
    pm.close()


@pytest.mark.parametrize("every", [0, 4])
def test_how_often_copies_are_compared(every: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    pm = autoptd.parallelize(
        nn.Linear(8, 1), d=2, backend="local", check_every=every, loss_fn=lambda out, y: (out - y).pow(2).mean(),
        example_inputs={"input": x, "targets": x[:, :1]},
    )  # fmt: skip
    for _ in range(2):
        pm.step(input=x, targets=x[:, :1])
    pm.rank_parameters(1)["weight"].data.add_(1.0)
    pm.step(input=x, targets=x[:, :1])
    if every:
        with pytest.raises(RuntimeFault, match=r"step 4: .*weight differs between ranks 0, 1"):
            pm.step(input=x, targets=x[:, :1])
    else:
        pm.step(input=x, targets=x[:, :1])
    pm.close()


@pytest.mark.parametrize("mesh", [{"t": 2}, {"p": 2}, {"d": 2}, {"t": 2, "p": 2}], ids=str)
def test_a_loop_over_parameters_reaches_every_rank(mesh: dict[str, int]) -> None:
    pm = make(**mesh)
    step(pm)
    once = pm.gradients()
    for p in pm.parameters():
        p.grad.mul_(0.5)
    assert all(torch.equal(x, 0.5 * once[name]) for name, x in pm.gradients().items())
    for p in pm.parameters():
        p.grad = None
    assert pm.gradients() == {}
    step(pm)
    assert all(torch.equal(x, once[name]) for name, x in pm.gradients().items())
    before = pm.state_dict()
    for p in pm.parameters():
        p.data.mul_(0.9)
    assert all(torch.equal(x, 0.9 * before[name]) for name, x in pm.state_dict().items())
    if mesh.get("t", 1) * mesh.get("d", 1) > 1:  # else nobody has it
        next(iter(pm.rank_parameters(0).values())).grad = None
        with pytest.raises((PlanError, RuntimeFault), match="but not on this one"):
            pm.gradients()
    pm.close()
