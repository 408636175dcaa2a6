"""A picture of a compiled program, as DOT text, and as SVG text if graphviz is installed.

In: a `Program`, a level, a stage. Out: a `Picture`.

| level | shows |
|---|---|
| `model` | stages, their parameters and collectives, what they send each other; needs no graphs |
| `layer` | the operators of one of each distinct layer, and of all that is outside of layers |
| `full` | all operators |

    picture = program.graph("layer")
    picture.save("graph.svg")           # or graph.dot; in a notebook, the picture shows itself
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from autoptd.errors import PlanError
from autoptd.program.program import Program
from autoptd.wings.viz.graphviz import scene_dot, scene_svg
from autoptd.wings.viz.layer_picture import layer_scene
from autoptd.wings.viz.model_picture import model_scene
from autoptd.wings.viz.scene import Scene

LEVELS = ("model", "layer", "full")


@dataclass(frozen=True)
class Picture:
    """A picture of a graph."""

    scene: Scene = field(repr=False)

    @cached_property
    def dot(self) -> str:
        """The picture in the DOT language, which any graphviz draws plainly."""
        return scene_dot(self.scene)

    @property
    def svg(self) -> str | None:
        """The picture as SVG with tooltips; None if graphviz is missing or fails, which is not an error."""
        return self._drawn[0]

    @property
    def why_not(self) -> str:
        """The reason why there is no SVG; "" if there is one."""
        return self._drawn[1]

    @cached_property
    def _drawn(self) -> tuple[str | None, str]:
        """The SVG, or the reason why there is none; a failure is a warning, too."""
        try:
            return scene_svg(self.scene), ""
        except ImportError as error:
            return None, f"it needs the packages of autoptd[pictures] ({error})"
        except Exception as error:
            fact = f"graphviz fails: {type(error).__name__}: {error}"
            warnings.warn(f"no picture of {self.scene.title!r}: {fact}", stacklevel=4)
            return None, fact

    def save(self, path: str | Path) -> None:
        """Write the picture to a .dot or .svg file; PlanError if it cannot be drawn."""
        path = Path(path)
        if path.suffix not in (".dot", ".svg"):
            raise PlanError(f"picture {path.name}", "ends in neither .dot nor .svg", "graph.svg or graph.dot")
        text = self.dot if path.suffix == ".dot" else self.svg
        if text is None:
            raise PlanError(
                f"picture {path.name}",
                self.why_not,
                "save it as .dot; pip install 'autoptd[pictures]' if a package is missing",
            )
        path.write_text(text, encoding="utf-8")

    # Called by notebooks.
    def _repr_svg_(self) -> str | None:
        return self.svg


def graph_picture(program: Program, level: str = "layer", stage: int | None = None) -> Picture:
    """Return the picture of a program, or of one `stage`.

    PlanError for an unknown level or stage, or a level that needs the graphs that a loaded program does not have.
    """
    if level not in LEVELS:
        raise PlanError(f"level={level!r}", "is not a level of a picture", f"one of {', '.join(LEVELS)}")
    if stage is not None and stage not in range(len(program.stages)):
        fact = f"there are stages 0 to {len(program.stages) - 1}"
        raise PlanError(f"stage={stage!r}", fact, "one of them")
    if level == "model":
        return Picture(model_scene(program, stage))
    if "LOCAL" not in program.graphs:
        remedy = "level='model', or compile the model again"
        raise PlanError(f"level={level!r}", "a loaded program has no graphs", remedy)
    # Tooltips show the FLOPs, which a `Compiled` program knows.
    work = getattr(program, "work", None)
    return Picture(layer_scene(program, folds=level == "layer", stage=stage, work=work))
