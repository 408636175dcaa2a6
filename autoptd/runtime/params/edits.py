"""Notices what the user writes to storage that stands apart from what stages use: weights that are clipped or projected through
`optimizer.param_groups`, or in a hook after its step.

In: the tensors that an optimizer steps, where they are not what stages compute with (masters, ZeRO's pieces). Out: the names of
those that were written to since the last update was published. torch counts writes to a tensor; who has its `.data`, or has
asked for what numpy or C can be given (`detach`, `data_ptr`), may write without being counted, so its values are compared from
then on.

    edits = Edits(stored)
    edits.note()                    # after an update was published, or values were loaded
    edits.found()                   # ["h.0.attn.weight"]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from autoptd.runtime.params.guard import GuardedParameter, unguarded


class Edits:
    """The versions of stored tensors when they were last published."""

    def __init__(self, stored: Mapping[str, GuardedParameter]) -> None:
        self.stored = dict(stored)
        self._versions: dict[str, int] = {}
        # Values of tensors whose `.data` or similar was taken: writes through it leave the version.
        self._values: dict[str, torch.Tensor] = {}
        self.note()

    @unguarded()
    @torch.no_grad()
    def note(self, names: Iterable[str] | None = None) -> None:
        """Record the current values of all, or of the named tensors as published."""
        for name in self.stored if names is None else names:
            if (x := self.stored.get(name)) is not None:
                self._versions[name] = x._version
                if _was_exposed(x):
                    self._values[name] = x.detach().clone()

    @unguarded()
    def found(self) -> list[str]:
        """Return the names of the tensors that were written to since the last `note`."""
        versions = self._versions
        return [
            name
            for name, x in self.stored.items()
            if x._version != versions[name] or (_was_exposed(x) and self._differs(name, x))
        ]

    def _differs(self, name: str, x: torch.Tensor) -> bool:
        known = self._values.get(name)
        # The first time there is no earlier value to compare with.
        return known is None or not torch.equal(known, x)


def _was_exposed(x: torch.Tensor) -> bool:
    # A tensor exchanged by torch.utils.swap_tensors has another class.
    return getattr(x, "was_exposed", True)


__all__ = ["Edits"]
