"""Count the work of one rank for one microbatch from a shape: products, bytes moved, bytes saved,
collectives.

In: a shape and sizes. Out: `Operator`s. All sizes may be numbers or numpy arrays of candidates. Symbols: b
microbatch rows, s the sequence, h hidden, a heads, f the MLP's inner width, V vocabulary, t and c degrees, e
bytes of an element. A rank has n = b * s / c tokens; between the split products, where values are whole over
tp, it works on n / r of them: r is t with sequence parallelism, else 1.

FLOPs are two per multiply-add, of products only; attention counts both of its products in full, as in SC'21.

    layer = layer_operators(shape, Sizes(b=1, t=8, c=1, r=1, e=2), attention="unfused")
    sum(op.forward_flops for op in layer)        # (24 b s h^2 + 4 b s^2 h) / 8 for a GPT
    sum(op.saved for op in layer)                # s b h (10 + 24/t + 5 a s / (h t)): Korthikanti et al. 2022, equation 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoptd.wings.planner.layout import vocab_rows
from autoptd.wings.planner.setting import full_share
from autoptd.wings.planner.shape import Shape

# A number, or a numpy array with one for each candidate.
Number = Any
# The core of attention: selective recomputation computes it again (Korthikanti et al. 2022, section 5).
CORE = "core"


@dataclass(frozen=True)
class Sizes:
    """One rank's share: b rows of a microbatch, t tensor and c context ranks, r as above, e bytes an element."""

    b: Number
    t: Number = 1
    c: Number = 1
    r: Number = 1
    e: Number = 2


@dataclass(frozen=True)
class Operator:
    """Forward and backward of one operator on one rank, for one microbatch.

    `product` is (batch, m, n, k) of a matrix product, with `has_weight` where one factor is a weight. `fused`
    is (forward FLOPs, backward FLOPs) of fused attention. `moved` are the bytes that an operator without
    product moves, `back` those of its backward. `saved` are bytes saved for backward. `part` is CORE for
    operators that selective recomputation repeats.
    """

    name: str
    product: tuple[Number, Number, Number, Number] | None = None
    has_weight: bool = False
    fused: tuple[Number, Number] | None = None
    moved: Number = 0
    back: Number = 0
    saved: Number = 0
    part: str = ""

    @property
    def forward_flops(self) -> Number:
        if self.fused is not None:
            return self.fused[0]
        if self.product is None:
            return 0
        batch, m, n, k = self.product
        return 2 * batch * m * n * k

    @property
    def backward_flops(self) -> Number:
        # The backward of a product has two products of the same size: the gradient of each factor.
        return self.fused[1] if self.fused is not None else 2 * self.forward_flops


def layer_operators(shape: Shape, sizes: Sizes, attention: str) -> list[Operator]:
    """Return one transformer layer, in order; `attention` is "unfused" (scores in memory) or "flash"."""
    return [*attention_operators(shape, sizes, attention), *mlp_operators(shape, sizes)]


def needed_again(operators: Sequence[Operator]) -> list[Operator]:
    """Return the operators of a layer's forward that its backward needs: all before the last product."""
    last = max(i for i, operator in enumerate(operators) if operator.has_weight)
    return list(operators[:last])


def attention_operators(shape: Shape, sizes: Sizes, attention: str) -> list[Operator]:
    """Return norm, QKV, the core, the projection, and the residual addition."""
    s, t, e, h = shape.seq, sizes.t, sizes.e, shape.hidden
    n = sizes.b * s / sizes.c
    q, kv = shape.query_width / t, kv_width(shape, t)
    core = unfused_core(shape, sizes) if attention == "unfused" else flash_core(shape, sizes)
    # Queries and keys are read and written once, forward and backward.
    rotated = 2 * e * n * (q + kv)
    rotate = [] if shape.positions else [Operator("rotary", moved=rotated, back=rotated)]
    return [
        norm(shape, sizes, "attention norm"),
        # Saved: the norm's result, a shard of it under sequence parallelism, and q, k and v for the core.
        Operator("qkv", (1, n, q + 2 * kv, h), has_weight=True, saved=e * n * (h / sizes.r + q + 2 * kv)),
        *rotate,
        *core,
        Operator("projection", (1, n, h, q), has_weight=True, saved=e * n * q),
        branch(shape, sizes, "attention residual"),
    ]


