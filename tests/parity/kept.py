"""Count what a rank keeps of one microbatch between its forward and its backward: used by tests and a benchmark."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import autoptd
from autoptd.runtime.regather import Regather


def kept_bytes(model: nn.Module, call: tuple[Tensor, ...], t: int, **keywords: Any) -> int:
    """Bytes of activations that autograd and the GEMMs of rank 0 keep between forward and backward of one microbatch."""
    pm = autoptd.parallelize(model, t, num_microbatches=1, backend="local", example_inputs=call, **keywords)
    kept: dict[int, int] = {}
    weights = {x.untyped_storage().data_ptr() for x in pm._ranks.here[0].params.leaves.values()}  # type: ignore[union-attr]
    make = Regather.__init__

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights and x.is_floating_point():
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    def note_shard(self: Regather, shard: Tensor, *args: Any) -> None:
        make(self, shard, *args)
        if threading.current_thread().name == "rank 0":
            pack(shard)

    stage = pm._ranks.here[0].executor._stages[0]  # type: ignore[union-attr]
    right = stage.forward

    def forward(**values: Tensor) -> tuple[Tensor, ...]:
        with saved_tensors_hooks(pack, lambda x: x):
            return right(**values)

    stage.forward = forward
    with mock.patch.object(Regather, "__init__", note_shard):
        pm.step(*call)
    pm.close()
    return sum(kept.values())
