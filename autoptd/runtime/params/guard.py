"""Parameters and gradients that refuse operations which would mistake a shard for the whole.

In: a rank's parameter or gradient. Out: the same tensor, of a class whose `__torch_function__` refuses, by caller:

- whatever `torch.nn.utils.clip_grad` does, and a gradient read or a leaf checked by `torch.optim`: one PlanError that
  names `pm.clip_grad_norm_` or `pm.optimizer`. accelerate and Lightning arrive here, too;
- a gradient read by `torch.amp.GradScaler`: ranks would skip different steps;
- with zero=1, reading or setting the gradient of a whole parameter: each rank keeps those of its stored pieces;
- a hook on a parameter's gradient: gradients are accumulated elsewhere, so it would never be called;
- a norm of a parameter or gradient (also of its `.data`, `.detach()`, `.float()`), or a sum of its squares: it would be the
  norm of a shard.

Everything else returns plain tensors. The runtime itself works in `unguarded()`, without these checks and their cost;
optimizers made by `pm.optimizer` step on the plain classes, which torch's foreach and fused implementations require.

    parameter = GuardedParameter(shard)
    parameter.grad = guard_gradient(grad)
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)         # PlanError
"""

from __future__ import annotations

import copy
import dis
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.errors import PlanError

CLIPPING, SCALING = "torch.nn.utils.clip_grad", "torch.amp.grad_scaler"
OPTIMIZERS, AVERAGES = "torch.optim.", "torch.optim.swa_utils"
READS = frozenset({Tensor.grad.__get__, Tensor.is_leaf.__get__})  # type: ignore[union-attr, attr-defined]
GRADIENT = Tensor.grad.__get__  # type: ignore[union-attr]
# Never refused for a parameter that has its gradient.
WRITES = frozenset({Tensor.grad.__set__})  # type: ignore[union-attr]
NORMS = frozenset(
    {
        torch.norm,
        torch.nuclear_norm,
        torch.frobenius_norm,
        torch.linalg.norm,
        torch.linalg.vector_norm,
        torch.linalg.matrix_norm,
        torch._foreach_norm,
        Tensor.norm,
    }
)
POWERS = frozenset({torch.pow, torch.square, Tensor.pow, Tensor.__pow__, Tensor.square})
PRODUCTS = frozenset({torch.mul, Tensor.mul, Tensor.__mul__})
SUMS = frozenset({torch.sum, torch.mean, Tensor.sum, Tensor.mean})
# Aliases whose writes do not count in the parameter's version, and what numpy or C may be given from.
EXPOSING = frozenset(
    {
        Tensor.data.__get__,  # type: ignore[attr-defined]
        Tensor.detach,
        Tensor.data_ptr,
        Tensor.numpy,
        Tensor.__array__,
        Tensor.__dlpack__,
        Tensor.storage,
        Tensor.untyped_storage,
        Tensor.view,
        Tensor.reshape,
        Tensor.flatten,
    }
)
FORWARDING = ("torch.overrides", "torch._tensor", "torch.functional")
# Of a tensor without its values.
ABOUT = frozenset(
    {
        Tensor.numel,
        Tensor.nelement,
        Tensor.size,
        Tensor.dim,
        Tensor.ndimension,
        Tensor.stride,
        Tensor.element_size,
        Tensor.is_floating_point,
        Tensor.is_complex,
        Tensor.is_contiguous,
        Tensor.get_device,
        Tensor.requires_grad_,
        torch.numel,
        torch.is_floating_point,
        torch.is_complex,
        *(
            getattr(Tensor, name).__get__
            for name in "shape ndim dtype device layout requires_grad is_leaf grad_fn is_cuda is_meta itemsize nbytes".split()
        ),
    }
)
HOOKS = frozenset({Tensor.register_hook, Tensor.register_post_accumulate_grad_hook})
SAME_VALUES = frozenset({Tensor.data.__get__, Tensor.detach, Tensor.float, Tensor.double})  # type: ignore[attr-defined]


