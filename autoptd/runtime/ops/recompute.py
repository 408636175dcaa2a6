"""Recompute activations: free them after forward, and compute them again in backward.

In: an emitted method, its recipe `..._again`, which recomputes the dropped values, and their arguments. Out:
the result of the method. Backward is still autograd's: its saved tensors are indexed by storage, so a dropped
value is freed wherever it was saved. The first backward that needs one runs the recipe; the last one that
needs a value frees it.

    x = self.again(self.layer, self.layer_again, i, w.h[i], x)

    def layer(self, i, w, x):
        c_fc = self.kept(F.linear(x, w.c_fc.weight))                # an argument of the recipe
        gelu = self.dropped(F.gelu(c_fc))
        return x + F.linear(gelu, w.c_proj.weight)

    def layer_again(self, i, w, x, c_fc):                           # the dropped values, in order
        return (F.gelu(c_fc),)

A recipe draws the dropout masks of its microbatch. Without gradients nothing is dropped or recomputed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache
from types import CodeType
from typing import Any, Protocol, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from autoptd.errors import InternalError
from autoptd.runtime.ops.dropout import Drawing
from autoptd.runtime.ops.views import View

Tensor = torch.Tensor
Value = TypeVar("Value")
# Runs a recipe with the masks of the microbatch whose forward it repeats.
Runner = Callable[[Callable[..., Any], Sequence[Any], Drawing | None], Any]


def as_in_forward(mask: Tensor) -> Tensor:
    """Return a mask that asks for a gradient, as it does in forward: attention has other kernels for those that do not."""
    return mask if torch.compiler.is_compiling() else mask.requires_grad_()


class Lender(Protocol):
    """Parameters whose memory is freed between uses: `runtime/params/units.py`."""

    def lend(self, x: Tensor) -> Any:
        """Return what autograd saves for a tensor: the tensor, or a `View`."""

    def take(self, saved: Any) -> Tensor:
        """Return the tensor that `lend` was given."""


class Saved(View):
    """A tensor that autograd saved, or that a recipe reads: itself, or how it is a view of a value that was dropped."""

    __slots__ = ("__weakref__", "_dropped", "_tensor")

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self._tensor: Tensor | None = tensor
        self._dropped: Dropped | None = None

    def let_go(self, dropped: Dropped) -> None:
        self._tensor, self._dropped = None, dropped

    def take(self) -> Tensor:
        """Return the tensor; a dropped one is computed again first, unless another reader has had that done."""
        if self._dropped is None:
            return self._tensor  # type: ignore[return-value]
        return self.of(self._dropped.value())


class Dropped:
    """A value that was let go: number `number` of what a recipe computes."""

    def __init__(self, call: Call, number: int, x: Tensor) -> None:
        self._call, self._number = call, number
        self._value: Tensor | None = None
        self._like = lies(x)

    @property
    def site(self) -> str:
        return f"{self._call.name}, value {self._number}"

    def value(self) -> Tensor:
        if self._value is None:
            self._call.run()
        if self._value is None:
            raise InternalError(self.site, "was not computed again")
        return self._value

    def fill(self, x: Tensor) -> None:
        """Take the value that the recipe computed: views of the first one must be views of this one."""
        like = lies(x)
        if like != self._like:
            raise InternalError(self.site, f"is recomputed as {like}, but was {self._like}")
        self._value = x


def lies(x: Tensor) -> tuple[Any, ...]:
    """Return where the entries of a tensor are in its storage: along a dim of size 1 there is no next one."""
    strides = tuple(stride if size > 1 else 0 for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.shape, strides, x.storage_offset(), x.untyped_storage().nbytes()


class Call:
    """One call of a method: its recipe with the arguments of that, and the values that it dropped."""

    def __init__(
        self, run: Runner, recipe: Callable[..., Any], args: Sequence[Any], drawing: Drawing | None
    ) -> None:
        self._run, self._recipe, self._drawing = run, recipe, drawing
        # `Saved` instead of tensors; the values kept for the recipe follow the arguments.
        self._args: list[Any] | None = list(args)
        # Weak: once no backward needs a value, it is not held here.
        self._dropped: list[weakref.ref[Dropped]] = []

    @property
    def name(self) -> str:
        return getattr(self._recipe, "__name__", str(self._recipe))

    def keep(self, x: View) -> None:
        self._args.append(x)  # type: ignore[union-attr]

    def drop(self, x: Tensor) -> Dropped:
        dropped = Dropped(self, len(self._dropped), x)
        self._dropped.append(weakref.ref(dropped))
        return dropped

    def run(self) -> None:
        """Compute all dropped values again."""
        if self._args is None:
            raise InternalError(self.name, "runs twice for one forward")
        args = [arg.take() if isinstance(arg, View) else arg for arg in self._args]
        # What only this recipe needed is free from here on.
        self._args = None
        values = self._run(self._recipe, args, self._drawing)
        del args
        if len(values) != len(self._dropped):
            raise InternalError(
                self.name, f"returns {len(values)} values for {len(self._dropped)} dropped ones"
            )
        for reference, value in zip(self._dropped, values, strict=True):
            dropped = reference()
            if dropped is not None:
                dropped.fill(value)


class Activations:
    """What one forward of a stage saves for its backward, filed by storage while that forward runs.

    A storage is known by a weak reference, which keeps its address from being given to another one.
    """

    def __init__(self, run: Runner) -> None:
        self.runner = run
        # Parameters that are gathered for their uses.
        self.units: Lender | None = None
        self._hooks: saved_tensors_hooks | None = None
        self._calls: list[Call] = []
        self._filed: dict[StorageWeakRef, list[weakref.ref[Saved]]] = {}
        self._gone: dict[StorageWeakRef, Dropped] = {}

    def __enter__(self) -> Activations:
        self._hooks = saved_tensors_hooks(self.save, lambda saved: saved.take())
        self._hooks.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._hooks.__exit__(*exc)  # type: ignore[union-attr]
        self._hooks = None
        self._calls, self._filed, self._gone = [], {}, {}

    @property
    def is_on(self) -> bool:
        return self._hooks is not None

    def call(
        self,
        method: Callable[..., Value],
        recipe: Callable[..., Any],
        args: Sequence[Any],
        drawing: Drawing | None,
    ) -> Value:
        """Call a method, some of whose values its recipe computes again from those arguments that it names too."""
        given = dict(zip(_arguments(method.__code__), args, strict=True))  # type: ignore[attr-defined]
        needed = [given[name] for name in _arguments(recipe.__code__) if name in given]  # type: ignore[attr-defined]
        filed = [self.save(arg.detach()) if isinstance(arg, Tensor) else arg for arg in needed]
        self._calls.append(Call(self.runner, recipe, filed, drawing))
        try:
            return method(*args)
        finally:
            self._calls.pop()

    def save(self, x: Tensor) -> View:
        """File a tensor; return a `Saved`, or what `units` lend, in its place."""
        if self.units is not None and (lent := self.units.lend(x)) is not x:
            return lent  # type: ignore[no-any-return]
        saved, storage = Saved(x), StorageWeakRef(x.untyped_storage())
        dropped = self._gone.get(storage)
        if dropped is None:
            self._filed.setdefault(storage, []).append(weakref.ref(saved))
        else:
            saved.let_go(dropped)
        return saved

    def keep(self, x: Tensor) -> None:
        """Keep a value for the recipe of the running call."""
        # Detached: its graph may hold this call.
        self._calls[-1].keep(self.save(x.detach()))

    def drop(self, x: Tensor) -> None:
        """Let go of a value wherever it is saved, now and later; the recipe of the running call computes it again."""
        storage = StorageWeakRef(x.untyped_storage())
        dropped = self._gone[storage] = self._calls[-1].drop(x)
        for reference in self._filed.pop(storage, ()):
            saved = reference()
            if saved is not None:
                saved.let_go(dropped)


@cache
def _arguments(code: CodeType) -> tuple[str, ...]:
    """Return the arguments of a method, without `self`."""
    return code.co_varnames[1 : code.co_argcount]
