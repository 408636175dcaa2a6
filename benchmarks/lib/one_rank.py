"""One rank of a world that is too large for this machine: its program runs, and nobody else is there.

In: a model on the meta device and a mesh. Out: a `Rank` whose weights are random, made one parameter at a time, so that no more
than a parameter is ever whole; collectives hand back local data (torch's "fake" process group), and random numbers arrive from
other stages, so that products are as they would be; the loss means nothing.

    rank = one_rank(model, (ids, targets), rank=0, device="cuda", t=8, p=16)
    step(rank, (ids, targets))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autoptd
from autoptd.compat import tree_map
from autoptd.runtime.step.launch import ProcessRank, Rank
from autoptd.runtime.step.microbatches import cut, flatten
from autoptd.runtime.world.world import Like, Pending
from benchmarks.lib.fake_world import fake_process_group

Batch = tuple[Tensor, ...] | Mapping[str, Tensor]


class RandomWeights(Mapping[str, Tensor]):
    """The model's parameters, each drawn when it is asked for."""

    def __init__(self, model: nn.Module, device: str) -> None:
        self._like, self._device = model.state_dict(), device

    def __getitem__(self, name: str) -> Tensor:
        like = self._like[name]
        return torch.empty(like.shape, dtype=like.dtype, device=self._device).normal_(std=0.02)

    def __iter__(self) -> Iterator[str]:
        return iter(self._like)

    def __len__(self) -> int:
        return len(self._like)


def one_rank(model: nn.Module, call: Batch, *, rank: int, device: str, **mesh: Any) -> Rank:
    """Start one rank of the process's default group, which is made for it, or was for another of the same world.

    `call` is a replica's batch: positional arguments, or keywords.
    """
    replicas = mesh.get("d", 1)
    everyone = tree_map(lambda x: x.new_empty((x.shape[0] * replicas, *x.shape[1:]), device="meta"), call)
    program = autoptd.compile(model, example_inputs=everyone, **mesh)
    if not dist.is_initialized():
        fake_process_group(rank, program.mesh.size)
    made = ProcessRank(program, RandomWeights(model, device), device=device).here[0]
    made.executor._loss_dtype = next(model.parameters()).dtype  # what the rank with the loss would tell
    for channel in made.world.channels_in.values():
        channel.receive = partial(_arrives, channel.receive)  # type: ignore[method-assign]
    return made


def _arrives(receive: Callable[..., Pending], like: Sequence[Like], site: str) -> Pending:
    pending = receive(like, site)
    for x in pending.wait():
        if x.is_floating_point():
            x.normal_()
    return pending


def step(rank: Rank, call: Batch) -> Tensor:
    """A step of this rank; gradients are gone afterwards."""
    program = rank.executor.program
    args, kwargs = ((), call) if isinstance(call, Mapping) else (call, {})
    batch = cut(program, flatten(args, dict(kwargs))[0], rank.executor.inputs, 0, rank.world.device)
    loss = rank.executor.step(batch, nan="ignore")
    for parameter in rank.params.local.values():
        parameter.grad = None
    return loss
