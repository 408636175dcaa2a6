"""Operators that only exist in AutoPTD's graphs; codegen writes each as a call of the runtime.

They stand for communication and for the local forms of split operators, and are never executed themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from autoptd.errors import InternalError
from autoptd.ir.fusion import OURS


def _marker(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that only stands in graphs: to call it is an error."""

    @wraps(function)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise InternalError(function.__name__, "a marker was executed")

    return refuse


@_marker
def convert(
    x: Any, name: str, dim: int = 0, outer: int = 1, to_dim: int = 0, to_outer: int = 1, *, size: int = 0
) -> Any:
    """Convert a value from one type over tp to another: `name` is a row of `ir.types.CONVERSIONS`.

    `dim` and `outer` locate the shards (see `ir.types.outer_size`); `to_dim` and `to_outer` the target shards
    of S -> S. `size` is that of a padded dim (see `ir.types.padded_size`).
    """


@_marker
def share(x: Any, pieces: int) -> Any:
    """Return one of `pieces` equal parts of a whole value that is added to a sum over the batch."""


@_marker
def first_rows(x: Any, dim: int) -> Any:
    """Return the rows of one microbatch from a constant whose rows are all equal."""


@_marker
def batch_sum(x: Any, index: int = -1) -> Any:
    """Return the sum of `x` (or the maximum of each entry) over all microbatches and replicas: x depends only
    on inputs, so it is known before the first forward.
    """


@_marker
def vocab_embedding(ids: Any, weight: Any, padding_idx: int = -1, *, size: int = 0) -> Any:
    """Look ids up in this rank's rows, as a partial sum over tp. `size`: all rows of a padded vocabulary."""


@_marker
def cross_entropy(
    logits: Any,
    targets: Any,
    weight: Any,
    *,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    vocab: bool,
    size: int,
    total: int,
) -> Any:
    """Compute the cross-entropy of one microbatch.

    `vocab`: the logits are split by vocabulary, whose padded size is `size` (else 0). `total` >= 0: the sum
    is divided by that global count.
    """


def _named(name: str) -> Callable[..., Any]:
    """Make the marker of an operator that takes any arguments."""

    def marker(*operands: Any, **keywords: Any) -> Any: ...

    marker.__name__ = name
    return _marker(marker)


# Operators over classes that are split over ranks (`runtime/ops/classes.py`), by the form of the operator. They take the
# operands, the dim and, if classes are padded, their number.
OVER_CLASSES = {
    f"classes_{name}": _named(f"classes_{name}")
    for name in ("log_softmax", "softmax", "logsumexp", "gather", "argmax")
}


@_marker
def mean(x: Any, dims: list[int], keepdim: bool, count: int) -> Any:
    """Divide the sum over `dims` by the global `count` of entries."""


@_marker
def dropout(
    x: Any, rate: float, site: int, batch: tuple[int, int] | None, shard: tuple[int, int] | None
) -> Any:
    """Dropout at call site number `site`; `batch` and `shard` are (dim, offset of this rank's elements) for
    rows and shards.
    """


@_marker
def noise(x: Any, kind: str, site: int, batch: tuple[int, int] | None, shard: tuple[int, int] | None) -> Any:
    """Random numbers of a kind, in the shape of x, at call site number `site`; `batch` and `shard` as for
    dropout.
    """


@_marker
def causal_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    order: str = "",
    window: int | None = None,
) -> Any:
    """Causal attention from this rank's queries to the keys of all ranks, up to each query or to the last
    one.
    """


@_marker
def by_expert(ids: Any, experts: int) -> Any:
    """Sort rows by expert; return their order and the end of each expert's rows. Over an axis, only this
    rank's experts.
    """


@_marker
def take_rows(x: Any, order: Any, choices: int = 1) -> Any:
    """Return rows of x in an order that has `choices` entries per row."""


@_marker
def put_rows(x: Any, order: Any, count: int) -> Any:
    """Return `count` rows: those of x at the places in `order`, and zeros elsewhere."""


@_marker
def grouped_mm(x: Any, weight: Any, ends: Any) -> Any:
    """Multiply each group of rows with its matrix."""


@_marker
def expert_rows(table: Any, order: Any, ends: Any) -> Any:
    """Return, for each row, its expert's row in a table."""


@_marker
def linear(x: Any, weight: Any, bias: Any, *, overlap: bool, wgrad: str, transposed: bool) -> Any:
    """Apply a linear layer with hooks on its backward: see passes/hook_gemms.py and `rt.linear`."""


# Operators of autoptd/kernels, which take the arguments that passes/fusion gives them.
FUSED = {name: _named(name) for name in OURS}
# Operators between a value and its reader that keep its entries, or its first rows.
PLACED = (convert, share, first_rows)
MARKERS = (
    *(convert, share, first_rows, batch_sum, vocab_embedding, cross_entropy, mean, dropout, linear),
    causal_attention,
    *(by_expert, take_rows, put_rows, grouped_mm, expert_rows),
    noise,
    *OVER_CLASSES.values(),
    *FUSED.values(),
)


def unconverted(node: Any) -> Any:
    """Return the node before conversions: a value in the types in which it is computed."""
    while node.target is convert:
        node = node.args[0]
    return node