def kv_width(shape: Shape, t: Number) -> Number:
    """Return the elements of a token's keys on one of t tensor ranks.

    If there are fewer heads than ranks, several ranks share one.
    """
    return shape.kv_width / np.minimum(t, shape.kv_heads)


def exchanged_heads(shape: Shape, t: Number, c: Number) -> Number:
    """Return the KV heads of a tensor rank that context ranks exchange, with the copies that make c divide
    them.

    0 if they gather keys and values instead, as in `passes/tokens/attention_rewrites.py`.
    """
    t, c = (np.asarray(degree).astype(int) for degree in (t, c))
    own, queries = shape.kv_heads // t, shape.heads // t
    copied = np.lcm(np.maximum(own, 1), c)
    pays = (own > 1) & (queries % copied == 0) & (queries + copied < own * c)
    return np.where((shape.kv_heads % t == 0) & ((own % c == 0) | pays), copied, 0)


def gathered_keys(shape: Shape, sizes: Sizes) -> Number:
    """Return the bytes of other ranks' keys and values that a rank gathers for attention and saves; 0 if
    none.
    """
    others = 2 * sizes.e * sizes.b * shape.seq * kv_width(shape, sizes.t) * (1 - 1 / sizes.c)
    return np.where(exchanged_heads(shape, sizes.t, sizes.c), 0.0, others)


def unfused_core(shape: Shape, sizes: Sizes) -> list[Operator]:
    """Return scores, a fused scale-mask-softmax, dropout, and the product with V, each through memory
    (SC'21, section 4.2).
    """
    s, t, e = shape.seq, sizes.t, sizes.e
    rows = s / sizes.c
    heads, width = sizes.b * shape.heads / t, shape.head_dim
    scores = heads * rows * s
    operators = [
        Operator("scores", (heads, rows, s, width), part=CORE),
        Operator("softmax", moved=2 * e * scores, back=3 * e * scores, saved=e * scores, part=CORE),
    ]
    if shape.dropout:
        drop = (2 * e + 1) * scores
        operators.append(Operator("dropout", moved=drop, back=drop, saved=(e + 1) * scores, part=CORE))
    operators.append(Operator("attend", (heads, rows, width, s), part=CORE))
    return operators


def flash_core(shape: Shape, sizes: Sizes) -> list[Operator]:
    """Return one kernel that never writes the scores.

    Its backward recomputes them: five products for two.

    It saves a float32 per row and head; Q, K and V are saved as the results of QKV, the output as the operand
    of the projection.
    """
    s, t, e = shape.seq, sizes.t, sizes.e
    n = sizes.b * s / sizes.c
    q, kv = shape.query_width / t, kv_width(shape, t)
    # q k^T and the product with V: two products of 2 n s q FLOPs each.
    forward = 4 * n * s * q
    moved = e * n * (2 * q + 2 * kv)
    saved = 4 * n * shape.heads / t
    fused = (forward, forward * 5 / 2)
    return [
        Operator("attention", fused=fused, moved=moved, back=2 * moved + e * n * q, saved=saved, part=CORE)
    ]


def mlp_operators(shape: Shape, sizes: Sizes) -> list[Operator]:
    """Return norm, the matrices up, the activation (with its gate), the matrix down, and the residual
    addition.
    """
    e, h, f = sizes.e, shape.hidden, shape.ffn / sizes.t
    n = sizes.b * shape.seq / sizes.c
    # One matrix up in a GPT; in a Llama two, up and gate, whose results the activation multiplies.
    ups = shape.mlp_matrices - 1
    return [
        norm(shape, sizes, "mlp norm"),
        Operator("mlp up", (1, n, ups * f, h), has_weight=True, saved=e * n * h / sizes.r),
        Operator(
            "activation", moved=e * n * f * (ups + 1), back=e * n * f * (2 * ups + 1), saved=e * n * f * ups
        ),
        Operator("mlp down", (1, n, h, f), has_weight=True, saved=e * n * f),
        branch(shape, sizes, "mlp residual"),
    ]


