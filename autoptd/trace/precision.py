"""Cast a model to its compute dtype while it is compiled.

In: the user's model, and the requested precision. Out: the same model inside a `with` block, cast like
`from_pretrained(dtype=...)` of transformers: parameters and persistent floating-point buffers, the content of a
checkpoint, are in that dtype. Buffers that are not saved (`persistent=False`) are not cast: they hold values
computed from the config that must not be rounded, such as rotary frequencies, whose error grows with the
position. If a model cannot run this way, as many of them are cast as necessary (`Narrowing.settle`). After the
block all tensors are the user's own again. Tensors that share memory still do.

    with computing_in(model, "bf16") as narrowing:
        captured = narrowing.settle(lambda: capture(model, args, kwargs, None))
        narrowing.cast                                   # () for most models, ("h.0.attn.mask", ...) for some
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import nn
from torch.fx import Graph, Node

from autoptd.compat import OpOverload, quiet_fakes
from autoptd.errors import PlanError, TraceError
from autoptd.ir.notes import is_tensor, note, op_name, ops, placeholders, tensor
from autoptd.trace.autocast import Autocast
from autoptd.trace.capture import Captured

# The dtype of `model.to(dtype)`, and of autocast, by the value of `precision`.
COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
AUTOCAST_DTYPES = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
# Dtypes that float32 storage holds without loss.
STORABLE = (torch.float32, torch.bfloat16, torch.float16)
# Error messages of torch about mixed operand dtypes.
MISMATCH = re.compile(r"dtype|scalar type|same type|BFloat16|Half|Float\b|promot", re.IGNORECASE)
# Operators, besides pointwise ones, that take mixed floating-point dtypes, or only read the shape of one.
TAKES_ANY = frozenset(
    f"aten.{name}"
    for name in "cat stack copy copy_ rms_norm scaled_dot_product_attention type_as expand_as view_as".split()
)
# With more kinds of buffers, only single kinds and all together are tried.
MOST_KINDS = 4


def check_precision(model: nn.Module, precision: str | None) -> None:
    """Raise PlanError if a model's parameters cannot be kept in float32 storage, as `precision` requires."""
    if precision is None:
        return
    # Under autocast a parameter in the other 16-bit dtype rounds twice, a cast from float32 storage once.
    allowed = STORABLE if precision in COMPUTE_DTYPES else (torch.float32, AUTOCAST_DTYPES[precision])
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype not in allowed:
            fact = f"{name} is {str(parameter.dtype).removeprefix('torch.')}: its storage would be float32"
            raise PlanError(f"precision={precision!r}", fact, "a float32 model, or precision=None")


def autocast_of(model: nn.Module, precision: str | None, device_type: str) -> Autocast:
    """Return the autocast for tracing a model for ranks on a device type; `OFF` without a "-mixed"."""
    device = next((x.device.type for x in model.parameters()), "cpu")
    # A model on meta has no device whose autocast state it could read.
    return Autocast(device_type, AUTOCAST_DTYPES.get(str(precision)), "cpu" if device == "meta" else device)


@dataclass(frozen=True)
class Place:
    """Hold the module and name of a buffer, and the user's tensor."""

    name: str
    module: nn.Module
    attribute: str
    own: torch.Tensor

    @property
    def kind(self) -> tuple[type, str]:
        """Return the key that the buffers of repeated layers have in common."""
        return type(self.module), self.attribute


@contextmanager
def computing_in(model: nn.Module, precision: str | None, cast: Collection[str] = ()) -> Iterator[Narrowing]:
    """Cast the parameters and persistent buffers of `model`, and the buffers named in `cast`, temporarily.

    Float64 tensors are not cast: `verify` uses them to compare values at full width.
    """
    if precision not in COMPUTE_DTYPES:
        yield Narrowing(None, ())
        return
    caster = _Cast(COMPUTE_DTYPES[precision])
    parameters = [(x, x.data, x.grad) for x in model.parameters() if x.is_floating_point()]
    saved, unsaved = _buffers(model)
    try:
        for parameter, data, _ in parameters:
            # torch rejects a gradient in another dtype than its parameter.
            parameter.grad = None
            parameter.data = caster(data)
        for place in saved:
            place.module._buffers[place.attribute] = caster(place.own)
        # Buffers that share memory with a cast tensor are cast too.
        tied = [place for place in unsaved if caster.has(place.own)]
        for place in tied:
            place.module._buffers[place.attribute] = caster(place.own)
        yield Narrowing(caster, tuple(place for place in unsaved if place not in tied), cast)
    finally:
        for parameter, data, grad in parameters:
            parameter.data = data
            parameter.grad = grad
        for place in (*saved, *unsaved):
            place.module._buffers[place.attribute] = place.own


