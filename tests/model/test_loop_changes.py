"""What a loop changes of the model from outside is one error, whatever holds it; what changes no number is not."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

import autoptd
from autoptd.errors import RuntimeFault
from autoptd.model.parallel_model import ParallelModel
from autoptd.trace import Traced

BATCH = (torch.arange(32.0).view(8, 4) / 32, torch.arange(16.0).view(8, 2) / 16)
SCALE, TABLE, LOGGED = 1.0, {"scale": 1.0}, 0
VARIABLE = "AUTOPTD_TEST_SCALE"


@dataclasses.dataclass
class Config:
    scale: float = 1.0
    other: int = 0


CONFIG = Config()


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def closed_over(scale: float) -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    def scaled(x: Tensor) -> Tensor:
        return x * scale

    def change(new: float) -> None:
        nonlocal scale
        scale = new

    return scaled, change


def multiplied(x: Tensor, by: float) -> Tensor:
    return x * by


def shifted(x: Tensor, by: float = 0.0, *, more: float = 0.0) -> Tensor:
    return x + by + more + shifted.last  # type: ignore[attr-defined, no-any-return]


shifted.last = 0.0  # type: ignore[attr-defined]


@functools.cache
def settings() -> types.SimpleNamespace:
    return types.SimpleNamespace(scale=1.0)


class Base:
    scale = 1.0

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.scale


class Helper(Base):
    """Inherits all that it has."""


HELPER, WEAK = Helper(), weakref.WeakKeyDictionary[type, float]({Base: 1.0})
VIEW, PROXY = memoryview(bytearray([1])), types.MappingProxyType(TABLE)


class Kept(nn.Module):
    """Does something in training only."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 if self.training else x


