"""Start and run the ranks of this process: all of them as threads, or one as a process among others.

In: a program and the parameters' values: full tensors by name, or a source of them. Out: `LocalRanks` or `ProcessRank`, with
one interface: `run(what, fn)` calls `fn` on every rank and returns the result of the first rank of this process.

    ranks = LocalRanks(program, state, timeout=60.0)
    ranks.run("step", lambda rank: rank.executor.step(microbatches_of[rank.world.rank]))
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist

from autoptd.errors import PlanError, RuntimeFault
from autoptd.ir.mesh import Mesh
from autoptd.program.program import Program
from autoptd.program.sources import Source
from autoptd.runtime.params.guard import unguarded
from autoptd.runtime.params.parameters import RankParameters, Values, owners
from autoptd.runtime.step.buffers import KnownBuffers
from autoptd.runtime.step.executor import Executor
from autoptd.runtime.step.timeline import Delays, Timeline, clocks_of
from autoptd.runtime.world.devices import check_device, has_launcher
from autoptd.runtime.world.processes import DistributedWorld
from autoptd.runtime.world.rendezvous import join_launch as join_launch
from autoptd.runtime.world.rendezvous import launched_ranks, own_place, tell_at_exit
from autoptd.runtime.world.threads import REMEDY, Ranks, ThreadWorld
from autoptd.runtime.world.world import Communicators, World, on_device

Result = TypeVar("Result")
# The activity named in errors while a program for other sizes is compiled and loaded.
COMPILING = "compiling for other sizes"
EDITS = "edits of parameters"
MODEL = "check of the model"
# What tells that a launcher started this process.
LAUNCHED = ("RANK", "WORLD_SIZE")


@dataclass
class Rank:
    """One rank: its world, its parameters, and its executors.

    `evaluator` may run the program of `model.eval()`. With batches of several sizes, these two run the program of the last
    call, and `others` holds all by key.
    """

    world: World
    params: RankParameters
    executor: Executor
    evaluator: Executor
    others: dict[Hashable, Executor] = field(default_factory=dict)

    @property
    def executors(self) -> list[Executor]:
        """Return all executors, each once."""
        return list(dict.fromkeys((self.executor, self.evaluator, *self.others.values())))

    @property
    def buffers(self) -> KnownBuffers:
        """Return the buffers that the programs of this rank have, and which of them a forward updates."""
        known = {name: x for executor in self.executors for name, x in executor.buffers.items()}
        updated = {name for executor in self.executors for name in executor.program.updated}
        return KnownBuffers(known, frozenset(updated))


class RunningRanks(ABC):
    """The ranks of this process; `replicas` is the number of replicas whose rows one call of `step` holds."""

    here: list[Rank]
    replicas: int

    @abstractmethod
    def run(self, what: str, fn: Callable[[Rank], Result]) -> Result:
        """Call `fn` on every rank of this process; `what` names the activity in errors."""

    @abstractmethod
    def close(self) -> None:
        """Stop the ranks; no call may follow."""

    @property
    def unrecorded(self) -> RunningRanks:
        """Return the same ranks, for calls that are not part of a recorded step."""
        return self

    @unguarded()
    def check_equal_copies(self) -> None:
        """Raise PlanError if a parameter was changed on only some ranks of this process."""
        if len(self.here) == 1:
            return
        # The optimizer and `load_state_dict` write to the copies of all ranks: their counts stay equal.
        for spec in self.here[0].params.specs:
            copies = [rank.params.local[spec.name] for rank in self.here if spec.name in rank.params.local]
            # torch counts the writes to a tensor.
            if len({copy._version for copy in copies}) > 1:
                fact = "was changed on some ranks only: each of the ranks in this process has its own tensor"
                remedy = "use pm.optimizer(...) instead of an optimizer over pm.parameters(); "
                remedy += "set values by pm.load_state_dict(...)"
                raise PlanError(spec.name, fact, remedy)

    def follow_edits(self) -> None:
        """Publish the user's edits, since the last update, of tensors that optimizers step; a collective."""
        if self._some_rank(any(rank.params.edits.found() for rank in self.here)):
            self.unrecorded.run(EDITS, lambda rank: rank.params.publish_edits())

    def _some_rank(self, flag: bool) -> bool:
        """Tell whether a flag is set on any rank that shares storage with the ranks of this process."""
        return flag

    def replica_of(self, rank: Rank) -> int:
        """Return the index of the replica of `rank` among those in a call of `step`."""
        return rank.world.replica if self.replicas > 1 else 0

    @property
    def has_rank_0(self) -> bool:
        return self.here[0].world.rank == 0

    @contextmanager
    def timed(self, delays: Delays | None = None) -> Iterator[Timeline]:
        """Time what these ranks execute in a `with` block, with `delays` added; no rank may run at either end."""
        clocks = clocks_of([rank.world.device for rank in self.here])
        timeline = Timeline(
            {rank.world.rank: clock for rank, clock in zip(self.here, clocks, strict=True)}, delays
        )
        before = {executor: executor.watch for rank in self.here for executor in rank.executors}
        for rank in self.here:
            for executor in rank.executors:
                executor.watch = timeline.watches[rank.world.rank]
        try:
            yield timeline
        finally:
            # Executors created within the block have watches, too.
            for executor in [executor for rank in self.here for executor in rank.executors]:
                executor.watch = before.get(executor)

    def attach(self, key: Hashable, program: Program) -> None:
        """Create the executor of `program`, compiled for other sizes, without using it; a collective."""

        def attach(rank: Rank) -> None:
            # That it reads parameters where they are was checked when it was compiled (program/follow.py).
            check_same_program(program, rank.world)
            # Only the stages that existed when a gather began wait for it.
            rank.params.wait()
            rank.others[key] = Executor(program, rank.world, rank.params, rank.buffers)

        self.unrecorded.run(COMPILING, attach)

    def use(self, key: Hashable, *, evaluates: bool = False) -> None:
        """Let steps, or evaluations, run the program that was attached as `key`."""
        for rank in self.here:
            chosen = rank.others[key]
            if evaluates:
                chosen.watch, rank.evaluator = rank.evaluator.watch, chosen
            elif chosen is not rank.executor:
                chosen.take_over(rank.executor)
                rank.executor = chosen