def refuse_gradient(func: Callable[..., Any], is_home: bool) -> None:
    """Raise a PlanError if `func` reads or sets the gradient of a parameter whose gradient is not kept with it."""
    if func in WRITES or (func == GRADIENT and not _asks_whether_it_exists()):
        if is_home:
            fact = "gradients are brought to whole tensors within optimizer.step(): between steps these have none"
            remedy = "pm.gradients(), which returns full ones; pm.clip_grad_norm_ and optimizer.zero_grad(); those of "
            remedy += (
                "pm.parameters(), with zero=0; or optimizer.register_step_pre_hook(...), where they are there"
            )
            raise PlanError("p.grad of optimizer.param_groups", fact, remedy)
        fact = (
            "with zero= each rank keeps only the gradients of its stored pieces: a whole parameter has none"
        )
        remedy = "read and change p.grad of the tensors in optimizer.param_groups, after pm.step; "
        remedy += "pm.gradients() returns full gradients, pm.clip_grad_norm_ clips them, optimizer.zero_grad() clears them"
        raise PlanError("parameter.grad", fact, remedy)


def refuse_values(func: Callable[..., Any]) -> None:
    """Raise a PlanError if `func` may read or write the values of a parameter that exist only while layers run."""
    if func not in ABOUT and func not in WRITES and func != GRADIENT:
        fact = "with zero=3 the values of a parameter are here only while its layer runs"
        remedy = "pm.state_dict() returns them, pm.load_state_dict(...) sets them; optimizer.param_groups has the pieces "
        remedy += "that this rank stores"
        raise PlanError(getattr(func, "__name__", str(func)), fact, remedy)


def _asks_whether_it_exists() -> bool:
    """Tell whether the caller is `hasattr`, which handles no error but AttributeError."""
    frame = sys._getframe(3)
    code = frame.f_code
    is_loaded = dis.opname[code.co_code[frame.f_lasti]] in ("LOAD_ATTR", "LOAD_METHOD")
    return not is_loaded and "hasattr" in code.co_names


def refuse(func: Callable[..., Any], caller: str, what: str) -> None:
    """Raise a PlanError if a call of `func` from module `caller` would mistake a shard for the whole."""
    if caller == CLIPPING:
        fact = "sees only the gradients that this rank holds, not those of the whole model"
        remedy = "pm.clip_grad_norm_(max_norm) or pm.clip_grad_value_(clip_value), which clip the gradients of the model"
        raise PlanError("torch.nn.utils clipping", fact, remedy)
    if func in READS and caller == SCALING:
        fact = (
            "each rank would look for infinities in its own part only, and skip steps that other ranks take"
        )
        raise PlanError(
            "torch.amp.GradScaler",
            fact,
            'precision="fp16", which scales the loss in the same way on all ranks',
        )
    if func in READS and caller.startswith(OPTIMIZERS) and caller != AVERAGES:
        fact = "a torch optimizer over pm.parameters() does not update the parts on other ranks, so copies drift apart"
        raise PlanError(
            "torch.optim", fact, "pm.optimizer(torch.optim.AdamW, lr=...), a real optimizer of that class"
        )
    if func in HOOKS:
        fact = f"a hook on a {what} is not called: gradients are summed over microbatches and ranks elsewhere"
        raise PlanError(getattr(func, "__name__", str(func)), fact, "change parameter.grad after pm.step")
    if func in NORMS or (func in SUMS and what.startswith("square")):
        fact = f"a norm of a {what.removeprefix('square of a ')} covers only the part that this rank holds"
        remedy = "pm.clip_grad_norm_(max_norm) returns the norm of all gradients; "
        remedy += "pm.gradients() and pm.state_dict() return full tensors"
        raise PlanError(getattr(func, "__name__", str(func)), fact, remedy)


@contextmanager
def unguarded() -> Iterator[None]:
    """Disable the checks in a `with` block, on this thread."""
    with torch._C.DisableTorchFunctionSubclass():
        yield


