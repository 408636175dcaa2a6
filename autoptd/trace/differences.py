"""How far runs of a model are apart: the loss and every gradient of one run are kept, those of others only
looked at.

In: losses, and the parameters that they were computed from, by name. Out: per tensor the largest difference
of an entry, relative to the tensor's largest one. A gradient is compared as backward makes it, and dropped: a
second set of them would be as large as the model. Differences are taken in float64, piece by piece.

    wanted = Reference(loss, parameters, share=1e-3)
    wanted.differences(loss_of_the_graph, leaves)       # {"loss": 0.0, "gradient of h.0.weight": 1.2e-7, ...}
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

# Entries that are compared at once: a float64 copy of more would cost too much memory.
PIECE = 1 << 20


class Reference:
    """The loss and the gradients of a run, against which other runs are held.

    A gradient's largest entry counts as at least `share` of that of all gradients: one that is zero but for
    rounding is not held against itself.
    """

    def __init__(self, loss: torch.Tensor, parameters: dict[str, torch.Tensor], share: float) -> None:
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        self._loss = loss.detach()
        self._gradients = dict(zip(parameters, gradients, strict=True))
        self._sizes = {name: largest_entry(gradient) for name, gradient in self._gradients.items()}
        self._least = max(1e-30, share * max(self._sizes.values(), default=0.0))

    def differences(self, loss: torch.Tensor, parameters: dict[str, torch.Tensor]) -> dict[str, float]:
        """Per tensor, the largest difference relative to its largest entry.

        What has no gradient in either run is left out.
        """
        met: dict[str, float] = {}

        def look(name: str, gradient: torch.Tensor | None) -> torch.Tensor | None:
            # A custom backward may return None for a tensor.
            if gradient is None:
                return None
            met[name] = difference(self._gradients[name], gradient)
            # Autograd keeps this stand-in instead of the gradient.
            return gradient.new_zeros(()).expand_as(gradient)

        hooks = [leaf.register_hook(partial(look, name)) for name, leaf in parameters.items()]
        try:
            torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
        size = largest_entry(self._loss)
        found = {"loss": _relative(difference(self._loss, loss.detach()), max(size, self._least))}
        for name, gradient in self._gradients.items():
            if name in met or gradient is not None:
                apart = met[name] if name in met else self._sizes[name]
                found[f"gradient of {name}"] = _relative(apart, max(self._sizes[name], self._least))
        return found


def _relative(apart: float, size: float) -> float:
    """The largest entry may be infinite or NaN where the difference is 0 or infinite."""
    return apart / size if 0.0 < apart < math.inf else apart


def largest_entry(x: torch.Tensor | None) -> float:
    """Return the largest absolute value; 0 of nothing."""
    if x is None or not x.numel():
        return 0.0
    return float(torch.stack([piece.abs().max() for piece in _pieces(x)]).max())


def difference(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    """Return the largest difference of two tensors, where None is zeros.

    0 where neither is finite, as in a loss that diverges.
    """
    if one is None or other is None:
        return max(largest_entry(one), largest_entry(other))
    if not one.numel():
        return 0.0
    pairs = zip(_pieces(one), _pieces(other), strict=True)
    largest = float(torch.stack([(a.double() - b.double()).abs().max() for a, b in pairs]).max())
    # A finite maximum means that all entries are finite.
    if math.isfinite(largest):
        return largest
    return math.inf if _is_finite(one) or _is_finite(other) else 0.0


def _is_finite(x: torch.Tensor) -> bool:
    return all(bool(piece.isfinite().all()) for piece in _pieces(x))


def _pieces(x: torch.Tensor) -> Sequence[torch.Tensor]:
    """Views along the longest dim, of PIECE entries at most, or of one slice."""
    count = -(-x.numel() // PIECE)
    return x.chunk(count, max(range(x.dim()), key=x.shape.__getitem__)) if count > 1 else [x]
