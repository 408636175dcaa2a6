"""Define the base class of emitted stages, and load their source as classes.

In: the text of `stage_2.py`, which defines `class Stage2(rt.Stage)` with `forward` (and `count`, where a loss divides by the
number of valid labels), and that of `layers.py`, with the methods that several stages call. Out: the class; an instance of it
holds this rank's weights under the model's own names.

    layers = load_layers(program.sources["layers.py"], "layers.py")
    stage = load_stage(program.sources["stage_2.py"], "stage_2.py", layers)(groups={"tp": group}, weights=weights, ...)
    stage.weights.transformer.h[3].ln_1.weight          # a tensor: this rank's shard
    stage.weights.transformer.h[3].at("attn.c_proj")    # "transformer.h.3.attn.c_proj"
    x, = stage.forward(x_from_1=x)
"""

from __future__ import annotations

import linecache
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd.graph import saved_tensors_hooks

from autoptd.errors import InternalError
from autoptd.runtime.ops.dropout import Draw, Drawing
from autoptd.runtime.ops.fused import Fused
from autoptd.runtime.ops.inductor import compile_layers
from autoptd.runtime.ops.linear import Deferred, WeightGradient
from autoptd.runtime.ops.recompute import Activations
from autoptd.runtime.params.namespace import make_namespace
from autoptd.runtime.world.world import Group


class Largest(NamedTuple):
    """The largest entries of a microbatch: combined over microbatches by maximum instead of by sum."""

    value: torch.Tensor


