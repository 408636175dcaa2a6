"""Check that an optimizer treats local tensors like the full parameters, whatever their shapes.

In: a user-defined optimizer class, its groups with the full shapes of the parameters, and the real optimizer
over local tensors. Out: why the two differ, "" if they do not. The trial computes no values: its tensors are
on the meta device.

A constructor may choose groups by `p.ndim` (the same in every shard and piece), by `p.numel()` (it is not),
or by position; `step` may skip small tensors. So the resulting groups are compared and then, for every pair
of different shapes, the operators of two steps and their numeric arguments.

    ShapeTrial(cls, keywords, ranks, [(names, options)]).finding(optimizer.param_groups)     # "" or the reason
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, product
from typing import Any, NamedTuple

import torch
from torch import optim

from autoptd.compat import TorchDispatchMode, tree_leaves
from autoptd.runtime.params.elementwise import Options, make, own_methods
from autoptd.runtime.params.parameters import RankParameters
from autoptd.runtime.params.parts import dtype_of

# Options that change how an update is computed, but not its result; and torch's record of names.
IGNORED = frozenset({"params", "param_names", "fused", "foreach", "capturable", "differentiable"})
# Options that torch's optimizers accept on some devices only.
HOW = frozenset({"fused", "capturable"})
# Classes that do not accept meta tensors are tried on real ones, of at most this number of elements.
MOST_ELEMENTS = 1 << 22


class Model(NamedTuple):
    """A parameter of the unmodified model."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def parameter(self, device: str) -> torch.nn.Parameter:
        x = torch.zeros(self.shape, dtype=self.dtype, device=device)
        return torch.nn.Parameter(x, self.requires_grad)


# The parameters of each group, and its options; and by their names.
Whole = Sequence[tuple[Sequence[Model], Options]]
NamedGroups = Sequence[tuple[Sequence[str], Options]]


class Groups(NamedTuple):
    """The names in each group that an optimizer makes from the full parameters, and the group's settings."""

    names: list[list[str]]
    settings: list[dict[str, Any]]


class ShapeTrial:
    """The trial of a user-defined class over the parameters of the ranks of this process."""

    def __init__(
        self,
        cls: type[optim.Optimizer],
        keywords: Mapping[str, Any],
        ranks: Sequence[RankParameters],
        groups: NamedGroups,
    ) -> None:
        self._cls, self._keywords, self._ranks, self._groups = cls, keywords, ranks, groups
        self._models = {
            spec.name: Model(spec.name, spec.shape, dtype_of(spec.storage.dtype), spec.requires_grad)
            for spec in ranks[0].specs
        }
        self.name_of = {id(x): name for rank in ranks for name, x in rank.stored.items()}
        # In which the class has the model's parameters in its groups; where that is not known, the model's own.
        self.order = list(self._models)

    def finding(self, local: Sequence[Mapping[str, Any]]) -> str:
        """Return how an optimizer with the groups `local` differs from the whole model's, or ""."""
        held = chain.from_iterable(group["params"] for group in local)
        if any(id(x) not in self.name_of for x in held):
            return "its constructor adds parameters of its own, which no rank shares with the others"
        # `elementwise = True` is a promise about values; the class need not accept meta tensors.
        is_trusted = getattr(self._cls, "elementwise", False)
        whole = []
        for names, options in self._groups:
            whole.append(([self._models[name] for name in names], options))
        try:
            groups = groups_of(self._cls, self._keywords, whole)
        except Exception as error:
            # Whatever a user's optimizer raises.
            text = f"its constructor could not be tried on the whole model ({type(error).__name__}: {error})"
            return "" if is_trusted else text
        self.order = list(chain.from_iterable(groups.names))
        if text := differing_groups(groups, local, self.name_of):
            return text
        if is_trusted or not own_methods(self._cls):
            return ""
        return next(filter(None, map(self._differing, self._pairs())), "")

    def names(self, group: Mapping[str, Any]) -> list[str]:
        """Return the names of a group's parameters, repeated for each local rank with a part of it."""
        return _names(group, self.name_of)

    def _pairs(self) -> list[tuple[Options, Model, Model]]:
        """Return the options, the model's parameter and the rank's wherever shapes differ, alike ones once."""
        found: dict[Any, tuple[Options, Model, Model]] = {}
        for number, (names, options) in enumerate(self._groups):
            for name, rank in product(names, self._ranks):
                model, own = self._models[name], rank.stored.get(name)
                if own is not None and tuple(own.shape) != tuple(model.shape):
                    there = model._replace(shape=tuple(own.shape))
                    found.setdefault((number, model.shape, there[1:]), (options, model, there))
        return list(found.values())

    def _differing(self, pair: tuple[Options, Model, Model]) -> str:
        options, model, there = pair
        return differing_step(self._cls, self._keywords, options, model, there)


