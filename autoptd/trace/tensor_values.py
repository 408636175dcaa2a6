"""Python code that needs the value of a tensor while it is traced: branches, checks, sizes, numbers.

A traced tensor has no value. Some branches can be resolved all the same:

- Random numbers against a bound that they do not cross: `if torch.rand(1) > self.dropout` with a dropout of 0.
- Checks, which do nothing but raise: `if x.isinf().any(): raise ValueError(...)`, `assert (x >= 0).all()`. The trace
  follows the branch that does not raise. Whether the exception leaves the forward, or is caught in it, is found by
  raising it: the first trace that meets a check ends there, and the next one passes it.

    checks = Checks()
    branches = Branches(checks)
    branches.see(torch.rand, (1,), made)
    branches.outcome(made > 0.0, frame)      # True; None where the value is not known

An operator whose result has a data-dependent size is refused, with its line and an alternative of known size
(`value_error`). A number that the forward turns into a tensor stays in the graph, also on meta (`make_tensor`).
"""

from __future__ import annotations

import dis
import operator
import os
import types
import warnings
from collections.abc import Callable, Iterator, Set
from typing import Any, TypeVar

import torch
from torch import Tensor

from autoptd.compat import DynamicOutputShapeException, FakeTensor
from autoptd.errors import TraceError
from autoptd.options.elsewhere import EXPERTS
from autoptd.trace.users import line_of

DRAWN = {torch.rand, torch.rand_like}
COMPARISONS = {getattr(place, name): name for place in (torch, Tensor) for name in ("gt", "ge", "lt", "le")}
RANDOM_REMEDY = "switch it off (a probability of 0), or draw outside and pass the numbers as an input"
Place = tuple[types.CodeType, int]
Error = TypeVar("Error", bound=Exception)


class Checks:
    """Track the checks of a model.

    `passed` are known to end the call when they raise; `tried` has raised in the running trace. `refused` is the first
    error by which the running trace was refused.
    """

    def __init__(self) -> None:
        self.passed: set[Place] = set()
        self.tried: Place | None = None
        self.refused: Exception | None = None

    def refuse(self, error: Error) -> Error:
        """Record an error that refuses the trace: the model may swallow it, and do what it does not do with values."""
        self.refused = self.refused or error
        return error

    def has_left(self, error: BaseException) -> bool:
        """Tell whether the tried check raised `error`, which left the forward; if so, pass it from now on."""
        if self.tried is None or not any(_is_raised_in(one, self.tried[0]) for one in _chain(error)):
            return False
        self.passed.add(self.tried)
        self.tried = None
        return True

    def site(self) -> str:
        """Return the line of the tried check."""
        assert self.tried is not None
        return _site(self.tried)

    def warn(self, known: Set[Place]) -> None:
        """Warn about the checks that the ranks will not make, besides those that are `known`."""
        for site in sorted({_site(place) for place in self.passed - known}):
            text = f"{site}: raises on the values of a tensor, which no step checks"
            warnings.warn(f"{text}: make this check in the training loop", stacklevel=2)


class Branches:
    """Track known facts about the values of tensors in one trace."""

    def __init__(self, checks: Checks) -> None:
        self._checks = checks
        # id -> (tensor, its version when drawn); keeping the tensor alive keeps its id unique.
        self._drawn: dict[int, tuple[Tensor, int]] = {}
        self._compared: dict[int, tuple[Tensor, int, bool | None]] = {}

    def see(self, func: Any, args: tuple[Any, ...], made: Any) -> None:
        """Record the result of a call if its values are known to be within bounds."""
        if func in DRAWN:
            self._drawn[id(made)] = (made, made._version)
        elif func in COMPARISONS and len(args) == 2 and self._is_drawn(args[0]):
            known = compared(args[0].dtype, COMPARISONS[func], args[1])
            self._compared[id(made)] = (made, made._version, known)

    def _is_drawn(self, x: Any) -> bool:
        return id(x) in self._drawn and self._drawn[id(x)][1] == x._version

    def outcome(self, x: Tensor, frame: types.FrameType) -> bool | None:
        """Return `bool(x)` in `frame`, None if unknown; TraceError if a random number decides it."""
        if not isinstance(x, FakeTensor) or x.constant is not None:
            return None
        if id(x) in self._compared and self._compared[id(x)][1] == x._version:
            known = self._compared[id(x)][2]
            if known is None:
                fact = "a random number decides a branch (LayerDrop does): the traced graph would repeat one outcome"
                raise TraceError(line_of(frame), fact, RANDOM_REMEDY)
            return known
        raising = raises_where(frame.f_code, frame.f_lasti)
        if raising is None or self._checks.tried is not None:
            return None
        place = (frame.f_code, frame.f_lasti)
        if place in self._checks.passed:
            return not raising
        self._checks.tried = place
        return raising


def compared(dtype: torch.dtype, name: str, bound: Any) -> bool | None:
    """Return how numbers drawn from [0, 1) compare with `bound`; None where some do and some do not.

    Drawn numbers are assumed to be nonzero: in float32, 0 has a probability of 2**-24.
    """
    if not isinstance(bound, (int, float)) or 0 < bound < 1:
        return None
    # In 16 bits, one number in 256 is 0.
    if bound == 0 and name in ("gt", "le") and dtype.itemsize < 4:
        return None
    return bool(getattr(operator, name)(0.5, bound))


