"""A program, once there is one, and the ranks of this process that run it: what all parts of a
`ParallelModel` share.

In: options, and the model's state dict or a source of weights; later the program. Out: the running ranks,
this process's place among them, and the position of the run (`Clock`).

    run = Run(options, model.state_dict())
    run.start(program)
    run.started("step").run("step", lambda rank: ...)
"""

from __future__ import annotations

import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from autoptd.errors import PlanError, RuntimeFault
from autoptd.ir.buffers import SharedBuffers
from autoptd.model.loop_watch import LoopWatch
from autoptd.options import Options
from autoptd.program.program import Program
from autoptd.program.sources import Source
from autoptd.runtime.params.loss_scale import LossScaler
from autoptd.runtime.step.buffers import ModelBuffers, copy_buffers
from autoptd.runtime.step.launch import (
    COMPILING,
    LocalRanks,
    ProcessRank,
    Rank,
    RunningRanks,
    is_launched,
    own_rank,
)
from autoptd.runtime.world.agree import agree, attempted
from autoptd.runtime.world.devices import device_of_ranks
from autoptd.subject.call import Call
from autoptd.subject.subject import Subject
from autoptd.trace.loss import Outputs

Result = TypeVar("Result")
# How many losses are remembered.
LOSSES = 20


def is_local(options: Options) -> bool:
    """Tell whether all ranks run in this process, so that `step` takes the global batch.

    PlanError for an impossible world.
    """
    return not is_launched(options.mesh, options.backend)


class Clock:
    """The position of a run. All ranks agree on `calls` and `evaluations`; `steps`, which the user may set,
    need not.
    """

    def __init__(self) -> None:
        self.ranks: list[Rank] = []
        self.calls = self.evaluations = 0
        # How often `steps` was set to another number than the next one.
        self.jumps = 0
        # How often weights went from the ranks to the user or back: the user may load a model with them.
        self.exchanges = 0
        # Of the last steps.
        self.losses: deque[torch.Tensor] = deque(maxlen=LOSSES)

    @property
    def steps(self) -> int:
        return self.ranks[0].executor.steps if self.ranks else 0

    @steps.setter
    def steps(self, count: int) -> None:
        if not hasattr(count, "__index__") or count < 0:
            raise PlanError(
                f"pm.steps={count!r}", "must be a non-negative integer", "for example pm.steps = 0"
            )
        self.jumps += 1
        for rank in self.ranks:
            rank.executor.steps = operator.index(count)


class ModelCompiler(Protocol):
    """Compiles one subject."""

    @property
    def subject(self) -> Subject: ...

    @property
    def options(self) -> Options: ...

    def for_training(self, call: Call, replicas: int, check: bool = True) -> Program:
        """Compile for steps with the rows of `replicas` replicas; `check` compares trace and model."""
        ...

    def for_sizes(self, call: Call, first: Program) -> Program:
        """Compile for steps of other sizes, on the ranks of the program that trains."""
        ...

    def for_evaluation(
        self, call: Call, first: Program, counts: tuple[int, ...] = (), outputs: Outputs | None = None
    ) -> Program:
        """Compile for an evaluation likewise; `counts` are the rows of every replica where they are not
        equal; `outputs`, what it returns besides the loss.
        """
        ...

    def prove(self, calls: Sequence[Call], what: str, *, evaluates: bool, is_made_up: bool) -> None:
        """Raise PlanError unless the model ignores the padding of a call."""
        ...


