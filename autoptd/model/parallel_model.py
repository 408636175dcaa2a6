"""What `parallelize` returns: the user's model, running on t*p*d ranks.

In: a program, options, and the model's state dict; or a compiler, for the arguments of the first step. Out: an object with
the training loop's verbs, under the model's own parameter names. Its parts have names: `state`, `sizes`, `adapters`, `clock`.
Calls marked *collective* are made by all ranks.

    pm = ParallelModel(program, options, model.state_dict())
    opt = pm.optimizer(torch.optim.AdamW, lr=3e-4)
    loss = pm.step(*pm.local_batch(x, y)); pm.clip_grad_norm_(1.0); opt.step(); opt.zero_grad()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import torch
from torch import nn

from autoptd.errors import PlanError
from autoptd.ir.mesh import Coordinate
from autoptd.model.adapters import Adapters
from autoptd.model.calls import Batch, Calls
from autoptd.model.checkpointer import Checkpointer
from autoptd.model.compiling import ModelCompiler
from autoptd.model.instead import InsteadOf
from autoptd.model.loop_changes import LoopChanges, is_due
from autoptd.model.loop_watch import LoopWatch
from autoptd.model.padded import EVALUATION
from autoptd.model.run import Clock, Run
from autoptd.model.sizes import Programs
from autoptd.model.state import LoadResult, State
from autoptd.model.updates import Updates
from autoptd.options import Options
from autoptd.program.folder_format import FolderFormat
from autoptd.program.program import Picture, Program
from autoptd.program.sources import Source
from autoptd.runtime.checks import copies as check_copies
from autoptd.runtime.checks import ranks as check_ranks
from autoptd.runtime.checks.call import check_call
from autoptd.runtime.measure.record import Record, recording
from autoptd.runtime.measure.stepclock import StepTimes, measured
from autoptd.runtime.step.launch import Rank, is_first_process
from autoptd.runtime.step.microbatches import cut, take_rows
from autoptd.runtime.step.timeline import Span
from autoptd.wings.viz import graph_picture

Draw = Callable[[Program, Path, Sequence[Span]], None]
P = ParamSpec("P")
R = TypeVar("R")


def part_verb(part: str, verb: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return a method that calls `verb` of a model's part."""

    @wraps(verb)
    def call(self: ParallelModel, *args: P.args, **kwargs: P.kwargs) -> R:
        return verb(getattr(self, part), *args, **kwargs)

    return call


