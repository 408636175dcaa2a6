"""Compute the bytes that a rank holds: parameters with their state, and the saved activations of microbatches
in flight.

In: a shape, a cluster, a setting. Out: bytes of the activations of a layer and of the ends for one
microbatch, of a parameter's state, and of temporary values. Numbers or arrays alike.

    state_bytes(Setting(d=4, zero=1), Software())       # State(weight=2, gradient=4, optimizer=3.0), in bf16

Bytes per parameter: bf16 keeps the weight (2), its gradient (4, or 2 where the software sums it so), a
float32 weight and two moments (12): 18. fp16 likewise, or with software that `copies_fp16_gradients` 2, 2 and
a float32 gradient more: 20. fp32: 4, 4, 8. Software
without `master_weights` keeps weight, gradient and both moments as wide as the weight: 2, 2, 4 in 16 bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoptd.ir.placement import bytes_per_element
from autoptd.wings.planner.cluster import ELEMENT_BYTES, Cluster, Software
from autoptd.wings.planner.counts import (
    CORE,
    Sizes,
    embedding_operators,
    gathered_keys,
    head_operators,
    layer_operators,
)
from autoptd.wings.planner.layout import vocab_rows
from autoptd.wings.planner.setting import Setting
from autoptd.wings.planner.shape import Shape

Number = Any


@dataclass(frozen=True)
class State:
    """Bytes per parameter of a rank."""

    weight: Number
    gradient: Number
    optimizer: Number


@dataclass(frozen=True)
class Activations:
    """Bytes that one microbatch keeps for backward on one rank: in a `layer`, the `embedding`, the `head`.

    In addition there are the bytes held `once`, while a layer runs: its values under full recomputation, and
    gradients; and the `logits` on the last stage.
    """

    layer: Number
    embedding: Number
    head: Number
    once: Number
    logits: Number


def state_bytes(setting: Setting, software: Software) -> State:
    """Return bytes per parameter, by the formula of `ir/placement.py`.

    ZeRO-1 cuts the optimizer's over the replicas, 2 the gradient too, 3 the parameter as well.
    """
    use, cut = ELEMENT_BYTES[setting.precision], setting.replicas
    # Without masters all is as wide as the weight.
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
    """Return the bytes of a gradient as it adds up."""
    use = ELEMENT_BYTES[setting.precision]
    is_narrow = not software.master_weights or _has_copied_gradient(setting, software)
    return use if use == 4 or is_narrow else software.gradient_bytes


def _has_copied_gradient(setting: Setting, software: Software) -> bool:
    return setting.precision == "fp16" and software.master_weights and software.copies_fp16_gradients


def add_overheads(held: Mapping[str, Sequence[float]], software: Software) -> dict[str, tuple[float, ...]]:
    """Add "slack", a fraction of a rank's tensors, and "context", memory outside of tensors, to bytes by kind
    and rank.
    """
    tensors = [sum(row) for row in zip(*held.values(), strict=True)]
    slack = [software.slack * nbytes for nbytes in tensors]
    found = {**held, "slack": slack, "context": [software.context_bytes] * len(tensors)}
    return {name: tuple(row) for name, row in found.items()}


def recipe_text(precision: str, software: Software) -> str:
    """Say in which precision training is, and what it holds of a parameter on one replica."""
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
    """Return the bytes of what ZeRO cuts and is whole for the moment.

    Stage 3: parameters of the layer that runs and of the next; 2 and 3: the gradients of a layer, until they
    are summed.
    """
    if setting.zero < 2:
        return 0.0
    largest = np.maximum(shape.layer_parameters / setting.t, vocab_rows(shape, setting.t) * shape.hidden)
    parameter = ELEMENT_BYTES[setting.precision] if setting.zero == 3 else 0
    return largest * (_sum_bytes(setting, software) + 2 * parameter)


__all__ = [
    "Activations",
    "State",
    "add_overheads",
    "count_activations",
    "fetched_bytes",
    "recipe_text",
    "state_bytes",
]
