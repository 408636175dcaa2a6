"""The programs of a run: the first one, and one for each other size of a batch, compiled when it first comes.

In: the calls of `step` and `eval_step`, and what compiles. Out: the program for a call, which the ranks use
from then on, and the call, padded where that was asked for. All programs share the ranks' parameters, and so
the optimizer; all ranks take part in each call.

    programs = Programs(run, compiler, changes)
    run.start(programs.first(args, kwargs, replicas))
    programs.begin(args, kwargs)
    program, args, kwargs = programs.find("step", args, kwargs)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from autoptd.compat import tree_flatten, tree_map
from autoptd.errors import AutoptdError, PlanError, RuntimeFault, TraceError
from autoptd.model.loop_changes import LoopChanges
from autoptd.model.outputs import ARGUMENT, OutputNames, Outputs
from autoptd.model.padded_calls import EVALUATION, PaddedCalls, check_updates
from autoptd.model.run import ModelCompiler, Run
from autoptd.options.buckets import EXACT, MAX_PROGRAMS
from autoptd.program.program import Program
from autoptd.runtime.checks.agreement import SIZES
from autoptd.runtime.checks.inputs import Sizes, agree_on_sizes
from autoptd.runtime.step.buffers import LOAD_THEM_BEFORE
from autoptd.runtime.step.launch import MODEL
from autoptd.runtime.step.microbatches import (
    check_call,
    check_kinds,
    check_structure,
    expected_shape,
    rows_of_replicas,
)
from autoptd.subject.call import Call

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
# A program, and the call that it takes.
SizedCall = tuple[Program, Args, Kwargs]


class Programs:
    """Programs by call and sizes; at most `most` that train, and as many that evaluate.

    Without a compiler there is only the first one. With `watches`, changes that the loop makes to the model
    are noticed.
    """

    def __init__(self, run: Run, compiler: ModelCompiler | None = None, *, watches: bool = False) -> None:
        self._run, self._compiler = run, compiler
        options = self._options = run.options
        self._changes: LoopChanges | None = None
        if watches and compiler is not None:
            self._changes = LoopChanges(compiler.subject.given, compiler.subject.remade, options.loss_fn)
        # Without `shapes` there are others for evaluations only, of fewer rows.
        self.most = options.shapes.max_programs or (
            MAX_PROGRAMS if options.shapes.how is not None else sys.maxsize
        )
        self._by_sizes: dict[Sizes, Program] = {}
        self._outputs = OutputNames()
        self._padding: PaddedCalls | None = None
        # Stands in for the call that the first program was compiled for, and the replicas whose rows it
        # holds.
        self._first_call: tuple[Call, int] | None = None
        run.before_overwriting.append(self._hold_to)

    def first(self, args: Args, kwargs: Kwargs, replicas: int) -> Program:
        """Compile for steps with such a call, which has the rows of `replicas` replicas."""
        if self._compiler is None:
            raise PlanError("compile_now", "there is nothing to compile", "autoptd.parallelize(model, ...)")
        self._first_call = (tree_map(_stand_in, (args, kwargs)), replicas)
        with self._holding() as compiler:
            return self._followed(compiler.for_training((args, kwargs), replicas))

    @contextmanager
    def _holding(self, brought: Mapping[str, torch.Tensor] | None = None) -> Iterator[ModelCompiler]:
        """Let the model have the run's buffers while it is compiled, with those that are `brought`."""
        assert self._compiler is not None
        with self._compiler.subject.holding({**self._run.values, **(brought or {})}):
            yield self._compiler

    def _followed(self, program: Program, *, evaluates: bool = False) -> Program:
        """Return a program that was just compiled, and remember the state of the model."""
        if self._changes is not None:
            self._changes.follow(program, evaluates=evaluates)
        return program

    def begin(self, args: Args, kwargs: Kwargs) -> None:
        """Take in the program that the ranks were started with, for such a call. Collective."""
        first, ranks = self._run.program, self._run.started("step")
        shapes = [(spec.name, expected_shape(first, spec, ranks.replicas)) for spec in first.inputs]
        sizes = Sizes("step", tuple(shapes), _texts(first, dict(first.constants)))
        self._by_sizes[sizes] = first
        for rank in ranks.here:
            rank.others[sizes] = rank.executor
        if self._options.shapes.how not in (None, EXACT):
            padding = self._padding = PaddedCalls(self._run, self._compiler, (args, kwargs))
            self.most = self._options.shapes.max_programs or max(MAX_PROGRAMS, len(padding.lengths))

    @property
    def trained(self) -> list[Program]:
        """Those that train, in the order in which their sizes came."""
        return [program for sizes, program in self._by_sizes.items() if sizes.call != EVALUATION]

    @property
    def evaluating(self) -> list[Program]:
        """Those that evaluate, likewise; one of training's may be among them."""
        return [program for sizes, program in self._by_sizes.items() if sizes.call == EVALUATION]

    def find(self, call: str, args: Args, kwargs: Kwargs, outputs: Outputs | None = None) -> SizedCall:
        """Return the program for a call, which the ranks use from now on, and the call as that takes it.
        Collective.

        Without `shapes`, steps have one, and evaluations one for each number of rows up to that of the first
        evaluation, or of training; an evaluation's is not compiled before it comes: some runs have none, and
        it takes as long as for training. PlanError on all ranks where they have other sizes, where there is
        no such program, or where it is one too many.
        """
        if outputs is not None:
            self._check_outputs()
        if self._compiler is None or (self._options.shapes.how is None and call != EVALUATION):
            return self._first, args, kwargs
        if self._padding is None:
            sizes = self._exact(call, args, kwargs, outputs)
        else:
            sizes, args, kwargs = self._padded(self._padding, call, args, kwargs)
        program = self._by_sizes.get(sizes)
        if program is None:
            self._check_count(sizes)
            program = self._run.together(lambda: self._compiled(sizes, (args, kwargs), outputs))
            if self._padding is not None:
                check_updates(program)
            self._attach(sizes, program)
        self._run.started(call).use(sizes, evaluates=call == EVALUATION)
        return program, args, kwargs

    def _check_outputs(self) -> None:
        """Raise PlanError where evaluations return no outputs."""
        if self._compiler is None:
            fact = "this program was compiled elsewhere, and returns the loss only"
            raise PlanError(ARGUMENT, fact, "a model from autoptd.parallelize(model, ...)")
        if self._padding is not None:
            fact = "shapes='bucket' pads the batch, and with it the outputs and sums over them"
            raise PlanError(ARGUMENT, fact, "shapes='exact', or pad the batch before the call")

    def _exact(self, call: str, args: Args, kwargs: Kwargs, outputs: Outputs | None) -> Sizes:
        """Return the sizes of a call that is not padded; in an evaluation, replicas may have other numbers of
        rows.
        """
        batched = self._batched if call == EVALUATION else set()
        sizes, _, counts = self._agreed(lambda: (self._own_sizes(call, args, kwargs, outputs), 0), batched)
        most = sizes.rows_of(batched)
        if self._run.is_process:
            most = max(counts)
        else:
            counts = rows_of_replicas(most, self._replicas, self._first.rows)
        # Names must be the same on all ranks.
        return sizes.with_rows(most, batched, counts) if len(set(counts)) > 1 else sizes

    @property
    def _first(self) -> Program:
        return self._run.program

    @property
    def _replicas(self) -> int:
        """How many replicas have their rows in a call."""
        return self._run.started("step").replicas

    @property
    def _batched(self) -> set[str]:
        return {spec.name for spec in self._first.inputs if spec.batched}

    def _own_sizes(self, call: str, args: Args, kwargs: Kwargs, outputs: Outputs | None) -> Sizes:
        """Return the sizes of a call; without `shapes`, PlanError for an evaluation that has more than fewer
        rows than another call, once there was an evaluation.
        """
        sizes = sizes_of(self._first, call, args, kwargs)
        known = [other for other in self._by_sizes if other.call == EVALUATION]
        if (
            self._options.shapes.how is None
            and known
            and not any(self._holds(other, sizes) for other in self._by_sizes)
        ):
            check_call(self._by_sizes[known[0]], args, kwargs, self._replicas, call)
        return replace(sizes, outputs=self._outputs.name_of(outputs))

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
        self, padding: PaddedCalls, call: str, args: Args, kwargs: Kwargs
    ) -> tuple[Sizes, Args, Kwargs]:
        """Return a call padded to the bucket that holds the longest of all ranks, and its sizes."""
        leaves, tree = tree_flatten((args, kwargs))

        def own() -> tuple[Sizes, int]:
            sizes_of(self._first, call, args, kwargs)
            length, rows = padding.measure(leaves)
            # Lengths may differ from replica to replica, rows may not.
            return Sizes(call, (("rows", (rows,)),), _texts(self._first, leaves)), length

        sizes, longest, _ = self._agreed(own)
        bucket = padding.bucket(longest)
        padded = padding.padded_call(call, leaves, tree, bucket, rows=sizes.shapes[0][1][0])
        sizes = sizes_of(self._first, call, *padded)
        if sizes not in self._by_sizes:
            self._check_count(sizes)
            padding.prove_length(call, leaves, tree, bucket)
        return sizes, *padded

    def _hold_to(self, brought: Mapping[str, torch.Tensor]) -> None:
        """Make sure that everything proven about buffers holds for other values, by compiling again; else
        PlanError.

        The programs of other sizes that were compiled for other values are compiled again when they are
        needed.
        """
        before = self._first
        if changed := before.differing(brought):
            self._run.compiled = self._compiled_again(before, brought, changed)
        for sizes, program in list(self._by_sizes.items()):
            if program is before:
                self._by_sizes[sizes] = self._first
            elif program.differing(brought):
                del self._by_sizes[sizes]
                for rank in self._run.started("step", even_unusable=True).here:
                    del rank.others[sizes]

    def _compiled_again(
        self, program: Program, brought: Mapping[str, torch.Tensor], changed: Sequence[str]
    ) -> Program:
        """Return the first program as one of other buffers; PlanError where it is another program."""
        what = "was compiled for others"
        if self._first_call is not None:
            call, replicas = self._first_call
            with self._holding(brought) as compiler:
                again = self._followed(compiler.for_training(call, replicas, check=False))
            # The same program: only the digests of the values read are new.
            if replace(again, looked_at=()).fingerprint() == replace(program, looked_at=()).fingerprint():
                return replace(program, looked_at=again.looked_at)
            what = "is another model with these values"
        fact = f"brings other values of {', '.join(changed)}, which were read while compiling: the program {what}"
        raise PlanError("load_state_dict", fact, LOAD_THEM_BEFORE)

    def check_changes(self, site: str) -> None:
        """Raise RuntimeFault on all ranks where a loop has changed what the model computes. Collective."""
        if (changes := self._changes) is not None:
            known = (self._first, *self.trained, *self.evaluating)
            self._run.agreed(MODEL, lambda: changes.check(known, site, self._run.values))

    def _agreed(
        self, own: Callable[[], tuple[Sizes, int]], batched: Collection[str] = ()
    ) -> tuple[Sizes, int, tuple[int, ...]]:
        """Return the sizes of a call, which all ranks have, the largest of their lengths, and the rows of
        every replica, which may differ in the tensors of `batched`; () for threads.
        """
        length = 0
        rows: tuple[int, ...] = ()
        sizes: Sizes | None = None
        fault: AutoptdError | None = None
        try:
            sizes, length = own()
        except AutoptdError as error:
            fault = error
        if self._run.is_process:
            length, rows = self._run.started("step").unrecorded.run(
                SIZES, lambda rank: agree_on_sizes(rank.world, sizes, fault, length, batched)
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
        remedy = (
            f"batches of fewer sizes (shapes='bucket' pads them), or Shapes(max_programs={2 * self.most})"
        )
        raise PlanError(f"pm.{sizes.call}", fact, remedy)

    def _compiled(self, sizes: Sizes, call: Call, outputs: Outputs | None = None) -> Program:
        """Compile for a call; where it cannot be, the error says for which sizes."""
        site = f"pm.{sizes.call} with {sizes}"
        try:
            with self._holding() as compiler:
                if sizes.call != EVALUATION:
                    return self._followed(compiler.for_sizes(call, self._first))
                like = self._by_sizes.get(sizes_of(self._first, "step", *call), self._first)
                return self._followed(
                    compiler.for_evaluation(call, like, sizes.rows, outputs), evaluates=True
                )
        except (PlanError, TraceError) as error:
            raise PlanError(site, f"{error.site}: {error.fact}", error.remedy) from error
        except AutoptdError:
            raise
        except Exception as error:
            fact = f"cannot be compiled for: {type(error).__name__}: {error}"
            raise RuntimeFault(site, fact, "other sizes, or see to what it says") from error

    def _attach(self, sizes: Sizes, program: Program) -> None:
        """Let the ranks know a program; an evaluation may be that which trains with these sizes."""
        ranks = self._run.started("step")
        known = next((other for other, its in self._by_sizes.items() if its is program), None)
        if known is None:
            ranks.attach(sizes, program)
        else:
            for rank in ranks.here:
                rank.others[sizes] = rank.others[known]
        self._by_sizes[sizes] = program


def sizes_of(first: Program, call: str, args: Args, kwargs: Kwargs) -> Sizes:
    """Return the sizes of a call; PlanError where it differs from the compiled one in more than these."""
    leaves = check_structure(first, args, kwargs, call)
    check_kinds(first, leaves, call)
    shapes = tuple((spec.name, tuple(leaves[spec.leaf].shape)) for spec in first.inputs)
    return Sizes(call, shapes, _texts(first, leaves))


def _stand_in(leaf: Any) -> Any:
    """Return a tensor that a call can be compiled for, without memory."""
    return leaf.new_zeros(()).expand_as(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _texts(first: Program, leaves: Mapping[int, Any] | Sequence[Any]) -> tuple[tuple[int, str], ...]:
    """Return the arguments that are not tensors, as text; of objects whose text may contain an address, the
    type.
    """
    found = []
    for number, _ in first.constants:
        value = leaves[number]
        is_plain = value is None or isinstance(value, (bool, int, float, complex, str))
        found.append((number, repr(value) if is_plain else type(value).__name__))
    return tuple(found)
