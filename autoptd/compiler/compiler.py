"""Compile the programs of one run: one for training, and those for other sizes and for evaluation.

In: a `Subject` and `Options`, once; a call for each program. Out: a `Program`, with the parameters and the
cut of the first.

    compiler = Compiler(Subject.of(model), options)
    first = compiler.for_training(((ids, targets), {}), replicas=2)
    longer = compiler.for_sizes(((longer_ids, longer_targets), {}), first)
    evaluation = compiler.for_evaluation(((ids, targets), {}), first)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import nn
from torch.fx import Graph

from autoptd import trace as tracing
from autoptd.compat import tree_leaves
from autoptd.compiler.driver import compile_program
from autoptd.compiler.request import Request
from autoptd.compiler.warn import warn_of_fallbacks
from autoptd.errors import PlanError
from autoptd.ir.notes import note, op_name
from autoptd.options import Options, Recompute, Zero
from autoptd.program.follow import check_follows, check_trains_alike
from autoptd.program.program import Picture, Program
from autoptd.runtime.step.launch import is_launched
from autoptd.runtime.step.microbatches import fitting_microbatches, is_call_of
from autoptd.subject.call import Call
from autoptd.subject.subject import Subject


class Compiler:
    """Compile a subject on request; `checks`: compare traces with the model, and warn, in one of the
    processes.

    `draw` makes the plots of its programs.
    """

    def __init__(
        self,
        subject: Subject,
        options: Options,
        *,
        checks: bool = True,
        draw: Callable[..., Picture] | None = None,
    ) -> None:
        self.subject, self.options = subject, options
        self._checks, self._draw = checks, draw
        # The train or eval mode of every module when the first program was compiled: the ranks train in
        # these.
        self._modes: Mapping[nn.Module, bool] = tracing.modes_of(subject.model)
        self._cast_buffers: Sequence[str] = ()

    def for_training(self, call: Call, replicas: int, check: bool = True) -> Program:
        """Compile for steps with such a call, which holds the rows of `replicas` replicas.

        `check` is False if this was compiled before, with other buffer values.
        """
        self._modes = tracing.modes_of(self.subject.model)
        check = check and self._checks
        program = compile_program(
            self.subject.model, self.options, *call, replicas=replicas, check=check, draw=self._draw
        )
        self._cast_buffers = program.cast_buffers
        if check:
            warn_of_fallbacks(program)
        return program

    def for_sizes(self, call: Call, first: Program) -> Program:
        """Compile for steps with batches of other sizes, on the ranks and the parameters of `first`.

        The layout of parameters and the cut are those of `first`; the values saved for backward are chosen
        again. PlanError if no such program is possible.
        """
        # `first` fixes every decision that parameters depend on; memory prices were tuned for its sizes.
        plan = replace(self.options.plan, cut=None, shard=(), rates=())
        options = replace(self.options, zero=self._zero(first), plan=plan)
        args, kwargs = self.subject.on_its_device(call)
        with tracing.in_modes(self._modes):
            program = compile_program(
                self.subject.model,
                options,
                args,
                kwargs,
                replicas=self._replicas,
                check=self._checks,
                like=first,
                draw=self._draw,
            )
        check_trains_alike(first, program)
        if self._checks:
            warn_of_fallbacks(program)
        return program

    def for_evaluation(
        self, call: Call, first: Program, counts: tuple[int, ...] = (), outputs: tracing.Outputs | None = None
    ) -> Program:
        """Compile for an evaluation, on the ranks and the parameters of `first`, a training program.

        `counts` are the rows of every replica if they differ; `outputs` is what it returns besides the loss.
        If eval mode only removes dropouts, and the sizes are those of training, the result is `first` itself,
        which draws no masks without gradients. For other sizes, for outputs, or for a model that computes
        something else in eval mode, it is compiled again with the layout and the cut of `first`. PlanError if
        eval mode draws dropouts, or reads parameters on other ranks than training does.
        """
        if self.options.shapes.how is not None:
            call = self.subject.on_its_device(call)
        is_same_size = not counts and is_call_of(first, *call, self._replicas)
        options = self._evaluating(call, first, is_same_size)
        if outputs is not None:
            options = replace(options, loss_fn=tracing.LossAndOutputs(options.loss_fn, outputs))
        model = self.subject.model
        with tracing.evaluating(model):
            evaluated = self._captured(options, call, first, counts)
        check_no_draws(evaluated.graph)
        # Training's graph at this size, to compare with that of eval mode.
        with tracing.in_modes(self._modes):
            if is_same_size and first.graphs and outputs is None:
                graph, buffers = first.graphs["TRACED"], first.buffers
            else:
                captured = self._captured(options, call, first, counts)
                graph, buffers = captured.graph, captured.buffers
            is_training = tracing.is_training_without_dropout(
                graph, evaluated.graph, buffers, evaluated.buffers
            )
            if is_training and is_same_size and outputs is None:
                return first
        like = first if first.graphs else first.follows
        # Without gradients no masks are drawn, so training's graph at this size can be used.
        with tracing.in_modes(self._modes) if is_training else tracing.evaluating(model):
            program = compile_program(
                model,
                options,
                *call,
                replicas=self._replicas,
                check=False,
                like=like,
                counts=counts,
                draw=self._draw,
            )
        check_follows(first, program)
        # The ranks hold all parameters of training, though an evaluation may read fewer.
        return replace(program, params=first.params, row_counts=counts)

    def prove(self, calls: Sequence[Call], what: str, *, evaluates: bool, is_made_up: bool) -> None:
        """Raise PlanError unless the loss and all gradients of a call stay the same with padding.

        `calls` are a call, the same one padded, and with other tokens in the padding; `what` names the
        padding.
        """
        # One process is enough: all have the same model.
        if not self._checks:
            return
        subject, precision = self.subject, self.options.precision
        with self._mode(evaluates):
            short, padded, others = map(subject.on_its_device, calls)
            if not tracing.has_values(subject.model):
                fact = "the model has no values yet, so that it cannot be run to check that it passes over padding"
                remedy = "autoptd.Buckets((512, 1024), check=False) where you know that it does, or a model with values"
                raise PlanError("shapes=", fact, remedy)
            # Compare in the model's dtype, which shows more than a narrower dtype of the inputs.
            tensors = [x for x in tree_leaves(short) if isinstance(x, torch.Tensor)]
            is_narrow = precision and any(x.is_floating_point() for x in tensors)
            with tracing.computing_in(subject.model, precision if is_narrow else None, self._cast_buffers):
                tracing.compare_padded(
                    subject.model, self.options.loss_fn, short, padded, others, what, is_made_up=is_made_up
                )

    @property
    def _replicas(self) -> int:
        """The number of replicas whose rows are in a call: all of them for threads."""
        return 1 if is_launched(self.options.mesh, self.options.backend) else self.options.mesh.replicas

    def _mode(self, evaluates: bool) -> AbstractContextManager[None]:
        return tracing.evaluating(self.subject.model) if evaluates else tracing.in_modes(self._modes)

    def _evaluating(self, call: Call, first: Program, is_same_size: bool) -> Options:
        """Return the options of an evaluation: no bound and no pins, as nothing is saved for backward."""
        options = replace(
            self.options,
            recompute=Recompute(False),
            plan=replace(self.options.plan, cut=None, shard=(), rates=(), keep=()),
            zero=self._zero(first),
            memory=math.inf,
            memory_price=first.plan["options"]["memory_price"],
        )
        own = first.num_microbatches if is_same_size else options.num_microbatches
        return replace(options, num_microbatches=fitting_microbatches(own, *call, self._replicas))

    def _zero(self, first: Program) -> Zero:
        """Return how ranks share storage, which "auto" leaves to the first program."""
        return replace(self.options.zero, stage=first.plan["options"]["zero"])

    def _captured(
        self, options: Options, call: Call, first: Program, counts: tuple[int, ...]
    ) -> tracing.Captured:
        model = self.subject.model
        with tracing.computing_in(model, options.precision, first.cast_buffers) as narrowing:
            request = Request(model, options, *call, self._replicas, narrowing, like=first, counts=counts)
            return request.capture(request.batch())


def check_no_draws(evaluated: Graph) -> None:
    """Raise PlanError for a model that draws random numbers in eval mode."""
    for node in tracing.draws(evaluated):
        is_dropout = op_name(node) == "aten.dropout"
        what = f"dropout of {node.args[1]} is" if is_dropout else "random numbers are"
        remedy = "F.dropout(x, p, training=self.training)" if is_dropout else "draw them where self.training"
        raise PlanError(note(node).module or "model", f"{what} drawn in eval mode as well", remedy)


__all__ = ["Compiler"]
