"""Where each draw of a recorded constructor starts from: the state that torch's generator would have there.

While operators are recorded, nothing is drawn, and generators stand still. What a constructor does to them itself shows
in their state: `torch.manual_seed`, `fork_rng`, a generator of its own. So after each recorded draw one number is really
drawn: the generator is in a state that it has been in at no draw before, by which the next draw is known to follow this
one. A state that no draw has left was set by the constructor: a new *stream* begins there.

    streams = Streams(seed=0)                     # torch's generator is seeded, as by torch.manual_seed(0)
    first = streams.draw(3, generator)            # operator 3 draws: Draw(root=0, before=None)
    second = streams.draw(7, generator)           # Draw(root=0, before=3)
    streams.close()                               # every generator is where its stream began

Stream 0 is the one that the seed begins.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from autoptd.errors import PlanError


@dataclass(frozen=True)
class Draw:
    """What an operator draws from: the stream `root`, where the draw of operator `before` has left it."""

    root: int
    before: int | None


class Streams:
    """The generators that a constructor draws from, from its start to its end."""

    def __init__(self, seed: int) -> None:
        self.roots: list[torch.Tensor] = []
        self._outside = torch.default_generator.get_state()
        self._generators: list[torch.Generator] = []
        # By digest of a state.
        self._known: dict[bytes, Draw] = {}
        self.rewound: set[int] = set()
        self._followed: set[Draw] = set()
        torch.default_generator.manual_seed(seed)
        self._root_of(torch.default_generator.get_state())

    def draw(self, number: int, generator: torch.Generator | None) -> Draw:
        """Note that operator `number` draws from `generator` (None: torch's own), and return where it starts."""
        generator = generator or torch.default_generator
        if generator.device.type != "cpu":
            fact = f"a constructor draws from a generator of {generator.device}, and is replayed on the CPU"
            raise PlanError("autoptd.deferred", fact, "a torch.Generator of the CPU")
        if generator is not torch.default_generator and generator not in self._generators:
            self._generators.append(generator)
        state = generator.get_state()
        draw = self._known.get(_digest(state)) or self._root_of(state)
        if draw in self._followed:
            self.rewound.add(number)
        self._followed.add(draw)
        torch.rand((), generator=generator, device="cpu")
        self._known[_digest(generator.get_state())] = Draw(draw.root, number)
        return draw

    def close(self) -> None:
        """Put torch's generator back where it was outside, and others where their streams began."""
        for generator in self._generators:
            draw = self._known.get(_digest(generator.get_state()))
            if draw is not None:
                generator.set_state(self.roots[draw.root])
        torch.default_generator.set_state(self._outside)

    def _root_of(self, state: torch.Tensor) -> Draw:
        draw = self._known[_digest(state)] = Draw(len(self.roots), None)
        self.roots.append(state)
        return draw


def _digest(state: torch.Tensor) -> bytes:
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()


__all__ = ["Draw", "Streams"]
