"""What stages of the compiler note of a node for later ones: one record a stage, all of them fields of `ir/notes.Note`.

A record is frozen: the stage that owns it sets another one, with `dataclasses.replace`, and a pass names in its contract the
records that it may change (`passes/runner.py`). A default says that there is nothing to note.

    note(node).rows = replace(note(node).rows, is_largest=True)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from autoptd.ir.types import Dims, I, ValueType


@dataclass(frozen=True)
class Origin:
    """Trace: how the model's code came by a value.

    - `name`: of the value in emitted files, where the code has none.
    - `piece`: which of the names on the left of an assignment the value has.
    - `constant`: the tensor that a placeholder stands for, if it is no buffer of the model.
    - `without_grad`: an operator in a region under no_grad; `ends_region`: the detach that `capture` puts after a region.
    - `batch_norm`: of which batch norm in training an operator is a part; `ends_norm`: the last of these.
    """

    name: str = ""
    piece: int | None = None
    constant: torch.Tensor | None = field(default=None, compare=False)
    without_grad: bool = False
    ends_region: bool = False
    batch_norm: str = ""
    ends_norm: bool = False


@dataclass(frozen=True)
class Draw:
    """Of an operator that draws random numbers.

    - `site`: its number in the model (trace).
    - `rows`: how what it draws follows the batch, S or I (annotate).
    - `inner_axis`: the axis that divides tokens within another axis' part (split_tokens).
    """

    site: int = -1
    rows: ValueType = I
    inner_axis: str | None = None


@dataclass(frozen=True)
class Rows:
    """Annotate: how a value follows the rows of the batch.

    - `blocks`: of how many blocks of an input's dim 0 a microbatch has equal parts.
    - `of_microbatch`: only `autoptd.per_microbatch` reads it.
    - `of_all`: every replica has the value, made of the rows of all of them.
    - `is_largest`: pieces of the batch have a largest entry each; the largest of these, not the sum, is that of the batch.
    - `equal`: operands whose rows are all equal, with the place where they meet the batch.
    - `sums`: operands that are read as sums over the whole batch; `taken_whole`: those read with the rows of all replicas.
    - `whole_call`: (args, kwargs) with the numbers of an operator for the rows of a whole step.
    - `counted_by`: how many replicas count the labels of a loss, which are those of all rows (localize).
    - `round`: the round before the first forward in which a batch sum is known (localize).
    """

    blocks: int = 1
    of_microbatch: bool = False
    of_all: bool = False
    is_largest: bool = False
    equal: Mapping[Node, tuple[int, int]] = field(default_factory=dict)
    sums: Sequence[Node] = ()
    taken_whole: Sequence[Node] = ()
    whole_call: tuple[Any, Any] | None = None
    counted_by: int = 1
    round: int = 0


@dataclass(frozen=True)
class Tokens:
    """Rewrites for ranks that divide tokens (`passes/tokens/`).

    - `is_moved_cut`: a cut of tokens that was moved to where there is little to cut.
    - `window`: the keys that a query sees under a mask, its own the last; `reads_window`: those that it reads without the mask.
    - `outer_heads`: of copies of KV heads, over how many ranks of other axes the heads are divided.
    - `model_dims`: the atoms of a parameter where no KV heads are copied.
    """

    is_moved_cut: bool = False
    window: int | None = None
    reads_window: int | None = None
    outer_heads: int = 0
    model_dims: Dims | None = None


@dataclass(frozen=True)
class Fused:
    """find_fusions: an operator that a fused one may stand for. `what` says which; `is_inner`: nothing outside reads it."""

    what: str = ""
    is_inner: bool = False


@dataclass(frozen=True)
class Local:
    """localize: the shapes of a value's pieces on a rank, and the traced shape of the first."""

    shapes: Sequence[tuple[int, ...]] = ()
    traced: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Keep:
    """keep: what backward finds of a value.

    - `again`: the seconds of an operator that backward runs again; `dropped`: the words above the line of a value that is not
      kept.
    - `whole`: a gather whose result is kept, not its shard.
    """

    again: float | None = None
    dropped: str = ""
    whole: bool = False


@dataclass(frozen=True)
class Absorbed:
    """A conversion that became part of an operator."""

    conversion: str
    payload_bytes: int
    why: str


@dataclass(frozen=True)
class Gemm:
    """hook_gemms: conversions that matrix products take over.

    - `absorbed`: the one that this product does; `uses`: by how many products a gathered input is read, which gather it again
      for backward; `overlaps`: backward's collective runs while another product is computed.
    """

    absorbed: Absorbed | None = None
    uses: int | None = None
    overlaps: bool = False


__all__ = ["Absorbed", "Draw", "Fused", "Gemm", "Keep", "Local", "Origin", "Rows", "Tokens"]
