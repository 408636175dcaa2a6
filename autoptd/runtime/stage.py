"""The base class of emitted stages, and how their source becomes a class.

In: the text of `stage_2.py`, which defines `class Stage2(rt.Stage)` with `forward` (and `count`, where a loss divides by the
number of valid labels). Out: the class; an instance of it holds this rank's weights under the model's own names.

    stage = load_stage(program.sources["stage_2.py"], "stage_2.py")(tp=group, weights=weights, buffers={}, device=device)
    stage.weights.transformer.h[3].ln_1.weight          # a tensor: this rank's shard
    x, = stage.forward(x_from_1=x)
"""

from __future__ import annotations

import linecache
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from autoptd.errors import InternalError
from autoptd.runtime.dropout import Draw, Drawing
from autoptd.runtime.fused import Fused
from autoptd.runtime.inductor import compile_layers
from autoptd.runtime.linear import Deferred, WeightGradient
from autoptd.runtime.world.world import Group


class Namespace:
    """Tensors by dotted name: `h.0.bias` is `.h[0].bias`. Built once; reading is plain attribute access.

    Names with a leading underscore and names that Python cannot spell are read as items: `["my-emb"].weight`.
    """

    def __init__(self) -> None:
        self._items: dict[int | str, Any] = {}

    def __getitem__(self, key: int | str) -> Any:
        return self._items[key]

    def _put(self, name: str, value: torch.Tensor) -> None:
        """File `value` under a dotted name."""
        *path, last = name.split(".")
        here = self
        for part in path:
            below = here._items.get(_key(part))
            if below is None:
                here._set(part, below := Namespace())
            here = below
        here._set(last, value)

    def _set(self, part: str, value: Any) -> None:
        self._items[_key(part)] = value
        if not part.isdecimal() and not part.startswith("_"):
            setattr(self, part, value)


def _key(part: str) -> int | str:
    return int(part) if part.isdecimal() and str(int(part)) == part else part


def make_namespace(tensors: Mapping[str, torch.Tensor]) -> Namespace:
    """Return the tensors of a flat mapping as a tree."""
    root = Namespace()
    for name, tensor in tensors.items():
        root._put(name, tensor)
    return root


class Stage:
    """One stage on one rank: what an emitted `forward` finds on `self`.

    `totals` are the global counts that weighted-mean losses divide by: sums over all microbatches and replicas, set before the
    first forward of every step (numbers or 0-d tensors). `drawing`: the dropout masks of the next forward; None: no dropout.
    `fused` has the fused operators. `main_grads` and `deferred` are what an emitted `rt.linear` names as its `wgrad`.
    """

    def __init__(
        self,
        *,
        tp: Group,
        weights: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        device: torch.device,
        fused: Fused | None = None,
    ) -> None:
        self.tp = tp
        self.fused = fused or Fused()
        self.weights: Any = make_namespace(weights)
        self.buffers: Any = make_namespace(buffers)
        self.device = device
        self.totals: tuple[float | torch.Tensor, ...] = ()
        self.drawing: Drawing | None = None
        self.main_grads: WeightGradient | None = None  # set before the first forward that needs gradients
        self.deferred = Deferred()

    def draw(self, site: int) -> Draw | None:
        """The masks of one dropout of the model, by the number of its call."""
        return None if self.drawing is None else self.drawing.draw(site)

    @property
    def counts(self) -> bool:
        """Whether a loss of this stage divides by counts: then its file has a `count` of its own."""
        return type(self).count is not Stage.count

    def forward(self, **values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run one microbatch: see the calling convention in `program/program.py`."""
        raise NotImplementedError

    def count(self, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what `totals` sums, of one microbatch; emitted for weighted-mean losses only."""
        raise NotImplementedError


def load_stage(source: str, filename: str, *, compiled: bool = False) -> type[Stage]:
    """Return the `Stage<i>` class that `source` defines; `compiled`: its layers by torch's compiler (`inductor.py`).

    Tracebacks and pdb show its lines: from disk if `filename` is a file, else from an entry in linecache.
    """
    if not Path(filename).is_file():
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = types.ModuleType(Path(filename).stem)
    module.__file__ = filename
    exec(compile(source, filename, "exec"), module.__dict__)  # the program's own text
    own = [
        one for one in vars(module).values() if isinstance(one, type) and issubclass(one, Stage) and one is not Stage
    ]
    if len(own) != 1 or not own[0].__name__.removeprefix("Stage").isdigit():
        raise InternalError(filename, f"defines {[one.__name__ for one in own]} where one class Stage<i> is expected")
    if compiled:
        compile_layers(own[0], module)
    return own[0]