class Inner(nn.Module):
    """Has what is nested."""

    shared = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.kept = nn.Linear(8, 8), nn.Dropout(0.0), Kept()
        self.options = types.SimpleNamespace(deep=types.SimpleNamespace(scale=1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.kept(self.drop(self.linear(x))) * self.options.deep.scale * self.shared


class Net(nn.Module):
    """Reads from everything that Python keeps state in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 8), Inner(), nn.Linear(8, 2)
        self.alpha, self.steps, self.unread = 1.0, 0, 0
        self.scales, self.by_name, self.array = [1.0, 1.0], {"a": 1.0}, np.ones(2)
        self.scaled, self.set_scale = closed_over(1.0)
        self.partial = functools.partial(multiplied, by=1.0)
        self.plain = torch.tensor(1.0)
        self.scale_0, self.doubles, self.table = 1.0, False, torch.arange(3.0)
        self.register_buffer("factor", torch.tensor(1.0))
        self.register_buffer("ignored", torch.tensor(1.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        # At some time the loop reaches it.
        if self.steps > 1000:
            x = -x
        x = (x + x if self.doubles else x * 2) * self.table[1]
        x = self.inner(self.first(x).tanh()) * self.alpha * self.scales[1] * self.by_name["a"]
        x = self.partial(self.scaled(x)) * SCALE * TABLE["scale"] * CONFIG.scale
        x = x * float(os.environ.get(VARIABLE, "1")) * self.plain * self.factor * float(self.array[0])
        return F.mse_loss(self.last(x) * getattr(self, f"scale_{len(self.scales) - 2}"), y)


class Patched(nn.Module):
    """Reads from what a program may patch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = HELPER.scaled(shifted(F.gelu(self.first(x)))) * settings().scale
        x = x * math.cos(0.0) * WEAK[Base] * float(VIEW[0]) * PROXY["scale"] * len([x])
        return F.mse_loss(self.last(x) + (torch.ones(1) / 3).double(), y)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Halved(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / 2


def set_global(name: str, value: Any) -> None:
    globals()[name] = value


def swap(model: Net) -> None:
    other = Halved(8, 2)
    other.load_state_dict(model.last.state_dict())
    model.last = other


def patch(model: Net) -> None:
    model.inner.forward = lambda x: x * 3  # type: ignore[method-assign]


EFFECTIVE: dict[str, Callable[[Net], Any]] = {
    "attribute": lambda model: setattr(model, "alpha", 2.0),
    "attribute by a made name": lambda model: setattr(model, "scale_0", 2.0),
    "nested attribute": lambda model: setattr(model.inner.options.deep, "scale", 2.0),
    "item of a list": lambda model: model.scales.__setitem__(1, 2.0),
    "item of a dict": lambda model: model.by_name.update(a=2.0),
    "numpy array": lambda model: model.array.fill(2.0),
    "global": lambda model: set_global("SCALE", 2.0),
    "item of a global": lambda model: TABLE.update(scale=2.0),
    "config of the module": lambda model: setattr(CONFIG, "scale", 2.0),
    "another config": lambda model: set_global("CONFIG", Config(scale=2.0)),
    "closure": lambda model: model.set_scale(2.0),
    "class attribute": lambda model: setattr(Inner, "shared", 2.0),
    "attribute over that of the class": lambda model: setattr(model.inner, "shared", 2.0),
    "environment": lambda model: os.environ.update({VARIABLE: "2"}),
    "partial": lambda model: model.partial.keywords.update(by=2.0),
    "another partial": lambda model: setattr(model, "partial", functools.partial(multiplied, by=2.0)),
    "submodule": swap,
    "forward": patch,
    "forward of a class": lambda model: setattr(Inner, "forward", lambda self, x: x),
    "a function of the file": lambda model: set_global("F", types.SimpleNamespace(mse_loss=F.l1_loss)),
    "hook": lambda model: model.inner.register_forward_hook(double),
    "dropout": lambda model: setattr(model.inner.drop, "p", 0.5),
    "tensor": lambda model: setattr(model, "plain", torch.tensor(2.0)),
    "tensor in place": lambda model: model.plain.fill_(2.0),
    "buffer": lambda model: model.factor.fill_(2.0),
    "another buffer": lambda model: setattr(model, "factor", torch.tensor(2.0)),
    "mode of a submodule": lambda model: model.inner.kept.eval(),
    "late": lambda model: setattr(model, "steps", 1001),
}


def set_code(_: nn.Module) -> None:
    shifted.__code__ = (lambda x, by=0.0, *, more=0.0: x * 2).__code__


def set_class(model: nn.Module) -> None:
    model.first[1].__class__ = nn.Sigmoid  # type: ignore[index]


PATCHES: dict[str, Callable[[pytest.MonkeyPatch, Any], Any]] = {
    "a function of torch": lambda patch, _: patch.setattr(F, "gelu", lambda x: x),
    "a method of tensors": lambda patch, _: patch.setattr(Tensor, "double", lambda x: x * 2),
    "a function of Python": lambda patch, _: patch.setattr(math, "cos", lambda x: 2.0),
    "a global over one of Python's": lambda patch, _: patch.setitem(globals(), "len", lambda x: 2.0),
    "defaults": lambda patch, _: patch.setattr(shifted, "__defaults__", (1.0,)),
    "defaults of keywords": lambda patch, _: patch.setattr(shifted, "__kwdefaults__", {"more": 1.0}),
    "code": lambda patch, _: set_code(_),
    "an attribute of a function": lambda patch, _: patch.setattr(shifted, "last", 1.0),
    "a cached object": lambda patch, _: patch.setattr(settings(), "scale", 2.0),
    "an attribute over the base's": lambda patch, _: patch.setattr(Helper, "scale", 2.0, raising=False),
    "a method over the base's": lambda patch, _: patch.setattr(
        Helper, "scaled", lambda _, x: x * 2, raising=False
    ),
    "an operator": lambda patch, _: patch.setattr(
        Helper,
        "__getattribute__",
        lambda x, name: 2.0 if name == "scale" else object.__getattribute__(x, name),
    ),
    "a call": lambda patch, _: patch.setattr(
        Patched, "__call__", lambda x, *args: nn.Module.__call__(x, *args) * 2, raising=False
    ),
    "a weak dict": lambda patch, _: patch.setitem(WEAK, Base, 2.0),
    "a view": lambda patch, _: VIEW.__setitem__(0, 2),
    "a proxy": lambda patch, _: patch.setitem(TABLE, "scale", 2.0),
    "the default dtype": lambda patch, _: torch.set_default_dtype(torch.float16),
    "another class": lambda patch, model: set_class(model),
    "a hook of gradients": lambda patch, model: model.last.weight.register_hook(lambda grad: grad * 2),
    "a hook of a backward": lambda patch, model: model.last.register_full_backward_hook(
        lambda _, grads, __: tuple(None if x is None else x * 2 for x in grads)
    ),
    "frozen": lambda patch, model: model.first.requires_grad_(False),
    "one that fails": lambda patch, model: setattr(model.first[1], "__class__", nn.ReLU),
    "a layer more": lambda patch, model: model.first.append(nn.Linear(8, 8)),
    "a parametrization": lambda patch, model: register_parametrization(model.first[0], "weight", Doubled()),
}


def log(model: Net) -> None:
    model.unread += 1
    model.history = [1, 2]  # type: ignore[assignment]
    set_global("LOGGED", LOGGED + 1)


def for_a_while(model: Net) -> None:
    model.alpha = 2.0
    model(*BATCH)
    model.alpha = 1.0


def evaluated(model: Net) -> None:
    model.eval()
    with torch.no_grad():
        model(*BATCH)


HARMLESS: dict[str, Callable[[Net], Any]] = {
    "what only the loop reads": log,
    "a number that decides nothing yet": lambda model: setattr(model, "steps", 7),
    "put back": for_a_while,
    "eval mode as a whole": evaluated,
    "equal": lambda model: set_global("CONFIG", Config()),
    "a field that nobody reads": lambda model: setattr(CONFIG, "other", 5),
    "a hook that looks": lambda model: model.inner.register_forward_hook(lambda *_: None),
    "p that is not drawn with": lambda model: setattr(model.inner.drop, "inplace", False),
    "another way to the same number": lambda model: setattr(model, "doubles", True),
    "a table that grew": lambda model: setattr(model, "table", torch.arange(9.0)),
    "buffer that nobody reads": lambda model: model.ignored.fill_(2.0),
    "state dict": lambda model: model.load_state_dict({k: x + 0 for k, x in model.state_dict().items()}),
}


# Noticed as one of the others is.
MORE = {
    *("nested attribute", "item of a dict", "item of a global", "another config", "another partial"),
    *("attribute over that of the class", "tensor in place", "another buffer", "a function of the file"),
    *("a method of tensors", "a function of Python", "defaults of keywords", "a method over the base's"),
    *("a proxy", "a hook of a backward", "a layer more", "a cached object"),
}


def some_of(forms: dict[str, Any], thorough: set[str]) -> list[Any]:
    return [pytest.param(form, marks=[pytest.mark.thorough] * (form in thorough)) for form in forms]


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in {"SCALE": 1.0, "CONFIG": Config(), "F": F, "LOGGED": 0}.items():
        monkeypatch.setitem(globals(), name, value)
    monkeypatch.setitem(TABLE, "scale", 1.0)
    monkeypatch.setattr(Inner, "shared", 1.0)
    monkeypatch.setattr(Inner, "forward", Inner.forward)
    monkeypatch.setenv(VARIABLE, "1")
    yield


def running(model: nn.Module, **options: Any) -> ParallelModel:
    return autoptd.parallelize(model, backend="local", example_inputs=BATCH, **{"check_every": 1, **options})


def train(pm: ParallelModel, steps: int) -> None:
    with warnings.catch_warnings():
        # Of gradients that add up.
        warnings.simplefilter("ignore")
        for _ in range(steps):
            pm.step(*BATCH)


@pytest.mark.parametrize("form", some_of(EFFECTIVE, MORE))
def test_a_change_of_what_the_forward_computes_is_a_fault(form: str) -> None:
    torch.manual_seed(0)
    model = Net()
    pm = running(model)
    train(pm, 2)
    before = model(*BATCH)
    EFFECTIVE[form](model)
    assert not torch.equal(before, model(*BATCH))
    with pytest.raises(RuntimeFault, match=r"^step 3: changed since the model was compiled: .* then, .* now"):
        train(pm, 1)


class Through(nn.Module):
    """Reads through weak proxies, which have the class of their objects."""

    def __init__(self, *objects: Any) -> None:
        super().__init__()
        self.last, self.held = nn.Linear(4, 2), [weakref.proxy(each) for each in objects]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        config, layer = self.held
        return F.mse_loss(self.last(x) * config.scale * layer.in_features, y)


def test_a_change_behind_a_weak_proxy_is_a_fault() -> None:
    config, layer = Config(), nn.Linear(1, 1)
    pm = running(Through(config, layer))
    train(pm, 2)
    config.scale = 2.0
    with pytest.raises(RuntimeFault, match="scale"):
        train(pm, 1)


@pytest.mark.parametrize("form", some_of(PATCHES, MORE))
def test_what_a_program_patches_is_a_fault(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Patched()
    pm, code, dtype = running(model), shifted.__code__, torch.get_default_dtype()
    train(pm, 2)
    try:
        PATCHES[form](monkeypatch, model)
        with pytest.raises(RuntimeFault, match=r"^step 3: changed since the model was compiled: "):
            train(pm, 1)
    finally:
        torch.set_default_dtype(dtype)
        shifted.__code__, VIEW[0] = code, 1


@pytest.mark.parametrize("move", ["half", "double", "meta"])
def test_a_model_that_was_moved_is_followed(move: str) -> None:
    model = Net()
    pm = running(model)
    train(pm, 2)
    model.to(move) if move == "meta" else getattr(model, move)()
    # What changes nothing is no change there either.
    model.steps, model.inner.drop.inplace = 7, True
    train(pm, 1)
    model.alpha = 2.0
    with pytest.raises(RuntimeFault, match=r"^step 4: changed since the model was compiled: alpha"):
        train(pm, 1)
    assert all(x.device.type == "meta" for x in model.parameters()) == (move == "meta")


def in_place(model: Net) -> None:
    """An entry that is not among those that are looked at."""
    with torch.no_grad():
        model.last.weight.view(-1)[-1] += 1


WRITES: dict[str, Callable[[Net], Any]] = {
    "in place": in_place,
    "loaded": lambda model: model.last.load_state_dict(nn.Linear(8, 2).state_dict()),
    "its data": lambda model: model.last.weight.data.mul_(2),
    "other data": lambda model: setattr(model.last.weight, "data", model.last.weight.data * 2),
    "another one": lambda model: setattr(model.last, "weight", nn.Parameter(torch.zeros(2, 8))),
}


@pytest.mark.parametrize("form", WRITES)
def test_a_parameter_that_the_loop_writes_to_is_warned_of_once(form: str) -> None:
    model = Net()
    pm = running(model)
    train(pm, 1)
    WRITES[form](model)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        pm.step(*BATCH)
        WRITES[form](model)
        pm.step(*BATCH)
    texts = [str(x.message) for x in found if "loop has written to them" in str(x.message)]
    assert len(texts) == 1 and texts[0].startswith("step 2: last.weight")


def test_weights_of_the_ranks_in_the_model_are_no_write() -> None:
    model = Net()
    pm = running(model)
    opt = pm.optimizer(torch.optim.SGD, lr=0.1)
    for move in (model.half, model.float, model.double, model.float):
        pm.step(*BATCH)
        opt.step()
        opt.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.load_state_dict(pm.state_dict())
            pm.step(*BATCH)
            opt.zero_grad()
            move()


def test_both_runs_that_are_compared_drop_the_same_entries() -> None:
    model = Net()
    model.inner.drop.p = 0.5
    pm = running(model)
    train(pm, 2)
    model.doubles = True
    train(pm, 1)


@pytest.mark.parametrize("form", HARMLESS)
def test_a_change_that_changes_no_number_is_none(form: str) -> None:
    model = Net()
    pm = running(model)
    train(pm, 2)
    before = model(*BATCH)
    for _ in range(2):
        HARMLESS[form](model)
        train(pm, 1)
    assert torch.equal(before, model.train()(*BATCH))


def test_what_changes_without_an_effect_is_traced_again_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    model, traced = Net(), []
    pm = running(model)
    differs = Traced.differs
    monkeypatch.setattr(Traced, "differs", lambda *args: traced.append(1) or differs(*args))
    for model.steps in range(5):
        train(pm, 1)
    assert len(traced) == 1


@pytest.mark.parametrize(("every", "found"), [(0, False), (1000, True)])
def test_the_first_steps_are_looked_at_unless_it_is_off(every: int, found: bool) -> None:
    model = Net()
    pm = running(model, check_every=every)
    train(pm, 1)
    model.alpha = 2.0
    if found:
        with pytest.raises(RuntimeFault, match=r"step 2: .*alpha"):
            train(pm, 1)
        # Put back, it goes on.
        model.alpha = 1.0
    train(pm, 1)


def test_a_change_of_what_only_evaluation_reads_is_a_fault() -> None:
    model = Net()
    model.inner.kept.forward = lambda x: x if model.training else x * model.alpha  # type: ignore[method-assign]
    pm = running(model)
    pm.eval_step(*BATCH)
    model.alpha = 2.0
    with pytest.raises(RuntimeFault, match=r"evaluation 2: .*alpha"):
        pm.eval_step(*BATCH)


def test_a_deferred_model_is_followed_as_well() -> None:
    with autoptd.deferred():
        model = Net()
    model.plain, model.table = torch.tensor(1.0), torch.arange(3.0)
    pm = running(model)
    train(pm, 2)
    model.alpha = 2.0
    with pytest.raises(RuntimeFault, match=r"step 3: .*alpha"):
        train(pm, 1)


def test_lists_of_a_traced_model_are_those_that_it_had() -> None:
    model = Net()
    scales = model.scales
    running(model)
    assert model.scales is scales