def norm(shape: Shape, sizes: Sizes, name: str) -> Operator:
    """Count a norm: it reads and writes its value.

    Its backward reads the value and a gradient and writes one.
    """
    nbytes = sizes.e * sizes.b * shape.seq / sizes.c * shape.hidden / sizes.r
    return Operator(name, moved=2 * nbytes, back=3 * nbytes, saved=nbytes)


def branch(shape: Shape, sizes: Sizes, name: str) -> Operator:
    """Count bias, dropout (its mask is a byte an element) and residual in one kernel.

    Backward adds the branches' gradients.
    """
    elements = sizes.b * shape.seq / sizes.c * shape.hidden / sizes.r
    mask = elements if shape.dropout else 0
    moved = 3 * sizes.e * elements + mask
    # Dropout's backward is a separate kernel, which reads a gradient and writes one.
    back = (5 if shape.dropout else 3) * sizes.e * elements + mask
    return Operator(name, moved=moved, back=back, saved=mask)


def embedding_operators(shape: Shape, sizes: Sizes) -> list[Operator]:
    """Return the lookup, positions and dropout before the first layer.

    Backward adds to the table in place.
    """
    elements = sizes.b * shape.seq / sizes.c * shape.hidden
    whole, part = sizes.e * elements, sizes.e * elements / sizes.r
    mask = elements / sizes.r if shape.dropout else 0
    return [
        Operator("embedding", moved=2 * whole, back=3 * whole),
        Operator("embedding sum", moved=3 * part + mask, back=2 * part + mask, saved=mask),
    ]


def head_operators(shape: Shape, sizes: Sizes) -> list[Operator]:
    """Return the last norm, the logits, and a cross-entropy in float32 (logits cast, exponentials, their
    gradient).
    """
    n = sizes.b * shape.seq / sizes.c
    rows = vocab_rows(shape, sizes.t)
    logits = n * rows
    e = sizes.e
    return [
        norm(shape, sizes, "last norm"),
        Operator("logits", (1, n, rows, shape.hidden), has_weight=True, saved=e * n * shape.hidden / sizes.r),
        # Forward: read, cast to float32, exponentials read and written. Saved: the float32 logits.
        Operator("cross-entropy", moved=(e + 4 + 4 + 8) * logits, back=(4 + e) * logits, saved=4 * logits),
    ]


def model_flops(shape: Shape, rows: Number, recompute: str = "none", *, replays_all: bool = True) -> Number:
    """Count the FLOPs of a step of `rows` sequences on all ranks: of the model alone, or including the
    recomputation of whole layers, or of the part that their backward needs.

    For a GPT "none" is 72 B s L h^2 (1 + s/(6h) + V/(12 L h)), and "full" is SC'21's equation 3.
    """
    sizes = Sizes(b=rows)
    layer = layer_operators(shape, sizes, "unfused")
    forward = sum(operator.forward_flops for operator in layer)
    core = sum(operator.forward_flops for operator in layer if operator.part == CORE)
    repeated = layer if replays_all else needed_again(layer)
    whole = sum(operator.forward_flops for operator in repeated)
    again = core if recompute == "selective" else full_share(recompute) * whole
    head = sum(operator.forward_flops for operator in head_operators(shape, sizes))
    return shape.layers * (3 * forward + again) + 3 * head


__all__ = [
    "CORE",
    "Operator",
    "Sizes",
    "embedding_operators",
    "exchanged_heads",
    "gathered_keys",
    "head_operators",
    "kv_width",
    "layer_operators",
    "model_flops",
    "needed_again",
]