class Stage:
    """One stage on one rank: the base class of emitted ones.

    - `groups`: the groups that it communicates over, by mesh axis or sub-axis.
    - `totals`: the global counts that weighted-mean losses divide by, sums over all microbatches and
      replicas, set before the first forward of every step (numbers or 0-d tensors).
    - `sums`: sums over all microbatches and replicas of values that depend on inputs only, by number, set
      likewise.
    - `parts`: contributions of microbatches to buffer updates, by number, in float64 (`per_step.py`).
    - `drawing`: the dropout masks of the next forward; None: no dropout.
    - `fused`: the fused operators.
    - `main_grads` and `deferred`: the values for `wgrad` in an emitted `rt.linear`.

    - `activations`: the tensors saved for backward, if methods of the stage have recipes.

    Class attributes: `layers` is the file of the methods shared with other stages; `is_compiled`: they are
    compiled.
    """

    layers = ""
    is_compiled = False

    def __init__(
        self,
        *,
        groups: Mapping[str, Group],
        weights: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        device: torch.device,
        fuse: str = "eager",
    ) -> None:
        self.groups = groups
        self.fused = Fused(fuse)
        self.weights: Any = make_namespace(weights, is_starred=self.is_compiled)
        self.buffers: Any = make_namespace(buffers, is_starred=self.is_compiled)
        self.device = device
        self.totals: tuple[float | torch.Tensor, ...] = ()
        self.sums: dict[int, torch.Tensor] = {}
        self.parts: dict[int, torch.Tensor] = {}
        # By name, of every microbatch.
        self.outputs: dict[str, list[torch.Tensor]] = {}
        self.drawing: Drawing | None = None
        # Set before the first forward that needs gradients.
        self.main_grads: WeightGradient | None = None
        self.deferred = Deferred()
        self.activations = Activations(self._repeat)
        self._recomputes = any(name.endswith(RECIPE) for name in dir(type(self)))

    def run(self, **values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run `forward`; values dropped by its methods are recomputed in backward."""
        if not torch.is_grad_enabled():
            return self.forward(**values)
        if self._recomputes:
            with self.activations:
                return self.forward(**values)
        if (units := self.activations.units) is not None:
            with saved_tensors_hooks(units.lend, units.take):
                return self.forward(**values)
        return self.forward(**values)

    def again(self, method: Callable[..., Any], recipe: Callable[..., Any], *args: Any) -> Any:
        """Call `method`; `recipe` recomputes its dropped values in backward."""
        if not self.activations.is_on:
            return method(*args)
        return self.activations.call(method, recipe, args, self.drawing)

    def dropped(self, x: Any) -> Any:
        """Return x, one or more tensors that are not kept for backward: a recipe recomputes them."""
        if self.activations.is_on:
            for each in (x,) if isinstance(x, torch.Tensor) else x:
                self.activations.drop(each)
        return x

    def kept(self, x: torch.Tensor) -> torch.Tensor:
        """Return x, which is kept for the recipe of the running method."""
        if self.activations.is_on:
            self.activations.keep(x)
        return x

    @torch.no_grad()
    def _repeat(self, recipe: Callable[..., Any], args: Sequence[Any], drawing: Drawing | None) -> Any:
        """Run a recipe with the masks of its microbatch: another one may have run forward since."""
        current, self.drawing = self.drawing, drawing
        try:
            return recipe(*args)
        finally:
            self.drawing = current

    def draw_masks(self, seed: int, step: int, first_row: int, rows: int) -> None:
        """Choose the masks of the next forward: those of `rows` rows of the global batch, from `first_row` on."""
        self.drawing = Drawing(seed, step, first_row, rows)

    def draw(self, site: int) -> Draw | None:
        """Return the masks of one dropout of the model, by the number of its call; None: no dropout."""
        return None if self.drawing is None else self.drawing.draw(site)

    @property
    def counts(self) -> bool:
        """Tell whether a loss of this stage divides by counts; its file then defines `count`."""
        return type(self).count is not Stage.count

    def forward(self, **values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run one microbatch: see the calling convention in `program/program.py`."""
        raise NotImplementedError

    def batch_sum(self, number: int, *, dtype: torch.dtype, shape: Sequence[int] = ()) -> torch.Tensor:
        """Return one of `sums`, in its dtype and shape in the model."""
        return self.sums[number].to(dtype).view(shape)

    def keep_part(self, loss: torch.Tensor, part: torch.Tensor, number: int, is_sum: bool) -> torch.Tensor:
        """Return the loss; keep a microbatch's part of a buffer update: a summand over the batch, or a value
        that all microbatches share.
        """
        if number not in self.parts:
            self.parts[number] = part.detach().to(torch.float64, copy=True)
        elif is_sum:
            self.parts[number] += part.detach()
        return loss

    def keep_output(self, loss: torch.Tensor, x: torch.Tensor, name: str) -> torch.Tensor:
        """Return the loss; keep what an evaluation returns for a microbatch."""
        self.outputs.setdefault(name, []).append(x.detach())
        return loss

    @cached_property
    def rounds(self) -> list[Callable[..., dict[int, torch.Tensor | Largest]]]:
        """Return the methods that compute a microbatch's part of `sums`; each may read earlier sums."""
        names = [name for name in dir(type(self)) if name.startswith(BATCH_SUMS)]
        return [getattr(self, name) for name in sorted(names, key=lambda name: int(name[len(BATCH_SUMS) :]))]

    def count(self, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the summands of `totals` for one microbatch; emitted for weighted-mean losses only."""
        raise NotImplementedError


# Name prefix of the methods that sum over the batch before the first forward.
BATCH_SUMS = "batch_sums_"
# The file of the methods that several stages call; the end of a recipe's name.
LAYERS, RECIPE = "layers.py", "_again"
Methods = Mapping[str, Callable[..., Any]]


def load_layers(source: str, filename: str, *, compiled: bool = False) -> Methods:
    """Return the methods that `layers.py` has for all stages; `filename` and `compiled` are those of `load_stage`."""
    module, own = execute(source, filename, Stage)
    # Per class, before its first call: torch.compile is lazy, nothing is compiled here.
    if compiled:
        compile_layers(own, module)
    return {name: method for name, method in vars(own).items() if callable(method)}


def load_stage(
    source: str, filename: str, layers: Methods | None = None, *, compiled: bool = False
) -> type[Stage]:
    """Return the `Stage<i>` class that `source` defines, with the methods of `layers`.

    `compiled`: its own layers by torch's compiler (`runtime/ops/inductor.py`). Tracebacks and pdb show its lines: from disk if
    `filename` is a file, else from an entry in linecache.
    """
    module, own = execute(source, filename, Stage)
    if not own.__name__.removeprefix("Stage").isdigit():
        raise InternalError(filename, f"defines {own.__name__!r} where one class Stage<i> is expected")
    if compiled:
        own.is_compiled = True
        compile_layers(own, module, is_whole=not own.layers)
    give_layers(own, layers or {})
    return own


def give_layers(stage: type[Stage], layers: Methods) -> None:
    """Add `layers` to the methods of a stage; InternalError where it needs some and there are none."""
    if stage.layers and not layers:
        raise InternalError(stage.__name__, f"calls methods of {stage.layers}, which was not loaded")
    for name, method in layers.items():
        setattr(stage, name, method)


Emitted = TypeVar("Emitted")


def execute(source: str, filename: str, base: type[Emitted]) -> tuple[types.ModuleType, type[Emitted]]:
    """Execute an emitted file; return its module, and the one class derived from `base` that it defines."""
    if not Path(filename).is_file():
        # Tracebacks and pdb read lines from here.
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = types.ModuleType(Path(filename).stem)
    module.__file__ = filename
    # No import: a process may hold two programs whose files have the same names.
    exec(compile(source, filename, "exec"), module.__dict__)
    derived = [
        value for value in vars(module).values() if isinstance(value, type) and issubclass(value, base)
    ]
    own = [value for value in derived if value is not base]
    if len(own) != 1:
        names = [value.__name__ for value in own]
        raise InternalError(
            filename, f"defines {names} where one class derived from {base.__name__} is expected"
        )
    return module, own[0]
