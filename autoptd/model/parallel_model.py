"""What `parallelize` returns: the user's model, running on t*p*d ranks.

In: a program, options, and the model's state dict; or a compiler, for the arguments of the first step
(started_model.py). Out: an object with the training loop's verbs, under the model's own parameter names.
Calls marked *collective* are made by all ranks.

    pm = ParallelModel(program, options, model.state_dict())
    opt = pm.optimizer(torch.optim.AdamW, lr=3e-4)
    loss = pm.step(*pm.local_batch(x, y)); pm.clip_grad_norm_(1.0); opt.step(); opt.zero_grad()
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoptd.errors import PlanError
from autoptd.ir.mesh import Coordinate
from autoptd.ir.shapes import EXACT
from autoptd.model.adapted_model import AdaptedModel
from autoptd.model.checkpointer import Checkpointer
from autoptd.model.optimizer_request import resolved
from autoptd.model.state import LoadResult
from autoptd.program.memory import StateMemory
from autoptd.program.program import Picture
from autoptd.runtime.checks import batch as check_batch
from autoptd.runtime.checks import copies as check_copies
from autoptd.runtime.checks import ranks as check_ranks
from autoptd.runtime.checks.call import check_call
from autoptd.runtime.measure.held_memory import count_memory
from autoptd.runtime.measure.record import Record, recording
from autoptd.runtime.measure.stepclock import StepTimes, measured
from autoptd.runtime.params.grad_norm import (
    check_finite,
    checked_clip_value,
    checked_norm_type,
    clip_gradients,
    clip_values,
    grad_norm,
)
from autoptd.runtime.params.optimizer import make_optimizer
from autoptd.runtime.step.launch import Rank, RunningRanks
from autoptd.runtime.step.microbatches import cut, flatten, is_call_in_one, take_rows
from autoptd.wings.viz import graph_picture


class ParallelModel(AdaptedModel):
    """A model on t*p*d ranks.

    With `backend="local"` they are threads of this process, else this process is one of them.

    `program` is the compiled model, or None: see `lazy`. `state` is the model's state dict: its parameters,
    and persistent buffers. With `weights` the parameters' values are those of this source instead. `compiler`
    compiles for the first `eval_step`, on the layout of the program that trains, and for batches of other
    sizes; without it, evaluation runs that program's forward. `draw` adds pictures to `show`. Collective.
    """

    # training

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run all microbatches forward and backward; return the detached loss of the global batch (0-d).

        Collective.

        Takes the arguments of the model, or one mapping of them: the global batch with `backend="local"`, this
        replica's rows of it (`local_batch`) under torchrun. Gradients are added to `parameter.grad` until
        `zero_grad`. A NaN loss raises RuntimeFault on all ranks, and adds none; on CUDA it is seen in the next
        step, when its own gradients were handed over.
        """
        if not torch.is_grad_enabled():
            mode = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
            fact = f"torch.{mode}() is on around it: a loop of one device would have no gradients, and this call adds them"
            remedy = "leave it off here; for the loss without gradients call pm.eval_step(...)"
            raise PlanError("pm.step", fact, remedy)
        _, ranks = self._running(args, kwargs)
        self._refuse_unequal(args, kwargs)
        args, kwargs = self._arranged(args, kwargs)
        program, args, kwargs = self._sized(args, kwargs)
        check_call(program, args, kwargs, ranks.replicas)
        # Before the step: after one that raised, all ranks still agree on the count.
        self._calls += 1
        call = self._calls

        scale = None if self._loss_scale is None else self._loss_scale.value

        def step(rank: Rank) -> torch.Tensor:
            names, replica = rank.executor.inputs, ranks.replica_of(rank)
            batch = cut(program, args, kwargs, names, replica, rank.world.device)
            return rank.executor.step(batch, self.options.nan, scale)

        self._check_changes(ranks, "step", call)
        # Outside of the step: its collectives are no part of the program, and not recorded.
        if check_copies.is_due(call, self.options.check_every):
            self._compare_copies()
        held = ranks.here[0].params
        self._loop.begin(chain(held.local.values(), held.stored.values()))
        with self._batch_checked(ranks, "step", call, flatten(args, kwargs)[0]):
            loss = ranks.run("step", step)
        self._loop.end()
        self._losses.append(loss)
        if self._loss_scale is not None:
            self._loss_scale.renew()
        return loss

    @property
    def loss_scale(self) -> float | None:
        """The loss scale of the next step with precision="fp16"; else None."""
        return None if self._loss_scale is None else self._loss_scale.value

    def measured_step(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, tuple[StepTimes, ...]]:
        """Run `step`, and return where its time went on every rank: computing, in collectives, waiting.

        Its peak memory. Collective.

        Steps measured like this take somewhat longer; on CUDA the times are the device's own, by events.
        """

        def step(ranks: RunningRanks) -> torch.Tensor:
            return self.step(*args, **kwargs)

        return measured(self._started("measured_step"), step)

    def eval_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the loss of the global batch without gradients, the model in eval mode. Collective.

        A batch may have fewer rows than others before: the last one of a dataset. They need not divide over d. A program for
        so many is compiled when they first come.
        """
        _, ranks = self._running(args, kwargs, "eval_step")
        args, kwargs = self._arranged(args, kwargs, "eval_step")
        program, args, kwargs = self._sized_evaluation(args, kwargs)
        check_call(program, args, kwargs, ranks.replicas, "eval_step")
        self._evaluations += 1
        self._check_changes(ranks, "evaluation", self._evaluations)

        def evaluate(rank: Rank) -> torch.Tensor:
            names, replica = rank.evaluator.inputs, ranks.replica_of(rank)
            device = rank.world.device
            return rank.evaluator.evaluate(cut(program, args, kwargs, names, replica, device, ranks.replicas))

        with self._batch_checked(ranks, "eval_step", self._evaluations, flatten(args, kwargs)[0]):
            return ranks.run("eval_step", evaluate)

    def _batch_checked(
        self, ranks: RunningRanks, call: str, count: int, leaves: Sequence[Any]
    ) -> AbstractContextManager[None]:
        """Check, where it is due, that the ranks of a replica read the same: around the `count`-th call of
        its kind.
        """
        # In local there is one batch for all ranks.
        if not self._is_process or not check_batch.is_due(count, self.options.check_every):
            return nullcontext()
        return check_batch.batch_checked(ranks, call, count, leaves)

    def local_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Cut a global batch to the rows that `step` takes here: this replica's under torchrun, all of them
        in local.

        Returns the positional arguments as a tuple, or keyword arguments as a dict; given both, the pair of
        the two: `pm.step(*pm.local_batch(x, y))`, `pm.step(**pm.local_batch(ids=x))`. Of a mapping of keywords,
        such as a tokenizer makes, a dict: `pm.step(pm.local_batch(batch))`. Rows that d does not divide are for
        `eval_step` alone.
        """
        is_in_one = is_call_in_one(args, kwargs, self._arguments, self._form)
        if self._is_process:
            args, kwargs = self._arranged(args, kwargs)
            mesh = self.options.mesh
            self._cut_unseen |= self._program is None and mesh.replicas > 1
            replica, can_be_unequal = mesh.replica_of(self._rank), self._takes_unequal
            share = take_rows(self._program, args, kwargs, mesh.replicas, replica, even=not can_be_unequal)
            if can_be_unequal:
                self._remember_unequal(flatten(args, kwargs)[0], flatten(*share)[0])
            args, kwargs = share
        if is_in_one:
            args, kwargs = self._in_full(args, kwargs)
            return {**dict(zip(self._arguments, args, strict=False)), **kwargs}
        if args and kwargs:
            return args, kwargs
        return kwargs or args

    @property
    def _takes_unequal(self) -> bool:
        """Whether replicas may have other numbers of rows in an evaluation."""
        program, has_programs = self._program, self._compiler is not None
        if program is None or not has_programs or self.options.shapes not in (None, EXACT):
            return False
        return program.row_blocks == 1

    def _remember_unequal(self, whole: Sequence[Any], share: Sequence[Any]) -> None:
        """Remember the tensors that were cut to other numbers of rows on other replicas: a step would end on some of them."""
        replicas = self.options.mesh.replicas
        cut = [(len(x), weakref.ref(own)) for x, own in zip(whole, share, strict=True) if own is not x]
        alive = [known for known in self._unequal if known[1]() is not None]
        self._unequal = alive + [known for known in cut if known[0] % replicas]

    def _refuse_unequal(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise PlanError on all ranks for a step with such tensors."""
        leaves = flatten(args, kwargs)[0] if self._unequal else []
        for rows, ref in self._unequal:
            if any(leaf is ref() for leaf in leaves):
                degrees = self.options.mesh.product_text(self.options.mesh.batch_axes)
                fact = f"{rows} rows do not divide over {degrees}, which is for pm.eval_step only"
                raise PlanError("pm.step", fact, "a batch that d divides: DataLoader(..., drop_last=True)")

    def optimizer(
        self,
        cls: type[torch.optim.Optimizer] | partial[torch.optim.Optimizer],
        params: Iterable[Any] | None = None,
        **keywords: Any,
    ) -> torch.optim.Optimizer:
        """Return a real `cls` over the local parameters: learning-rate schedulers work on it. Collective.

        `cls` may be a functools.partial of a class. `params` takes names, globs, tensors (those of the model that was
        handed to parallelize as well) and (name, tensor) pairs, or group dicts of such; None is all.
        Elementwise classes only. Its `state_dict` speaks original names and full tensors, and is collective.
        In local it steps all ranks at once. Adam, AdamW and SGD take torch's fused form unless `fused=`,
        `foreach=`, `capturable=` or `differentiable=` is given. With precision="fp16", `step` changes nothing
        where a gradient of any rank is not finite: `step_was_skipped` of the optimizer says so, and `skipped`
        counts.
        """
        ranks = self._started("optimizer")

        def run(fn: Callable[[Any], Any]) -> Any:
            return ranks.run("optimizer", lambda rank: fn(rank.params))

        held = [rank.params for rank in ranks.here]
        trained = {name for spec in held[0].specs for name in (spec.name, *spec.aliases)}
        cls, params, keywords = resolved(cls, params, keywords, self._original, trained)
        optimizer = make_optimizer(cls, held, run, params, self._loss_scale, **keywords)
        self._optimizers.append(weakref.ref(optimizer))
        self._loop.follow(optimizer)
        optimizer.on_zero = self._loop.clear
        return optimizer

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return `optimizer.state_dict()`: full tensors by original names on rank 0, {} elsewhere. Collective."""
        return optimizer.state_dict()

    def load_optimizer_state_dict(
        self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]
    ) -> None:
        """Load what `optimizer_state_dict` returned; every rank passes all of it."""
        optimizer.load_state_dict(dict(state_dict))

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clip the global norm of all gradients, each parameter counted once; return the norm before.

        `norm_type` is 2, inf (the largest entry), 1, or the p of any other p-norm. With `error_if_nonfinite`, a norm
        that is NaN or infinite is a RuntimeFault on all ranks, and nothing is changed. Collective.
        """
        # As torch does: a number of a config file may be text.
        ranks, limit, p = self._started("clip_grad_norm_"), float(max_norm), checked_norm_type(norm_type)
        if error_if_nonfinite:
            check_finite(ranks.run("clip_grad_norm_", lambda rank: grad_norm(rank.params, p)))
        norm = ranks.run("clip_grad_norm_", lambda rank: clip_gradients(rank.params, limit, p))
        # Powers of finite gradients may overflow.
        if self._loss_scale is not None and p in (1, 2, inf):
            self._loss_scale.saw(norm)
        return norm

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp every entry of all gradients to [-clip_value, clip_value], as `torch.nn.utils.clip_grad_value_` does. All ranks
        call it.
        """
        ranks, value = self._started("clip_grad_value_"), checked_clip_value(clip_value)
        # An infinity would be a number afterwards, and the update not skipped.
        if self._loss_scale is not None:
            self._loss_scale.saw(ranks.run("clip_grad_value_", lambda rank: grad_norm(rank.params, inf)))
        ranks.run("clip_grad_value_", lambda rank: clip_values(rank.params, value))

    def check_ranks(self, *args: Any, **kwargs: Any) -> None:
        """Raise RuntimeFault on all ranks where replicas do not compute the same, bit by bit. Collective.

        Takes a global batch, the same on all ranks, of which every replica runs the first one's rows, twice, forward and
        backward; nothing of it is kept. What differs is named with its rank: a weight that lost a bit, or a device that
        computes wrongly. Needs kernels that give the same bits each time (`torch.use_deterministic_algorithms`), and says
        where they do not. With one replica, only whether each rank computes the same twice.
        """
        ranks, mesh = self._settled("check_ranks"), self.options.mesh
        args, kwargs = self._arranged(args, kwargs)
        # A program is that of what `step` takes: the rows of one replica, or of all of them.
        if not self._is_process:
            program, args, kwargs = self._sized(args, kwargs)
        args, kwargs = take_rows(self.program, args, kwargs, mesh.replicas, 0)
        if self._is_process:
            program, args, kwargs = self._sized(args, kwargs)
        check_call(program, args, kwargs, 1)
        scale = None if self._loss_scale is None else self._loss_scale.value

        def check(rank: Rank) -> None:
            rows = cut(program, args, kwargs, rank.executor.inputs, 0, rank.world.device)
            check_ranks.check_ranks(rank, rows, scale)

        ranks.unrecorded.run(check_ranks.SITE, check)

    def memory(self) -> dict[int, StateMemory]:
        """Count the bytes that the ranks of this process hold, by rank: parameters, gradients (of the last step),
        masters, and the moments of the optimizers that `optimizer` made.

        `program.memory(rank)` predicts the same, for AdamW.
        """
        optimizers = self._living_optimizers()
        return {
            rank.world.rank: count_memory(rank.params, rank.executor.__dict__.get("gradients"), optimizers)
            for rank in self._started("memory").here
        }

    def checkpointer(
        self,
        folder: str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        every: int | str,
        mtbf: float | None = None,
        keep: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Checkpointer:
        """Return what saves the run every so many steps, keeps the last `keep` checkpoints, and resumes.

        For a `with` block; `step(loss)` of it behind each step. See `autoptd.model.checkpointer`. Collective. With
        `every="auto"` by Young's rule: every sqrt(2 * what a save takes, as measured * `mtbf`), where `mtbf` is the
        mean hours between two faults of the whole job.
        """
        return Checkpointer(self, folder, optimizer, every=every, mtbf=mtbf, keep=keep, extra=extra)

    # parameters

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (first original name, local tensor) of the parameters of this rank, number of dims kept.

        In local: those of all ranks, one rank after the other, so that what a loop over them changes is changed on every
        rank; a name comes once for every rank that has a part or a copy, so that what a loop keeps of its own is kept by
        tensor, not by name. `rank_parameters` has those of one rank.
        """
        for rank in self._started("named_parameters").here:
            yield from rank.params.local.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the tensors of `named_parameters`."""
        return (parameter for _, parameter in self.named_parameters())

    def rank_parameters(self, rank: int) -> dict[str, nn.Parameter]:
        """Return the local parameters of one rank of this process, by first original name."""
        found = [held for held in self._started("rank_parameters").here if held.world.rank == rank]
        if not found:
            raise PlanError(
                "rank_parameters", f"rank {rank} is not in this process", "a rank of this process"
            )
        return dict(found[0].params.local)

    # the rest

    @contextmanager
    def record(self) -> Iterator[Record]:
        """Record what the ranks of this process do in a `with` block, as it is executed.

        `record.collectives`: every collective and send with its kind, mesh axis, payload bytes, group size, phase, site
        and reason. `record.flops`: matrix products in FLOPs and other operators in elements, by stage, phase and module,
        and whether every tensor rank computes the same. `record.spans`: start and end of every action, on CUDA the
        device's. Steps run slower meanwhile.
        """
        ranks = self._started("record")
        with recording(ranks) as (recorded, record):
            self._ranks = recorded
            try:
                yield record
            finally:
                self._ranks = ranks

    def show(self, folder: str | Path | None = None, record: Record | None = None) -> Picture:
        """Return the picture of the graph (of a loaded program, of its stages); notebooks show it.

        With `folder`, write the program and all its pictures there (rank 0 only). With `record`, that of a
        step, its schedule chart and trace have what was executed beside what was simulated.
        """
        self._started("show")
        program = self.program
        if folder is not None and self.coordinate == Coordinate():
            program.save(folder)
            if self._draw is not None:
                self._draw(program, Path(folder), record.spans if record else ())
        return graph_picture(program, "layer" if program.graphs else "model")


__all__ = ["LoadResult", "ParallelModel"]
