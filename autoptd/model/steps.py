"""Steps and evaluations: a call's way from the user's arguments to the microbatches of every rank.

In: the arguments of `pm.step`. Out: the loss, and gradients in the ranks' parameters. A call is brought into
the form that was compiled, which is compiled first if there is none, then to the program for its sizes, and
compared with that.

    steps = Steps(run, sizes, calls)
    loss = steps.step(ids, targets)
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, NamedTuple

import torch

from autoptd.errors import PlanError
from autoptd.model.calls import Calls
from autoptd.model.loop_changes import is_due
from autoptd.model.outputs import Outputs, bring_together
from autoptd.model.run import Run
from autoptd.model.sizes import EVALUATION, Programs
from autoptd.program.program import Program
from autoptd.runtime.checks.agreement import COPIES, RANKS
from autoptd.runtime.checks.copies import check_copies, check_settings, copies_are_due
from autoptd.runtime.checks.inputs import batch_checked, batch_is_due
from autoptd.runtime.checks.ranks import check_ranks
from autoptd.runtime.step.executor import Executor
from autoptd.runtime.step.launch import Rank, RunningRanks
from autoptd.runtime.step.microbatches import check_call, cut, take_rows


class Batch(NamedTuple):
    """The leaves of a call that fits a program, and the ranks that run it."""

    call: str
    program: Program
    ranks: RunningRanks
    leaves: list[Any]
    # How often ranks compare what they read.
    every: int

    def microbatches(self, rank: Rank, executor: Executor) -> list[dict[str, torch.Tensor]]:
        """Cut what a rank's stages read."""
        replica, device = self.ranks.replica_of(rank), rank.world.device
        return cut(self.program, self.leaves, executor.inputs, replica, device, self.ranks.replicas)

    def checked(self, count: int) -> AbstractContextManager[None]:
        """Check, where it is due, that the ranks of a replica read the same: around the `count`-th call of
        its kind.
        """
        if not batch_is_due(count, self.every):
            return nullcontext()
        return batch_checked(self.ranks.unrecorded.run, self.call, count, self.leaves)


