"""What a loop does to the tensors of the model that it handed over: it moves or casts them, or writes to them.

In: the user's model. Out: a model that is traced as at compilation after `model.half()` or `model.cpu()`; and the names of
parameters that the loop has written to, which the ranks, whose copies are trained, do not see.

    sorts = sorts_of(model)
    model.half()
    with sorted_as(model, sorts, without_values):
        ...                                     # what looks at the model finds float32
    weights = Weights(model)
    weights.written(model)                      # ["fc.weight"]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from autoptd.compat import FakeTensor
from autoptd.ir.buffers import same_entries

# How many entries of a parameter are compared.
MOST_LOOKED_AT = 64
# What models are cast to.
CASTS = (torch.float32, torch.bfloat16, torch.float16)


class Sort(NamedTuple):
    """What a trace reads of a parameter or a buffer."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> Sort:
        return cls(x.shape, x.dtype, x.device)


def sorts_of(model: nn.Module) -> dict[str, Sort]:
    """Return the sorts of all parameters and buffers."""
    return {name: Sort.of(x) for name, _, _, x in _registered(model)}


@contextmanager
def sorted_as(
    model: nn.Module, sorts: Mapping[str, Sort], make: Callable[[Tensor, Sort], Tensor]
) -> Iterator[None]:
    """Replace, for a while, tensors that had another dtype or device by what `make` returns."""
    before, made = [], dict[int, Tensor]()
    for name, home, key, x in _registered(model):
        then = sorts.get(name)
        if then is not None and then != Sort.of(x) and then.shape == x.shape:
            if id(x) not in made:
                value = make(x.detach(), then)
                is_parameter = isinstance(x, nn.Parameter)
                made[id(x)] = nn.Parameter(value, x.requires_grad) if is_parameter else value
            before.append((home, key, x))
            home[key] = made[id(x)]
    try:
        yield
    finally:
        for home, key, x in before:
            home[key] = x


def without_values(x: Tensor, then: Sort) -> Tensor:
    """Return a tensor of a sort that takes no memory."""
    return torch.zeros((), dtype=then.dtype, device=then.device).expand(then.shape)


def cast_back(x: Tensor, then: Sort) -> Tensor:
    """Return a tensor in the dtype that it had, where it is now."""
    return x.to(then.dtype)


class Weights:
    """The parameters of a model, known by where they are, how often they were written to, and some of their entries."""

    def __init__(self, model: nn.Module) -> None:
        self._known = {name: _seen(x) for name, x in _with_values(model)}

    def written(self, model: nn.Module) -> list[str]:
        """Return the names of those that hold something else since the last call; a model that is moved, or cast, does not."""
        found = []
        for name, x in _with_values(model):
            if name not in self._known or self._known[name][0] != x.shape:
                continue
            (_, place, writes, entries), now = self._known[name], _seen(x)
            self._known[name] = now
            # Torch does not count writes through `.data`.
            is_counted = place == now[1] and writes != now[2]
            if is_counted or not is_rounded(entries, now[3]):
                found.append(name)
        return found


def is_rounded(before: Tensor, after: Tensor) -> bool:
    """Tell whether entries are the same, or rounded to a narrower dtype, by a model that was cast."""
    if before.shape != after.shape:
        return False
    between = CASTS if before.is_floating_point() else (after.dtype,)
    return any(same_entries(before.to(dtype).to(after.dtype), after) for dtype in (after.dtype, *between))


def _seen(x: Tensor) -> tuple[torch.Size, tuple[int, int], int, Tensor]:
    """Return the shape of a parameter, where it is, how often it was written to, and copies of some entries."""
    flat, writes = x.detach().reshape(-1), -1 if x.is_inference() else x._version
    some = flat[:: max(1, len(flat) // MOST_LOOKED_AT)].to("cpu", copy=True)
    return x.shape, (id(x), x.data_ptr()), writes, some


def _with_values(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, x in model.named_parameters(remove_duplicate=False):
        if not (x.is_meta or isinstance(x, FakeTensor)) and x.layout is torch.strided:
            yield name, x


def _registered(model: nn.Module) -> Iterator[tuple[str, dict[str, Tensor | None], str, Tensor]]:
    """Yield the name of each parameter and buffer, also of one that has several; where it is registered, and as what."""
    for path, module in model.named_modules():
        for home in (module._parameters, module._buffers):
            for key, x in list(home.items()):
                if x is not None:
                    yield f"{path}.{key}".removeprefix("."), home, key, x  # type: ignore[misc]


__all__ = ["Sort", "Weights", "cast_back", "is_rounded", "sorted_as", "sorts_of", "without_values"]
