"""Layers that are copied in a trace: the same graph as when each is run, and no copy of a layer that differs."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoptd.ir.notes import note, value
from autoptd.trace import capture, capture_again
from autoptd.trace.autocast import OFF, Autocast
from autoptd.trace.capture import IGNORED
from autoptd.trace.layers import kinds
from autoptd.trace.layers.kinds import Kinds

WIDTH, LAYERS = 8, 8
USERS = re.compile(r"\[num_users=\d+\]")


class Layer(nn.Module):
    """A layer with all that may differ between layers."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.scale, self.flag = index, 1.5, False
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.register_buffer("shift", torch.randn(WIDTH))
        self.options = {"power": 2}

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(self.norm(x)) * self.scale + self.shift
        return x + (F.gelu(y) if self.flag else y ** self.options["power"])


class Model(nn.Module):
    def __init__(self, layer: Callable[[int], nn.Module] = Layer, count: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(map(layer, range(count)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def traced(model: nn.Module, *args: Any, rows: int = 4, autocast: Autocast = OFF) -> tuple[str, str, int]:
    """Trace a model twice, with two numbers of rows; return both graphs, and how many layers were not run."""
    args = args or (torch.randn(rows, WIDTH),)
    captured = capture(model, args, {}, None, autocast)
    again = capture_again(captured, model, tuple(torch.cat([x, x]) for x in args), {}, None, autocast)
    copies = sum(len(each.copies) for each in captured.raw.copied)
    return text(captured.raw.graph) + text(captured.graph), text(again), copies


def text(graph: torch.fx.Graph) -> str:
    """Write a graph without the assertions that torch.export adds to casts at the end, which are dropped later."""
    lines = []
    for node in graph.nodes:
        if node.target in IGNORED:
            continue
        about = note(node)
        shape = getattr(value(node), "shape", None) if node.op != "output" else None
        named = f"{about.module} {about.source} {about.name} {about.origin.without_grad}"
        lines.append(f"{USERS.sub('', node.format_node())} {shape} {named}")
    return "\n".join(lines)


def check(make: Callable[[], nn.Module], skipped: int, **how: Any) -> None:
    """Compare the traces with those of a model whose layers are all run."""
    first, again, count = traced(make(), **how)
    with mock.patch.object(kinds, "FEWEST", 1 << 30):
        expected = traced(make(), **how)
    assert (first, again) == expected[:2]
    assert (count, expected[2]) == (skipped, 0)


def test_all_but_three_of_equal_layers_are_copied() -> None:
    check(Model, LAYERS - 3)


def test_fewer_than_four_are_run() -> None:
    check(lambda: Model(count=3), 0)


def set_scale(layer: Any) -> None:
    layer.scale = 2.5


def set_flag(layer: Any) -> None:
    layer.flag = True


def set_option(layer: Any) -> None:
    layer.options = {"power": 3}


def add_hook(layer: Any) -> None:
    layer.linear.register_forward_hook(lambda module, args, out: 2 * out)


def patch_forward(layer: Any) -> None:
    layer.forward = lambda x: x + layer.linear(x)


def patch_inner_forward(layer: Any) -> None:
    layer.linear.forward = lambda x: 3 * F.linear(x, layer.linear.weight)


def set_class(layer: Any) -> None:
    layer.__class__ = type("Other", (Layer,), {"forward": lambda self, x: x + self.linear(x)})


def replace_child(layer: Any) -> None:
    layer.norm = nn.Identity()


def drop_bias(layer: Any) -> None:
    layer.linear.bias = None


def freeze(layer: Any) -> None:
    layer.linear.weight.requires_grad_(False)


def set_eps(layer: Any) -> None:
    layer.norm.eps = 1e-3


def set_dtype(layer: Any) -> None:
    layer.shift = layer.shift.double()


def plain_tensor(layer: Any) -> None:
    layer.scale = torch.tensor(2.0)


DIFFERENCES = [
    *(
        set_scale,
        set_flag,
        set_option,
        add_hook,
        patch_forward,
        patch_inner_forward,
        set_class,
        replace_child,
    ),
    *(drop_bias, freeze, set_eps, plain_tensor),
]


@pytest.mark.parametrize("change", DIFFERENCES)
def test_a_layer_that_differs_is_run(change: Callable[[Any], None]) -> None:
    def make() -> Model:
        model = Model()
        change(model.layers[4])
        return model

    check(make, LAYERS - 4)


def test_what_a_layer_that_differs_changes() -> None:
    def make() -> Model:
        model = Model()
        set_dtype(model.layers[4])
        return model

    # The last one is called with another dtype than the second: it cannot confirm the others.
    check(make, 0)


def test_the_values_of_buffers_are_no_difference() -> None:
    def make() -> Model:
        model = Model()
        model.layers[4].shift.fill_(7)
        return model

    check(make, LAYERS - 3)


class Branching(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x) if self.index == 4 else super().forward(x)


class ByIndex(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (self.index + 1)


class Hiding(Layer):
    """Reads its number where exceptions are caught."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            factor = [1, 1, 1, 1, 5, 1, 1, 1][self.index]
        except Exception:
            factor = 1
        return factor * super().forward(x)


@pytest.mark.parametrize("layer", [Branching, ByIndex, Hiding])
def test_layers_that_read_a_number_that_differs_are_run(layer: type[Layer]) -> None:
    check(lambda: Model(layer), 0)
    model = Model(layer)
    traced(model)
    assert [one.index for one in model.layers] == [*range(LAYERS)]


class Windowed(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.window = 2 + index % 2

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.window


def test_numbers_that_are_read_tell_kinds_apart() -> None:
    check(lambda: Model(Windowed, 12), 2 * (6 - 3))


class Counting(Layer):
    """Another result at every second or third call; what is left after the layers that are run is what was there before."""

    calls, period = 0, 2

    def forward(self, x: Tensor) -> Tensor:
        Counting.calls = (Counting.calls + 1) % self.period
        return super().forward(x) * (2 if Counting.calls == 1 else 1)


class Counting3(Counting):
    period = 3


class Drawing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.choice([1, 2])


SHARED = {"factor": 1}


class ReadsShared(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * SHARED["factor"]


class WritesShared(Model):
    """Changes between calls what layers read, and restores it."""

    def __init__(self) -> None:
        super().__init__(ReadsShared)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number == 4:
                SHARED["factor"] = 3
            x = layer(x)
            if number == 4:
                SHARED["factor"] = 1
        return x.square().mean()


def test_a_layer_is_run_after_something_was_written() -> None:
    # The fifth, and the sixth.
    check(WritesShared, LAYERS - 5)


@pytest.mark.parametrize("layer", [Counting, Counting3, Drawing])
def test_layers_that_change_state_are_run(layer: type[Layer]) -> None:
    _, _, skipped = safely(lambda: traced(Model(layer)))
    assert skipped == 0


def safely(call: Callable[[], Any]) -> Any:
    """Return ("", "", 0) for a model that is refused."""
    from autoptd.errors import TraceError

    try:
        return call()
    except TraceError:
        return "", "", 0


class Passing(Model):
    """Passes something else to one layer."""

    def __init__(self, other: Callable[[Tensor], tuple[Any, ...]]) -> None:
        super().__init__(WithFactor)
        self.other = other

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x, *(self.other(x) if number == 4 else (1.0, None)))
        return x.square().mean()


class WithFactor(Layer):
    def forward(self, x: Tensor, factor: Any, other: Tensor | None) -> Tensor:  # type: ignore[override]
        out = super().forward(x) * factor
        return out if other is None else out + other


ARGUMENTS = [
    lambda x: (2.0, None),
    lambda x: (1, None),
    lambda x: (-1.0, None),
    lambda x: (1.0, x),
    lambda x: (1.0, x.detach()),
]


@pytest.mark.parametrize("other", ARGUMENTS)
def test_a_layer_with_other_arguments_is_run(other: Any) -> None:
    check(lambda: Passing(other), LAYERS - 4)


class Stateful(Model):
    """Runs one layer in another mode of the thread."""

    def __init__(self, mode: Callable[[], Any]) -> None:
        super().__init__()
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number == 4:
                with self.mode():
                    made = layer(x)
                x = x + made
            else:
                x = layer(x)
        return x.square().mean()


@contextmanager
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES = [torch.no_grad, functools.partial(torch.autocast, "cpu", torch.bfloat16), double_by_default]


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_in_another_mode_is_run(mode: Callable[[], Any]) -> None:
    first, again, _ = safely(lambda: traced(Stateful(mode)))
    with mock.patch.object(kinds, "FEWEST", 1 << 30):
        expected = safely(lambda: traced(Stateful(mode)))
    assert (first, again) == expected[:2]


class Twice(Model):
    """Calls every layer twice."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.layers, *self.layers]:
            x = layer(x)
        return x.square().mean()


class Backwards(Model):
    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x.square().mean()


class Collecting(Model):
    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            made = layer(x)
            x = made + x if number % 2 else made
        return x.square().mean() + sum(p.square().sum() for p in self.layers[4].parameters())


def test_other_ways_to_call_layers() -> None:
    check(Twice, LAYERS - 3)
    # The last one is called first, and cannot confirm the others.
    check(Backwards, 0)
    check(Collecting, LAYERS - 3)


class Pair(Layer):
    """Returns several values: a new tensor, its argument, a number, and one that only some read."""

    def forward(self, x: Tensor) -> Any:
        out = super().forward(x)
        return {"out": out, "same": (x, 3)}, out.mean()


class Pairs(Model):
    def __init__(self) -> None:
        super().__init__(Pair)

    def forward(self, x: Tensor) -> Tensor:
        extra = x.new_zeros(())
        for layer in self.layers:
            made, mean = layer(x)
            x = made["out"] + made["same"][0] * made["same"][1]
            extra = extra + mean
        return x.square().mean() + extra


class SomeRead(Pairs):
    def forward(self, x: Tensor) -> Tensor:
        extra = x.new_zeros(())
        for number, layer in enumerate(self.layers):
            made, mean = layer(x)
            x = made["out"]
            extra = extra + mean if number != 4 else extra
        return x.square().mean() + extra


def test_results_of_several_values() -> None:
    check(Pairs, LAYERS - 3)
    first, again, _ = traced(SomeRead())
    with mock.patch.object(kinds, "FEWEST", 1 << 30):
        assert (first, again) == traced(SomeRead())[:2]


class Tied(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers[5].linear.weight = self.layers[2].linear.weight


class TiedInside(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.other = nn.Linear(WIDTH, WIDTH)
        if index != 4:
            self.other.weight = self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.other(x)


class SharedModule(Model):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.norm = self.layers[0].norm


def test_shared_parameters() -> None:
    check(Tied, LAYERS - 3)
    check(lambda: Model(TiedInside), LAYERS - 4)
    first, again, _ = traced(SharedModule())
    with mock.patch.object(kinds, "FEWEST", 1 << 30):
        assert (first, again) == traced(SharedModule())[:2]


class InPlace(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).add_(1)


class View(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, None].transpose(0, 1)[0]


@pytest.mark.parametrize("layer", [InPlace, View])
def test_writes_and_views(layer: type[Layer]) -> None:
    first, again, _ = traced(Model(layer))
    with mock.patch.object(kinds, "FEWEST", 1 << 30):
        assert (first, again) == traced(Model(layer))[:2]


def test_the_outermost_modules_that_are_alike_are_a_kind() -> None:
    class Nested(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.inner = nn.ModuleList(map(Layer, range(4)))

    model = Model(Nested, 4)
    assert {member.path for member in Kinds(model).members.values()} == {f"layers.{i}" for i in range(4)}
    two = Model(Nested, 2)
    members = Kinds(two).members.values()
    assert {member.path for member in members} == {
        f"layers.{i}.inner.{j}" for i in range(2) for j in range(4)
    }
    assert len({member.kind for member in members}) == 2


def test_hooks_of_all_modules_turn_it_off() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        assert not Kinds(Model()).members
    finally:
        handle.remove()


class CastAndRead(Model):
    """Reads a parameter of a layer outside of it, where autocast has cached the cast."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.linear(x, self.layers[4].linear.weight).float().square().mean()


class Region(Model):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for layer in self.layers:
                x = layer(x)
        return x.float().square().mean()


def test_autocast() -> None:
    mixed = Autocast("cpu", torch.bfloat16)
    check(Model, LAYERS - 3, autocast=mixed)
    check(CastAndRead, 0, autocast=mixed)
    check(Region, 0)


class NoOp(Layer):
    """Casts its argument and a parameter to what they are: other operators read the result of the cast from then on."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(torch.float32)) + self.norm.bias.to(torch.float32)


class ReadsAgain(Model):
    def __init__(self) -> None:
        super().__init__(NoOp)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x * layer(x)
        return x.square().mean() + sum(p.sum() for p in self.layers[3].parameters())


def test_casts_that_do_nothing() -> None:
    check(ReadsAgain, LAYERS - 3)
