"""Keep the padding of parameters that a mesh does not divide evenly at zero, whatever the optimizer does.

In: a rank's parameters. Out: views or indices of their padding, and a function that clears it after an
update.

    clear_padding(padding_of(params))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from autoptd.runtime.ops.shards import real_rows
from autoptd.runtime.params.parameters import RankParameters
from autoptd.runtime.params.parts import own_piece
from autoptd.runtime.params.storage import alias


class Padding(NamedTuple):
    """The padding of a parameter that this rank stores: a view of it, or its indices in a flat piece."""

    stored: torch.Tensor
    indices: torch.Tensor | None


def padding_of(params: RankParameters) -> list[Padding]:
    """Return the padding in what a rank stores, parameter by parameter."""
    found = []
    for spec in params.specs:
        size, x = spec.padded_size(params.world.mesh), params.stored.get(spec.name)
        if not size or x is None:
            continue
        local = params.local[spec.name]
        width = local.shape[spec.cut_dim]
        real = real_rows(size, width, own_piece(spec, params.world)[0])
        if not params.is_shared(spec.name):
            found.append(Padding(alias(x).narrow(spec.cut_dim, real, width - real), None))
            continue
        mask = torch.zeros(local.shape, dtype=torch.bool, device=x.device)
        mask.narrow(spec.cut_dim, real, width - real).fill_(True)
        piece = params.piece_of(spec.name, mask)
        assert piece is not None
        found.append(Padding(alias(x).view(-1), piece.view(-1).nonzero().flatten()))
    return found


@torch.no_grad()
def clear_padding(paddings: Sequence[Padding]) -> None:
    """Set the padding of parameters to zero again: without an epsilon, an optimizer computes 0 / 0 there."""
    for stored, indices in paddings:
        if indices is None:
            stored.zero_()
        else:
            stored.index_fill_(0, indices, 0)


__all__ = ["Padding", "clear_padding", "padding_of"]
