"""Check the arguments of `step` against the compiled ones, and cut them into microbatches.

In: a program and one call. Out: one PlanError with every difference in structure, shapes, dtypes and constants: the
expected value, the reason and the remedy; or a dict of batch inputs by name for each microbatch. Microbatch j of replica r
owns the global rows from r*B/d + j*b on (b rows per microbatch, B per step).

    leaves = check_call(program, args, kwargs, replicas=1)
    microbatches = cut(program, leaves, names={"ids"}, replica=0, device=torch.device("cpu"))
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from autoptd.compat import tree_flatten, tree_unflatten
from autoptd.errors import PlanError, a_type
from autoptd.program.program import Program
from autoptd.program.specs import InputSpec
from autoptd.runtime.params.parts import dtype_of

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@dataclass(frozen=True)
class CallForm:
    """How the arguments of a call are passed: the first `positions` of `names` by position, then these keywords."""

    names: tuple[str, ...]
    positions: int
    keywords: tuple[str, ...]

    def arrange(self, args: Args, kwargs: Kwargs, call: str = "step") -> tuple[Args, Kwargs]:
        """Return the call in this form, moving arguments between positions and keywords as Python would bind them."""
        if len(args) == self.positions and tuple(kwargs) == self.keywords:
            return args, kwargs
        # Not strict: `is_bound` is False where there are more arguments than names.
        given = dict(zip(self.names, args, strict=False))
        wanted = (*self.names[: self.positions], *self.keywords)
        is_bound = len(args) <= len(self.names) and not given.keys() & kwargs.keys()
        given |= kwargs
        # `forward(*args)` has fewer names than compiled positions: its arguments cannot be moved to keywords.
        if not is_bound or set(given) != set(wanted) or len(wanted) != self.positions + len(self.keywords):
            compiled = _call_text(self.positions, self.keywords)
            fact = f"was called with {_call_text(len(args), kwargs)}, but was compiled for {compiled}"
            raise PlanError(call, fact, self._remedy(args, kwargs, call))
        by_position = tuple(given[name] for name in wanted[: self.positions])
        return by_position, {name: given[name] for name in self.keywords}

    def _remedy(self, args: Args, kwargs: Kwargs, call: str) -> str:
        """Return the remedy for a call that does not fit, such as unpacking a loader's list."""
        is_list = len(args) == 1 and not kwargs and isinstance(args[0], (list, tuple))
        if is_list and len(args[0]) == self.positions + len(self.keywords):
            return f"pm.{call}(*batch), with a star: each of its {len(args[0])} entries is an argument"
        return "pass what example_inputs holds"


def is_call_in_one(args: Args, kwargs: Kwargs, names: Collection[str], form: CallForm | None) -> bool:
    """Tell whether a call is one mapping of keywords, as tokenizers make them: `step(batch)` for `step(**batch)`.

    `names` are those of the model's arguments; a model that was compiled for one argument may take a mapping itself.
    """
    if len(args) != 1 or kwargs or not isinstance(args[0], Mapping):
        return False
    if form is not None and form.positions == 1 and not form.keywords:
        return False
    return set(args[0]) <= {*names, "targets", *(form.keywords if form else ())}


def _call_text(positions: int, keywords: Collection[str]) -> str:
    """Return `2 arguments by position and mask=`."""
    parts = []
    if positions or not keywords:
        parts.append(f"{positions} argument{'s' * (positions != 1)} by position")
    if keywords:
        parts.append(", ".join(f"{name}=" for name in keywords))
    return " and ".join(parts)


def expected_shape(program: Program, spec: InputSpec, replicas: int) -> tuple[int, ...]:
    """Return the shape of an argument that holds the rows of `replicas` replicas."""
    if not spec.batched:
        return spec.shape
    return (spec.shape[0] * program.num_microbatches * replicas, *spec.shape[1:])


def check_structure(program: Program, args: Args, kwargs: Kwargs, call: str = "step") -> list[Any]:
    """Return the leaves of a call; raise PlanError if its arguments differ from the compiled ones."""
    leaves, tree = flatten(args, kwargs)
    if tree != program.tree:
        fact = "its arguments differ from the compiled ones in number, keywords or nesting"
        raise PlanError(call, fact, "pass what example_inputs holds")
    return leaves


