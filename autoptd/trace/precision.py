"""Cast a model to its compute dtype while it is compiled, or widen a copy of it to float64.

`computing_in` casts like `from_pretrained(dtype=...)` of transformers: parameters and persistent floating-point
buffers, the content of a checkpoint, are in that dtype. Buffers that are not saved (`persistent=False`) are not cast:
they hold values computed from the config that must not be rounded, such as rotary frequencies, whose error grows with
the position. If a model cannot run this way, as many of them are cast as necessary (`Narrowing.settle`). After the
block all tensors are the user's own again. Tensors that share memory still do.

    with computing_in(model, "bf16") as narrowing:
        captured = narrowing.settle(lambda: capture(model, args, kwargs, None))
        narrowing.cast                                   # () for most models, ("h.0.attn.mask", ...) for some

The float64 copy is for `verify`, and to tell rounding from a fault. Under `Widen`, a model's own casts to float32
become casts to float64.

    with Widen():
        loss = widen_model(model)(*widen_inputs(call))
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.fx import Graph, Node

from autoptd.compat import OpOverload, quiet_fakes, tree_map
from autoptd.errors import PlanError, TraceError
from autoptd.ir.expert_mm import GroupedProducts
from autoptd.ir.notes import is_tensor, note, op_name, ops, placeholders, tensor
from autoptd.subject.storage import map_attribute_tensors
from autoptd.trace.autocast import Autocast

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


class HasGraph(Protocol):
    """A result of tracing: `Captured`."""

    @property
    def graph(self) -> Graph: ...


Result = TypeVar("Result", bound=HasGraph)


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

    def settle(self, trace: Callable[[], Result]) -> Result:
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

    def _searched(self, trace: Callable[[], Result]) -> Result | None:
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


FLOAT32 = {torch.float32: torch.float64}
# Casts that name their dtype.
CASTS = {
    torch.Tensor.float: torch.float32,
    torch.Tensor.bfloat16: torch.bfloat16,
    torch.Tensor.half: torch.float16,
}


class Widen(GroupedProducts):
    """Turn requests for float32 into float64, so that a model's upcasts do not truncate a float64 check.

    `dtypes` maps the requested dtypes to replace.
    """

    def __init__(self, dtypes: Mapping[torch.dtype, torch.dtype] = FLOAT32) -> None:
        super().__init__(_grouped_product, _is_float64)
        self._dtypes = dtypes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The tracer calls this to rebuild a constant of the model, which keeps its dtype.
        if func is torch.empty_strided:
            return func(*args, **(kwargs or {}))
        if CASTS.get(func) in self._dtypes:
            return args[0].to(self._dtypes[CASTS[func]])
        # x.to(torch.float32), softmax(x, -1, torch.float32), zeros(..., dtype=torch.float32).
        wide = [self._wide(arg) for arg in args]
        named = {key: self._wide(arg) for key, arg in (kwargs or {}).items()}
        return super().__torch_function__(func, types, wide, named)

    def _wide(self, arg: Any) -> Any:
        return self._dtypes.get(arg, arg) if isinstance(arg, torch.dtype) else arg


def in_float64() -> GroupedProducts:
    """Support grouped matmuls in float64, for which torch has no kernel."""
    return GroupedProducts(_grouped_product, _is_float64)


def _is_float64(x: torch.Tensor) -> bool:
    return x.dtype == torch.float64


def _grouped_product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Compute a grouped matmul with a matrix per row, independently of the code that ranks run."""
    groups = torch.searchsorted(ends, torch.arange(len(x), device=x.device), right=True)
    return torch.bmm(x.unsqueeze(1), weight[groups]).squeeze(1)


def widen_model(model: nn.Module) -> nn.Module:
    """Return a float64 copy, plain tensor attributes included; tied weights stay tied."""
    try:
        wide = copy.deepcopy(model).double()
        map_attribute_tensors(wide, lambda x: x.double() if x.is_floating_point() else x)
        return wide
    # deepcopy refuses a module that keeps a tensor with a history, as the old weight_norm does.
    except RuntimeError as error:
        fact = f"it cannot be copied: {str(error).splitlines()[0]}"
        raise PlanError("verify", fact, "keep only parameters and buffers on modules") from error


def widen_inputs(call: Any) -> Any:
    def wide(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return tree_map(wide, call)