def groups_of(cls: type[optim.Optimizer], keywords: Mapping[str, Any], whole: Whole) -> Groups:
    """Return the groups that a class makes of the full parameters; raise what its constructor raises."""
    total = 0
    for some, _ in whole:
        total += sum(torch.Size(x.shape).numel() for x in some)

    def trial(device: str) -> Groups:
        name_of: dict[int, str] = {}
        groups = []
        for some, options in whole:
            held = [x.parameter(device) for x in some]
            name_of |= {id(x): model.name for x, model in zip(held, some, strict=True)}
            groups.append((held, _portable(options)))
        made = make(cls, _portable(keywords), groups).param_groups
        names = [_names(group, name_of) for group in made]
        return Groups(names, [_settings(group) for group in made])

    return _on_meta(trial, total)  # type: ignore[no-any-return]


def differing_groups(whole: Groups, local: Sequence[Mapping[str, Any]], name_of: Mapping[int, str]) -> str:
    """Return the local tensor whose group or settings differ from those of its full parameter."""
    if len(local) != len(whole.names):
        return f"its constructor makes {len(whole.names)} groups of the model's parameters, and {len(local)} of a rank's"
    place: dict[str, int] = {}
    for number, names in enumerate(whole.names):
        place |= dict.fromkeys(names, number)
    for number, group in enumerate(local):
        for x in group["params"]:
            name = name_of[id(x)]
            if place.get(name) != number:
                what = f"{name}, of shape {tuple(x.shape)} on a rank"
                return f"its constructor puts {what}, into another group than the model's own parameter"
        if not group["params"]:
            continue
        for key, value in _settings(group).items():
            if not same(value, whole.settings[number].get(key)):
                return f"its constructor sets {key} of group {number} by the shapes of a rank's tensors"
    return ""


def differing_step(
    cls: type[optim.Optimizer], keywords: Mapping[str, Any], options: Options, one: Model, other: Model
) -> str:
    """Return why two steps differ on a tensor of the shape of `one` and on one of the shape of `other`."""
    settings, own = _portable(keywords), _portable(options)

    def trial(device: str) -> bool:
        calls = []
        for model in (one, other):
            parameter = model.parameter(device)
            optimizer = make(cls, settings, [([parameter], own)])
            log = _Log()
            for _ in range(2):
                parameter.grad = torch.zeros_like(parameter)
                with log:
                    optimizer.step()
            calls.append(log.calls)
        return calls[0] == calls[1]

    try:
        is_same = _on_meta(trial, max(torch.Size(model.shape).numel() for model in (one, other)))
    except Exception as error:
        # Whatever a user's optimizer raises.
        return f"it could not be tried on {one.name} ({type(error).__name__}: {error})"
    if is_same:
        return ""
    return f"it treats {one.name}, of shape {one.shape}, otherwise in the shape {other.shape} that a rank has of it"


def same(one: Any, other: Any) -> bool:
    """Tell whether two settings of groups are equal."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and bool((one.cpu() == other.cpu()).all())
    try:
        return type(one) is type(other) and bool(one == other)
    except Exception:
        # Whatever a user puts there: arrays, say, have no one answer.
        return repr(one) == repr(other)


def _on_meta(trial: Any, numel: int) -> Any:
    try:
        return trial("meta")
    except Exception:
        if numel > MOST_ELEMENTS:
            raise
        return trial("cpu")


def _portable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those that torch refuses where there is no device."""
    return {key: value for key, value in settings.items() if key not in HOW}


def _names(group: Mapping[str, Any], name_of: Mapping[int, str]) -> list[str]:
    return [name_of[id(x)] for x in group["params"]]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in IGNORED}


class _Log(TorchDispatchMode):
    """Notes the operators that run in a `with` block, and the numbers that they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[str, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        every = [*args, *(kwargs or {}).values()]
        self.calls.append((str(func), tuple(_numbers(every))))
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            # A number that Python reads.
            return torch.zeros((), dtype=args[0].dtype, device="cpu").item()
        return func(*args, **(kwargs or {}))


def _numbers(args: Sequence[Any]) -> list[str]:
    """Return the numbers among the arguments of an operator, without sizes, which are lists of integers."""
    found: list[str] = []
    for arg in args:
        if isinstance(arg, (list, tuple)):
            leaves = tree_leaves(arg)
            found += [] if all(type(x) is int for x in leaves) else _numbers(leaves)
        elif isinstance(arg, torch.Tensor):
            found += [repr(arg.item())] if arg.dim() == 0 and arg.device.type == "cpu" else []
        elif isinstance(arg, (bool, int, float, complex)):
            # As text, in which one NaN is like another.
            found.append(repr(arg))
    return found


__all__ = ["NamedGroups", "ShapeTrial", "same"]