class Steps:
    """Runs steps and evaluations."""

    def __init__(self, run: Run, sizes: Programs, calls: Calls) -> None:
        self._run, self._sizes, self._calls, self._loop = run, sizes, calls, run.loop

    def compile_now(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compile for steps with such a global batch, and start the ranks. Collective."""
        self._compile(args, kwargs, self._run.options.mesh.replicas)

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any], replicas: int) -> None:
        program = self._sizes.first(args, kwargs, replicas)
        self._calls.compiled(program, args, kwargs)
        self._run.start(program)
        self._loop.started()
        self._sizes.begin(args, kwargs)

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run all microbatches forward and backward; return the detached loss of the global batch (0-d).

        Collective.

        Takes the arguments of the model, or one mapping of them: the global batch with `backend="local"`,
        this replica's rows of it (`local_batch`) under torchrun. Gradients are added to `parameter.grad`
        until `zero_grad`. A NaN loss raises RuntimeFault on all ranks, and adds none; on CUDA it is seen in
        the next step, when its own gradients were handed over.
        """
        if not torch.is_grad_enabled():
            mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
            fact = f"torch.{mode}() is on around it: a loop of one device would have no gradients, and this call adds them"
            remedy = "leave it off here; for the loss without gradients call pm.eval_step(...)"
            raise PlanError("pm.step", fact, remedy)
        batch = self._batch("step", args, kwargs)
        ranks, clock, loss_scale = batch.ranks, self._run.clock, self._run.loss_scale
        # Before the step: after one that raised, all ranks still agree on the count.
        clock.calls += 1
        scale = None if loss_scale is None else loss_scale.value

        def step(rank: Rank) -> torch.Tensor:
            executor = rank.executor
            return executor.step(batch.microbatches(rank, executor), self._run.options.ranks.nan, scale)

        self._check_loop("step", clock.calls)
        # Outside of the step: its collectives do not belong to the program, and are not recorded.
        if copies_are_due(clock.calls, self._run.options.ranks.check_every):
            self.compare_copies()
        held = ranks.here[0].params
        self._loop.begin(chain(held.local.values(), held.stored.values()))
        with batch.checked(clock.calls):
            loss = ranks.run("step", step)
        self._loop.end()
        clock.losses.append(loss)
        if loss_scale is not None:
            loss_scale.renew()
        return loss

    def eval_step(
        self, *args: Any, outputs: Outputs | None = None, everywhere: bool = False, **kwargs: Any
    ) -> Any:
        """Return the loss of the global batch without gradients, the model in eval mode. Collective.

        A batch may have fewer rows than others before: the last one of a dataset. They need not divide over
        d. A program for that number is compiled when it first comes.

        With `outputs` the result is a pair: the loss, and the values asked for: the name of a part of the model's
        output ("logits"), several names, or a function of that output and of the call's arguments, which returns a tensor
        or a dict of tensors: `lambda output, input_ids, labels: output.logits.argmax(-1)`. It is compiled as a part of the
        model, once for each function, so that what it computes is computed where the data are; pass the same function in
        all calls. Tensors with the batch in dim 0 come with the rows of this call, on all ranks of the replica; with
        `everywhere`, all ranks get those of the global batch. Sums over the batch are those of the global batch.
        """
        batch = self._batch(EVALUATION, args, kwargs, outputs)
        clock = self._run.clock
        clock.evaluations += 1
        self._check_loop("evaluation", clock.evaluations)

        def evaluate(rank: Rank) -> torch.Tensor:
            return rank.evaluator.evaluate(batch.microbatches(rank, rank.evaluator))

        with batch.checked(clock.evaluations):
            loss = batch.ranks.run(EVALUATION, evaluate)
        if outputs is None:
            return loss
        return loss, bring_together(
            batch.ranks,
            batch.program,
            outputs,
            lambda rank: len(batch.microbatches(rank, rank.evaluator)),
            everywhere,
        )

    def _batch(
        self, call: str, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs | None = None
    ) -> Batch:
        """Bring a call to the program that runs it, which is compiled if there is none; PlanError where it
        does not fit.

        Collective.
        """
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            fact = "autocast is on around it, and the compiled model does not follow it"
            raise PlanError(
                f"pm.{call}", fact, "leave autocast off; precision='bf16-mixed' computes as under it"
            )
        args, kwargs = self._calls.in_form(args, kwargs, call)
        if self._run.compiled is None:
            # What `step` gets: this replica's rows for a process, the global batch for threads.
            self._compile(args, kwargs, 1 if self._run.is_process else self._run.options.mesh.replicas)
        ranks = self._run.started(call)
        ranks.check_equal_copies()
        ranks.unrecorded.follow_edits()
        if call != EVALUATION:
            self._calls.refuse_unequal(args, kwargs)
        program, args, kwargs = self._sizes.find(call, args, kwargs, outputs)
        # In local there is one batch for all ranks.
        every = self._run.options.ranks.check_every if self._run.is_process else 0
        return Batch(call, program, ranks, check_call(program, args, kwargs, ranks.replicas, call), every)

    def _check_loop(self, call: str, count: int) -> None:
        """Raise RuntimeFault on all ranks where the loop has changed what the model computes; warn of written
        weights.
        """
        if is_due(count, self._run.options.ranks.check_every):
            self._loop.check_weights(f"{call} {count}", self._run.clock.exchanges)
            self._sizes.check_changes(f"{call} {count}")

    def compare_copies(self) -> None:
        """Raise RuntimeFault on all ranks where copies of parameters or of their state differ, or settings of
        optimizers.

        Collective.
        """
        made, call, ranks = self._run.optimizers, self._run.clock.calls, self._run.started("step").unrecorded
        states = [optimizer.state for optimizer in made.values()]
        ranks.run(COPIES, lambda rank: check_copies(rank.params, states, call))
        # Ranks as threads share one optimizer.
        if self._run.is_process:
            ranks.run(COPIES, lambda rank: check_settings(rank.world, made, call))

    def check_ranks(self, *args: Any, **kwargs: Any) -> None:
        """Raise RuntimeFault on all ranks where replicas do not compute the same, bit by bit. Collective.

        Takes a global batch, the same on all ranks. Every replica runs the rows of the first one, twice,
        forward and backward; nothing of it is kept. What differs is named with its rank: a weight that lost a
        bit, or a device that computes wrongly. Needs kernels that give the same bits each time
        (`torch.use_deterministic_algorithms`), and says where they do not. With one replica, only whether
        each rank computes the same twice.
        """
        ranks, replicas = self._run.settled("check_ranks"), self._run.options.mesh.replicas
        args, kwargs = self._calls.in_form(args, kwargs)
        # A program is that of what `step` takes: the rows of one replica, or of all of them.
        if not self._run.is_process:
            program, args, kwargs = self._sizes.find("step", args, kwargs)
        args, kwargs = take_rows(self._run.program, args, kwargs, replicas, 0)
        if self._run.is_process:
            program, args, kwargs = self._sizes.find("step", args, kwargs)
        leaves, loss_scale = check_call(program, args, kwargs, 1), self._run.loss_scale
        scale = None if loss_scale is None else loss_scale.value

        def check(rank: Rank) -> None:
            rows = cut(program, leaves, rank.executor.inputs, 0, rank.world.device)
            check_ranks(rank.executor, rows, scale)

        ranks.unrecorded.run(RANKS, check)


__all__ = ["Calls", "Steps"]