class GuardedParameter(nn.Parameter):
    """A rank's parameter: see the module's docstring. `arrival` waits until it has the last update.

    `bears_gradient`: its gradient is kept with it, not with the pieces that ranks store. `is_home`: it is a whole tensor
    that an optimizer steps (`whole.py`). `is_absent`: it has no values between steps. `was_exposed`: something that its
    version does not count, such as numpy, may have written to it: from then on its values are compared.
    """

    arrival: Callable[[], None] | None = None
    bears_gradient: bool = True
    is_home: bool = False
    is_absent: bool = False
    was_exposed: bool = False

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Setting a gradient is what every loop does to every parameter.
        if func not in WRITES or not args[0].bears_gradient:
            if func not in WRITES:
                refuse(func, _caller(), "parameter")
            for arg in (*args, *(kwargs or {}).values()):
                for x in arg if isinstance(arg, (list, tuple)) else (arg,):
                    # A gather of the last update may be pending.
                    if type(x) is GuardedParameter and x.arrival is not None:
                        x.arrival()
                        if x.is_absent:
                            refuse_values(func)
                        if not x.bears_gradient:
                            refuse_gradient(func, x.is_home)
            if func in EXPOSING and type(args[0]) is GuardedParameter:
                args[0].was_exposed = True
        # `unguarded()` without its generator: this is a hot path.
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return guard_square(result, "parameter") if _is_square(func, args) else result

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Pickled as a plain tensor, without the state of this process.
        if self.is_absent:
            refuse_values(Tensor.__reduce_ex__)
        with unguarded():
            return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class GuardedGradient(Tensor):
    """A parameter's gradient on one rank: see the module's docstring."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        refuse(func, _caller(), "gradient")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if _is_square(func, args):
            return guard_square(result, "gradient")
        return guard_gradient(result) if func in SAME_VALUES else result

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with unguarded():
            return copy.deepcopy(self.as_subclass(Tensor), memo)  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        with unguarded():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[arg-type]


class GuardedSquare(Tensor):
    """The squares of a parameter or gradient on one rank: their sum over all entries covers only a part of the model."""

    of: str = ""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if func in SUMS and type(args[0]) is cls and result.dim() == 0:
            refuse(func, "", f"square of a {args[0].of}")
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        with unguarded():
            return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[arg-type]


def guard_square(squares: Tensor, of: str) -> Tensor:
    """Guard squares of a parameter or gradient; return them."""
    guarded = squares.as_subclass(GuardedSquare)
    guarded.of = of
    return guarded


def _is_square(func: Callable[..., Any], args: Any) -> bool:
    return func in POWERS or (func in PRODUCTS and len(args) > 1 and args[0] is args[1])


def guard_gradient(grad: Tensor) -> Tensor:
    """Guard `grad`, a tensor of the runtime's own, in place; return it."""
    if type(grad) is Tensor:
        grad.__class__ = GuardedGradient
    return grad


def remove_guards(parameters: Iterable[Tensor]) -> None:
    """Give parameters and their gradients torch's own classes, which its fast optimizers require."""
    with unguarded():
        for x in parameters:
            if type(x) is GuardedParameter:
                x.__class__ = nn.Parameter  # type: ignore[assignment]
            if type(x.grad) is GuardedGradient:
                x.grad.__class__ = Tensor  # type: ignore[assignment]


def install_guards(parameters: Iterable[Tensor]) -> None:
    """Guard parameters and gradients as before `remove_guards`."""
    with unguarded():
        for x in parameters:
            if type(x) is nn.Parameter:
                x.__class__ = GuardedParameter
            if x.grad is not None:
                guard_gradient(x.grad)


def _caller() -> str:
    """Return the module that made a call, past torch's modules that only forward it."""
    frame = sys._getframe(2)
    while frame.f_globals.get("__name__") in FORWARDING and frame.f_back:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))
