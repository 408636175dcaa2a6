"""What a rank keeps of one microbatch between its forward and its backward: used by tests and a benchmark.

Counted are the storages that autograd saves, that recipes read and that gathers keep, each once, without parameters, buffers
and the batch.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor, nn

import autoptd
from autoptd.runtime.ops.linear import Regather
from autoptd.runtime.ops.recompute import Saved
from autoptd.runtime.step.launch import Rank
from autoptd.runtime.step.stage import Stage


def kept_bytes(model: nn.Module, call: tuple[Tensor, ...], t: int, **keywords: Any) -> int:
    """Bytes of activations that rank 0 keeps of one microbatch."""
    pm = autoptd.parallelize(model, t, num_microbatches=1, backend="local", example_inputs=call, **keywords)
    kept = kept_by_stage(pm, call)
    pm.close()
    return sum(kept.values())


def kept_by_stage(pm: autoptd.ParallelModel, call: tuple[Tensor, ...]) -> dict[int, int]:
    """Bytes that the forward of the last microbatch leaves for backward on rank 0, of each of its stages."""
    with watched(pm.run.ranks.here[0]) as found:  # type: ignore[union-attr]
        pm.step(*call)
    return found


@contextmanager
def watched(rank: Rank) -> Iterator[dict[int, int]]:
    """Have the forwards of a rank fill in the bytes that they leave for backward, by stage."""
    found: dict[int, int] = {}
    with mock.patch.object(Regather, "__init__", _noting_shard()):
        for number, stage in rank.executor.stages.items():
            own = [*rank.params.weights_of_stage(number).values(), *rank.executor.buffers.values()]
            _watch(stage, number, own, found)
        yield found


# By thread: the shards that gathers of the running forward keep.
SHARDS: dict[str, list[Tensor]] = {}


def _noting_shard() -> Any:
    make = Regather.__init__

    def noting(self: Regather, shard: Tensor, *args: Any) -> None:
        make(self, shard, *args)
        SHARDS.setdefault(threading.current_thread().name, []).append(shard.detach())

    return noting


def _watch(stage: Stage, number: int, own: list[Tensor], found: dict[int, int]) -> None:
    """Have `found` filled by every forward of a stage; `own` are its parameters and buffers."""
    stage._recomputes = True  # so that all is filed
    activations, run = stage.activations, stage.run
    save = activations.save
    filed: list[weakref.ref[Saved]] = []

    def noted(x: Tensor) -> Saved:
        saved = save(x)
        filed.append(weakref.ref(saved))
        return saved

    def watching(**values: Tensor) -> tuple[Tensor, ...]:
        filed.clear()
        shards = SHARDS[threading.current_thread().name] = []
        results = run(**values)
        batch = [x for x in values.values() if not x.requires_grad]
        foreign = {x.untyped_storage()._cdata for x in (*own, *batch)}
        held = [x for x in values.values() if x.requires_grad] + shards
        for reference in filed:
            saved = reference()
            if saved is not None and saved._tensor is not None:
                held.append(saved._tensor)
        sizes = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in held}
        found[number] = sum(nbytes for which, nbytes in sizes.items() if which not in foreign)
        return results

    stage.activations.save = noted  # type: ignore[method-assign]
    stage.run = watching  # type: ignore[method-assign]


def fullest(program: autoptd.Program) -> int:
    """Bytes that the fullest rank takes in a step."""
    return max(peak.nbytes for peak in autoptd.peak_memory(program))
