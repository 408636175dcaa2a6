"""Find the peak memory of a step by rehearsing it: every rank's actions run on tensors without data.

In: a program. Out: for every pipeline rank, the bytes at its peak, and the action in which it occurs. The
rehearsal runs the same code as a rank: the emitted stages, autograd, recomputation, messages, gradient sums.
A storage counts from the operator that allocates it to its last reader; the moments of AdamW are those of the
ledger (`state_memory` of `program/buckets.py`).

    peak_memory(program)[0]                     # Peak(nbytes=71204864, at="B0.1")

Two microbatches run; the others repeat the second one, in the order of the schedule. The batch itself,
workspace of kernels and of the optimizer step, and allocator fragmentation are not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from autoptd.compat import TorchDispatchMode, tree_leaves
from autoptd.compiler.on_meta import AsOnCpu
from autoptd.ir.actions import Action
from autoptd.kernels.forms import has_triton
from autoptd.program.program import Program, check_program
from autoptd.program.specs import ParamSpec
from autoptd.runtime.params.guard import unguarded
from autoptd.runtime.params.parameters import RankParameters
from autoptd.runtime.params.parts import dtype_of
from autoptd.runtime.step.executor import Executor
from autoptd.runtime.step.per_step import set_batch_sums
from autoptd.runtime.step.stage import Stage
from autoptd.runtime.world.shape_world import ShapeWorld

# Microbatches that run: a gradient is allocated in the first, and accumulated in the others.
REHEARSED = 2
# The name of the moment at which gradients are summed, after the last action.
GRADIENTS = "gradients"


class Peak(NamedTuple):
    """The memory peak of a rank: its bytes, and the action that runs ("gradients" after the last one)."""

    nbytes: int
    at: str


class _Change(NamedTuple):
    """The effect of an action on the bytes of a rank: the peak above those before, and the change after it."""

    rise: int
    net: int


def peak_memory(program: Program) -> tuple[Peak, ...]:
    """Return the memory peak of a step with AdamW on every pipeline rank."""
    check_program("autoptd.peak_memory", program)
    # On meta, Triton operators only allocate the outputs of their kernels, but inductor would compile.
    is_known = program.fuse != "inductor" and has_triton()
    fuse = program.fuse if is_known or not program.fuse else "eager"
    buffers = {name: buffer.to("meta") for name, buffer in program.buffers.items()}
    bare = replace(program, fuse=fuse, buffers=buffers)
    return tuple(_peak(bare, place) for place in range(program.mesh.pipeline_ranks))


def _peak(program: Program, place: int) -> Peak:
    """Rehearse the first rank of a pipeline rank."""
    rank, live = program.mesh.ranks_at(place)[0], _LiveOnMeta()
    with live, unguarded():
        world = ShapeWorld(rank, program.mesh)
        params = RankParameters(program, world, _Shapes(program.params))
        for bucket in params.shared:
            live.resized(bucket.use.untyped_storage())
            bucket.on_resize = live.resized
        executor = _Rehearsal(program, world, params)
        watch = _Watch(live)
        executor.rehearse(watch)
    state = program.memory(rank)
    moments = list(_moments(program.orders[place], watch, watch.first + state.moments))
    # Between steps a rank holds its gradients, including rounded copies for the user.
    return max([Peak(state.total, GRADIENTS), *moments], key=lambda peak: peak.nbytes)


def _moments(order: Sequence[Action], watch: _Watch, now: int) -> Iterator[Peak]:
    """Yield the bytes of every action of a rank, which has `now` before the first one."""
    seen: dict[tuple[Any, ...], int] = {}
    for action in order:
        key = _kind_of(action)
        rehearsed, number = watch.changes[key], seen.get(key, 0)
        seen[key] = number + 1
        change = rehearsed[min(number, len(rehearsed) - 1)]
        yield Peak(now + change.rise, str(action))
        now += change.net
    yield Peak(now + watch.last.rise, GRADIENTS)


def _kind_of(action: Action) -> tuple[Any, ...]:
    return action.kind, action.stage, action.peer


class LiveBytes(TorchDispatchMode):
    """Count the live bytes of all storages that operators allocate in a `with` block: `now`, and `most`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._bytes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor):
                self.add(x)
        return made

    def add(self, x: torch.Tensor) -> None:
        """Count the storage of a tensor, once."""
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return

        def end(_: Any) -> None:
            del self._alive[key]
            self.now -= self._bytes.pop(key)

        self._alive[key], self._bytes[key] = weakref.ref(storage, end), 0
        self.resized(storage)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count the present size of a storage that is counted."""
        key, nbytes = storage._cdata, storage.nbytes()
        self.now += nbytes - self._bytes[key]
        self._bytes[key] = nbytes
        self.most = max(self.most, self.now)


class _LiveOnMeta(LiveBytes):
    """The same with all tensors on the meta device, including those that a model creates elsewhere."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            # A number that Python reads.
            return torch.zeros((), dtype=args[0].dtype, device="cpu").item()
        if any(arg.name == "device" for arg in func._schema.arguments):
            kwargs = {**(kwargs or {}), "device": torch.device("meta")}
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Watch:
    """Record the changes of every action in `changes`, by kind, stage and peer; called by the executor."""

    def __init__(self, live: LiveBytes) -> None:
        self._live = live
        self.first = 0
        self.last = _Change(0, 0)
        self.changes: dict[tuple[Any, ...], list[_Change]] = {}

    def begin(self) -> None:
        """Record the bytes before the first action."""
        self.first = self._live.now

    def start(self, action: Action | None = None) -> None:
        self._before = self._live.most = self._live.now

    def end(self, action: Action) -> None:
        self.changes.setdefault(_kind_of(action), []).append(self._change())

    def finish(self) -> None:
        """Record the changes after the last action."""
        self.last = self._change()

    def _change(self) -> _Change:
        return _Change(self._live.most - self._before, self._live.now - self._before)