def is_call_of(program: Program, args: Args, kwargs: Kwargs, replicas: int) -> bool:
    """Tell whether a call has the compiled structure, constants, shapes and dtypes."""
    leaves, tree = flatten(args, kwargs)
    if tree != program.tree:
        return False
    if not all(is_same_constant(leaves[number], value) for number, value in program.constants):
        return False
    for spec in program.inputs:
        x = leaves[spec.leaf]
        if tuple(x.shape) != expected_shape(program, spec, replicas) or str(x.dtype) != f"torch.{spec.dtype}":
            return False
    return True


def is_same_constant(given: Any, compiled: Any) -> bool:
    """Tell whether two constants of a call are the same value of the same type."""
    if type(given) is not type(compiled):
        return False
    # By text, -0.0 is not 0.0, and a NaN equals itself.
    return repr(given) == repr(compiled) if isinstance(given, (float, complex)) else given == compiled


def cut(
    program: Program,
    leaves: Sequence[Any],
    names: Collection[str],
    replica: int,
    device: torch.device,
    replicas: int = 1,
) -> list[dict[str, torch.Tensor]]:
    """Return the microbatches of replica `replica` of the `replicas` whose rows the leaves hold, with the inputs `names`.

    Their number is that of the program, or less if replicas have other numbers of rows.
    """
    count = program.num_microbatches
    if program.row_counts:
        leaves, rows = _own_rows(program, leaves, replica, replicas)
        count = rows // program.rows
    microbatches: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
    for spec in program.inputs:
        if spec.name not in names:
            continue
        x = leaves[spec.leaf].detach()
        if spec.batched:
            # Ranks as threads are called with the rows of all replicas, a process with those of its replica.
            rows = spec.shape[0] * count
            if x.shape[0] > rows:
                x = part_of_rows(x, replica, x.shape[0] // rows, spec.blocks)
        x = _to(x, device)
        # Views: microbatches share the memory of the batch. Unbatched tensors are whole in each of them.
        pieces = [x] * count
        if spec.batched and count > 1:
            pieces = [part_of_rows(x, number, count, spec.blocks) for number in range(count)]
        for microbatch, piece in zip(microbatches, pieces, strict=True):
            microbatch[spec.name] = piece
    return microbatches


def _own_rows(
    program: Program, leaves: Sequence[Any], replica: int, replicas: int
) -> tuple[Sequence[Any], int]:
    """Return a call with the rows of one replica, if replicas differ, and their number."""
    batched = [spec.leaf for spec in program.inputs if spec.batched]
    # A process is called with the rows of its replica.
    if replicas == 1:
        return leaves, len(leaves[batched[0]])
    rows, first = program.row_counts[replica], sum(program.row_counts[:replica])
    own = [x.narrow(0, first, rows) if leaf in batched else x for leaf, x in enumerate(leaves)]
    return own, rows


def part_of_rows(x: torch.Tensor, number: int, parts: int, blocks: int = 1) -> torch.Tensor:
    """Return part `number` of `parts` equal parts of a batch: that part of each block, concatenated.

    With one block the result is a view.
    """
    if blocks == 1:
        rows = x.shape[0] // parts
        return x.narrow(0, number * rows, rows)
    folded = x.unflatten(0, (blocks, parts, -1))
    return folded.select(1, number).flatten(0, 1)


def _to(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `x` on `device`; from the host to a CUDA device without waiting."""
    if device.type == "cuda" and x.device.type == "cpu":
        # Through a pinned copy: the transfer runs later, when the caller may have overwritten `x`.
        pinned = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
        return pinned.copy_(x).to(device, non_blocking=True)
    # A tensor already on the device is not copied: the step then reads the caller's memory.
    return x.to(device)


def rows_of_replicas(total: int, replicas: int, rows: int) -> tuple[int, ...]:
    """Return the rows of an evaluation for each replica; a microbatch of the program has `rows` rows.

    If replicas do not divide them, parts that divide a microbatch are dealt out: of 5 rows 3 and 2.
    """
    unit = total // replicas if total % replicas == 0 else math.gcd(total, rows)
    each, more = divmod(total // max(unit, 1), replicas)
    return tuple(unit * (each + (replica < more)) for replica in range(replicas))


def take_rows(
    program: Program | None, args: Args, kwargs: Kwargs, replicas: int, replica: int, even: bool = True
) -> tuple[Args, Kwargs]:
    """Return a call with the rows of one replica, given a call with the rows of all `replicas`.

    The program knows which arguments are batched; before there is one, those whose dim 0 has the batch's length
    (`batch_rows`). PlanError where the replicas do not divide the rows, unless they need not be `even`.
    """
    leaves, tree = tree_flatten((args, kwargs))
    # Indices of the leaves with a dim 0: a 0-d tensor has no rows to divide.
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not tensors:
        return args, kwargs
    batched = [i for i in tensors if leaves[i].shape[0] == batch_rows(leaves, replicas)]
    blocks = 1
    if program is not None:
        # Not its sizes: an evaluation may have others.
        check_structure(program, args, kwargs)
        batched = [spec.leaf for spec in program.inputs if spec.batched and spec.leaf in tensors]
        blocks = program.row_blocks
    for i in batched:
        rows = leaves[i].shape[0]
        if not even and rows % replicas and program is not None:
            counts = rows_of_replicas(rows, replicas, program.rows)
            leaves[i] = leaves[i].narrow(0, sum(counts[:replica]), counts[replica])
            continue
        if rows % (replicas * blocks):
            apart = f" in {blocks} blocks" if blocks > 1 else ""
            fact = f"{rows} rows{apart} do not divide over d={replicas}"
            raise PlanError("local_batch", fact, "a batch that d divides: DataLoader(..., drop_last=True)")
        leaves[i] = part_of_rows(leaves[i], replica, replicas, blocks)
    return tree_unflatten(leaves, tree)  # type: ignore[return-value]


def batch_rows(leaves: Sequence[Any], pieces: int) -> int:
    """Return the number of rows of a call: dim 0 of its first tensor.

    Exceptions are a first tensor of one entry (a temperature) where others have more rows, and one of one row that
    `pieces` do not divide: then it is the most frequent size of the others, the first of equally frequent ones.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]
    sizes = [x.shape[0] for x in tensors]
    first = tensors[0]
    others = sizes[1:] if tuple(first.shape) == (1,) else [size for size in sizes if size > 1]
    if sizes[0] != 1 or not others or (first.dim() > 1 and pieces == 1):
        return sizes[0]
    return max(others, key=others.count)


def fitting_microbatches(asked: int | None, args: Args, kwargs: Kwargs, replicas: int) -> int | None:
    """Return the requested number of microbatches, or None (the default) if it does not divide an
    evaluation's rows: without gradients any number gives the same loss.
    """
    pieces = replicas * (asked or 1)
    leaves = [
        leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor) and leaf.dim()
    ]
    return None if leaves and batch_rows(leaves, pieces) % pieces else asked


