"""Check that an optimizer is elementwise, so that its update of a shard is the shard of its update.

In: a torch optimizer's class, its keywords, and the options of its groups. Out: nothing, or a PlanError.
torch's own optimizers are known, as are subclasses that override no method. Other classes are tried for a few
steps on small tensors: whole, in halves and, for ZeRO, in flat pieces. `shape_trial.py` tries them on the
shapes of the model.

    check_elementwise(torch.optim.AdamW, {"lr": 1e-3}, [{"weight_decay": 0.1}], has_pieces=True)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import optim

from autoptd.errors import PlanError
from autoptd.ir.scopes import on_cpu
from autoptd.runtime.params.storage import as_piece

# The settings of a group, without its parameters.
Options = Mapping[str, Any]
Tensors = list[torch.Tensor]

ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adagrad,
    optim.RMSprop,
    optim.Rprop,
    optim.Adamax,
    optim.Adadelta,
    optim.ASGD,
)
# Every dim is even, so that it can be halved.
SHAPES = ((6, 4), (4,), (2, 4, 6))
# The scale of the gradients in each of the trial steps: a norm or a bound within the optimizer shows at one of them.
SCALES = (1.0, 1e-3, 1e3, 1e-6)
# The scale of the parameters that the steps begin with: a bound on what a step may do to one may be its own norm.
STARTS = (1.0, 1e-4)


def check_elementwise(
    cls: type[optim.Optimizer],
    keywords: Mapping[str, Any],
    groups: Sequence[Options] = ({},),
    *,
    has_pieces: bool = False,
) -> None:
    """Raise PlanError for a class that is neither known nor found by trial to update every element by itself.

    `groups` are the options of its groups. With `has_pieces` it steps flat pieces of parameters, as ZeRO stores them.
    """
    # `elementwise = True` on a class is its author's word: see the remedies below.
    if cls in ELEMENTWISE or getattr(cls, "elementwise", False):
        return
    base = next((parent for parent in cls.__mro__ if parent in ELEMENTWISE), None)
    if base is None:
        raise PlanError(
            f"optimizer {cls.__name__}",
            "is not known to update every element by itself, so shards would be updated differently from the whole",
            f"one of {', '.join(known.__name__ for known in ELEMENTWISE)}, or a class derived from one; "
            "or set elementwise = True on the class if it is",
        )
    own = own_methods(cls)
    if own and (reason := try_parts(cls, keywords, groups, has_pieces)):
        fact = f"derives from {base.__name__} with a {own[0]} of its own: {reason}"
        remedy = f"{base.__name__}; or set elementwise = True if that is meant so"
        raise PlanError(f"optimizer {cls.__name__}", fact, remedy)


def own_methods(cls: type) -> list[str]:
    """Return the methods of torch's own class that classes derived from it override, the constructor last."""
    base = next((parent for parent in cls.__mro__ if parent in ELEMENTWISE), None)
    between = cls.__mro__ if base is None else cls.__mro__[: cls.__mro__.index(base)]
    names = {name for derived in between for name in vars(derived)}
    found = sorted(
        name for name in names if hasattr(base or optim.Optimizer, name) and not name.startswith("__")
    )
    return found + ["constructor"] * ("__init__" in names)


# The trial leaves the user's random numbers where they were.
@torch.random.fork_rng(devices=[])
def try_parts(
    cls: type[optim.Optimizer], keywords: Mapping[str, Any], groups: Sequence[Options], has_pieces: bool
) -> str:
    """Step small tensors whole, in halves along every dim, in pieces, and without the first; return why the results differ, ""
    if they do not.
    """
    torch.manual_seed(0)
    values = [torch.randn(size, dtype=torch.float64, device="cpu") for size in SHAPES]
    for start in STARTS:
        first = [start * x for x in values]
        if reason := _try_from(first, cls, keywords, groups, has_pieces):
            return reason
    return ""


