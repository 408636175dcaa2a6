"""Cut the arguments of `step` into microbatches, after comparing them with what was compiled.

In: the (args, kwargs) of one call. Out: per microbatch a dict of batch inputs by name. Row order: replica r's microbatch j owns
the global rows from r*B/d + j*b onward (b rows per microbatch, B per step).

    check_call(program, args, kwargs, replicas=1)
    microbatches = cut(program, args, kwargs, names={"ids"}, replica=0, device=torch.device("cpu"))
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from autoptd.compat import tree_flatten, tree_unflatten
from autoptd.errors import PlanError
from autoptd.program.program import Program
from autoptd.program.specs import InputSpec
from autoptd.runtime.parameters import dtype_of

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@dataclass(frozen=True)
class CallForm:
    """How the arguments of a call are passed: so many by position, then these keywords; `names` are those of the positions."""

    names: tuple[str, ...]
    positions: int
    keywords: tuple[str, ...]

    def arrange(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Return a call as one of this form: by position what came by keyword, and the other way round, as Python binds it."""
        if len(args) == self.positions and tuple(kwargs) == self.keywords:
            return args, kwargs
        given = dict(zip(self.names, args, strict=False))
        wanted = (*self.names[: self.positions], *self.keywords)
        is_bound = len(args) <= len(self.names) and not given.keys() & kwargs.keys()
        given |= kwargs
        if not is_bound or set(given) != set(wanted) or len(wanted) != self.positions + len(self.keywords):
            fact = f"was called with {_call_text(len(args), kwargs)}, compiled was {_call_text(self.positions, self.keywords)}"
            raise PlanError("step", fact, "pass what example_inputs holds")
        return tuple(given[name] for name in wanted[: self.positions]), {
            name: given[name] for name in self.keywords
        }


def _call_text(positions: int, keywords: Collection[str]) -> str:
    """`2 arguments by position and mask=`."""
    parts = [f"{positions} argument{'s' * (positions != 1)} by position"] if positions or not keywords else []
    return " and ".join([*parts, *([", ".join(f"{name}=" for name in keywords)] if keywords else [])])


def expected_shape(program: Program, spec: InputSpec, replicas: int) -> tuple[int, ...]:
    """Shape of an argument that holds the rows of `replicas` replicas."""
    if not spec.batched:
        return spec.shape
    return (spec.shape[0] * program.num_microbatches * replicas, *spec.shape[1:])


def check_call(program: Program, args: Args, kwargs: Kwargs, replicas: int) -> None:
    """Compare a call with the compiled one: PlanError with all differences in structure, shapes, dtypes and constants."""
    leaves = check_structure(program, args, kwargs)
    findings = []
    for spec in program.inputs:
        leaf, shape, dtype = leaves[spec.leaf], expected_shape(program, spec, replicas), dtype_of(spec.dtype)
        if not isinstance(leaf, torch.Tensor):
            findings.append(f"{spec.name} is {leaf!r}, a tensor {list(shape)} was compiled")
        elif tuple(leaf.shape) != shape or leaf.dtype != dtype:
            findings.append(
                f"{spec.name} is {_text(leaf.shape, leaf.dtype)}, {_text(shape, dtype)} was compiled"
            )
    for number, value in program.constants:
        if not is_same_constant(leaves[number], value):
            findings.append(f"argument {number} is {leaves[number]!r}, {value!r} was compiled")
    if findings:
        remedy = "every step takes the sizes of example_inputs: drop a smaller last batch (DataLoader(..., drop_last=True)), "
        raise PlanError("step", "; ".join(findings), remedy + "or parallelize again for other sizes")


def check_structure(program: Program, args: Args, kwargs: Kwargs) -> list[Any]:
    """The leaves of a call; PlanError where its arguments are not those that were compiled."""
    leaves, tree = flatten(args, kwargs)
    if tree != program.tree:
        fact = "its arguments are not those that were compiled: another number of them, other keywords, or nested otherwise"
        raise PlanError("step", fact, "pass what example_inputs holds")
    return leaves


