"""One rank of a world that is too large for this machine: its program runs, and nobody else is there.

In: a model on the meta device and a mesh. Out: a `Rank` whose weights are random, made one parameter at a time, so that no more
than a parameter is ever whole; collectives hand back local data (torch's "fake" process group), so the numbers mean nothing.

    rank = one_rank(model, (ids, targets), rank=0, device="cuda", t=8, p=16)
    step(rank, (ids, targets))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import autoptd
from autoptd.compat import fake_process_group
from autoptd.runtime.batch import cut
from autoptd.runtime.launch import ProcessRank, Rank


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


def one_rank(model: nn.Module, call: tuple[Tensor, ...], *, rank: int, device: str, **mesh: Any) -> Rank:
    """Start one rank; of the process's default group, which must not exist yet. `call` is a replica's batch."""
    program = autoptd.compile(model, example_inputs=tuple(x.to("meta") for x in call), **mesh)
    fake_process_group(rank, program.mesh.size)
    made = ProcessRank(program, RandomWeights(model, device), device=device).here[0]
    made.executor._loss_dtype = next(model.parameters()).dtype  # what the rank with the loss would tell
    return made


def step(rank: Rank, call: tuple[Tensor, ...]) -> Tensor:
    """A step of this rank; gradients are gone afterwards."""
    program = rank.executor.program
    batch = cut(program, call, {}, rank.executor.inputs, 0, rank.world.device)
    loss = rank.executor.step(batch, nan="ignore")
    for parameter in rank.params.local.values():
        parameter.grad = None
    return loss