def _try_from(
    first: Tensors,
    cls: type[optim.Optimizer],
    keywords: Mapping[str, Any],
    groups: Sequence[Options],
    has_pieces: bool,
) -> str:
    grads = []
    for scale in SCALES:
        grads.append([scale * torch.randn_like(x) for x in first])
    # What one of two ranks has.
    cuts = [
        (f"halves of a tensor along dim {dim}", partial(_half, dim=dim, number=number))
        for dim in range(max(map(len, SHAPES)))
        for number in range(2)
    ]
    if has_pieces:
        what = "flat pieces of a tensor, in which zero=1 divides it,"
        cuts += [(what, partial(_piece, number=number)) for number in range(2)]
    try:
        whole = _train(cls, keywords, groups, first, grads)
        for what, cut in cuts:
            parts = _train(cls, keywords, groups, cut(first), [cut(step_grads) for step_grads in grads])
            for own, expected in zip(parts, whole, strict=True):
                # Not to the bit, as kernels vectorise parts differently; a norm of the whole is far off.
                pairs = zip(own, cut(expected), strict=True)
                if not all(torch.allclose(x, y, rtol=1e-9, atol=1e-12) for x, y in pairs):
                    return f"{what} are updated differently from the whole"
        # A rank has some of the model's tensors, and of ranks as threads one has several copies.
        rest = _train(cls, keywords, groups, first, grads, without_first=True)
        for own, expected in zip(rest, whole, strict=True):
            if not all(torch.equal(x, y) for x, y in zip(own[1:], expected[1:], strict=True)):
                return "what it does to a tensor depends on which others are in the group"
    except Exception as error:
        # Whatever a user's optimizer raises.
        return f"it could not be tried ({type(error).__name__}: {error})"
    return ""


def _half(tensors: Tensors, dim: int, number: int) -> Tensors:
    """Return one half of each tensor along `dim`, or all of it if it has no such dim."""
    return [x.chunk(2, dim)[number].contiguous() if dim < x.dim() else x for x in tensors]


def _piece(tensors: Tensors, number: int) -> Tensors:
    """Return one of two flat ranges of each tensor, which meet where no row ends."""
    pieces: Tensors = []
    for x in tensors:
        first = x.numel() // 2 - 1
        ranges = x.reshape(-1).split([first, x.numel() - first])
        pieces.append(as_piece(ranges[number], x.dim()))
    return pieces


def _train(
    cls: type[optim.Optimizer],
    keywords: Mapping[str, Any],
    groups: Sequence[Options],
    first: Tensors,
    grads: Sequence[Tensors],
    *,
    without_first: bool = False,
) -> list[Tensors]:
    """Return by group the values after one step per entry of `grads`, each group from the values `first`.

    With `without_first` the first tensor of each is taken out of the optimizer that was made.
    """
    # What the optimizer counts is where its parameters are.
    with on_cpu():
        held = [_parameters(first) for _ in groups]
        optimizer = make(cls, keywords, list(zip(held, groups, strict=True)))
        gone = {id(parameters[0]) for parameters in held} if without_first else ()
        for group in optimizer.param_groups:
            group["params"] = [x for x in group["params"] if id(x) not in gone]
        for step_grads in grads:
            for parameters in held:
                for x, grad in zip(parameters, step_grads, strict=True):
                    x.grad = grad.clone()
            optimizer.step()
    return held


def _parameters(values: Tensors) -> Tensors:
    return [torch.nn.Parameter(x.clone()) for x in values]


def make(
    cls: type[optim.Optimizer],
    keywords: Mapping[str, Any],
    groups: Sequence[tuple[Sequence[torch.Tensor], Options]],
) -> optim.Optimizer:
    """Return an optimizer for a trial, with copies of tensors among the settings; one group without options is a list."""
    local = [{**_copied(options), "params": list(parameters)} for parameters, options in groups]
    is_list = len(groups) == 1 and not groups[0][1]
    return cls(local[0]["params"] if is_list else local, **_copied(keywords))


def _copied(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
        for key, value in settings.items()
    }


__all__ = ["ELEMENTWISE", "check_elementwise", "make", "own_methods"]