def is_call_of(program: Program, args: Args, kwargs: Kwargs, replicas: int) -> bool:
    """Whether a call is one that the program takes: its structure, constants, shapes and dtypes."""
    leaves, tree = flatten(args, kwargs)
    if tree != program.tree or not all(
        is_same_constant(leaves[leaf], value) for leaf, value in program.constants
    ):
        return False
    pairs = ((leaves[spec.leaf], spec) for spec in program.inputs)
    return all(
        tuple(x.shape) == expected_shape(program, spec, replicas) and str(x.dtype) == f"torch.{spec.dtype}"
        for x, spec in pairs
    )


def is_same_constant(given: Any, compiled: Any) -> bool:
    """Whether two constants of a call are one value, of one type: -0.0 is not 0.0, and a NaN is itself."""
    if type(given) is not type(compiled):
        return False
    return repr(given) == repr(compiled) if isinstance(given, (float, complex)) else given == compiled


def cut(
    program: Program, args: Args, kwargs: Kwargs, names: Collection[str], replica: int, device: torch.device
) -> list[dict[str, torch.Tensor]]:
    """Return the microbatches of one of the replicas whose rows the call holds, with the inputs called `names`."""
    leaves, _ = flatten(args, kwargs)
    count = program.num_microbatches
    microbatches: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
    for spec in program.inputs:
        if spec.name not in names:
            continue
        x = leaves[spec.leaf].detach()
        rows = spec.shape[0] * count if spec.batched else 0
        if spec.batched and x.shape[0] > rows:
            x = x.narrow(0, replica * rows, rows)
        x = _to(x, device)
        pieces = x.split(spec.shape[0]) if spec.batched and count > 1 else [x] * count
        for microbatch, piece in zip(microbatches, pieces, strict=True):
            microbatch[spec.name] = piece
    return microbatches


def _to(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`x` on `device`; from the host to a CUDA device without waiting, through memory that nobody writes to meanwhile."""
    if device.type == "cuda" and x.device.type == "cpu":
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x).to(device, non_blocking=True)
    return x.to(device)


def take_rows(
    program: Program | None, args: Args, kwargs: Kwargs, replicas: int, replica: int
) -> tuple[Args, Kwargs]:
    """Return the call with the rows of one replica of `replicas`, of a call with the rows of all.

    Batched arguments are the program's; before there is one, those whose dim 0 is as long as the batch (`batch_rows`).
    """
    leaves, tree = tree_flatten((args, kwargs))
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not tensors:
        return args, kwargs
    batched = [i for i in tensors if leaves[i].shape[0] == batch_rows(leaves, replicas)]
    if program is not None:
        check_structure(program, args, kwargs)  # not its sizes: those of an evaluation may be others
        batched = [spec.leaf for spec in program.inputs if spec.batched and spec.leaf in tensors]
    for i in batched:
        rows, rest = divmod(leaves[i].shape[0], replicas)
        if rest:
            fact = f"{leaves[i].shape[0]} rows do not divide over d={replicas}"
            raise PlanError("local_batch", fact, "a batch that d divides: DataLoader(..., drop_last=True)")
        leaves[i] = leaves[i].narrow(0, replica * rows, rows)
    return tree_unflatten(leaves, tree)  # type: ignore[return-value]


def batch_rows(leaves: Sequence[Any], pieces: int) -> int:
    """The rows of a call: dim 0 of its first tensor.

    A first tensor of one entry (a temperature) is no batch where others have more rows, nor is one of one row that `pieces` do
    not divide: the batch is then what most tensors have, and of equally many the first.
    """
    sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    first = next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim())
    others = sizes[1:] if tuple(first.shape) == (1,) else [size for size in sizes if size > 1]
    if sizes[0] != 1 or not others or (first.dim() > 1 and pieces == 1):
        return sizes[0]
    return max(others, key=others.count)


def flatten(args: Args, kwargs: Kwargs) -> tuple[list[Any], str]:
    """The leaves of a call, and the text of how they are nested; most calls are tensors by position."""
    if not kwargs and all(isinstance(one, torch.Tensor) for one in args):
        return list(args), _tree_of_leaves(len(args))
    leaves, tree = tree_flatten((args, kwargs))
    return leaves, str(tree)


@cache
def _tree_of_leaves(count: int) -> str:
    return str(tree_flatten(((0,) * count, {}))[1])


def _text(shape: Collection[int], dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
