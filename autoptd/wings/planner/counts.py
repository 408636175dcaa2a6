"""Count what a rank does and holds, from a shape: its operators, parameters, their state, and saved activations.

Sizes may be numbers or numpy arrays with one entry per candidate. Symbols: b microbatch rows, s the sequence, h
hidden, a heads, f the MLP's inner width, V vocabulary, t and c degrees, e bytes of an element. A rank has
n = b * s / c tokens; between the split products, where values are whole over tp, it works on n / r of them: r is t
with sequence parallelism, else 1.

FLOPs are two per multiply-add, of products only; attention counts both of its products in full, as in SC'21.

    layer = layer_operators(shape, Sizes(b=1, t=8, c=1, r=1, e=2), attention="unfused")
    sum(op.forward_flops for op in layer)        # (24 b s h^2 + 4 b s^2 h) / 8 for a GPT
    sum(op.saved for op in layer)                # s b h (10 + 24/t + 5 a s / (h t)): Korthikanti et al. 2022, equation 2
    split_layers(106, 12, first=1.0, last=1.0, layer=1.0)      # [8, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 8]
    state_bytes(Setting(d=4, zero=1), Software())              # State(weight=2, gradient=4, optimizer=3.0), in bf16

Bytes per parameter: bf16 keeps the weight (2), its gradient (4, or 2 where the software sums it in 16 bits), a
float32 weight and two moments (12): 18. fp16 does the same; software that `copies_fp16_gradients` keeps 2, 2 and
another float32 gradient: 20. fp32: 4, 4, 8. Software without `master_weights` keeps gradient and moments in the
dtype of the weight: 2, 2, 4 in 16 bits.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoptd.ir.placement import bytes_per_element
from autoptd.ir.types import ALIGNED, MIN_ALIGNED, shard_size
from autoptd.wings.planner.cluster import ELEMENT_BYTES, Cluster, Software
from autoptd.wings.planner.setting import Setting, full_share
from autoptd.wings.planner.shape import Shape

# A number, or a numpy array with one for each candidate.
Number = Any
# The core of attention: selective recomputation computes it again (Korthikanti et al. 2022, section 5).
CORE = "core"


@dataclass(frozen=True)
class Sizes:
    """The sizes b, t, c, r and e of the module's docstring."""

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
    """Return norm, QKV, core, projection and residual addition."""
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
    """Return the elements of a token's keys on one of t tensor ranks; more ranks than KV heads share them."""
    return shape.kv_width / np.minimum(t, shape.kv_heads)


def exchanged_heads(shape: Shape, t: Number, c: Number) -> Number:
    """Return the KV heads of a tensor rank that context ranks exchange, with the copies that make c divide them; 0 if
    they gather keys and values instead, as in `passes/tokens/attention_rewrites.py`.
    """
    t, c = (np.asarray(degree).astype(int) for degree in (t, c))
    own, queries = shape.kv_heads // t, shape.heads // t
    copied = np.lcm(np.maximum(own, 1), c)
    pays = (own > 1) & (queries % copied == 0) & (queries + copied < own * c)
    return np.where((shape.kv_heads % t == 0) & ((own % c == 0) | pays), copied, 0)


def gathered_keys(shape: Shape, sizes: Sizes) -> Number:
    """Return the bytes of other ranks' keys and values that a rank gathers for attention and saves."""
    others = 2 * sizes.e * sizes.b * shape.seq * kv_width(shape, sizes.t) * (1 - 1 / sizes.c)
    return np.where(exchanged_heads(shape, sizes.t, sizes.c), 0.0, others)