def flatten(args: Args, kwargs: Kwargs) -> tuple[list[Any], str]:
    """Return the leaves of a call, and a text of their structure."""
    # A shortcut for tensors by position, which avoids walking a tree.
    if not kwargs and all(isinstance(arg, torch.Tensor) for arg in args):
        return list(args), _tree_of_leaves(len(args))
    leaves, tree = tree_flatten((args, kwargs))
    return leaves, str(tree)


@cache
def _tree_of_leaves(count: int) -> str:
    return str(tree_flatten(((0,) * count, {}))[1])


AGAIN = "or parallelize again for other sizes"
OTHER_SIZES = "parallelize(..., shapes='exact' or 'bucket'), for batches of several sizes"


def check_kinds(program: Program, leaves: Sequence[Any], call: str = "step") -> None:
    """Raise PlanError with every argument that is not a tensor of the compiled dtype and number of dims."""
    facts = []
    for spec in program.inputs:
        leaf, dtype = leaves[spec.leaf], dtype_of(spec.dtype)
        is_tensor = isinstance(leaf, torch.Tensor)
        if not is_tensor or leaf.dim() != len(spec.shape) or leaf.dtype != dtype:
            facts.append(
                f"{spec.name} is {value_text(leaf)}, but was compiled as a tensor {_text(spec.shape, dtype)}"
            )
    if facts:
        remedy = "tensors of these dtypes and numbers of dims; their sizes may differ"
        raise PlanError(call, "; ".join(facts), remedy)


