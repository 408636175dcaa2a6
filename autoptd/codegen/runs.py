"""The rounds of a repeat that a stage has: where they stand among its operators, and what goes in and out of them.

In: the `Repeat`s of a program, the operators of a stage. Out: `Run`s. A round within which a stage ends is in none.

    find_runs(repeats, body)    # [Run(repeat, first=6, stop=9, start=0)]: layers 6 to 8
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.fx import Node

from autoptd.codegen.repeats import Repeat, Steps


@dataclass(frozen=True)
class Run:
    """Rounds `first` to `stop - 1` of a repeat, one after the other in the body of a stage."""

    repeat: Repeat
    first: int
    stop: int
    start: int  # index of its first operator in the stage's body

    @property
    def count(self) -> int:
        return self.stop - self.first

    @property
    def end(self) -> int:
        """Index of the stage's first operator behind it."""
        return self.start + self.count * self.repeat.at.length

    @property
    def rounds(self) -> range:
        return range(self.first, self.stop)

    @property
    def steps(self) -> Steps:
        """The `i` of this run."""
        every = self.repeat.steps
        return Steps(every.first + self.first * every.step, every.step)

    @property
    def initials(self) -> list[Node]:
        return self.repeat.entering(self.first)

    @property
    def finals(self) -> list[Node]:
        return self.repeat.leaving(self.stop - 1)

    def outer(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """Of an operand's values in all rounds, those of this run."""
        return nodes[self.first : self.stop]


def find_runs(repeats: Sequence[Repeat], body: Sequence[Node]) -> list[Run]:
    """The rounds that a stage, whose operators are `body`, has from their first operator to their last."""
    position = {node: i for i, node in enumerate(body)}
    found: list[Run] = []
    for repeat in repeats:
        for k in range(repeat.at.count):
            if not all(node in position for node in repeat.round(k)):
                continue
            start = position[repeat.round(k)[0]]
            if found and found[-1].repeat is repeat and found[-1].stop == k and found[-1].end == start:
                found[-1] = replace(found[-1], stop=k + 1)
            else:
                found.append(Run(repeat, k, k + 1, start))
    return found
