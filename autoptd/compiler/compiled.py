"""Define the result of a compilation: a `Program` that explains its decisions and draws its graph.

In: a program, and the findings of the passes. Out: texts and plots. A program loaded from disk has neither:
see `Program.explain` and `Program.graph`.

    program.explain("transformer.h.0.mlp.c_fc")
    program.graph("layer").save("graph.svg")
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch.fx import Node

from autoptd.errors import PlanError
from autoptd.ir.layout import Sizes
from autoptd.ir.notes import local_shape
from autoptd.passes.context import Findings
from autoptd.passes.kept.keep import explain_kept
from autoptd.passes.ops.costs import backward_flops, flops
from autoptd.program.program import Picture, Program
from autoptd.program.weighed import found_text

# Draws a compiled program, or one stage of it, at a level.
Draw = Callable[["Compiled", str, int | None], Picture]


@dataclass(frozen=True, eq=False, repr=False)
class Compiled(Program):
    """A program with the findings of its compilation.

    - `found`: the results of the passes.
    - `sizes`: the sizes that local shapes of the graph depend on.
    - `draw`: makes plots; passed in by the caller, so that the compiler does not depend on it.
    """

    found: Findings = field(default_factory=Findings)
    sizes: Sizes | None = None
    draw: Draw | None = None

    def explain(self, module: str) -> str:
        """Explain how a module is split, and how its values are kept for backward: see `Program.explain`."""
        # Imported here: it loads sympy, a quarter of a second.
        from autoptd.passes.solve.explain import explain_split

        split = explain_split(self.found.assignments, module, found_text(self.plan.get("weighed")))
        return split + explain_kept(self.found.kept_values, module)

    def graph(self, level: str = "layer", stage: int | None = None) -> Picture:
        """Return a plot of the program: see `Program.graph`."""
        if self.draw is None:
            raise PlanError("program.graph", "was compiled without pictures", "compile with autoptd.compile")
        return self.draw(self, level, stage)

    def work(self, node: Node) -> tuple[int, int]:
        """Return the FLOPs of an operator on a rank, forward and backward."""

        def shape(node: Node) -> tuple[int, ...]:
            assert self.sizes is not None
            return local_shape(node, self.sizes)

        return flops(node, shape), backward_flops(node, shape)


__all__ = ["Compiled", "Draw"]
