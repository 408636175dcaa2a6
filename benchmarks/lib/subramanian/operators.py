"""S1: the work of one transformer layer on one rank and one microbatch, operator by operator, for many candidates at once.

In: a transformer and arrays of microbatch sizes and tensor degrees. Out: per operator FLOPs, bytes moved, bytes kept, bytes of
weights and collectives, each an array over the candidates. Activations and weights have 2 bytes an element, dropout masks 1.

Terms: t1 splits heads and hidden widths, t2 splits the sequence ("1D" is t2 = 1; "2D" keeps whole weights over t2; "SUMMA"
splits weights over both and multiplies in `panels` steps). A product of [rows, inner] and [inner, outer] takes
rows * outer * (2 inner - 1) FLOPs. Source: arXiv:2410.00273, section 3.1 and appendix A.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.lib.subramanian.system import Quirks, Transformer

Array = NDArray[np.float64]
ELEMENT, MASK = 2.0, 1.0  # bytes


@dataclass(frozen=True)
class Collective:
    """`size` bytes (the whole, not a rank's share) over the ranks of `axis` ("t1" or "t2")."""

    kind: str  # all_gather, reduce_scatter, all_reduce, broadcast, reduce
    size: Array
    axis: str


@dataclass(frozen=True)
class Work:
    """What one direction costs: FLOPs, bytes to and from memory, collectives."""

    flops: Array
    moved: Array
    collectives: tuple[Collective, ...] = ()


@dataclass(frozen=True)
class Operator:
    """One operator: forward and backward, `kept` bytes until backward, bytes of `weights`.

    `is_matrix`: it runs on the matrix units. `is_paneled`: SUMMA, its collectives run panel by panel beside the product.
    """

    name: str
    forward: Work
    backward: Work
    kept: Array = field(default_factory=lambda: np.zeros(1))
    weights: Array = field(default_factory=lambda: np.zeros(1))
    is_matrix: bool = False
    is_paneled: bool = False


@dataclass(frozen=True)
class Local:
    """What a rank holds of a layer, as arrays: `rows` tokens of a microbatch, split over t2 only, and so on."""

    shape: Transformer
    b: Array
    t1: Array
    t2: Array
    panels: Array = field(default_factory=lambda: np.ones(1))

    @property
    def seq(self) -> Array:
        """Tokens of one sequence."""
        return self.shape.seq // self.t2

    @property
    def rows(self) -> Array:
        return self.b * self.seq

    @property
    def scattered_rows(self) -> Array:
        """Tokens of the microbatch where t1 splits the sequence as well (around norms)."""
        return self.b * (self.seq // self.t1)

    def split(self, width: int) -> Array:
        return width // self.t1


def layer(local: Local, tensor: str, ratio: float, quirks: Quirks) -> list[Operator]:
    """The operators of a layer under "1D", "2D" or "SUMMA" tensor parallelism.

    `ratio` is matrix over vector FLOP/s: fused attention runs on the matrix units, its softmax and dropout do not.
    """
    if tensor == "SUMMA":
        return _summa_layer(local, ratio, quirks)
    return _sliced_layer(local, ratio, whole_biases=tensor == "1D" and quirks.whole_biases_in_1d)


def _sliced_layer(local: Local, ratio: float, whole_biases: bool) -> list[Operator]:
    """Megatron's split over t1 with sequence parallelism, the sequence over t2, keys and values gathered over t2."""
    e, f = local.shape.hidden, local.shape.ffn
    rows, thin = local.rows, local.scattered_rows
    biased = rows if whole_biases else thin
    whole = e * np.ones_like(rows)
    wide = rows * local.split(f)
    return [
        _column("fc1", local, e, f),
        _bias("fc1_bias", rows, local.split(f)),
        _activation("gelu", wide),
        _dropout("dropout1", wide),
        _row("fc2", local, f, e),
        _bias("fc2_bias", biased, whole),
        _dropout("dropout2", thin * e),
        _norm("norm1", thin, whole, _sliced_norm_collectives(local)),
        _column("qkv", local, e, 3 * e),
        _attention("attention", local, ratio),
        _row("proj", local, e, e),
        _bias("proj_bias", rows, whole if whole_biases else local.split(e)),
        _dropout("dropout3", thin * e),
        _norm("norm2", thin, whole, _sliced_norm_collectives(local)),
    ]


def _summa_layer(local: Local, ratio: float, quirks: Quirks) -> list[Operator]:
    """Every matrix on a t1 x t2 grid, multiplied with SUMMA; attention as in the sliced layer."""
    e, f, rows = local.shape.hidden, local.shape.ffn, local.rows
    narrow, wide = rows * local.split(e), rows * local.split(f)
    norm_width = local.split(local.shape.seq if quirks.summa_norm_is_seq_wide else e)
    return [
        _summa("fc1", local, e, f),
        _bias("fc1_bias", rows, local.split(f)),
        _activation("gelu", wide),
        _dropout("dropout1", wide),
        _summa("fc2", local, f, e),
        _bias("fc2_bias", rows, local.split(e)),
        _dropout("dropout2", narrow),
        _norm("norm1", rows, norm_width, _summa_norm_collectives(local)),
        _summa("qkv", local, e, 3 * e),
        _attention("attention", local, ratio),
        _summa("proj", local, e, e),
        _bias("proj_bias", rows, local.split(e)),
        _dropout("dropout3", narrow),
        _norm("norm2", rows, norm_width, _summa_norm_collectives(local)),
    ]


def _column(name: str, local: Local, inner: int, outer: int) -> Operator:
    """[rows, inner] x [inner, outer/t1]; the gradient of the input is reduced and scattered over t1."""
    scatter = Collective("reduce_scatter", _over(local.t1, ELEMENT * local.rows * inner), "t1")
    return _linear(name, local.rows, inner * np.ones_like(local.rows), local.split(outer), (), (scatter,))


def _row(name: str, local: Local, inner: int, outer: int) -> Operator:
    """[rows, inner/t1] x [inner/t1, outer]; the result is reduced and scattered over t1."""
    scatter = Collective("reduce_scatter", _over(local.t1, ELEMENT * local.rows * outer), "t1")
    return _linear(name, local.rows, local.split(inner), outer * np.ones_like(local.rows), (scatter,), ())


def _linear(
    name: str,
    rows: Array,
    inner: Array,
    outer: Array,
    forward: tuple[Collective, ...],
    backward: tuple[Collective, ...],
) -> Operator:
    """A product without bias; backward is two products that read the output's gradient twice."""
    read, made, weights = ELEMENT * rows * inner, ELEMENT * rows * outer, ELEMENT * inner * outer
    flops = rows * inner * (2 * outer - 1) + inner * outer * (2 * rows - 1)
    return Operator(
        name,
        Work(rows * outer * (2 * inner - 1), read + made + weights, forward),
        Work(flops, 2 * (read + made + weights), backward),
        kept=read,
        weights=weights,
        is_matrix=True,
    )


def _summa(name: str, local: Local, inner: int, outer: int) -> Operator:
    """[rows, inner/t1] x [inner/t2, outer/t1] on the grid: each panel is broadcast, partial results are added per panel."""
    rows, part = local.rows, local.split(outer)
    left, right = ELEMENT * rows * inner, ELEMENT * inner * part
    moved = left + right + ELEMENT * rows * part * local.panels
    across, down = _over(local.t1, left), _over(local.t2, right)
    return Operator(
        name,
        Work(
            2 * rows * part * inner, moved, (_sent("broadcast", across, "t1"), _sent("broadcast", down, "t2"))
        ),
        Work(
            rows * inner * (2 * part - 1) + inner * part * (2 * rows - 1),
            2 * moved,
            (
                _sent("broadcast", down, "t2"),
                _sent("reduce", across, "t1"),
                _sent("broadcast", across, "t1"),
                _sent("reduce", down, "t2"),
            ),
        ),
        kept=ELEMENT * rows * local.split(inner),
        weights=ELEMENT * (inner // local.t2) * part,
        is_matrix=True,
        is_paneled=True,
    )


def _bias(name: str, rows: Array, width: Array) -> Operator:
    work = Work(rows * width, ELEMENT * (rows * width + width))
    return Operator(name, work, work, weights=ELEMENT * width)


def _activation(name: str, count: Array) -> Operator:
    """GELU through tanh: 8 FLOPs an element forward, 13 backward."""
    return Operator(
        name,
        Work(8 * count, 2 * ELEMENT * count),
        Work(13 * count, 3 * ELEMENT * count),
        kept=ELEMENT * count,
    )


def _dropout(name: str, count: Array) -> Operator:
    work = Work(count, (2 * ELEMENT + MASK) * count)
    return Operator(name, work, work, kept=MASK * count)


def _norm(name: str, rows: Array, width: Array, collectives: tuple[Collective, Collective]) -> Operator:
    """LayerNorm of `rows` tokens of `width` elements: mean 2, variance 3, scaling 4 FLOPs an element."""
    count = rows * width
    return Operator(
        name,
        Work(9 * count, ELEMENT * (2 * count + 2 * rows + 2 * width), collectives[:1]),
        Work(12 * count - 4 * rows, ELEMENT * (5 * count + 2 * width), collectives[1:]),
        kept=ELEMENT * count,
        weights=2 * ELEMENT * width,
    )


def _sliced_norm_collectives(local: Local) -> tuple[Collective, Collective]:
    """The tokens are gathered behind a norm; backward scatters them again."""
    size = _over(local.t1, ELEMENT * local.rows * local.shape.hidden)
    return Collective("all_gather", size, "t1"), Collective("reduce_scatter", size, "t1")


def _summa_norm_collectives(local: Local) -> tuple[Collective, Collective]:
    """Mean and variance are sums over t1; backward adds the gradients of scale and shift."""
    forward = 2 * ELEMENT * local.rows
    backward = ELEMENT * (2 * local.shape.hidden // local.t1 + 2 * local.b * local.shape.seq // local.t2)
    return (
        Collective("all_reduce", _over(local.t1, forward), "t1"),
        Collective("all_reduce", _over(local.t1, backward), "t1"),
    )


def _attention(name: str, local: Local, ratio: float) -> Operator:
    """Fused attention with dropout; backward computes scores, softmax and dropout again; K and V are gathered over t2."""
    seq, q = local.shape.seq, local.shape.hidden // local.shape.heads
    heads = local.b * local.split(local.shape.heads)
    mine, whole = heads * local.seq, heads * seq  # rows of all heads: of the queries, of the keys
    scores = mine * seq
    one, other = (
        scores * (2 * q - 1),
        mine * q * (2 * seq - 1),
    )  # a product with inner size q; with inner size l
    split = whole * q * (2 * local.seq - 1)  # with the queries as inner size
    softmax = ratio * (3 * scores + mine * (seq - 1))  # with dropout
    softmax_backward = ratio * (4 * scores + mine * (seq - 1))
    kept = ELEMENT * (4 * mine * q + 2 * mine)
    gathered = _over(local.t2, 2 * ELEMENT * whole * q)
    return Operator(
        name,
        Work(
            one + softmax + other,
            ELEMENT * (2 * mine * q + 2 * whole * q + mine),
            (_sent("all_gather", gathered, "t2"),),
        ),
        Work(
            2 * one + other + 2 * split + softmax + softmax_backward,
            2 * ELEMENT * (whole * q + mine * q) + kept,
            (_sent("all_gather", gathered, "t2"), _sent("reduce_scatter", gathered, "t2")),
        ),
        kept=kept,
        is_matrix=True,
    )


def _over(degree: Array, size: Array) -> Array:
    """The size of a collective over `degree` ranks: nothing where there is one."""
    return np.where(degree > 1, size, 0.0)


def _sent(kind: str, size: Array, axis: str) -> Collective:
    return Collective(kind, size, axis)