def _buffers(model: nn.Module) -> tuple[list[Place], list[Place]]:
    """Return the persistent floating-point buffers, and the others."""
    saved: list[Place] = []
    unsaved: list[Place] = []
    for path, module in model.named_modules():
        for attribute, x in module._buffers.items():
            if x is not None and x.is_floating_point():
                place = Place(f"{path}.{attribute}" if path else attribute, module, attribute, x)
                is_saved = attribute not in module._non_persistent_buffers_set
                (saved if is_saved else unsaved).append(place)
    return saved, unsaved


class Narrowing:
    """Choose which non-persistent buffers to cast, after `caster` (None: no cast) has cast other tensors."""

    def __init__(self, caster: _Cast | None, places: tuple[Place, ...], cast: Collection[str] = ()) -> None:
        self._caster = caster
        self._kinds: dict[tuple[type, str], list[Place]] = {}
        for place in places:
            if caster is not None and caster.changes(place.own):
                self._kinds.setdefault(place.kind, []).append(place)
        given = [place.kind for place in places if place.name in cast]
        self._given = list(dict.fromkeys(kind for kind in given if kind in self._kinds))
        self._set(self._given)

    @property
    def cast(self) -> tuple[str, ...]:
        """Return the names of the cast buffers."""
        return tuple(place.name for kind in self._cast for place in self._kinds[kind])

    def _set(self, kinds: Collection[tuple[type, str]]) -> None:
        """Cast the buffers of some kinds, and restore the others."""
        self._cast = tuple(kinds)
        for kind, places in self._kinds.items():
            for place in places:
                assert self._caster is not None
                x = self._caster(place.own) if kind in kinds else place.own
                place.module._buffers[place.attribute] = x

    def settle(self, trace: Callable[[], Captured]) -> Captured:
        """Return a trace of the model with unchanged buffers, else with as few kinds cast as it needs to run.

        Raises the first error if it never runs.
        """
        if not self._kinds:
            return trace()
        # torch logs every failing operator, which the error reports as well.
        with quiet_fakes():
            try:
                captured = trace()
            except TraceError as error:
                if not MISMATCH.search(error.fact) or (found := self._searched(trace)) is None:
                    raise
                return found
            # Tracing without data does not reveal all failures on a device.
            return captured if self._fits(captured.graph) else self._searched(trace) or captured

    def _searched(self, trace: Callable[[], Captured]) -> Captured | None:
        kinds = [kind for kind in self._kinds if kind not in self._given]
        sizes = range(1, len(kinds) + 1) if len(kinds) <= MOST_KINDS else (1, len(kinds))
        for size in sizes:
            for more in combinations(kinds, size):
                self._set((*self._given, *more))
                try:
                    captured = trace()
                except TraceError:
                    continue
                if self._fits(captured.graph):
                    return captured
        self._set(self._given)
        return None

    def _fits(self, graph: Graph) -> bool:
        """Tell whether no operator mixes a wide value derived from these buffers with a 16-bit one."""
        kept: set[str] = set()
        for kind, places in self._kinds.items():
            if kind not in self._cast:
                kept.update(place.name for place in places)
        wide = {node for node in placeholders(graph, "buffer") if note(node).name in kept}
        if not wide:
            return True
        assert self._caster is not None
        narrow = self._caster.dtype
        for node in ops(graph):
            if not wide.intersection(node.all_input_nodes):
                continue
            if _dtypes(node.all_input_nodes) >= {narrow} and not takes_any(node):
                return False
            if narrow not in (made := _dtypes([node])) and made:
                wide.add(node)
        return True


def takes_any(node: Node) -> bool:
    """Tell whether an operator takes operands of several floating-point dtypes."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return True
    return torch.Tag.pointwise in node.target.tags or op_name(node) in TAKES_ANY


def _dtypes(nodes: Collection[Node]) -> set[torch.dtype]:
    """Return the floating-point dtypes of some values."""
    return {tensor(node).dtype for node in nodes if is_tensor(node) and tensor(node).dtype.is_floating_point}


class _Cast:
    """Cast tensors storage by storage, so that shared storage, and shared tensors, stay shared."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.storages: dict[int, torch.Tensor] = {}
        # By id, with the source tensor, which keeps the id unique.
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.changes(x):
            return x
        storage = x.detach().untyped_storage()
        if storage._cdata not in self.storages:
            count = storage.nbytes() // x.element_size()
            self.storages[storage._cdata] = x.detach().as_strided((count,), (1,), 0).to(self.dtype)
        whole = self.storages[storage._cdata]
        made = whole.as_strided(x.size(), x.stride(), x.storage_offset())
        return self._made.setdefault(id(x), (x, made))[1]

    def changes(self, x: torch.Tensor) -> bool:
        """Tell whether the cast changes the dtype of a tensor."""
        return not x.is_complex() and x.dtype not in (torch.float64, self.dtype)

    def has(self, x: torch.Tensor) -> bool:
        """Tell whether a tensor with the same memory was cast."""
        return x.detach().untyped_storage()._cdata in self.storages


__all__ = ["COMPUTE_DTYPES", "Narrowing", "autocast_of", "check_precision", "computing_in"]
