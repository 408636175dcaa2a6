"""What a rank holds of the model's parameters, counted on the tensors that are there: see `program/state_memory.py`.

In: a rank's parameters and gradients, and the optimizers of this process. Out: bytes by kind. A tensor counts with the
memory that it keeps alive, which several may share.

    count_memory(rank.params, rank.executor.gradients, [optimizer])
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from autoptd.program.state_memory import StateMemory
from autoptd.runtime.params.gradients import Gradients
from autoptd.runtime.params.guard import unguarded
from autoptd.runtime.params.optimizer import NamedOptimizer
from autoptd.runtime.params.parameters import RankParameters


@unguarded()
def count_memory(
    params: RankParameters, gradients: Gradients | None, optimizers: Sequence[torch.optim.Optimizer]
) -> StateMemory:
    """Return what a rank holds now; of gradients, what it held in the last step."""
    used = {**_storages(params.local.values()), **_storages(bucket.use for bucket in params.shared)}
    # Between its uses, a parameter without a master is its range.
    used |= _storages(bucket.range for bucket in params.shared if not bucket.plan.params[0].has_master)
    stored = {**_storages(params.stored.values()), **_storages(bucket.range for bucket in params.shared)}
    moments: list[torch.Tensor] = []
    for optimizer in optimizers:
        for x in params.stored.values():
            state = optimizer.state.get(x, {}).values()
            moments += [
                value for value in state if isinstance(value, torch.Tensor) and value.shape == x.shape
            ]
        # Whole tensors are here in addition to the pieces that ranks store.
        homes = optimizer.binding.homes if isinstance(optimizer, NamedOptimizer) else {}
        if (home := homes.get(params.world.rank)) is not None:
            for x in home.stored.values():
                moments += [x, *filter(torch.is_tensor, optimizer.state.get(x, {}).values())]
    return StateMemory(
        parameters=sum(used.values()),
        gradients=0 if gradients is None else gradients.held_bytes,
        masters=sum(nbytes for key, nbytes in stored.items() if key not in used),
        moments=sum(_storages(moments).values()),
    )


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the bytes of the storages of some tensors, by address."""
    found = {}
    for x in tensors:
        storage = x.detach().untyped_storage()
        # Without entries there is no memory, and no address.
        if storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    return found
