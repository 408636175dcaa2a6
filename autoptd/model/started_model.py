"""A model that is compiled when its arguments are known, and whose ranks are then started.

In: a program, or a way to compile one; options; the model's state dict, or a source of weights. Out: the
program, the running ranks, and this process's place among them: what the verbs of `ParallelModel` work on.

    pm = ParallelModel.lazy(compiler)
    pm.compile_now((x, y), {})
    pm.program, pm.coordinate
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from autoptd.compat import tree_map
from autoptd.errors import PlanError, RuntimeFault
from autoptd.ir.buffers import SharedBuffers
from autoptd.ir.mesh import Coordinate
from autoptd.model.adapters import Adapters
from autoptd.model.compiling import ModelCompiler
from autoptd.model.instead import InsteadOf
from autoptd.model.loop_changes import LoopChanges, is_due
from autoptd.model.loop_watch import LoopWatch
from autoptd.model.optimizer_request import OwnParameters
from autoptd.model.sizes import EVALUATION, Programs
from autoptd.options import Options
from autoptd.program.folder_format import FolderFormat
from autoptd.program.program import Program
from autoptd.program.sources import Source
from autoptd.runtime.checkpoint.restore import agree, attempted
from autoptd.runtime.params.loss_scale import LossScale
from autoptd.runtime.step.launch import (
    MODEL,
    LocalRanks,
    ProcessRank,
    RunningRanks,
    is_first_process,
    is_launched,
    own_rank,
)
from autoptd.runtime.step.microbatches import CallForm, is_call_in_one
from autoptd.runtime.step.model_buffers import ModelBuffers
from autoptd.runtime.step.timeline import Span
from autoptd.runtime.world.devices import device_of_ranks
from autoptd.subject.call import Call

Draw = Callable[[Program, Path, Sequence[Span]], None]
# A program, and the call that it takes.
SizedCall = tuple[Program, tuple[Any, ...], dict[str, Any]]
# How many losses are remembered.
LOSSES = 20


def is_local(options: Options) -> bool:
    """Tell whether all ranks run in this process, so that `step` takes the global batch.

    PlanError for a world that cannot be.
    """
    return not is_launched(options.mesh, options.backend)


class StartedModel(InsteadOf):
    """A program, once there is one, and the ranks that run it; the keywords are explained at `ParallelModel`."""

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
        self.options = options
        self._is_process = not is_local(options)
        subject = None if compiler is None else compiler.subject
        self._loop, self._original = LoopWatch(speaks=False), OwnParameters()
        self._changes: LoopChanges | None = None
        self._arguments = () if subject is None else subject.arguments
        # The form of the call that was compiled for: other spellings of it are brought into this form.
        self._form: CallForm | None = None
        # Whether `local_batch` cut rows for one of several replicas before it was known which belong together.
        self._cut_unseen = False
        # Tensors that `local_batch` cut for an evaluation, with the rows of the whole batch.
        self._unequal: list[tuple[int, weakref.ref[torch.Tensor]]] = []
        # Calls of `step`. All ranks agree on it; `steps`, which the user may set, need not.
        self._calls = 0
        self._evaluations = 0
        # How often `steps` was set to another number than the next one.
        self._jumps = 0
        self._state = {name: x.detach() for name, x in state.items()}
        self._names = list(self._state)
        self._compiler, self._draw = compiler, draw
        # Stands in for the call that was compiled for, and the number of replicas whose rows it holds.
        self._call: tuple[Call, int] | None = None
        self._weights = weights
        self._format = FolderFormat() if subject is None else subject.format
        self._adapters = None if subject is None else Adapters(subject.model)
        self._loss_scale = LossScale.of(options)
        # Those that the user still has.
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        # The calls that have warned of gradients that wait for an update.
        self._told_gradients: set[str] = set()
        # Of the last steps.
        self._losses: deque[torch.Tensor] = deque(maxlen=LOSSES)
        # What checkpoints say of a program, once it was asked for.
        self._told: tuple[Program, dict[str, Any]] | None = None
        # Why the ranks' values cannot be used, if so.
        self._unusable = ""
        # Called before parameters and moments are overwritten: a save may still be copying them.
        self._release: Callable[[], None] = lambda: None
        self._buffers = ModelBuffers(SharedBuffers() if subject is None else subject.shared)
        self._program: Program | None = None
        self._ranks: RunningRanks | None = None
        # Those of other sizes: where batches may have several, and of evaluations.
        self._programs = Programs(options, compiler, are_processes=self._is_process)
        if program is not None:
            self._start(program)
            self._programs.begin(self.program, self._started("step"), (), {})

    @classmethod
    def lazy(cls, compiler: ModelCompiler, draw: Draw | None = None) -> Self:
        """Return a model that is compiled by `compile_now`, else at the first step, for the arguments given there.

        The user's loop is watched for what compiled programs do not follow.
        """
        subject = compiler.subject
        pm = cls(
            None, compiler.options, subject.state(), compiler=compiler, weights=subject.source, draw=draw
        )
        speaks, loss_fn = is_first_process(), compiler.options.loss_fn
        pm._changes = LoopChanges(subject.given, subject.remade, loss_fn, speaks=speaks)
        pm._original, pm._loop = OwnParameters(subject.given), LoopWatch(speaks=speaks)
        pm._loop.guard(subject.given)
        return pm

    def compile_now(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compile for steps with such a global batch, and start the ranks. Collective."""
        self._compile_for(args, kwargs, self.options.mesh.replicas)

    def _compile_for(self, args: tuple[Any, ...], kwargs: dict[str, Any], replicas: int) -> None:
        compiler = self._compiler
        if compiler is None:
            raise PlanError("compile_now", "there is nothing to compile", "use ParallelModel.lazy")
        self._call = (tree_map(_stand_in, (args, kwargs)), replicas)
        with compiler.subject.holding(self._state):
            program = self._followed(compiler.for_training((args, kwargs), replicas))
        if self._cut_unseen and program.row_blocks > 1:
            fact = f"the rows of {program.row_blocks} blocks of the batch belong together, which was not known when it was cut"
            raise PlanError("local_batch", fact, "example_inputs= of parallelize, a global batch")
        self._start(program)
        self._programs.begin(self.program, self._started("step"), args, kwargs)
        self._form = CallForm(self._arguments, len(args), tuple(kwargs))

    def _followed(self, program: Program, *, evaluates: bool = False) -> Program:
        """Return a program that was just compiled, and remember the model as it was."""
        if self._changes is not None:
            self._changes.follow(program, evaluates=evaluates)
        return program

    def __repr__(self) -> str:
        """Say on a line what runs where."""
        where = "processes" if self._is_process else "threads"
        program = repr(self._program) if self._program is not None else "compiled at the first step"
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
        self._started("program", even_unusable=True)
        assert self._program is not None
        return self._program

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs that train, in the order in which their sizes came: with `shapes`, there may be several."""
        first = self.program
        return tuple(self._programs.trained) or (first,)

    @property
    def coordinate(self) -> Coordinate:
        """This rank's place on the mesh; rank 0's in local."""
        return self.options.mesh.coordinate(self._rank)

    @property
    def _rank(self) -> int:
        """This process's rank; the first one where they are all here."""
        return own_rank() if self._is_process else 0

    @property
    def share(self) -> tuple[int, int]:
        """Which rows of a global batch `step` takes here: (number of the replica, how many there are); (0, 1) in local."""
        mesh = self.options.mesh
        return (mesh.replica_of(self._rank), mesh.replicas) if self._is_process else (0, 1)

    def close(self) -> None:
        """Stop the ranks (threads, or the process group if it was made here); no call may follow."""
        self._loop.close()
        if self._ranks is not None:
            self._ranks.close()

    def _living_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return those of the optimizers made here that the user still has."""
        return [made for ref in self._optimizers if (made := ref()) is not None]

    def _running(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], call: str = "step"
    ) -> tuple[Program, RunningRanks]:
        """Return the program and its ranks; compile for this call if there is no program yet."""
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            fact = "autocast is on around it, and the compiled model does not follow it"
            raise PlanError(
                f"pm.{call}", fact, "leave autocast off; precision='bf16-mixed' computes as under it"
            )
        if self._program is None:
            args, kwargs = self._in_full(args, kwargs)
            # What `step` gets: this replica's rows for a process, the global batch for threads.
            self._compile_for(args, kwargs, 1 if self._is_process else self.options.mesh.replicas)
        assert self._program is not None
        ranks = self._started("step")
        ranks.check_equal_copies()
        ranks.unrecorded.follow_edits()
        return self._program, ranks

    def _sized(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SizedCall:
        """Return the program that trains with a call, which the ranks use from now on, and the call, padded where that was
        asked for. Collective.
        """
        first, ranks, compiler = self.program, self._started("step"), self._compiler
        if self.options.shapes is None or compiler is None:
            return first, args, kwargs

        def compile(args: tuple[Any, ...], kwargs: dict[str, Any], counts: tuple[int, ...]) -> Program:
            with compiler.subject.holding(self._buffers.now(ranks)):
                return self._followed(compiler.for_sizes((args, kwargs), first))

        return self._programs.find("step", ranks, args, kwargs, compile)

    def _sized_evaluation(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SizedCall:
        """Return the program that evaluates a call likewise. Collective.

        Without `shapes`, there is one for each number of rows up to that of the first evaluation, or of training.
        """
        trained, ranks = self.program, self._started("eval_step")
        compiler, programs = self._compiler, self._programs
        if compiler is None:
            return trained, args, kwargs

        # Not before the first evaluation: some runs have none, and compiling takes as long as for training.
        def compile(args: tuple[Any, ...], kwargs: dict[str, Any], counts: tuple[int, ...]) -> Program:
            first = programs.trained_for(args, kwargs)
            with compiler.subject.holding(self._buffers.now(ranks)):
                program = compiler.for_evaluation((args, kwargs), first, counts)
                return self._followed(program, evaluates=True)

        return programs.find(EVALUATION, ranks, args, kwargs, compile)

    def _arranged(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], call: str = "step"
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bring a call into the form of the compiled one, where that is known."""
        args, kwargs = self._in_full(args, kwargs)
        return self._form.arrange(args, kwargs, call) if self._form else (args, kwargs)

    def _in_full(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call whose keywords are one mapping with keywords."""
        is_one = is_call_in_one(args, kwargs, self._arguments, self._form)
        return ((), dict(args[0])) if is_one else (args, kwargs)

    def _check_changes(self, ranks: RunningRanks, call: str, count: int) -> None:
        """Raise RuntimeFault on all ranks where a loop has changed what the model computes. Collective."""
        changes = self._changes
        if changes is None or not is_due(count, self.options.check_every):
            return
        known = (self.program, *self._programs.trained, *self._programs.evaluating)
        site, buffers = f"{call} {count}", self._buffers.now(ranks)
        attempt = attempted(lambda: changes.check(known, site, buffers))
        ranks.unrecorded.run(MODEL, lambda rank: agree(rank.world, MODEL, attempt))

    def _note_exchange(self) -> None:
        if self._changes is not None:
            self._changes.note_exchange()

    def _start(self, program: Program) -> None:
        options = self.options
        # Buffers may have changed since a saved program was compiled.
        program = self._buffers.take(program, self._state, self._weights)
        if self._is_process:
            start: Callable[..., RunningRanks] = partial(ProcessRank, backend=options.backend)
            device = options.device
        else:
            start = LocalRanks
            device = str(device_of_ranks(self._state.values(), options.device, "local"))
        self._ranks = start(program, self._weights or self._state, device=device, timeout=options.timeout)
        self._program = program
        self._buffers.follow(self._ranks)
        # The ranks hold copies: the model's own tensors, and what made them, may be freed.
        self._state, self._weights = {}, None

    def _settled(self, what: str) -> RunningRanks:
        """Return the ranks, whose parameters have what the user wrote to them. Collective."""
        ranks = self._started(what)
        self._note_exchange()
        ranks.unrecorded.follow_edits()
        return ranks

    def _started(self, what: str, even_unusable: bool = False) -> RunningRanks:
        if self._ranks is None:
            fact = "the model is compiled at the first step, there are no ranks yet"
            raise PlanError(f"pm.{what}", fact, "pass example_inputs= to parallelize, or call pm.step before")
        if self._unusable and not even_unusable:
            raise RuntimeFault(f"pm.{what}", self._unusable, "pm.load(...) of another checkpoint")
        return self._ranks


def _stand_in(leaf: Any) -> Any:
    """Return a tensor that a call can be compiled for, without memory."""
    return leaf.new_zeros(()).expand_as(leaf) if isinstance(leaf, torch.Tensor) else leaf


__all__ = ["StartedModel", "is_local"]
