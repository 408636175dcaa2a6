"""Compare the arguments of `step` with the compiled ones.

In: a program, one call, and the number of replicas whose rows it holds. Out: nothing, or one PlanError with all
differences in structure, shapes, dtypes and constants: the expected value, the reason, and the remedy.

    check_call(program, args, kwargs, replicas=1)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from autoptd.errors import PlanError, a_type
from autoptd.program.program import Program
from autoptd.program.specs import InputSpec
from autoptd.runtime.params.parts import dtype_of
from autoptd.runtime.step.microbatches import check_structure, expected_shape, is_same_constant

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
                f"{spec.name} is {value_text(leaf)}, compiled was a tensor {_text(spec.shape, dtype)}"
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
            facts.append(f"{spec.name} is {value_text(leaf)}, expected is a tensor {_text(shape, dtype)}")
            remedies.append("pass what example_inputs holds")
        elif tuple(leaf.shape) != shape or leaf.dtype != dtype:
            facts.append(f"{spec.name} is {value_text(leaf)}, expected is {_text(shape, dtype)}")
            if spec.batched and _is_other_batch(leaf, shape):
                why = _rows_text(program, spec, replicas)
            remedies.append(_remedy(program, spec, leaf, shape, replicas))
            has_other_sizes |= leaf.dtype == dtype and leaf.dim() == len(shape)
        elif leaf.requires_grad and call == "step":
            _refuse_gradient(spec.name, leaf)
    # The traced graph holds these values: another one given here would be ignored.
    for number, value in program.constants:
        if not is_same_constant(leaves[number], value):
            facts.append(f"argument {number} is {value_text(leaves[number])}, compiled was {value!r}")
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
    remedy = "make what it comes from a part of the model; or detach() it, where no gradient is meant"
    raise PlanError("step", f"{name} {origin}, and a step hands no gradient back to its arguments", remedy)


def _is_other_batch(leaf: torch.Tensor, shape: tuple[int, ...]) -> bool:
    """Tell whether the number of rows is the first thing that differs."""
    return leaf.dim() == len(shape) and leaf.dim() > 0 and leaf.shape[0] != shape[0]


def _rows_text(program: Program, spec: InputSpec, replicas: int) -> str:
    """Return the reason for the expected number of rows."""
    rows, m, d = spec.shape[0], program.num_microbatches, program.mesh.replicas
    if d == 1:
        return f" (the global batch of example_inputs has {rows * m} rows)"
    whole = f"the global batch of example_inputs has {rows * m * d} rows"
    return f" ({whole}, of which step takes {'all' if replicas == d else f'the {rows * m} of one of {d} replicas'})"


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
    return "example_inputs=the global batch, as large as that of a step"


def value_text(value: Any) -> str:
    """Return what an argument is, on a line: of a tensor its shape and dtype."""
    if isinstance(value, torch.Tensor):
        return _text(value.shape, value.dtype)
    text = repr(value)
    return text if len(text) <= 80 else a_type(value)


def _text(shape: Collection[int], dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


__all__ = ["check_call", "check_kinds", "value_text"]
