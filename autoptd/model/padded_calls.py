"""How calls of other lengths are padded: to the fewest lengths, and only where the model passes over the padding.

In: the run, what compiles, and its first call. Out: calls of the length of a bucket, once padding was shown to change
neither the loss nor gradients.

    padding = PaddedCalls(run, compiler, call)
    args, kwargs = padding.padded_call("step", leaves, tree, padding.bucket(longest), rows)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoptd.compat import tree_flatten, tree_unflatten
from autoptd.errors import PlanError
from autoptd.model.run import ModelCompiler, Run
from autoptd.options.buckets import Buckets, bucket_lengths
from autoptd.program.program import Program
from autoptd.runtime.step.pad_batch import BatchPadding, lead_of
from autoptd.subject.call import Call
from autoptd.trace.padding import labels_of

EVALUATION = "eval_step"
TOKENS, ROWS = "padded tokens", "added rows"
UNKNOWN_ROWS = (
    "the batch has fewer rows than that of example_inputs, and no argument by which the loss could pass over rows "
    "that are added: no labels with an ignore_index, no mask",
    "drop a smaller last batch (DataLoader(..., drop_last=True))",
)
# Rows of the runs that show whether padding changes anything.
PROOF_ROWS = 4


class PaddedCalls(BatchPadding):
    """How the calls of a run are padded; `call` was the first one."""

    def __init__(self, run: Run, compiler: ModelCompiler | None, call: Call) -> None:
        first, options, shapes = run.program, run.options, run.options.shapes.how
        assert shapes is not None
        check_updates(first)
        length = lead_of(first).shape[1]
        lengths = bucket_lengths(shapes, length, options.token_unit)
        pad = dict(getattr(shapes, "pad", {}))
        super().__init__(first, lengths, labels_of(first.graphs["TRACED"]), pad, run.started("step").replicas)
        self._run, self._compiler = run, compiler
        self._is_checked = not isinstance(shapes, Buckets) or shapes.check
        # The calls that rows were added to, without changing the loss, with the arguments that are blank in
        # these rows.
        self._blanks: dict[str, tuple[str, ...]] = {}
        leaves, tree = tree_flatten(call)
        self.prove_length("step", leaves, tree, length)

    def padded_call(self, call: str, leaves: Sequence[Any], tree: Any, bucket: int, rows: int) -> Call:
        """Return a call of `rows` rows padded to a bucket. Collective."""
        if rows < self.rows and call not in self._blanks:
            self._blanks[call] = self._find_blank(call, leaves, tree)
        blank = self._blanks.get(call, ())
        return tree_unflatten(self.padded(leaves, bucket, self.rows, blank), tree)  # type: ignore[return-value]

    def prove_length(self, call: str, leaves: Sequence[Any], tree: Any, bucket: int) -> None:
        """Raise PlanError on all ranks unless the model passes over the tokens that fill a bucket up."""

        def prove() -> None:
            short = self.cut(leaves, min(self.length_of(leaves), max(1, 3 * bucket // 4)), PROOF_ROWS)
            self._compare(call, tree, short, bucket, self.rows_of(short))

        if bucket > 1 and self._is_checked:
            self._run.together(prove)

    def _find_blank(self, call: str, leaves: Sequence[Any], tree: Any) -> tuple[str, ...]:
        """Return the fewest arguments that are to be blank in added rows. Collective.

        PlanError where the model reads such rows all the same.
        """
        refused = PlanError(f"pm.{call}", *UNKNOWN_ROWS)
        if not self._is_checked:
            # Which arguments the loss reads as a mask, only trying shows.
            if self.labels:
                return ()
            raise refused
        for number, blank in enumerate(self.possible_blanks()):
            try:
                self._run.together(lambda: self._prove_rows(call, blank, leaves, tree))  # noqa: B023
                return blank
            except PlanError as error:
                # A refusal is the answer of all ranks, whatever data each has.
                refused = error if number == 0 else refused
        raise refused

    def _prove_rows(self, call: str, blank: tuple[str, ...], leaves: Sequence[Any], tree: Any) -> None:
        """Raise PlanError unless the model passes over rows whose labels are all ignored, and that are
        `blank`.
        """
        length = self.length_of(leaves)
        short = self.cut(leaves, length, PROOF_ROWS)
        self._compare(call, tree, short, length, self.rows_of(short) + 1, blank)

    def _compare(
        self,
        call: str,
        tree: Any,
        given: Sequence[Any],
        length: int,
        rows: int,
        blank: tuple[str, ...] = (),
    ) -> None:
        """Raise PlanError unless the model ignores the padding of a call to `length` tokens and `rows` rows.

        It is tried with other numbers too.
        """
        if self._compiler is None:
            fact = "there is no model to check that it passes over padding"
            raise PlanError("shapes=", fact, "autoptd.parallelize(model, ...)")
        own_length, own_rows = self.length_of(given), self.rows_of(given)
        what = TOKENS if length > own_length else ROWS
        for number, short in enumerate([given, *self.varied(given)]):
            padded = self.padded(short, length, rows, blank)
            others = self.with_other_tokens(padded, own_length, own_rows)
            calls: list[Any] = [tree_unflatten(list(leaves), tree) for leaves in (short, padded, others)]
            self._compiler.prove(calls, what, evaluates=call == EVALUATION, is_made_up=number > 0)


def check_updates(program: Program) -> None:
    """Raise PlanError where padding would count in a buffer: whether it would is not seen from a loss."""
    if program.updated_by_batch:
        fact = f"buffer {program.updated_by_batch[0]} is updated by what depends on the batch, and padding would count"
        raise PlanError("shapes=", fact, "shapes='exact'")
