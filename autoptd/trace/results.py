"""Remember what operators return for fake tensors: layers of one kind call the same ones on the same sizes.

The metadata of results follow from those of the operands, the other arguments, and settings of torch, which make up the
key. A result that is known is made without running the operator: of the same sizes, dtype and device, in the storage of the
same operand where it is a view, and non-leaf where it has a gradient. All Python code of the model runs, in every layer.

    results = Results()
    made = results.call(aten.linear.default, (x, weight), {})

Such a result lacks what autograd knows of it: its base, if it is a view, and the operator's own gradient. A forward that
writes into a tensor with such views, or asks for these (`ASKS_AUTOGRAD`), goes on to its end, so that it undoes what it has
set; then it is traced again, and every operator runs (`run_all`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from autoptd.compat import FakeTensor, OpOverload, WithoutDispatch, WithoutDispatcher, new_fake

aten = torch.ops.aten
PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
# Names of torch functions and attributes that show how autograd has made a tensor.
ASKS_AUTOGRAD = {"grad_fn", "output_nr", "_base", "_is_view", "backward", "grad"}
Key = tuple[Any, ...]


class Unknown(Exception):
    """Signal that an operator has to run."""


class Gradient(torch.autograd.Function):
    """Give a new tensor a gradient function, as the results of operators have."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, new: list[Tensor]) -> Tensor:  # type: ignore[override]
        return new[0]


# The method of autograd, which `watch_tracing` replaces for the functions of models.
with_gradient = super(torch.autograd.Function, Gradient).apply


@dataclass(frozen=True, slots=True)
class Result:
    """Describe one result: operand number `operand` itself, a view of it, or (None) a new tensor."""

    operand: int | None
    is_view: bool
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, made: Any, operands: Sequence[FakeTensor]) -> Result:
        """Describe a result of a call; Unknown where it has more than metadata."""
        if type(made) is not FakeTensor or not _is_described(made):
            raise Unknown
        number = next((i for i, one in enumerate(operands) if one is made), None)
        is_view = number is None
        if is_view:
            storage = _storage(made)
            number = next((i for i, one in enumerate(operands) if _storage(one) == storage), None)
            if made.requires_grad and (made.is_leaf or not any(one.requires_grad for one in operands)):
                raise Unknown
        how = made.shape, made.stride(), made.storage_offset(), made.dtype, made.fake_device
        return cls(number, is_view and number is not None, *how, made.requires_grad)

    def make(self, operands: Sequence[FakeTensor]) -> FakeTensor:
        """Make the result of a call with other tensors of the same metadata."""
        if self.operand is not None and not self.is_view:
            return operands[self.operand]
        mode = operands[0].fake_mode
        with WithoutDispatch(), WithoutDispatcher():
            if self.operand is None:
                made = new_fake(mode, self.size, self.stride, self.dtype, self.device)
            else:
                storage = operands[self.operand].untyped_storage()
                empty = torch.empty(0, dtype=self.dtype, device="meta")
                view = empty.set_(storage, self.offset, self.size, self.stride)
                made = FakeTensor(mode, view, self.device)
            if not self.requires_grad:
                return made
            source = next(one for one in operands if one.requires_grad)
            return with_gradient(source, [made])  # type: ignore[no-any-return]


