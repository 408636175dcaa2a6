"""Weights that are changed through `optimizer.param_groups`, or in a hook after its step: stages use them from then on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import autoptd
from autoptd.errors import PlanError
from tests.runtime.params.test_own_optimizers import batch, net

Edit = Callable[[Any], None]


def tensors(optimizer: Any) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@torch.no_grad()
def in_place(optimizer: Any) -> None:
    for p in tensors(optimizer):
        p.clamp_(-0.02, 0.02)


def by_data(optimizer: Any) -> None:
    for p in tensors(optimizer):
        p.data.clamp_(-0.02, 0.02)


def by_numpy(optimizer: Any) -> None:
    for p in tensors(optimizer):
        if p.numel():
            array = p.detach().numpy()
            array.clip(-0.02, 0.02, out=array)


@torch.no_grad()
def one_matrix(optimizer: Any) -> None:
    """Of which some ranks have nothing."""
    for p in optimizer.param_groups[1]["params"]:
        p.clamp_(-0.02, 0.02)


MESHES = [
    {"d": 2},
    {"d": 4, "zero": 1},
    {"t": 2, "d": 2, "zero": 1},
    {"p": 2, "num_microbatches": 2, "d": 2, "zero": 1},
    {"d": 4, "zero": 1, "dp_shard": 2},
]


EDITS = [in_place, by_data, by_numpy, one_matrix]
# By default each edit on a mesh or two of its own.
CASES = [
    pytest.param(
        mesh,
        edit,
        id=f"{mesh}-{edit.__name__}",
        marks=[] if number % len(EDITS) == EDITS.index(edit) else pytest.mark.thorough,
    )
    for number, mesh in enumerate(MESHES)
    for edit in EDITS
]


@pytest.mark.parametrize(("mesh", "edit"), CASES)
@pytest.mark.parametrize("is_hook", [False, True])
def test_parity_with_clamped_weights(mesh: dict[str, Any], edit: Edit, is_hook: bool) -> None:
    model = net()
    pm = autoptd.parallelize(net(), **mesh, backend="local", example_inputs=batch(0), check_every=1)
    named = dict(model.named_parameters())
    others = [name for name in named if name != "a.weight"]
    want = torch.optim.AdamW(
        [{"params": [named[name] for name in others]}, {"params": [model.a.weight]}], lr=0.1
    )
    opt = pm.optimizer(torch.optim.AdamW, [{"params": others}, {"params": ["a.weight"]}], lr=0.1)
    if is_hook:
        for optimizer in (opt, want):
            optimizer.register_step_post_hook(lambda optimizer, *_: edit(optimizer))
    for seed in range(3):
        loss = model(*batch(seed))
        loss.backward()
        assert torch.allclose(pm.step(*batch(seed)), loss.detach(), rtol=0, atol=1e-12)
        for optimizer in (opt, want):
            optimizer.step()
            optimizer.zero_grad()
            if not is_hook:
                edit(optimizer)
        assert torch.allclose(pm.eval_step(*batch(9)), model(*batch(9)).detach(), rtol=0, atol=1e-12)
    found = pm.state_dict()
    assert all(torch.allclose(found[name], x, rtol=0, atol=1e-9) for name, x in model.state_dict().items())
    pm.close()


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-mixed"])
def test_masters_that_were_changed(precision: str, zero: int, tmp_path: Path) -> None:
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    x, y = (value.to(low) for value in batch(0))
    keywords: dict[str, Any] = {"d": 2, "zero": zero, "precision": precision, "example_inputs": (x, y)}
    pm = autoptd.parallelize(net().float(), **keywords, backend="local")
    opt = pm.optimizer(torch.optim.SGD, lr=0.1)
    pm.step(x, y)
    opt.step()
    opt.zero_grad()
    # Who has this might write to it.
    assert all(p.data is not None for p in pm.parameters())
    with torch.no_grad():
        for p in tensors(opt):
            p.zero_()
    pm.save(tmp_path / "zeros", opt)
    assert not any(bool(value.any()) for value in pm.state_dict().values())
    of_zeros = y.double().square().mean()
    for call in (pm.eval_step, pm.step):
        assert torch.allclose(call(x, y).double(), of_zeros, rtol=1e-2)
    # The other place still counts, too; both at once do not.
    with torch.no_grad():
        for p in pm.parameters():
            p.fill_(0.5)
    assert all(bool((value == 0.5).all()) for value in pm.state_dict().values())
    with torch.no_grad():
        for p in [*pm.parameters(), *tensors(opt)]:
            p.fill_(0.25)
    with pytest.raises(PlanError, match="was changed both through"):
        pm.step(x, y)
    opt.zero_grad()
    pm.load(tmp_path / "zeros", opt)
    assert torch.allclose(pm.step(x, y).double(), of_zeros, rtol=1e-2)
    pm.close()


@pytest.mark.parametrize(
    "expose",
    [
        lambda p: p.data,
        lambda p: p.detach(),
        lambda p: p.data_ptr(),
        lambda p: p.untyped_storage(),
        lambda p: p.view(-1),
    ],
)
def test_what_an_alias_may_write_is_compared(expose: Callable[[torch.Tensor], Any]) -> None:
    pm = autoptd.parallelize(net(), d=2, zero=1, backend="local", example_inputs=batch(0))
    opt = pm.optimizer(torch.optim.SGD, lr=0.1)
    pm.step(*batch(0))
    opt.step()
    shown: list[Any] = [*tensors(opt), *pm.parameters()]
    # The runtime's own doings expose nothing: such a comparison is made by nobody who did not ask.
    assert not any(p.was_exposed for p in shown)
    assert expose(shown[0]) is not None and [p.was_exposed for p in shown].count(True) == 1
    pm.close()


def assigned(p: torch.nn.Parameter) -> None:
    p.data = p.data * 0.5


def frozen(p: torch.nn.Parameter) -> None:
    p.requires_grad_(False)


def exchanged(p: torch.nn.Parameter) -> None:
    torch.utils.swap_tensors(p, torch.nn.Parameter(p.detach() * 0.5))


@pytest.mark.parametrize("options", [{"zero": 1}, {"precision": "bf16-mixed"}], ids=str)
@pytest.mark.parametrize(
    "change, words",
    [(assigned, "data was replaced"), (exchanged, "data was replaced"), (frozen, "requires_grad")],
)
def test_what_an_optimizer_steps_is_not_replaced(
    options: dict[str, Any], change: Callable[[Any], None], words: str
) -> None:
    """Stages would go on with the weights of before, whose updates nobody would see."""
    call = tuple(x.float() for x in batch(0)) if "precision" in options else batch(0)
    model = net().float() if "precision" in options else net()
    pm = autoptd.parallelize(model, d=2, **options, backend="local", example_inputs=call)
    opt = pm.optimizer(torch.optim.SGD, lr=0.1)
    pm.step(*call)
    opt.step()
    opt.zero_grad()
    for p in tensors(opt):
        change(p)
    assert pm.state_dict()
    with pytest.raises(PlanError, match=words):
        pm.step(*call)
    pm.close()
