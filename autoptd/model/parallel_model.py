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
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import torch
from torch import nn

from autoptd.errors import PlanError
from autoptd.ir.mesh import Coordinate
from autoptd.model.adapters import Adapters
from autoptd.model.calls import Calls
from autoptd.model.checkpointer import Checkpointer
from autoptd.model.compiling import ModelCompiler
from autoptd.model.instead import InsteadOf
from autoptd.model.loop_changes import LoopChanges
from autoptd.model.loop_watch import LoopWatch
from autoptd.model.run import Clock, Run
from autoptd.model.sizes import Programs
from autoptd.model.state import LoadResult, State
from autoptd.model.steps import Steps
from autoptd.model.updates import Updates
from autoptd.options import Options
from autoptd.program.folder_format import FolderFormat
from autoptd.program.program import Picture, Program
from autoptd.program.sources import Source
from autoptd.runtime.measure.record import Record, recording
from autoptd.runtime.measure.stepclock import StepTimes, measured
from autoptd.runtime.step.launch import is_first_process
from autoptd.runtime.step.timeline import Span

# Writes the pictures of a program into a folder, if there is one; returns that of its graph.
Draw = Callable[[Program, Path | None, Sequence[Span]], Picture]
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
    sizes; without it, evaluation runs that program's forward. `draw` makes the pictures of `show`. Collective.
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
        self._steps = Steps(self.run, self.sizes, self._calls, self._loop)
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
        subject.check_values()
        return cls(None, options, subject.state(), compiler=compiler, weights=subject.source, draw=draw)

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
    compile_now = part_verb("_steps", Steps.compile_now)
    step = part_verb("_steps", Steps.step)
    eval_step = part_verb("_steps", Steps.eval_step)
    check_ranks = part_verb("_steps", Steps.check_ranks)

    @property
    def loss_scale(self) -> float | None:
        """The loss scale of the next step with precision="fp16"; else None."""
        return None if self.run.loss_scale is None else self.run.loss_scale.value

    def measured_step(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, tuple[StepTimes, ...]]:
        """Run `step`; return where its time went on every rank (computing, in collectives, waiting), and its peak memory.

        Collective. Steps measured like this take somewhat longer; on CUDA the times are the device's own, by events.
        """
        return measured(self.run.started("measured_step"), lambda _: self.step(*args, **kwargs))

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
        """Return a checkpointer, which saves the run every few steps, keeps the last `keep` checkpoints, and resumes.

        For a `with` block; call its `step(loss)` after every training step. See `autoptd.model.checkpointer`. Collective. With
        `every="auto"` by Young's rule: every sqrt(2 * what a save takes, as measured * `mtbf`), where `mtbf` is the
        mean hours between two faults of the whole job.
        """
        return Checkpointer(self.state, folder, optimizer, every=every, mtbf=mtbf, keep=keep, extra=extra)

    # parameters

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (first original name, local tensor) of the parameters of this rank, number of dims kept.

        In local: those of all ranks, one rank after the other, so that a loop over them changes every rank. A name comes
        once for every rank that has a part or a copy: a loop that keeps state keys it by tensor, not by name.
        `rank_parameters` has those of one rank.
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
        """Record what the ranks of this process do in a `with` block, while it is executed.

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
        step, its schedule chart and trace show the executed step next to the simulated one.
        """
        self.run.started("show")
        if self._draw is None:
            fact = "this model was made without anything that draws"
            remedy = "draw=autoptd.wings.reports.pictures.draw_program of ParallelModel; pm.program.save(folder) for the files"
            raise PlanError("pm.show", fact, remedy)
        into = Path(folder) if folder is not None and self.coordinate == Coordinate() else None
        if into is not None:
            self.program.save(into)
        return self._draw(self.program, into, record.spans if record else ())


__all__ = ["LoadResult", "ParallelModel"]
