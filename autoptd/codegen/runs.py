"""Find the rounds of a repeat in a stage: their position among its operators, and the values they read and
return.

In: the `Repeat`s of a program, the operators of a stage. Out: `Run`s. A round cut by the end of a stage is in
none.

    find_runs(repeats, body)    # [Run(repeat, first=6, stop=9, start=0)]: layers 6 to 8
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch.fx import Node

from autoptd.codegen.repeats import Repeat, Steps


@dataclass(frozen=True)
class Run:
    """Rounds `first` to `stop - 1` of a repeat, contiguous in the body of a stage from index `start` on."""

    repeat: Repeat
    first: int
    stop: int
    start: int

    @property
    def count(self) -> int:
        return self.stop - self.first

    @property
    def end(self) -> int:
        """The index after its last operator."""
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
        """Select the values of an operand in the rounds of this run from those in all rounds."""
        return nodes[self.first : self.stop]


def find_runs(repeats: Sequence[Repeat], body: Sequence[Node]) -> list[Run]:
    """Return the complete rounds among the operators `body` of a stage, consecutive ones as one run."""
    position = {node: i for i, node in enumerate(body)}
    runs: list[Run] = []
    for repeat in repeats:
        for k in range(repeat.at.count):
            if not all(node in position for node in repeat.round(k)):
                continue
            # The stages have the operators in the program's order, so a complete round is contiguous.
            start = position[repeat.round(k)[0]]
            last = runs[-1] if runs else None
            # Layers 6 to 8 and 9 to 11 are two runs if the stage has an operator between 8 and 9.
            if last and last.repeat is repeat and last.stop == k and last.end == start:
                runs[-1] = replace(last, stop=k + 1)
            else:
                runs.append(Run(repeat, k, k + 1, start))
    return runs
