"""A model on a mesh next to the same model on one device, in float64: every number of a step is compared to 1e-9.

    with Pair(Net(), (ids, labels), t=2) as pair:
        pair.train(ids, labels, max_norm=0.1)   # loss, gradients, norm, clipped gradients, updated parameters
        assert pair.sharded("head.weight")      # the mesh has the structure in which it goes wrong elsewhere

The one-device side is torch's own loop, on the whole batch. With dropout, it drops the elements that the seed says.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

import autoptd
from autoptd.verify.one_device import masks_of

TOLERANCE = 1e-9
LR = 1e-2
Groups = Callable[[Sequence[tuple[str, nn.Parameter]]], list[dict[str, Any]]]


def everything(named: Sequence[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    """One group, of what is trained."""
    return [{"params": [p for _, p in named if p.requires_grad]}]


def loss_of(output: Any) -> Tensor:
    found: Tensor = output[-1] if isinstance(output, tuple) else output
    return found


def wide(batch: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in batch)


def near(found: dict[str, Tensor], wanted: dict[str, Tensor], floor: float = 0.0) -> None:
    """Assert that tensors are equal to 1e-9 of their largest entry, or of `floor` if that is larger."""
    assert found.keys() >= wanted.keys(), wanted.keys() - found.keys()
    for name, x in wanted.items():
        assert found[name].shape == x.shape, name
        if x.numel():
            scale = max(float(x.abs().max()), floor, 1e-300)
            difference = float((found[name].double() - x.double()).abs().max()) / scale
            assert difference <= TOLERANCE, f"{name}: {difference:.1e}"


class Pair:
    """`plain` is the model on one device, `pm` the same on a mesh; `seed` draws the dropout masks of both."""

    def __init__(
        self, model: nn.Module, batch: Sequence[Any], groups: Groups = everything, **asked: Any
    ) -> None:
        self.plain = copy.deepcopy(model).double()
        asked = {"backend": "local", "example_inputs": wide(batch), **asked}
        self.pm = autoptd.parallelize(copy.deepcopy(self.plain), **asked)
        keywords: dict[str, Any] = {"lr": LR, "eps": 1e-3, "weight_decay": 0.1}
        self.theirs = torch.optim.AdamW(groups(list(self.plain.named_parameters())), **keywords)
        self.ours = self.pm.optimizer(torch.optim.AdamW, groups(list(self.pm.named_parameters())), **keywords)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pm.close()

    def train(self, *batch: Any, max_norm: float | None = None) -> float:
        """Make one step with an update; return the loss."""
        loss = self.backward(*batch)
        if max_norm is not None:
            self.clip(max_norm)
        self.update()
        return loss

    def backward(self, *batch: Any) -> float:
        """Add the gradients of a batch."""
        batch = wide(batch)
        found = self.pm.step(*batch)
        with masks_of(self.pm.programs[-1], self.pm.steps):
            loss = loss_of(self.plain(*batch))
            loss.backward()
        near({"loss": found}, {"loss": loss.detach()})
        self.compare_gradients()
        return float(loss.detach())

    def gradients(self) -> dict[str, Tensor]:
        """Those of one device."""
        return {name: p.grad for name, p in self.plain.named_parameters() if p.grad is not None}

    def compare_gradients(self) -> None:
        wanted = self.gradients()
        near(self.pm.gradients(), wanted, 1e-3 * max(float(x.abs().max()) for x in wanted.values()))

    def clip(self, max_norm: float) -> float:
        """Clip both by `max_norm`; return the norm."""
        wanted = torch.nn.utils.clip_grad_norm_(self.plain.parameters(), max_norm)
        near({"norm": self.pm.clip_grad_norm_(max_norm)}, {"norm": wanted})
        self.compare_gradients()
        return float(wanted)

    def update(self) -> None:
        for optimizer in (self.ours, self.theirs):
            optimizer.step()
            optimizer.zero_grad()
        self.compare_state()

    def compare_state(self) -> None:
        """Compare parameters and persistent buffers."""
        near(self.pm.state_dict(), self.plain.state_dict(), LR)

    def resumed(self, folder: Path, batch: Sequence[Any], **asked: Any) -> Pair:
        """Save, and return a pair whose mesh loads that, next to the same one-device run."""
        self.pm.save(folder, optimizer=self.ours)
        # Other initial values: what is not loaded shows.
        fresh = copy.deepcopy(self.plain)
        with torch.no_grad():
            for parameter in fresh.parameters():
                parameter.add_(1.0)
        other = Pair(fresh, batch, **asked)
        other.pm.load(folder, optimizer=other.ours)
        other.plain, other.theirs = self.plain, self.theirs
        other.compare_state()
        return other

    def kind(self, name: str, axis: str = "tp") -> str:
        """The letter of a parameter's type over an axis: S sharded, R its gradients are summed, I neither."""
        layout = self.pm.programs[-1].param(name).use.layout
        return (
            "".join(sorted({kind.kind for part, kind in layout.over_mesh if part.split(":")[0] == axis}))
            or "I"
        )

    def stages(self, name: str) -> tuple[int, ...]:
        return self.pm.programs[-1].param(name).stages
