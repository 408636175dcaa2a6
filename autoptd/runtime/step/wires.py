"""Tabulate which stage sends which crossings to which other stage, for the executor.

In: a program. Out: `Wires`.

    wires = Wires(program)
    wires.values[0, 1]             # the values that stage 1 reads from stage 0
    wires.grad_targets[0]          # [1]: the stages that send gradients back to stage 0
"""

from __future__ import annotations

from collections.abc import Iterable

from autoptd.program.program import Program
from autoptd.program.specs import CrossingSpec

Peers = dict[int, list[int]]


class Wires:
    """The crossings between stages: `values[source, target]` go forward; the gradients of
    `gradients[source, target]` return from target to source.

    The other tables list the peers of every stage, ascending.
    """

    def __init__(self, program: Program) -> None:
        spec_of = {crossing.name: crossing for crossing in program.crossings}
        self.outputs: dict[int, list[CrossingSpec]] = {}
        self.values: dict[tuple[int, int], list[CrossingSpec]] = {}
        self.gradients: dict[tuple[int, int], list[CrossingSpec]] = {}
        # In the order of the program, by which both ends of a message pack and unpack.
        for stage in program.stages:
            self.outputs[stage.index] = [spec_of[name] for name in stage.outputs]
            for crossing in self.outputs[stage.index]:
                for target in crossing.targets:
                    pair = stage.index, target
                    self.values.setdefault(pair, []).append(crossing)
                    # Ids and masks have no gradient to send back.
                    if crossing.has_grad:
                        self.gradients.setdefault(pair, []).append(crossing)
        num_stages = len(program.stages)
        self.sources, self.targets = _peers(self.values, num_stages)
        self.grad_sources, self.grad_targets = _peers(self.gradients, num_stages)


def _peers(pairs: Iterable[tuple[int, int]], num_stages: int) -> tuple[Peers, Peers]:
    """Return two tables by stage, from pairs (source, target): its sources, and its targets."""
    sources: Peers = {stage: [] for stage in range(num_stages)}
    targets: Peers = {stage: [] for stage in range(num_stages)}
    for source, target in sorted(pairs):
        sources[target].append(source)
        targets[source].append(target)
    return sources, targets