def unfused_core(shape: Shape, sizes: Sizes) -> list[Operator]:
    """Return scores, a fused scale-mask-softmax, dropout and the product with V, all through memory (SC'21, 4.2)."""
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
    """Return one kernel that never writes the scores: its backward has five products for forward's two.

    It saves a float32 per row and head; Q, K and V are saved as results of QKV, the output as the projection's operand.
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
    """Return norm, the matrices up, the activation (with its gate), the matrix down and the residual addition."""
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
    """Return a norm: forward reads and writes its value, backward reads it and a gradient and writes one."""
    nbytes = sizes.e * sizes.b * shape.seq / sizes.c * shape.hidden / sizes.r
    return Operator(name, moved=2 * nbytes, back=3 * nbytes, saved=nbytes)


def branch(shape: Shape, sizes: Sizes, name: str) -> Operator:
    """Return bias, dropout (its mask has a byte per element) and residual in one kernel.

    Backward adds the branches' gradients.
    """
    elements = sizes.b * shape.seq / sizes.c * shape.hidden / sizes.r
    mask = elements if shape.dropout else 0
    moved = 3 * sizes.e * elements + mask
    # Dropout's backward is a separate kernel, which reads a gradient and writes one.
    back = (5 if shape.dropout else 3) * sizes.e * elements + mask
    return Operator(name, moved=moved, back=back, saved=mask)


def embedding_operators(shape: Shape, sizes: Sizes) -> list[Operator]:
    """Return the lookup, positions and dropout before the first layer; backward adds to the table in place."""
    elements = sizes.b * shape.seq / sizes.c * shape.hidden
    whole, part = sizes.e * elements, sizes.e * elements / sizes.r
    mask = elements / sizes.r if shape.dropout else 0
    return [
        Operator("embedding", moved=2 * whole, back=3 * whole),
        Operator("embedding sum", moved=3 * part + mask, back=2 * part + mask, saved=mask),
    ]


def head_operators(shape: Shape, sizes: Sizes) -> list[Operator]:
    """Return the last norm, the logits, and a cross-entropy in float32 (cast, exponentials, gradient)."""
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
    """Count the FLOPs of a step of `rows` sequences on all ranks, with the recomputation of whole layers
    (`replays_all`) or of the part that their backward needs.

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