def check_call(
    program: Program, args: tuple[Any, ...], kwargs: dict[str, Any], replicas: int, call: str = "step"
) -> list[Any]:
    """Return the leaves of a call; raise PlanError with every argument that differs from the compiled one."""
    leaves = check_structure(program, args, kwargs, call)
    facts, why, remedies, has_other_sizes = [], "", [], False
    for spec in program.inputs:
        leaf, shape, dtype = leaves[spec.leaf], expected_shape(program, spec, replicas), dtype_of(spec.dtype)
        # That these are the rows was agreed on when the program was chosen.
        if spec.batched and program.row_counts:
            shape = (len(leaf), *shape[1:])
        if not isinstance(leaf, torch.Tensor):
            facts.append(f"{spec.name} is {value_text(leaf)}, expected a tensor {_text(shape, dtype)}")
            remedies.append("pass what example_inputs holds")
        elif tuple(leaf.shape) != shape or leaf.dtype != dtype:
            facts.append(f"{spec.name} is {value_text(leaf)}, expected {_text(shape, dtype)}")
            if spec.batched and _is_other_batch(leaf, shape):
                why = _rows_text(program, spec, replicas)
            remedies.append(_remedy(program, spec, leaf, shape, replicas))
            has_other_sizes |= leaf.dtype == dtype and leaf.dim() == len(shape)
        elif leaf.requires_grad and call == "step":
            _refuse_gradient(spec.name, leaf)
    # The traced graph holds these values: another one given here would be ignored.
    for number, value in program.constants:
        if not is_same_constant(leaves[number], value):
            facts.append(f"argument {number} is {value_text(leaves[number])}, but was compiled as {value!r}")
            remedies.append("pass what example_inputs holds")
    if facts:
        # Inputs and targets have the same fault as a rule.
        again = f"or {OTHER_SIZES}; " * has_other_sizes
        remedy = f"{'; '.join(dict.fromkeys(remedies))}; {again}{AGAIN}"
        raise PlanError(call, "; ".join(facts) + why, remedy)
    return leaves


def _refuse_gradient(name: str, leaf: torch.Tensor) -> None:
    """Raise PlanError: backward would give an argument its gradient, and what it was computed from, on one device."""
    origin = (
        "is a leaf with requires_grad" if leaf.is_leaf else "was computed from tensors with requires_grad"
    )
    remedy = "make the module that computes it a part of the model, or detach() it if no gradient is intended"
    raise PlanError("step", f"{name} {origin}, but a step does not return gradients to its arguments", remedy)


def _is_other_batch(leaf: torch.Tensor, shape: tuple[int, ...]) -> bool:
    """Tell whether the number of rows is the first thing that differs."""
    return leaf.dim() == len(shape) and leaf.dim() > 0 and leaf.shape[0] != shape[0]


def _rows_text(program: Program, spec: InputSpec, replicas: int) -> str:
    """Return the reason for the expected number of rows."""
    rows, m, d = spec.shape[0], program.num_microbatches, program.mesh.replicas
    if d == 1:
        return f" (the global batch of example_inputs has {rows * m} rows)"
    whole = f"the global batch of example_inputs has {rows * m * d} rows"
    return f" ({whole}; step takes {'all of them' if replicas == d else f'the {rows * m} of one of {d} replicas'})"


def _remedy(
    program: Program, spec: InputSpec, leaf: torch.Tensor, shape: tuple[int, ...], replicas: int
) -> str:
    """Return what to do about a tensor of another shape or dtype."""
    dtype = dtype_of(spec.dtype)
    if leaf.dtype != dtype:
        return f"{spec.name}.to({dtype})"
    if leaf.dim() != len(shape):
        return "pass what example_inputs holds"
    if not _is_other_batch(leaf, shape):
        dim = next(i for i, size in enumerate(shape) if size != leaf.shape[i])
        padded = f"padding='max_length', truncation=True, max_length={shape[dim]}"
        return f"pad or cut dim {dim} to {shape[dim]} in every step (a tokenizer: {padded})"
    if not spec.batched:
        return "pass what example_inputs holds"
    whole = expected_shape(program, spec, program.mesh.replicas)[0]
    if replicas < program.mesh.replicas and leaf.shape[0] == whole:
        return "pm.step(*pm.local_batch(...)) cuts a global batch to this replica's rows"
    if leaf.shape[0] < shape[0]:
        return "drop a smaller last batch (DataLoader(..., drop_last=True))"
    return "pass a global batch as large as that of a step as example_inputs"


def value_text(value: Any) -> str:
    """Return what an argument is, on a line: of a tensor its shape and dtype."""
    if isinstance(value, torch.Tensor):
        return _text(value.shape, value.dtype)
    text = repr(value)
    return text if len(text) <= 80 else a_type(value)


def _text(shape: Collection[int], dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"
