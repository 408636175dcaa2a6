"""The form of calls: arguments by position or by name, one mapping of them, and the rows of a replica.

In: the arguments of `pm.step`. Out: the same in the form of the call that was compiled.

    calls = Calls(run, ("ids", "targets"), is_compiled_again=True)
    args, kwargs = calls.in_form((ids,), {"targets": targets})
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from autoptd.errors import PlanError
from autoptd.model.run import Run
from autoptd.options.buckets import EXACT
from autoptd.program.program import Program
from autoptd.runtime.step.microbatches import CallForm, flatten, is_call_in_one, take_rows
from autoptd.subject.call import Call


class Calls:
    """The form of calls; `names` are those of the model's own arguments.

    `is_compiled_again`: evaluations have separate programs, whose replicas may have different numbers of
    rows.
    """

    def __init__(self, run: Run, names: Sequence[str], *, is_compiled_again: bool) -> None:
        self._run, self._names = run, tuple(names)
        self._is_compiled_again = is_compiled_again
        # The form of the call that was compiled for: other spellings of it are brought into this form.
        self._form: CallForm | None = None
        # Whether rows were cut for one of several replicas before it was known which belong together.
        self._cut_unseen = False
        # Tensors that were cut for an evaluation, with the rows of the whole batch.
        self._unequal: list[tuple[int, weakref.ref[torch.Tensor]]] = []

    def compiled(self, program: Program, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take the form of the first call that was compiled; PlanError where rows were cut that belong
        together.
        """
        if self._cut_unseen and program.row_blocks > 1:
            fact = f"the rows of {program.row_blocks} blocks of the batch belong together, which was not known when it was cut"
            raise PlanError("local_batch", fact, "example_inputs= of parallelize, a global batch")
        self._form = CallForm(self._names, len(args), tuple(kwargs))

    def in_form(self, args: tuple[Any, ...], kwargs: dict[str, Any], call: str = "step") -> Call:
        """Bring a call into the form of the compiled one, where that is known."""
        args, kwargs = self._in_full(args, kwargs)
        return self._form.arrange(args, kwargs, call) if self._form else (args, kwargs)

    def _in_full(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Return a call whose keywords are one mapping with keywords."""
        return ((), dict(args[0])) if self._is_in_one(args, kwargs) else (args, kwargs)

    def _is_in_one(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return is_call_in_one(args, kwargs, self._names, self._form)

    def local_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Cut a global batch to the rows that `step` takes here: this replica's under torchrun, all of them
        in local.

        Returns the positional arguments as a tuple, or keyword arguments as a dict; given both, the pair of
        the two: `pm.step(*pm.local_batch(x, y))`, `pm.step(**pm.local_batch(ids=x))`. Of a mapping of
        keywords, such as a tokenizer makes, a dict: `pm.step(pm.local_batch(batch))`. Rows that d does not
        divide are for `eval_step` alone.
        """
        is_in_one = self._is_in_one(args, kwargs)
        if self._run.is_process:
            args, kwargs = self._own_rows(*self.in_form(args, kwargs))
        if is_in_one:
            args, kwargs = self._in_full(args, kwargs)
            return {**dict(zip(self._names, args, strict=False)), **kwargs}
        if args and kwargs:
            return args, kwargs
        return kwargs or args

    def _own_rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        replica, replicas = self._run.share
        program = self._run.compiled
        self._cut_unseen |= program is None and replicas > 1
        # In an evaluation, replicas may have other numbers of rows.
        can_be_unequal = (
            program is not None
            and program.row_blocks == 1
            and self._is_compiled_again
            and self._run.options.shapes.how in (None, EXACT)
        )
        share = take_rows(program, args, kwargs, replicas, replica, even=not can_be_unequal)
        if can_be_unequal:
            # A step with these would end on some of the ranks.
            pairs = zip(flatten(args, kwargs)[0], flatten(*share)[0], strict=True)
            cut = [(len(x), weakref.ref(own)) for x, own in pairs if own is not x]
            self._unequal = [known for known in self._unequal if known[1]() is not None]
            self._unequal += [known for known in cut if known[0] % replicas]
        return share

    def refuse_unequal(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise PlanError on all ranks for a step with tensors that have other numbers of rows on other
        replicas.
        """
        leaves = flatten(args, kwargs)[0] if self._unequal else []
        for rows, ref in self._unequal:
            if any(leaf is ref() for leaf in leaves):
                mesh = self._run.options.mesh
                fact = f"{rows} rows do not divide over {mesh.product_text(mesh.batch_axes)}, which is for pm.eval_step only"
                raise PlanError("pm.step", fact, "a batch that d divides: DataLoader(..., drop_last=True)")