class ParallelModel(InsteadOf):
    """A model on t*p*d ranks.

    With `backend="local"` they are threads of this process, else this process is one of them.

    `program` is the compiled model, or None: see `lazy`. `state` is the model's state dict: its parameters,
    and persistent buffers. With `weights` the parameters' values are those of this source instead. `compiler`
    compiles for the first `eval_step`, on the layout of the program that trains, and for batches of other
    sizes; without it, evaluation runs that program's forward. `draw` adds pictures to `show`. Collective.
    """

    def __init__(
        self,
        program: Program | None,
        options: Options,
        state: Mapping[str, torch.Tensor],
        *,
        compiler: ModelCompiler | None = None,
        weights: Source | None = None,
        draw: Draw | None = None,
    ) -> None:
        subject = None if compiler is None else compiler.subject
        self.options, self._draw = options, draw
        # What compiled programs do not follow, in a loop that was written for the model.
        changes, self._loop = None, LoopWatch()
        if subject is not None and program is None:
            changes = LoopChanges(subject.given, subject.remade, options.loss_fn)
            self._loop = LoopWatch(subject.given, speaks=is_first_process())
        self.run = Run(options, state, weights, None if subject is None else subject.shared)
        self.sizes = Programs(self.run, compiler, changes)
        self.adapters = Adapters(self.run, self.sizes, None if subject is None else subject.model)
        format = FolderFormat() if subject is None else subject.format
        self.state = State(self.run, self.sizes, self.adapters, format)
        names = () if subject is None else subject.arguments
        self._calls = Calls(self.run, names, is_compiled_again=compiler is not None)
        self._updates = Updates(self.run, self._loop)
        if program is not None:
            self.run.start(program)
            self.sizes.begin((), {})

    @classmethod
    def lazy(cls, compiler: ModelCompiler, draw: Draw | None = None) -> Self:
        """Return a model that is compiled by `compile_now`, else at the first step, for the arguments given there.

        The user's loop is watched for what compiled programs do not follow.
        """
        subject, options = compiler.subject, compiler.options
        return cls(None, options, subject.state(), compiler=compiler, weights=subject.source, draw=draw)

    def compile_now(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compile for steps with such a global batch, and start the ranks. Collective."""
        self._compile(args, kwargs, self.options.mesh.replicas)

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any], replicas: int) -> None:
        program = self.sizes.first(args, kwargs, replicas)
        self._calls.compiled(program, args, kwargs)
        self.run.start(program)
        self._loop.started()
        self.sizes.begin(args, kwargs)

    def __repr__(self) -> str:
        """Say on a line what runs where."""
        where = "processes" if self.run.is_process else "threads"
        program = repr(self.run.compiled) if self.run.compiled else "compiled at the first step"
        return f"<{type(self).__name__} on {self.options.mesh.size} {where}: {program.strip('<>')}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise PlanError: what copy, deepcopy, pickle and torch.save ask for."""
        fact = "its parameters belong to ranks that run, and it is neither copied nor pickled"
        remedy = (
            "pm.save(folder) and pm.load(folder) for a checkpoint, torch.save(pm.state_dict(), file) for weights; for a copy "
            "or an average (AveragedModel), one of the unmodified model: before each update weights = pm.state_dict() on every "
            "rank, and on rank 0 model.load_state_dict(weights)"
        )
        raise PlanError("copy of a ParallelModel", fact, remedy)

    @property
    def program(self) -> Program:
        """The compiled program."""
        return self.run.program

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs that train, in the order in which their sizes came: with `shapes`, there may be several."""
        first = self.program
        return tuple(self.sizes.trained) or (first,)

    @property
    def clock(self) -> Clock:
        """The position of the run: its steps, how often they were set, and the last losses."""
        return self.run.clock

    @property
    def steps(self) -> int:
        """How often `step` was called, whose number draws the dropout masks; set it on all ranks to resume a run."""
        return self.run.clock.steps

    @steps.setter
    def steps(self, count: int) -> None:
        self.run.started("steps")
        self.run.clock.steps = count

    @property
    def coordinate(self) -> Coordinate:
        """This rank's place on the mesh; rank 0's in local."""
        return self.options.mesh.coordinate(self.run.rank)

    @property
    def share(self) -> tuple[int, int]:
        """Which rows of a global batch `step` takes here: (number of the replica, how many there are); (0, 1) in local."""
        return self.run.share

    def close(self) -> None:
        """Stop the ranks (threads, or the process group if it was made here); no call may follow."""
        self._loop.close()
        if self.run.ranks is not None:
            self.run.ranks.close()

    # checkpoints, weights and adapters

    save = part_verb("state", State.save)
    load = part_verb("state", State.load)
    fingerprint = part_verb("state", State.fingerprint)
    state_dict = part_verb("state", State.state_dict)
    load_state_dict = part_verb("state", State.load_state_dict)
    save_pretrained = part_verb("state", State.save_pretrained)
    gradients = part_verb("state", State.gradients)
    save_adapter = part_verb("adapters", Adapters.save)
    load_adapter = part_verb("adapters", Adapters.load)
    on_overwrite = part_verb("run", Run.on_overwrite)

    # training

    optimizer = part_verb("_updates", Updates.optimizer)
    optimizer_state_dict = part_verb("_updates", Updates.optimizer_state_dict)
    load_optimizer_state_dict = part_verb("_updates", Updates.load_optimizer_state_dict)
    clip_grad_norm_ = part_verb("_updates", Updates.clip_grad_norm_)
    clip_grad_value_ = part_verb("_updates", Updates.clip_grad_value_)
    memory = part_verb("_updates", Updates.memory)
    local_batch = part_verb("_calls", Calls.local_batch)

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
        batch = self._batch("step", args, kwargs)
        ranks, clock, loss_scale = batch.ranks, self.run.clock, self.run.loss_scale
        # Before the step: after one that raised, all ranks still agree on the count.
        clock.calls += 1
        scale = None if loss_scale is None else loss_scale.value

        def step(rank: Rank) -> torch.Tensor:
            executor = rank.executor
            return executor.step(batch.microbatches(rank, executor), self.options.nan, scale)

        self._check_loop("step", clock.calls)
        # Outside of the step: its collectives are no part of the program, and not recorded.
        if check_copies.is_due(clock.calls, self.options.check_every):
            self.run.compare_copies()
        held = ranks.here[0].params
        self._loop.begin(chain(held.local.values(), held.stored.values()))
        with batch.checked(clock.calls):
            loss = ranks.run("step", step)
        self._loop.end()
        clock.losses.append(loss)
        if loss_scale is not None:
            loss_scale.renew()
        return loss

    def eval_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the loss of the global batch without gradients, the model in eval mode. Collective.

        A batch may have fewer rows than others before: the last one of a dataset. They need not divide over d. A program for
        so many is compiled when they first come.
        """
        batch = self._batch(EVALUATION, args, kwargs)
        clock = self.run.clock
        clock.evaluations += 1
        self._check_loop("evaluation", clock.evaluations)

        def evaluate(rank: Rank) -> torch.Tensor:
            return rank.evaluator.evaluate(batch.microbatches(rank, rank.evaluator))

        with batch.checked(clock.evaluations):
            return batch.ranks.run(EVALUATION, evaluate)

    def _batch(self, call: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        """Bring a call to the program that runs it, which is compiled if there is none; PlanError where it does not fit.

        Collective.
        """
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            fact = "autocast is on around it, and the compiled model does not follow it"
            raise PlanError(
                f"pm.{call}", fact, "leave autocast off; precision='bf16-mixed' computes as under it"
            )
        args, kwargs = self._calls.in_form(args, kwargs, call)
        if self.run.compiled is None:
            # What `step` gets: this replica's rows for a process, the global batch for threads.
            self._compile(args, kwargs, 1 if self.run.is_process else self.options.mesh.replicas)
        ranks = self.run.started(call)
        ranks.check_equal_copies()
        ranks.unrecorded.follow_edits()
        if call != EVALUATION:
            self._calls.refuse_unequal(args, kwargs)
        program, args, kwargs = self.sizes.find(call, args, kwargs)
        # In local there is one batch for all ranks.
        every = self.options.check_every if self.run.is_process else 0
        return Batch(call, program, ranks, check_call(program, args, kwargs, ranks.replicas, call), every)

    def _check_loop(self, call: str, count: int) -> None:
        """Raise RuntimeFault on all ranks where the loop has changed what the model computes; warn of written weights."""
        if is_due(count, self.options.check_every):
            self._loop.check_weights(f"{call} {count}", self.run.clock.exchanges)
            self.sizes.check_changes(f"{call} {count}")

    @property
    def loss_scale(self) -> float | None:
        """The loss scale of the next step with precision="fp16"; else None."""
        return None if self.run.loss_scale is None else self.run.loss_scale.value

    def measured_step(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, tuple[StepTimes, ...]]:
        """Run `step`; return where its time went on every rank (computing, in collectives, waiting), and its peak memory.

        Collective. Steps measured like this take somewhat longer; on CUDA the times are the device's own, by events.
        """
        return measured(self.run.started("measured_step"), lambda _: self.step(*args, **kwargs))

    def check_ranks(self, *args: Any, **kwargs: Any) -> None:
        """Raise RuntimeFault on all ranks where replicas do not compute the same, bit by bit. Collective.

        Takes a global batch, the same on all ranks, of which every replica runs the first one's rows, twice, forward and
        backward; nothing of it is kept. What differs is named with its rank: a weight that lost a bit, or a device that
        computes wrongly. Needs kernels that give the same bits each time (`torch.use_deterministic_algorithms`), and says
        where they do not. With one replica, only whether each rank computes the same twice.
        """
        ranks, replicas = self.run.settled("check_ranks"), self.options.mesh.replicas
        args, kwargs = self._calls.in_form(args, kwargs)
        # A program is that of what `step` takes: the rows of one replica, or of all of them.
        if not self.run.is_process:
            program, args, kwargs = self.sizes.find("step", args, kwargs)
        args, kwargs = take_rows(self.program, args, kwargs, replicas, 0)
        if self.run.is_process:
            program, args, kwargs = self.sizes.find("step", args, kwargs)
        leaves, scale = check_call(program, args, kwargs, 1), self.loss_scale

        def check(rank: Rank) -> None:
            rows = cut(program, leaves, rank.executor.inputs, 0, rank.world.device)
            check_ranks.check_ranks(rank, rows, scale)

        ranks.unrecorded.run(check_ranks.SITE, check)

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

        For a `with` block; call its `step(loss)` after every training step. See `autoptd.model.checkpointer`. Collective. With
        `every="auto"` by Young's rule: every sqrt(2 * what a save takes, as measured * `mtbf`), where `mtbf` is the
        mean hours between two faults of the whole job.
        """
        return Checkpointer(self.state, folder, optimizer, every=every, mtbf=mtbf, keep=keep, extra=extra)

    # parameters

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (first original name, local tensor) of the parameters of this rank, number of dims kept.

        In local: those of all ranks, one rank after the other, so that what a loop over them changes is changed on every
        rank; a name comes once for every rank that has a part or a copy, so that what a loop keeps of its own is kept by
        tensor, not by name. `rank_parameters` has those of one rank.
        """
        for rank in self.run.started("named_parameters").here:
            yield from rank.params.local.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the tensors of `named_parameters`."""
        return (parameter for _, parameter in self.named_parameters())

    def rank_parameters(self, rank: int) -> dict[str, nn.Parameter]:
        """Return the local parameters of one rank of this process, by first original name."""
        found = [held for held in self.run.started("rank_parameters").here if held.world.rank == rank]
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
        ranks = self.run.started("record")
        with recording(ranks) as (recorded, record):
            self.run.ranks = recorded
            try:
                yield record
            finally:
                self.run.ranks = ranks

    def show(self, folder: str | Path | None = None, record: Record | None = None) -> Picture:
        """Return the picture of the graph (of a loaded program, of its stages); notebooks show it.

        With `folder`, write the program and all its pictures there (rank 0 only). With `record`, that of a
        step, its schedule chart and trace have what was executed beside what was simulated.
        """
        self.run.started("show")
        program = self.program
        if folder is not None and self.coordinate == Coordinate():
            program.save(folder)
            if self._draw is not None:
                self._draw(program, Path(folder), record.spans if record else ())
        return graph_picture(program, "layer" if program.graphs else "model")


__all__ = ["LoadResult", "ParallelModel"]
