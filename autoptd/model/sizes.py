"""The programs of a run whose batches have several sizes: one for each, compiled when it first comes.

In: the calls of `step` and `eval_step`, and a way to compile. Out: the program for a call, which the ranks use from then on,
and the call, padded where that was asked for. All programs share the ranks' parameters, and so the optimizer; all ranks take
part in each call.

    programs = Programs(options, compiler, are_processes=False)
    programs.begin(first, ranks, args, kwargs)
    program, args, kwargs = programs.find("step", ranks, args, kwargs, compile)
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from autoptd.compat import tree_flatten, tree_unflatten
from autoptd.errors import AutoptdError, PlanError, RuntimeFault, TraceError
from autoptd.ir.shapes import EXACT, MAX_PROGRAMS, Buckets, bucket_lengths
from autoptd.ir.types import ZIGZAG
from autoptd.model.compiling import ModelCompiler
from autoptd.options import Options
from autoptd.program.program import Program
from autoptd.runtime.checkpoint.restore import agree, attempted
from autoptd.runtime.checks import sizes as check_sizes
from autoptd.runtime.checks.call import check_call, check_kinds
from autoptd.runtime.checks.sizes import Sizes, agree_on_sizes
from autoptd.runtime.step.launch import COMPILING, RunningRanks
from autoptd.runtime.step.microbatches import check_structure, expected_shape, rows_of_replicas
from autoptd.runtime.step.pad_batch import BatchPadding, lead_of
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
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
# (args, kwargs, the rows of every replica where they are not equal)
Compile = Callable[[Args, Kwargs, tuple[int, ...]], Program]


class Programs:
    """Programs by what they are for; at most so many that train, and as many that evaluate.

    `are_processes`: the ranks may be called with different batches. Threads have one for all of them.
    """

    def __init__(self, options: Options, compiler: ModelCompiler | None, *, are_processes: bool) -> None:
        self._options, self._compiler, self._are_processes = options, compiler, are_processes
        # Without `shapes` there are others for evaluations only, of fewer rows.
        self.most = options.max_programs or (MAX_PROGRAMS if options.shapes is not None else sys.maxsize)
        self._by_sizes: dict[Sizes, Program] = {}
        self._padding: BatchPadding | None = None
        # The calls that rows were added to, without a change, and what is blank in these.
        self._blanks: dict[str, tuple[str, ...]] = {}

    def begin(self, first: Program, ranks: RunningRanks, args: Args, kwargs: Kwargs) -> None:
        """Take in the program that the ranks were started with, for such a call. A collective."""
        shapes = [(spec.name, expected_shape(first, spec, ranks.replicas)) for spec in first.inputs]
        sizes = Sizes("step", tuple(shapes), _texts(first, dict(first.constants)))
        self._first, self._by_sizes[sizes] = first, first
        for rank in ranks.here:
            rank.others[sizes] = rank.executor
        shapes_of = self._options.shapes
        if shapes_of == EXACT or shapes_of is None:
            return
        check_updates(first)
        options, length = self._options, lead_of(first).shape[1]
        # Ranks that split tokens want equal parts of them.
        parts = math.prod(map(options.mesh.degree, options.mesh.token_axes))
        unit = parts * (options.mesh.value_ranks if options.sequence_parallel is True else 1)
        if options.token_order == ZIGZAG:
            unit = math.lcm(unit, 2 * parts)
        lengths = bucket_lengths(shapes_of, length, unit)
        self.most = options.max_programs or max(MAX_PROGRAMS, len(lengths))
        labels, pad = labels_of(first.graphs["TRACED"]), dict(getattr(shapes_of, "pad", {}))
        padding = self._padding = BatchPadding(first, lengths, labels, pad, ranks.replicas)
        leaves, tree = tree_flatten((args, kwargs))
        self._done(ranks, lambda: self._prove_length("step", padding, leaves, tree, length))

    @property
    def trained(self) -> list[Program]:
        """Those that train, in the order in which their sizes came."""
        return [program for sizes, program in self._by_sizes.items() if sizes.call != EVALUATION]

    @property
    def evaluating(self) -> list[Program]:
        """Those that evaluate, likewise; one of training's may be among them."""
        return [program for sizes, program in self._by_sizes.items() if sizes.call == EVALUATION]

    def find(
        self, call: str, ranks: RunningRanks, args: Args, kwargs: Kwargs, compile: Compile
    ) -> tuple[Program, Args, Kwargs]:
        """Return the program for a call, which the ranks use from now on, and the call as that takes it. A collective.

        PlanError on all ranks where they have other sizes, where there is no such program, or where it is one too many.
        """
        if self._padding is None:
            sizes = self._exact(call, ranks, args, kwargs)
        else:
            sizes, args, kwargs = self._padded(self._padding, call, ranks, args, kwargs)
        program = self._by_sizes.get(sizes)
        if program is None:
            self._check_count(sizes)
            program = self._compiled(sizes, ranks, lambda: compile(args, kwargs, sizes.rows))
            if self._padding is not None:
                check_updates(program)
            self._attach(sizes, program, ranks)
        ranks.use(sizes, evaluates=call == EVALUATION)
        return program, args, kwargs

    def _exact(self, call: str, ranks: RunningRanks, args: Args, kwargs: Kwargs) -> Sizes:
        """Return the sizes of a call that is not padded; in an evaluation, replicas may have other numbers of rows."""
        batched = self._batched if call == EVALUATION else set()
        sizes, _, counts = self._agreed(
            ranks, lambda: (self._own_sizes(call, ranks, args, kwargs), 0), batched
        )
        most = sizes.rows_of(batched)
        if self._are_processes:
            most = max(counts)
        else:
            counts = rows_of_replicas(most, ranks.replicas, self._first.rows)
        # Names must be the same on all ranks.
        return sizes.with_rows(most, batched, counts) if len(set(counts)) > 1 else sizes

    @property
    def _batched(self) -> set[str]:
        return {spec.name for spec in self._first.inputs if spec.batched}

    def _own_sizes(self, call: str, ranks: RunningRanks, args: Args, kwargs: Kwargs) -> Sizes:
        """Return the sizes of a call; without `shapes`, PlanError for an evaluation that has more than fewer rows than another
        call, once there was an evaluation.
        """
        sizes = sizes_of(self._first, call, args, kwargs)
        known = [other for other in self._by_sizes if other.call == EVALUATION]
        if (
            self._options.shapes is None
            and known
            and not any(self._holds(other, sizes) for other in self._by_sizes)
        ):
            check_call(self._by_sizes[known[0]], args, kwargs, ranks.replicas, call)
        return sizes

    def _holds(self, most: Sizes, sizes: Sizes) -> bool:
        """Tell whether a call differs from another one in nothing but fewer rows."""
        batched = self._batched

        def is_within(name: str, shape: tuple[int, ...], own: tuple[int, ...]) -> bool:
            return own == shape or (name in batched and own[1:] == shape[1:] and own[0] <= shape[0])

        pairs = zip(most.shapes, sizes.shapes, strict=True)
        return most.constants == sizes.constants and all(
            is_within(name, shape, own) for (name, shape), (_, own) in pairs
        )

    def _padded(
        self, padding: BatchPadding, call: str, ranks: RunningRanks, args: Args, kwargs: Kwargs
    ) -> tuple[Sizes, Args, Kwargs]:
        """Return a call padded to the bucket that holds the longest of all ranks, and its sizes."""
        leaves, tree = tree_flatten((args, kwargs))

        def own() -> tuple[Sizes, int]:
            sizes_of(self._first, call, args, kwargs)
            length, rows = padding.measure(leaves)
            # Lengths may differ from replica to replica, rows may not.
            return Sizes(call, (("rows", (rows,)),), _texts(self._first, leaves)), length

        sizes, longest, _ = self._agreed(ranks, own)
        bucket, rows = padding.bucket(longest), sizes.shapes[0][1][0]
        if rows < padding.rows and call not in self._blanks:
            self._blanks[call] = self._find_blank(call, padding, ranks, leaves, tree)
        blank = self._blanks.get(call, ())
        padded = tree_unflatten(padding.padded(leaves, bucket, padding.rows, blank), tree)
        sizes = sizes_of(self._first, call, *padded)
        if sizes not in self._by_sizes:
            self._check_count(sizes)
            self._done(ranks, lambda: self._prove_length(call, padding, leaves, tree, bucket))
        return sizes, *padded

    def _prove_length(
        self, call: str, padding: BatchPadding, leaves: Sequence[Any], tree: Any, bucket: int
    ) -> None:
        """Raise PlanError unless the model passes over the tokens that fill a bucket up."""
        have = min(padding.length_of(leaves), max(1, 3 * bucket // 4))
        if bucket > 1 and self._is_checked:
            short = padding.cut(leaves, have, PROOF_ROWS)
            self._compare(call, tree, padding, short, bucket, padding.rows_of(short))

    def _find_blank(
        self, call: str, padding: BatchPadding, ranks: RunningRanks, leaves: Sequence[Any], tree: Any
    ) -> tuple[str, ...]:
        """Return the fewest arguments that are to be blank in added rows. A collective.

        PlanError where the model reads such rows all the same.
        """
        blanks = padding.possible_blanks()
        refused = PlanError(f"pm.{call}", *UNKNOWN_ROWS)
        if not self._is_checked:
            # Which arguments the loss reads as a mask, only trying shows.
            if padding.labels:
                return ()
            raise refused
        for number, blank in enumerate(blanks):
            try:
                self._done(ranks, lambda: self._prove_rows(call, padding, blank, leaves, tree))  # noqa: B023
                return blank
            except PlanError as error:
                # A refusal is the answer of all ranks, whatever data each has.
                refused = error if number == 0 else refused
        raise refused

    def _prove_rows(
        self, call: str, padding: BatchPadding, blank: tuple[str, ...], leaves: Sequence[Any], tree: Any
    ) -> None:
        """Raise PlanError unless the model passes over rows whose labels are all ignored, and that are `blank`."""
        length = padding.length_of(leaves)
        short = padding.cut(leaves, length, PROOF_ROWS)
        self._compare(call, tree, padding, short, length, padding.rows_of(short) + 1, blank)

    @property
    def _is_checked(self) -> bool:
        shapes = self._options.shapes
        return not isinstance(shapes, Buckets) or shapes.check

    def _compare(
        self,
        call: str,
        tree: Any,
        padding: BatchPadding,
        given: Sequence[Any],
        length: int,
        rows: int,
        blank: tuple[str, ...] = (),
    ) -> None:
        """Raise PlanError unless the model passes over what fills a call up to so many tokens and rows.

        It is tried with other numbers too.
        """
        if self._compiler is None:
            fact = "there is no model to check that it passes over padding"
            raise PlanError("shapes=", fact, "autoptd.parallelize(model, ...)")
        own_length, own_rows = padding.length_of(given), padding.rows_of(given)
        what = TOKENS if length > own_length else ROWS
        for number, short in enumerate([given, *padding.varied(given)]):
            padded = padding.padded(short, length, rows, blank)
            others = padding.with_other_tokens(padded, own_length, own_rows)
            calls: list[Any] = [tree_unflatten(list(leaves), tree) for leaves in (short, padded, others)]
            self._compiler.prove(calls, what, evaluates=call == EVALUATION, is_made_up=number > 0)

    def trained_for(self, args: Args, kwargs: Kwargs) -> Program:
        """Return the program that trains with the sizes of an evaluation, if there is one, else the first."""
        return self._by_sizes.get(sizes_of(self._first, "step", args, kwargs), self._first)

    def forget(self, brought: Mapping[str, torch.Tensor], first: Program, ranks: RunningRanks) -> None:
        """Forget the programs that were compiled for other values of buffers: they are compiled again when they are needed.

        The first one, which may have read others, is `first` from now on.
        """
        for sizes, program in list(self._by_sizes.items()):
            if program is self._first:
                self._by_sizes[sizes] = first
            elif program.differing(brought):
                del self._by_sizes[sizes]
                for rank in ranks.here:
                    del rank.others[sizes]
        self._first = first

    def _agreed(
        self, ranks: RunningRanks, own: Callable[[], tuple[Sizes, int]], batched: Collection[str] = ()
    ) -> tuple[Sizes, int, tuple[int, ...]]:
        """Return the sizes of a call, which all ranks have, the largest of their lengths, and the rows of every replica, which
        may differ in the tensors of `batched`; () for threads.
        """
        length = 0
        rows: tuple[int, ...] = ()
        sizes: Sizes | None = None
        fault: AutoptdError | None = None
        try:
            sizes, length = own()
        except AutoptdError as error:
            fault = error
        if self._are_processes:
            length, rows = ranks.unrecorded.run(
                check_sizes.SITE, lambda rank: agree_on_sizes(rank.world, sizes, fault, length, batched)
            )
        if fault is not None:
            raise fault
        assert sizes is not None
        return sizes, length, rows

    def _check_count(self, sizes: Sizes) -> None:
        """Raise PlanError where another program would be one too many."""
        known = [other for other in self._by_sizes if other.call == sizes.call]
        if len(known) < self.most:
            return
        shown = "; ".join(map(str, known[:4])) + "; ..." * (len(known) > 4)
        fact = f"{sizes} would be program {len(known) + 1}, and there are {len(known)} already ({shown})"
        remedy = f"batches of fewer sizes (shapes='bucket' pads them), or max_programs={2 * self.most}"
        raise PlanError(f"pm.{sizes.call}", fact, remedy)

    def _compiled(self, sizes: Sizes, ranks: RunningRanks, compile: Callable[[], Program]) -> Program:
        """Compile on all ranks; where one of them cannot, all raise why."""

        def explained() -> Program:
            site = f"pm.{sizes.call} with {sizes}"
            try:
                return compile()
            except (PlanError, TraceError) as error:
                raise PlanError(site, f"{error.site}: {error.fact}", error.remedy) from error
            except AutoptdError:
                raise
            except Exception as error:
                fact = f"cannot be compiled for: {type(error).__name__}: {error}"
                raise RuntimeFault(site, fact, "other sizes, or see to what it says") from error

        program: Program = self._done(ranks, explained)
        return program

    def _done(self, ranks: RunningRanks, act: Callable[[], Any]) -> Any:
        """Do something in every process; where one of them cannot, all raise why."""
        if not self._are_processes:
            return act()
        attempt = attempted(act)
        return ranks.unrecorded.run(COMPILING, lambda rank: agree(rank.world, COMPILING, attempt))

    def _attach(self, sizes: Sizes, program: Program, ranks: RunningRanks) -> None:
        """Let the ranks know a program; an evaluation may be that which trains with these sizes."""
        known = next((other for other, its in self._by_sizes.items() if its is program), None)
        if known is None:
            ranks.attach(sizes, program)
        else:
            for rank in ranks.here:
                rank.others[sizes] = rank.others[known]
        self._by_sizes[sizes] = program


def check_updates(program: Program) -> None:
    """Raise PlanError where padding would count in a buffer: whether it would is not seen from a loss."""
    if program.updated_by_batch:
        fact = f"buffer {program.updated_by_batch[0]} is updated by what depends on the batch, and padding would count"
        raise PlanError("shapes=", fact, "shapes='exact'")


def sizes_of(first: Program, call: str, args: Args, kwargs: Kwargs) -> Sizes:
    """Return the sizes of a call; PlanError where it differs from the compiled one in more than these."""
    leaves = check_structure(first, args, kwargs, call)
    check_kinds(first, leaves, call)
    shapes = tuple((spec.name, tuple(leaves[spec.leaf].shape)) for spec in first.inputs)
    return Sizes(call, shapes, _texts(first, leaves))


def _texts(first: Program, leaves: Mapping[int, Any] | Sequence[Any]) -> tuple[tuple[int, str], ...]:
    """Return the arguments that are no tensors, as text; of what may say its address, the type."""
    found = []
    for number, _ in first.constants:
        value = leaves[number]
        is_plain = value is None or isinstance(value, (bool, int, float, complex, str))
        found.append((number, repr(value) if is_plain else type(value).__name__))
    return tuple(found)


__all__ = ["Programs", "sizes_of"]