class LoadResult(NamedTuple):
    """Names that a state dict lacked, and names that are not in the model; both empty when strict."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Run:
    """The program and the ranks; `shared` lists the buffers that share memory, `watched` is the user's model
    if its loop is watched.
    """

    def __init__(
        self,
        options: Options,
        state: Mapping[str, torch.Tensor],
        weights: Source | None = None,
        shared: SharedBuffers | None = None,
        watched: nn.Module | None = None,
    ) -> None:
        self.options, self.is_process = options, not is_local(options)
        # The program that trains with the first sizes; None until it is compiled.
        self.compiled: Program | None = None
        # Recorded ones for a while, in `pm.record()`.
        self.ranks: RunningRanks | None = None
        self.clock = Clock()
        self.buffers = ModelBuffers(shared or SharedBuffers())
        self.loss_scale = LossScaler.of(options)
        # In the model's order.
        self.names = list(state)
        self._values = {name: x.detach() for name, x in state.items()}
        self._weights = weights
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        # Why the ranks' values cannot be used, if so.
        self._unusable = ""
        self._before_overwriting: list[Callable[[], None]] = []
        # Called with new values of buffers before anything is overwritten; PlanError if the programs do not
        # hold for them.
        self.before_overwriting: list[Callable[[Mapping[str, torch.Tensor]], None]] = []
        self.loop = LoopWatch(watched, speaks=self.rank == 0)

    def start(self, program: Program) -> None:
        """Start the ranks. Collective."""
        program = self.buffers.take(program, self._values, self._weights)
        options = self.options
        if self.is_process:
            make: Callable[..., RunningRanks] = partial(ProcessRank, backend=options.backend)
            device = options.device
        else:
            make = LocalRanks
            device = str(device_of_ranks(self._values.values(), options.device, "local"))
        self.ranks = make(
            program, self._weights or self._values, device=device, timeout=options.ranks.timeout
        )
        self.compiled, self.clock.ranks = program, self.ranks.here
        for executor in self.ranks.here[0].executors:
            self.buffers.follow(executor.program, executor.buffers)
        # The ranks hold copies: the model's own tensors, and what made them, may be freed.
        self._values, self._weights = {}, None

    def started(self, what: str, even_unusable: bool = False) -> RunningRanks:
        """Return the ranks; PlanError before there are any, RuntimeFault while their values cannot be used."""
        if self.ranks is None:
            fact = "the model is compiled at the first step, there are no ranks yet"
            raise PlanError(f"pm.{what}", fact, "pass example_inputs= to parallelize, or call pm.step before")
        if self._unusable and not even_unusable:
            raise RuntimeFault(f"pm.{what}", self._unusable, "pm.load(...) of another checkpoint")
        return self.ranks

    def settled(self, what: str) -> RunningRanks:
        """Return the ranks, whose parameters have what the user wrote to them. Collective."""
        ranks = self.started(what)
        self.clock.exchanges += 1
        ranks.unrecorded.follow_edits()
        return ranks

    @property
    def program(self) -> Program:
        self.started("program", even_unusable=True)
        assert self.compiled is not None
        return self.compiled

    @property
    def values(self) -> dict[str, torch.Tensor]:
        """The values of the model's buffers now; before the start, all values of the model."""
        return self._values if self.ranks is None else self.buffers.now(self.ranks.here[0].executor.buffers)

    @property
    def rank(self) -> int:
        """This process's rank; the first one where they are all here."""
        return own_rank() if self.is_process else 0

    @property
    def share(self) -> tuple[int, int]:
        """Which rows of a global batch `step` takes here: (number of the replica, how many there are); (0, 1)
        in local.
        """
        mesh = self.options.mesh
        return (mesh.replica_of(self.rank), mesh.replicas) if self.is_process else (0, 1)

    def together(self, act: Callable[[], Result]) -> Result:
        """Do something in every process; where one of them cannot, all raise why."""
        return self.agreed(COMPILING, act) if self.is_process else act()

    def agreed(self, site: str, act: Callable[[], Result]) -> Result:
        """Do something once in every process; where it fails in one of them, all ranks raise why. Collective."""
        attempt, ranks = attempted(act), self.started("step", even_unusable=True).unrecorded
        return ranks.run(site, lambda rank: agree(rank.world, site, attempt))  # type: ignore[no-any-return]

    @contextmanager
    def on_overwrite(self, release: Callable[[], None]) -> Iterator[None]:
        """Call `release` before parameters and moments are overwritten: a save may still be copying them."""
        self._before_overwriting.append(release)
        try:
            yield
        finally:
            self._before_overwriting.remove(release)

    @contextmanager
    def overwriting(self, site: str, brought: Mapping[str, torch.Tensor], what: str = "") -> Iterator[None]:
        """Overwrite buffers with those in `brought`, and parameters in a `with` block.

        PlanError before anything has changed if the programs do not hold for these buffers. If the block
        raises, the values cannot be used, since `what` did not end.
        """
        for check in self.before_overwriting:
            check(brought)
        for release in self._before_overwriting:
            release()
        self._unusable = what and f"{what} did not end"
        self.buffers.load(brought)

        def load(rank: Rank) -> None:
            for executor in rank.executors:
                copy_buffers(executor.buffers, brought)

        self.started(site, even_unusable=True).unrecorded.run(site, load)
        yield
        self._unusable = ""

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.append(weakref.ref(optimizer))

    @property
    def optimizers(self) -> dict[int, torch.optim.Optimizer]:
        """Those that the user still has, by the number in which all ranks made them."""
        return {number: made for number, ref in enumerate(self._optimizers) if (made := ref()) is not None}