def split_layers(layers: int, stages: int, first: float, last: float, layer: float) -> list[int]:
    """Return the layers of each stage: equal numbers if they divide, as published systems require.

    Else each remaining layer goes to the stage that is shortest so far; `first` and `last` are the seconds of the
    ends of the model.
    """
    counts = [layers // stages] * stages
    if layers % stages:
        loads = [(count * layer, stage) for stage, count in enumerate(counts)]
        loads[0] = (loads[0][0] + first, 0)
        loads[-1] = (loads[-1][0] + last, stages - 1)
        # Greedy is optimal here: all layers take the same time.
        heapq.heapify(loads)
        for _ in range(layers % stages):
            load, stage = heapq.heappop(loads)
            counts[stage] += 1
            heapq.heappush(loads, (load + layer, stage))
    return counts


def layer_parameters(shape: Shape, t: Number) -> Number:
    """Count the parameters of a layer on one of t tensor ranks."""
    # Separate: more ranks than KV heads do not make them smaller.
    keys_and_values = 2 * shape.kv_width * (shape.hidden + (1 if shape.biases else 0))
    others = shape.layer_matrices + shape.layer_split_biases - keys_and_values
    return others / t + keys_and_values / np.minimum(t, shape.kv_heads) + shape.layer_whole


def vocab_rows(shape: Shape, t: Number) -> Number:
    """Return the rows of the embedding on one of t tensor ranks, with padding if t does not divide them."""
    if isinstance(t, int):
        return shard_size(shape.vocab, t)
    # `shard_size` for arrays of t: rounded up, and to a multiple of ALIGNED where that is padding anyway.
    each = -(-shape.vocab // t)
    is_aligned = (each * t != shape.vocab) & (each >= MIN_ALIGNED)
    return np.where(is_aligned, -(-each // ALIGNED) * ALIGNED, each)


def end_parameters(shape: Shape, t: Number) -> tuple[Number, Number]:
    """Count the parameters of the embedding, and of the head with the last norm, on one tensor rank."""
    matrix = vocab_rows(shape, t) * shape.hidden
    return matrix + (shape.seq * shape.hidden if shape.positions else 0), matrix + shape.norm_parameters


def stage_parameters(shape: Shape, counts: list[int], t: int) -> list[float]:
    """Count the parameters of each stage on one tensor rank; a stage with both ends has a tied matrix once."""
    layer = layer_parameters(shape, t)
    embedding, head = end_parameters(shape, t)
    found = [count * layer for count in counts]
    found[0] += embedding
    found[-1] += head
    if len(counts) == 1 and shape.tied:
        found[0] -= vocab_rows(shape, t) * shape.hidden
    return found


@dataclass(frozen=True)
class State:
    """Bytes per parameter of a rank."""

    weight: Number
    gradient: Number
    optimizer: Number


@dataclass(frozen=True)
class Activations:
    """Bytes that one microbatch keeps for backward on one rank: in a `layer`, the `embedding`, the `head`.

    `once` are held while a layer runs: its values under full recomputation, and gradients. `logits` are those of the
    last stage.
    """

    layer: Number
    embedding: Number
    head: Number
    once: Number
    logits: Number


def state_bytes(setting: Setting, software: Software) -> State:
    """Return bytes per parameter, by the formula of `ir/placement.py`.

    ZeRO-1 shards the optimizer state over the replicas, 2 gradients too, 3 parameters as well.
    """
    use, cut = ELEMENT_BYTES[setting.precision], setting.replicas
    wide = 4 if software.master_weights else use
    sums = _sum_bytes(setting, software)
    found = bytes_per_element(use, wide, sums, has_master=use < wide, parts=cut if setting.zero >= 1 else 1)
    copied = 4 if _has_copied_gradient(setting, software) else 0
    return State(
        found.parameter / (cut if setting.zero >= 3 else 1),
        found.gradient / (cut if setting.zero >= 2 else 1) + software.extra_parameter_bytes,
        found.master + found.optimizer + copied / (cut if setting.zero >= 1 else 1),
    )


def _sum_bytes(setting: Setting, software: Software) -> int:
    """Return the bytes of an element of the gradient sums."""
    use = ELEMENT_BYTES[setting.precision]
    is_narrow = not software.master_weights or _has_copied_gradient(setting, software)
    return use if use == 4 or is_narrow else software.gradient_bytes


def _has_copied_gradient(setting: Setting, software: Software) -> bool:
    return setting.precision == "fp16" and software.master_weights and software.copies_fp16_gradients


def add_overheads(held: Mapping[str, Sequence[float]], software: Software) -> dict[str, tuple[float, ...]]:
    """Add "slack", a fraction of a rank's tensors, and "context", memory outside of them, to bytes by kind and rank."""
    tensors = [sum(row) for row in zip(*held.values(), strict=True)]
    slack = [software.slack * nbytes for nbytes in tensors]
    found = {**held, "slack": slack, "context": [software.context_bytes] * len(tensors)}
    return {name: tuple(row) for name, row in found.items()}


def recipe_text(precision: str, software: Software) -> str:
    """Describe the precision and the bytes of a parameter on one replica."""
    state = state_bytes(Setting(precision=precision), software)
    is_copied = software.master_weights and ELEMENT_BYTES[precision] == 2
    optimizer = "float32 copy and moments" if is_copied else "moments"
    total = state.weight + state.gradient + state.optimizer
    parts = f"weight {state.weight:g}, gradient {state.gradient:g}, {optimizer} {state.optimizer:g}"
    return f"AdamW in {precision}, {total:g} bytes a parameter ({parts})"


def count_activations(shape: Shape, cluster: Cluster, setting: Setting) -> Activations:
    """Count bytes per microbatch; the modes are those of Korthikanti et al. 2022, sections 4 and 5."""
    e = ELEMENT_BYTES[setting.precision]
    sizes = Sizes(setting.microbatch, setting.t, setting.c, setting.t if setting.sequence_parallel else 1, e)
    operators = layer_operators(shape, sizes, cluster.software.attention)
    whole = sum(operator.saved for operator in operators)
    if cluster.software.context == "solved":
        whole = whole + gathered_keys(shape, sizes)
    core = sum(operator.saved for operator in operators if operator.part == CORE)
    # The residual of a microbatch on one context rank.
    value = e * setting.microbatch * shape.seq / setting.c * shape.hidden
    share, is_selective = setting.full_share, setting.recompute == "selective"
    kept = (1 - share) * (whole - core * is_selective) + share * value / sizes.r
    # The bytes that one layer holds in addition to its input while it is recomputed.
    again = whole - value / sizes.r if share else core * is_selective
    head = head_operators(shape, sizes)
    logits = sum(operator.saved for operator in head if operator.name == "cross-entropy")
    return Activations(
        layer=kept,
        embedding=sum(operator.saved for operator in embedding_operators(shape, sizes)),
        head=sum(operator.saved for operator in head) - logits,
        once=again + 4 * value,
        # Float32 logits, and their gradient in e bytes.
        logits=logits * (1 + e / 4),
    )


def fetched_bytes(shape: Shape, setting: Setting, software: Software) -> Number:
    """Return the bytes of gathered tensors that ZeRO shards: with stage 3 the parameters of the layer that runs and of
    the next, with 2 and 3 the gradients of a layer until they are summed.
    """
    if setting.zero < 2:
        return 0.0
    largest = np.maximum(shape.layer_parameters / setting.t, vocab_rows(shape, setting.t) * shape.hidden)
    parameter = ELEMENT_BYTES[setting.precision] if setting.zero == 3 else 0
    return largest * (_sum_bytes(setting, software) + 2 * parameter)