class Results:
    """Call operators, or make their results; all operators run if the forward before has observed more."""

    def __init__(self) -> None:
        self.run_all = False
        self._known: dict[Key, tuple[type | None, list[Result]]] = {}
        self._viewed: set[int] = set()
        self._depth = 0

    def begin(self) -> None:
        """Note the modes outside of the forward."""
        self._depth = torch._C._len_torch_dispatch_stack()

    def call(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Return what `func(*args, **kwargs)` does."""
        if self.run_all:
            return func(*args, **kwargs)
        if not _is_pure(func):
            self._check_writes(func, args, kwargs)
            return func(*args, **kwargs)
        operands: list[FakeTensor] = []
        try:
            key = (func, *self._settings(), _key((args, kwargs), operands))
            # Settings of more kinds decide what operators make of nothing.
            if not operands:
                raise Unknown
            kind, known = self._known[key]
        except (Unknown, TypeError):
            return func(*args, **kwargs)
        except KeyError:
            return self._learn(key, operands, func(*args, **kwargs))
        made = [one.make(operands) for one in known]
        self._viewed |= {_storage(operands[one.operand]) for one in known if one.is_view}
        return made[0] if kind is None else kind(made)

    def _learn(self, key: Key, operands: list[FakeTensor], made: Any) -> Any:
        kind = type(made) if isinstance(made, (list, tuple)) else None
        pieces = [made] if kind is None else made
        try:
            found = [Result.of(piece, operands) for piece in pieces]
        except Unknown:
            return made
        new = [_storage(piece) for piece, one in zip(pieces, found, strict=True) if one.operand is None]
        if found and len(set(new)) == len(new):
            self._known[key] = kind, found
        return made

    def _settings(self) -> Key:
        """Return the settings of torch on which metadata depend; Unknown where the model's code sees every operator."""
        if torch._C._len_torch_dispatch_stack() != self._depth:
            raise Unknown
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_dtype(),
            torch._C._get_math_sdp_enabled(),
            torch._C._get_flash_sdp_enabled(),
            torch._C._get_mem_efficient_sdp_enabled(),
            torch._C._get_cudnn_sdp_enabled(),
            tuple(torch._C._get_sdp_priority_order()),
            torch._C._get_mkldnn_enabled(),
            torch._C._get_deterministic_algorithms(),
            torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        )

    def _check_writes(self, func: OpOverload, args: Any, kwargs: Any) -> None:
        for number, name in _written(func):
            x = args[number] if number < len(args) else kwargs.get(name)
            for one in x if isinstance(x, (list, tuple)) else [x]:
                if isinstance(one, Tensor) and self._viewed and _storage(one) in self._viewed:
                    self.run_all = True

    def observe(self, func: Any) -> None:
        """Note whether the forward calls a torch function that shows more of a result than is remembered."""
        self.run_all |= _asks_autograd(func)


@cache
def _is_pure(func: OpOverload) -> bool:
    """Tell whether an operator only computes: metadata of its results follow from the key."""
    is_ours = func.namespace in ("aten", "autoptd")
    may_write = torch.Tag.maybe_aliasing_or_mutating in func.tags and func is not aten.dropout.default
    return is_ours and not func._schema.is_mutable and not may_write


@cache
def _written(func: OpOverload) -> list[tuple[int, str]]:
    """Return the arguments that an operator writes to, by position and name."""
    arguments = enumerate(func._schema.arguments)
    return [(i, one.name) for i, one in arguments if one.alias_info is not None and one.alias_info.is_write]


@cache
def _asks_autograd(func: Any) -> bool:
    """Tell whether a torch function, or the getter of an attribute, shows what autograd knows of a tensor."""
    name = getattr(func, "__name__", "")
    return (getattr(func.__self__, "__name__", "") if name == "__get__" else name) in ASKS_AUTOGRAD


def _key(arg: Any, operands: list[FakeTensor]) -> Key:
    """Return the part of the key for an argument, and add its tensors to `operands`; Unknown without one."""
    kind = type(arg)
    if kind is FakeTensor:
        if not _is_described(arg):
            raise Unknown
        operands.append(arg)
        where = arg.shape, arg.stride(), arg.storage_offset(), arg.dtype, arg.fake_device
        return (*where, arg.requires_grad, arg.is_neg())
    if kind in PLAIN:
        # True equals 1.
        return kind, arg
    if kind is dict:
        return tuple((name, _key(one, operands)) for name, one in arg.items())
    if kind in (list, tuple, torch.Size):
        return (kind, *[_key(one, operands) for one in arg])
    raise Unknown


def _is_described(x: FakeTensor) -> bool:
    """Tell whether metadata are all there is to know of a fake tensor."""
    return x.constant is None and x.layout is torch.strided and not x.dtype.is_complex


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
