"""Which stage has how many layers, and how many parameters that is.

In: a shape, p * v stages, the seconds of a layer and of both ends. Out: layers per stage; parameters per
rank.

    split_layers(106, 12, first=1.0, last=1.0, layer=1.0)      # [8, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 8]
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from autoptd.ir.types import ALIGNED, MIN_ALIGNED, shard_size
from autoptd.wings.planner.shape import Shape

Number = Any


def split_layers(layers: int, stages: int, first: float, last: float, layer: float) -> list[int]:
    """Return the layers of each stage: equal where they divide, as published systems demand.

    Else each remaining layer goes to the stage that is currently shortest; `first` and `last` are the
    seconds of the ends in addition to their layers.
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
    """Count the parameters of a layer on one of t tensor ranks.

    Where key and value heads are fewer, ranks share them.
    """
    # Apart from the others: more ranks than KV heads do not make them smaller.
    keys_and_values = 2 * shape.kv_width * (shape.hidden + (1 if shape.biases else 0))
    others = shape.layer_matrices + shape.layer_split_biases - keys_and_values
    return others / t + keys_and_values / np.minimum(t, shape.kv_heads) + shape.layer_whole


def vocab_rows(shape: Shape, t: Number) -> Number:
    """Return the rows of the embedding on one of t tensor ranks.

    Where t does not divide the vocabulary, the last holds padding.
    """
    if isinstance(t, int):
        return shard_size(shape.vocab, t)
    # `shard_size` for arrays of t: rounded up, and to a multiple of ALIGNED where that is padding anyway.
    each = -(-shape.vocab // t)
    is_aligned = (each * t != shape.vocab) & (each >= MIN_ALIGNED)
    return np.where(is_aligned, -(-each // ALIGNED) * ALIGNED, each)


def end_parameters(shape: Shape, t: Number) -> tuple[Number, Number]:
    """Count the parameters of the embedding and of the head with the last norm on one tensor rank, a copy
    each.
    """
    matrix = vocab_rows(shape, t) * shape.hidden
    return matrix + (shape.seq * shape.hidden if shape.positions else 0), matrix + shape.norm_parameters


def stage_parameters(shape: Shape, counts: list[int], t: int) -> list[float]:
    """Count the parameters of each stage on one tensor rank.

    A stage with both ends has a tied matrix once.
    """
    layer = layer_parameters(shape, t)
    embedding, head = end_parameters(shape, t)
    found = [count * layer for count in counts]
    found[0] += embedding
    found[-1] += head
    # Several stages hold a copy of it each, at both ends.
    if len(counts) == 1 and shape.tied:
        found[0] -= vocab_rows(shape, t) * shape.hidden
    return found


__all__ = ["end_parameters", "layer_parameters", "split_layers", "stage_parameters", "vocab_rows"]
