"""Equal layers that do not do the same: what tells them apart is outside of them. On meta nothing but the trace sees it.

Whoever traces equal layers once must find each of these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from autoptd.ir.notes import ops
from autoptd.trace import capture

WIDTH, LAYERS, OTHER, FACTOR = 8, 6, 3, 5.0
BY_MODULE: dict[Any, float] = {}


class Layer(nn.Module):
    def __init__(self, factor: Callable[[Layer], float]) -> None:
        super().__init__()
        self.factor, self.linear = factor, nn.Linear(WIDTH, WIDTH)
        self.home: list[nn.ModuleList] = []

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.linear.weight, self.linear.bias) * self.factor(self)


class Times(TorchFunctionMode):
    """Multiplies the results of linear layers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made * FACTOR if func is linear else made


class Model(nn.Module):
    def __init__(self, factor: Callable[[Layer], float], has_mode: bool = False) -> None:
        super().__init__()
        self.layers, self.has_mode = nn.ModuleList(Layer(factor) for _ in range(LAYERS)), has_mode
        for layer in self.layers:
            layer.home.append(self.layers)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if self.has_mode and number == OTHER:
                with Times():
                    x = layer(x)
            else:
                x = layer(x)
        return x.square().mean()


def if_other(is_other: Callable[[Layer], bool]) -> Callable[[Layer], float]:
    return lambda layer: FACTOR if is_other(layer) else 1.0


FACTORS = {
    "by module": lambda layer: BY_MODULE.get(layer, 1.0),
    "by id": lambda layer: BY_MODULE.get(id(layer), 1.0),
    "by text": lambda layer: BY_MODULE.get(object.__repr__(layer), 1.0),
    "by id of a part": lambda layer: BY_MODULE.get(id(layer.linear), 1.0),
    "by place": if_other(lambda layer: list(layer.home[0]).index(layer) == OTHER),
    "by identity": if_other(lambda layer: layer is layer.home[0][OTHER]),
    "by equality": if_other(lambda layer: layer == layer.home[0][OTHER]),
    "by membership": if_other(lambda layer: layer in [layer.home[0][OTHER]]),
}


def times_in_trace(model: nn.Module) -> list[str]:
    """Return the operators of a trace that multiply by the factor."""
    x = torch.empty(4, WIDTH, device="meta")
    graph = capture(model, (x,), {}, None).graph
    return [node.name for node in ops(graph) if FACTOR in node.args]


@pytest.mark.parametrize("name", FACTORS)
def test_a_layer_that_asks_which_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = Model(FACTORS[name])
    other = model.layers[OTHER]
    for key in (other, id(other), object.__repr__(other), id(other.linear)):
        monkeypatch.setitem(BY_MODULE, key, FACTOR)
    assert len(times_in_trace(model)) == 1


def test_a_mode_around_one_layer() -> None:
    with torch.device("meta"):
        model = Model(lambda layer: 1.0, has_mode=True)
    assert len(times_in_trace(model)) == 1