class LocalRanks(RunningRanks):
    """All ranks as threads of this process."""

    def __init__(self, program: Program, full: Values, device: str = "cpu", timeout: float = 300.0) -> None:
        shared = ThreadWorld(program.mesh, communicators_of(program), device, timeout)
        self._pool = Ranks(shared)
        self.replicas = program.mesh.replicas
        try:
            self.here = self._pool.run(lambda world: make_rank(program, world, full))
        except BaseException:
            # Without a caller to close them the threads would wait for jobs until the process exits.
            self._pool.close()
            raise

    def run(self, what: str, fn: Callable[[Rank], Result]) -> Result:
        def task(world: World) -> Result:
            world.at = what
            # On the rank's own thread, which is where the block is valid.
            with unguarded():
                return fn(self.here[world.rank])

        return self._pool.run(task)[0]

    def close(self) -> None:
        self._pool.close()


class ProcessRank(RunningRanks):
    """This process is one rank; creating it is a collective of all."""

    def __init__(
        self,
        program: Program,
        full: Values,
        device: str | None = None,
        timeout: float = 300.0,
        backend: str | None = None,
    ) -> None:
        self._world = DistributedWorld(program.mesh, communicators_of(program), device, timeout, backend)
        self.replicas = 1
        self.here = [make_rank(program, self._world, full)]

    def run(self, what: str, fn: Callable[[Rank], Result]) -> Result:
        if self._world.is_closed:
            raise RuntimeFault("ranks as processes", "pm.close() has ended them", REMEDY)
        self._world.at = what
        self._world.board.begin(what)
        with on_device(self._world.device), unguarded():
            try:
                return fn(self.here[0])
            except Exception:
                raise
            # After Ctrl-C and similar exceptions the others wait for this rank.
            except BaseException as exc:
                self._world.report_fault(exc)
                raise
            finally:
                # The caller may synchronize: with the results, or after an exception with started work.
                self._world.mark()

    def _some_rank(self, flag: bool) -> bool:
        world, params = self._world, self.here[0].params
        if not params.shared or not params.is_lent:
            return flag
        if world.device.type != "cuda":
            own = torch.tensor(int(flag), dtype=torch.int32, device=world.device)
            return self.run(
                EDITS, lambda rank: bool(world.hops(world.mesh.gradient_axes).all_reduce(own, EDITS))
            )
        # There the answer of other ranks would have to be waited for, in every step.
        if flag:
            fact = "weights were changed after optimizer.step() had sent them to those that share their storage (zero=1)"
            remedy = "change them in optimizer.register_step_post_hook(...), or those of pm.parameters()"
            error = PlanError("optimizer.param_groups", fact, remedy)
            world.report_fault(error)
            raise error
        return False

    def close(self) -> None:
        self._world.close()