class _Rehearsal(Executor):
    """An executor on the meta device, which reads no numbers."""

    def rehearse(self, watch: _Watch) -> None:
        """Run the actions of the first microbatches, up to the sums of gradients."""
        self.steps, self.watch = 1, watch  # type: ignore[assignment]
        self.gradients.begin()
        watch.begin()
        order = [pair for pair in self._order if pair[0].microbatch < REHEARSED]
        with AsOnCpu():
            self._execute([self._batch() for _ in range(REHEARSED)], order)
        watch.start()
        self.gradients.finish()
        watch.finish()

    def _batch(self) -> dict[str, torch.Tensor]:
        specs = [spec for spec in self.program.inputs if spec.name in self.inputs]
        return {
            spec.name: torch.empty(spec.shape, dtype=dtype_of(spec.dtype), device="meta") for spec in specs
        }

    def _set_totals(self) -> None:
        for index, stage in self.stages.items():
            batch = self._batch()
            inputs = {name: batch[name] for name in self.program.stages[index].inputs}
            set_batch_sums(stage, [inputs], lambda own, _: own)
            if stage.counts:
                stage.totals = (1.0,) * len(stage.count(**inputs))

    def _load(self, index: int) -> Stage:
        stage = super()._load(index)
        repeat = stage.activations.runner

        def repeat_as_on_cpu(*args: Any) -> Any:
            # Torch exits modes while it runs a backward.
            with AsOnCpu():
                return repeat(*args)

        stage.activations.runner = repeat_as_on_cpu
        return stage


class _Shapes(Mapping[str, torch.Tensor]):
    """The model's parameters, without values."""

    def __init__(self, specs: Sequence[ParamSpec]) -> None:
        self._specs = {spec.name: spec for spec in specs}

    def __getitem__(self, name: str) -> torch.Tensor:
        spec = self._specs[name]
        return torch.empty(spec.shape, dtype=dtype_of(spec.storage.dtype), device="meta")

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)


__all__ = ["LiveBytes", "Peak", "peak_memory"]