def raises_where(code: types.CodeType, offset: int) -> bool | None:
    """Return the truth value for which the branch at `offset` of `code` only leads to a `raise`."""
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    index = _index(code)
    at = index.get(offset, len(steps))
    # From Python 3.13 on a branch takes a bool, which the preceding instruction makes.
    if at + 1 < len(steps) and steps[at].opname == "TO_BOOL":
        at += 1
    if at == len(steps) or not steps[at].opname.startswith("POP_JUMP"):
        return None
    is_taken_if = steps[at].opname.endswith("TRUE")
    sides = {is_taken_if: index[steps[at].argval], not is_taken_if: at + 1}
    raising = [value for value, start in sides.items() if _only_raises(steps, index, start)]
    return raising[0] if len(raising) == 1 else None


def _index(code: types.CodeType) -> dict[int, int]:
    """Return the index of each instruction by offset; a jump may target the EXTENDED_ARG words before it."""
    found: dict[int, int] = {}
    number = 0
    for step in dis.get_instructions(code):
        found[step.offset] = number
        number += step.opname != "EXTENDED_ARG"
    return found


def _only_raises(steps: list[dis.Instruction], index: dict[int, int], start: int) -> bool:
    waiting, seen = [start], set()
    while waiting:
        at = waiting.pop()
        step = steps[at]
        if at in seen or step.opname in ("RAISE_VARARGS", "RERAISE"):
            continue
        if step.opname.startswith(("RETURN", "YIELD", "INSTRUMENTED")):
            return False
        seen.add(at)
        if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs:
            waiting.append(index[step.argval])
        if not step.opname.startswith(("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE")):
            waiting.append(at + 1)
    return True


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an exception and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_raised_in(error: BaseException, code: types.CodeType) -> bool:
    """Tell whether a `raise` in `code` itself raised the error, and not a function that it called."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return (
        last is not None
        and last.tb_frame.f_code is code
        and dis.opname[code.co_code[last.tb_lasti]] == "RAISE_VARARGS"
    )


def _site(place: Place) -> str:
    code, offset = place
    line = max(
        (line for start, end, line in code.co_lines() if start <= offset < end and line is not None),
        default=code.co_firstlineno,
    )
    return f"{os.path.basename(code.co_filename)}:{line}"


COUNTS = (
    "F.one_hot(labels.flatten(), num_classes).sum(0), whose size does not depend on the labels; of weights, "
)
COUNTS += "(F.one_hot(labels, num_classes) * weights[:, None]).sum(0)"
ROWS = "torch.where(mask[:, None], x, 0).sum() / mask.sum() for a mean of x[mask], labels of -100 (ignore_index) for a loss of "
ROWS += "some rows, mask.sum() for their number; of a mask that never changes, its indices as a buffer; for the experts of "
ROWS += 'transformers, from_config(config, experts_implementation="grouped_mm")'
DISTINCT = "F.one_hot(labels.flatten(), num_classes).sum(0), whose entries above 0 are the values that occur"
REPEATS = (
    "output_size=, where the sum of the repeats is known; rows of a batch are repeated in the data loader"
)
CLASSES = "F.one_hot(labels, num_classes)"
VALUE_REMEDY = (
    "compute with the tensor itself (x * scale, torch.where, gather; torch.arange(n) < length for a slice), "
)
VALUE_REMEDY += "or keep the number as an attribute"
OTHERS = "use torch.where or a mask of fixed size"
# By the names of torch functions and aten operators.
REMEDIES = {"bincount": COUNTS, "repeat_interleave": REPEATS, "one_hot": CLASSES}
REMEDIES |= dict.fromkeys(("nonzero", "nonzero_numpy", "argwhere", "where", "masked_select", "index"), ROWS)
REMEDIES |= dict.fromkeys(("unique", "_unique2", "unique_dim", "unique_consecutive"), DISTINCT)
# Names under which indexing and `torch.unique` appear.
CALLED = {
    "__getitem__": "index",
    "_return_output": "unique",
    "_return_inverse": "unique",
    "_return_counts": "unique",
}


def value_error(error: BaseException, called: Callable[..., Any] | None, site: str) -> TraceError:
    """Return the refusal of a line in which torch needs values of a tensor, in its function `called`."""
    name = getattr(called, "__name__", "")
    name = CALLED.get(name, name)
    if name in REMEDIES or isinstance(error, DynamicOutputShapeException):
        fact = f"the size of {name}'s result depends on the values of a tensor"
        return TraceError(site, fact, REMEDIES.get(name, OTHERS))
    fact = "the value of a tensor becomes a Python number, and a branch or a size may depend on it"
    return TraceError(site, fact, f"{VALUE_REMEDY}; {EXPERTS}" if "for expert" in site else VALUE_REMEDY)


def make_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Call `torch.tensor(*args, **kwargs)`, or `torch.full` for a number on meta."""
    is_number = len(args) == 1 and isinstance(args[0], (bool, int, float))
    if is_number and kwargs.keys() <= {"dtype", "device"} and _is_meta(kwargs.get("device")):
        return torch.full((), args[0], **kwargs)
    return torch.tensor(*args, **kwargs)


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"