def make_rank(program: Program, world: World, full: Values) -> Rank:
    """Return one rank, ready to step; a collective of all ranks."""
    # Before any other collective: ranks of two programs would call different ones, and wait for each other.
    check_same_program(program, world)
    if not isinstance(full, Mapping):
        check_same_source(full, world)
    params = RankParameters(program, world, full)
    executor = Executor(program, world, params)
    return Rank(world, params, executor, executor)


def is_launched(mesh: Mesh, backend: str | None) -> bool:
    """Tell whether ranks are processes (of a launcher, or an initialised process group) rather than threads of this one.

    PlanError when the number of processes is not that of the mesh, or when there are none and `backend` is not "local".
    """
    if backend == "local":
        return False
    if not has_launcher(backend):
        # One rank needs no launcher: it runs in this process. Unless a backend was named, which only processes have.
        if mesh.size == 1 and backend is None:
            return False
        raise PlanError(
            f"{mesh}",
            f"{mesh.size} ranks are requested, but this process was not started by torchrun{_half_set()}",
            f"torchrun --nproc-per-node {mesh.size} ..., or backend='local' for ranks as threads",
        )
    size = launched_ranks()
    if size != mesh.size:
        raise PlanError(
            f"world size {size}",
            f"{'*'.join(mesh.degrees)} is {mesh.size} ({mesh})",
            f"torchrun --nproc-per-node {mesh.size} ..., or t, p, d whose product is {size}",
        )
    own_place()
    return True


def _half_set() -> str:
    """Describe the part of a launch that this process has found, for an error that there is no whole one."""
    for name, other in (LAUNCHED, LAUNCHED[::-1]):
        if name in os.environ:
            return f": {name} is set, and {other} is not"
    return " or srun, only within a job of Slurm" if "SLURM_JOB_ID" in os.environ else ""


def enter_world(mesh: Mesh, backend: str | None, device: str | None) -> None:
    """Check that this process can run the requested ranks; report its early exit to other processes."""
    if is_launched(mesh, backend):
        tell_at_exit()
    check_device(device)


def is_first_process() -> bool:
    """Tell whether this process speaks for its torchrun world: what it says of the model holds for all of them."""
    return os.environ.get("RANK", "0") == "0"


def own_rank() -> int:
    """Return this process's rank, with or without a process group."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])


def check_same_program(program: Program, world: World) -> None:
    """Raise RuntimeFault on all ranks unless all compiled the same program; a collective."""
    # The hash covers sources and plan, which are the same text for all ranks: only their groups differ.
    prints = world.everyone().gather_objects(program.fingerprint(), "fingerprint of the program")
    others = [rank for rank, text in enumerate(prints) if text != prints[0]]
    if others:
        raise RuntimeFault(
            f"rank {world.rank}",
            f"rank {', '.join(map(str, others))} compiled a different program than rank 0",
            "run the same code with the same model, options and example_inputs sizes on every rank",
        )


def check_same_source(source: Source, world: World) -> None:
    """Raise RuntimeFault on all ranks unless all have the same values: nodes may have old copies of files."""
    prints = world.everyone().gather_objects(source.fingerprint(), "fingerprint of the weights")
    others = [rank for rank, text in enumerate(prints) if text != prints[0]]
    if others:
        parts = world.everyone().gather_objects(source.parts(), "parts of the weights")
        names = {name for other in others for name in differing(parts[0], parts[other])}
        fact, remedy = source.difference([name for name in {**parts[0], **parts[others[0]]} if name in names])
        raise RuntimeFault(f"rank {world.rank}", f"rank {', '.join(map(str, others))} {fact}", remedy)


def differing(one: Mapping[str, str], two: Mapping[str, str]) -> list[str]:
    """Return the names under which two mappings have different values, or only one of them has any."""
    return [name for name in {**one, **two} if one.get(name) != two.get(name)]


def communicators_of(program: Program) -> Communicators:
    """Return the communicators that `program` needs."""
    shared = {owners(program, spec) for spec in program.params}
    links = set()
    for crossing in program.crossings:
        source = program.rank_of_stage(crossing.source)
        for stage in crossing.targets:
            target = program.rank_of_stage(stage)
            # Ranks, not stages: with v > 1 several stages share a link, or a crossing stays on its rank.
            links |= {(source, target), (target, source)} if crossing.has_grad else {(source, target)}
    return Communicators(
        owners=tuple(sorted(ranks for ranks in shared if len(ranks) > 1)),
        links=tuple(sorted((source, target) for source, target in links if source != target)),
        sub_axes=program.sub_axes,
        joint=program.joint_axes,
    )
