"""What a loop still does with the model that it handed over is told with its line; right ones hear nothing."""

from __future__ import annotations

import copy
import gc
import io
import linecache
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from autoptd.errors import PlanError
from autoptd.ir.scopes import paused_collection
from autoptd.model.loop_watch import LoopLook, LoopWatch
from tests.model.test_loop_watch import BATCH, Model, made

Act = Callable[[nn.Module, nn.Module], Any]
GRADIENTS, AVERAGE = ["gradients of model.parameters()"], ["average of weights"]


def heard(act: Callable[[], Any]) -> list[str]:
    """The warnings of a call, by their first words; each names a line that says so."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        act()
    assert all("# told" in linecache.getline(each.filename, each.lineno) for each in told), told
    return [str(each.message).partition(":")[0] for each in told]


def trained(act: Act, when: str = "before", **options: Any) -> Callable[[], None]:
    """A loop of three updates that calls `act(model, other)` before each, after it, or after all of them."""
    model, pm, optimizer = made(**options)
    other = copy.deepcopy(model)

    def loop() -> None:
        for _ in range(3):
            pm.step(*BATCH)
            if when == "before":
                act(model, other)
            optimizer.step()
            optimizer.zero_grad()
            if when == "after":
                act(model, other)
        if when == "late":
            act(model, other)
        assert sys.getprofile() is None
        pm.close()

    return loop


def clip(model: nn.Module, other: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # told


def clip_a_list(model: nn.Module, other: nn.Module) -> None:
    nn.utils.clip_grad_norm_(list(model.parameters()), 1.0)  # told


def clip_some(model: Any, other: nn.Module) -> None:
    nn.utils.clip_grad_norm_((p for p in model.second.parameters() if p.requires_grad), 1.0)  # told


def clip_by_value(model: nn.Module, other: nn.Module) -> None:
    with pytest.raises(RuntimeError):  # torch's own, without a gradient
        nn.utils.clip_grad_value_(model.parameters(), 1.0)  # told


def norm_by_hand(model: nn.Module, other: nn.Module) -> None:
    total = 0.0
    for p in model.parameters():  # told
        if p.grad is not None:
            total += float(p.grad.norm())


def norm_of_a_sum(model: nn.Module, other: nn.Module) -> None:
    sum(p.grad.norm() for _, p in model.named_parameters() if p.grad is not None)  # told


@pytest.mark.parametrize(
    "act",
    [clip, clip_a_list, clip_some, clip_by_value, norm_by_hand, norm_of_a_sum],
    ids=lambda f: f.__name__,
)
def test_gradients_of_the_model_are_told_to_be_none(act: Act) -> None:
    assert heard(trained(act)) == GRADIENTS


def test_it_does_not_matter_on_which_layout_or_thread_nor_where_the_loop_is_written() -> None:
    assert heard(trained(clip, d=2, zero=1)) == GRADIENTS
    assert heard(trained(clip, p=2, precision="bf16-mixed")) == GRADIENTS
    thread = threading.Thread(target=trained(clip))
    assert heard(lambda: (thread.start(), thread.join())) == GRADIENTS
    model, pm, optimizer = made()
    lines = "for _ in range(2):\n    pm.step(*x)\n    clip(model, model)\n    opt.step()\n    opt.zero_grad()"
    cell = compile(lines, "<cell 1>", "exec")
    assert (
        heard(lambda: exec(cell, {"pm": pm, "x": BATCH, "clip": clip, "model": model, "opt": optimizer}))
        == GRADIENTS
    )


def test_an_update_every_few_steps_is_waited_for() -> None:
    model, pm, optimizer = made()

    def loop() -> None:
        for number in range(4):
            pm.step(*BATCH)  # told
            if number % 2:
                clip(model, model)
                optimizer.step()
                optimizer.zero_grad()
        assert pm.run.loop._look is None

    assert heard(loop) == ["pm.step", *GRADIENTS]


def average(model: nn.Module, other: nn.Module) -> None:
    AveragedModel(other).update_parameters(model)  # told


def average_by_hand(model: nn.Module, other: nn.Module) -> None:
    with torch.no_grad():
        for e, p in zip(other.parameters(), model.parameters(), strict=True):  # told
            e.mul_(0.9).add_(p, alpha=0.1)


def average_data(model: nn.Module, other: nn.Module) -> None:
    for e, p in zip(other.parameters(), model.parameters(), strict=True):  # told
        e.data = 0.9 * e.data + 0.1 * p.data


class EMA:
    def __init__(self, model: nn.Module) -> None:
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():  # told
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * p.detach()


def average_by_a_class(model: nn.Module, other: nn.Module) -> None:
    EMA(other).update(model)


@pytest.mark.parametrize(
    "act", [average, average_by_hand, average_data, average_by_a_class], ids=lambda f: f.__name__
)
def test_averages_of_the_model_are_told_to_be_initial(act: Act) -> None:
    assert heard(trained(act, "after")) == AVERAGE


def save_an_average(model: nn.Module, other: nn.Module) -> None:
    averaged = AveragedModel(other)
    averaged.update_parameters(model)
    torch.save(averaged.state_dict(), io.BytesIO())  # told


def save_a_copy(model: nn.Module, other: nn.Module) -> None:
    torch.save(copy.deepcopy(model).state_dict(), io.BytesIO())  # told


def test_late_averages_and_copies_are_told_as_they_are_saved() -> None:
    assert heard(trained(save_an_average, "late")) == AVERAGE
    assert heard(trained(save_a_copy, "late")) == ["model.state_dict()"]


def train_another(model: nn.Module, other: nn.Module) -> None:
    other(*BATCH).backward()
    clip(other, model)
    EMA(other).update(other)
    for p in other.parameters():
        p.grad = None


def train_it_too(model: nn.Module, other: nn.Module) -> None:
    model(*BATCH).backward()  # told
    clip(model, other)
    model.zero_grad()


def look_at_it(model: nn.Module, other: nn.Module) -> None:
    model.train()
    str(model)
    sum(p.numel() for p in model.parameters() if p.requires_grad)
    [torch.dist(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True)]
    copy.deepcopy(other).state_dict(), other.state_dict()


@pytest.mark.parametrize("act", [train_another, look_at_it], ids=lambda f: f.__name__)
def test_a_loop_may_use_its_model_for_something_else(act: Act) -> None:
    assert heard(trained(act, "before")) == heard(trained(act, "after")) == []


def test_gradients_of_a_model_that_is_trained_too_may_be_clipped() -> None:
    assert heard(trained(train_it_too)) == ["model(...)"]


@pytest.mark.parametrize("by_hand", [True, False])
def test_weights_that_are_brought_back_may_be_averaged(by_hand: bool) -> None:
    model, pm, optimizer = made()
    averaged = AveragedModel(model)

    def loop() -> None:
        for _ in range(3):
            pm.step(*BATCH)
            optimizer.step()
            optimizer.zero_grad()
            state = pm.state_dict()
            if by_hand:
                for name, p in model.named_parameters():
                    p.data.copy_(state[name])
            else:
                model.load_state_dict(state)
            averaged.update_parameters(model)
        best = copy.deepcopy(model)
        best.state_dict(), averaged.state_dict()

    assert heard(loop) == []
    assert not torch.equal(averaged.module.first.weight, Model().first.weight)


def test_a_copy_that_was_loaded_is_what_was_trained() -> None:
    model, pm, optimizer = made()

    def loop() -> None:
        pm.step(*BATCH)
        optimizer.step()
        late = copy.deepcopy(model)
        late.load_state_dict(pm.state_dict())
        late.state_dict()

    assert heard(loop) == []


def test_gradients_that_only_the_model_forgets_are_told() -> None:
    model, pm, optimizer = made(d=2)

    def loop() -> None:
        for _ in range(3):
            model.zero_grad()
            pm.step(*BATCH)
            optimizer.step()  # told

    assert heard(loop) == ["optimizer.step()"]


def test_a_step_after_an_update_may_only_be_for_its_loss() -> None:
    _, pm, optimizer = made()

    def loop() -> None:
        for _ in range(2):
            pm.step(*BATCH)
            optimizer.step()
            pm.step(*BATCH)
            optimizer.zero_grad()

    assert heard(loop) == []


def test_gradients_may_be_set_to_zero_by_hand() -> None:
    _, pm, optimizer = made(d=2)

    def loop() -> None:
        for _ in range(3):
            pm.step(*BATCH)
            optimizer.step()
            for p in pm.parameters():
                p.grad.zero_()

    assert heard(loop) == []


def test_gradients_of_another_optimizer_may_wait_for_its_update() -> None:
    _, pm, _ = made(d=2)
    often, seldom = (pm.optimizer(torch.optim.SGD, [f"{part}.*"], lr=0.1) for part in ("first", "second"))

    def loop() -> None:
        for number in range(4):
            pm.step(*BATCH)
            for optimizer in (often, seldom)[: 1 + number % 2]:
                optimizer.step()
                optimizer.zero_grad()

    assert heard(loop) == []


def test_backward_of_the_loss_is_one_error() -> None:
    _, pm, _ = made()
    loss = pm.step(*BATCH) / 2
    with pytest.raises(PlanError, match=r"^loss.backward\(\): pm.step has run backward already"):
        loss.backward()
    pm.close()


def test_a_profiler_is_left_alone() -> None:
    def profile(*_: Any) -> None:
        pass

    _, pm, optimizer = made()
    sys.setprofile(profile)
    pm.step(*BATCH)
    assert sys.getprofile() is profile
    sys.setprofile(None)
    optimizer.step()
    optimizer.zero_grad()
    pm.step(*BATCH)
    assert sys.getprofile() is pm.run.loop._look
    sys.setprofile(profile)
    optimizer.step()
    optimizer.zero_grad()
    pm.step(*BATCH)
    assert sys.getprofile() is profile
    sys.setprofile(None)


def test_a_look_ends_after_so_many_calls_and_with_its_model() -> None:
    for limit in (10, 1000):
        _, pm, optimizer = made()
        pm.step(*BATCH)
        look = pm.run.loop._look
        assert sys.getprofile() is look
        look._left = limit
        if limit > 10:
            del pm, optimizer
            gc.collect()
        for number in range(20):
            abs(number)
        assert sys.getprofile() is None and look._left > limit - 30


def test_a_look_ends_where_the_model_is_closed() -> None:
    model, pm, optimizer = made()
    pm.step(*BATCH)
    optimizer.step()
    AveragedModel(model).update_parameters(model)  # told
    assert sys.getprofile() is not None
    assert heard(pm.close) == AVERAGE and sys.getprofile() is None


def test_a_look_that_ends_in_a_call_of_its_own_lives_until_garbage_is_collected() -> None:
    """Python may be about to call it once more."""
    model = nn.Linear(2, 2)
    watch = LoopWatch(speaks=False)
    look = LoopLook(watch, model)
    alive = weakref.ref(look)
    gc.collect()
    with paused_collection():
        look.start()
        del look, watch
        model(torch.ones(1, 2))
        assert sys.getprofile() is None and alive() is not None
    gc.collect()
    assert alive() is None
