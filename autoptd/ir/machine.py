"""What a rank can do, in round numbers: the units in which the solver weighs compute, memory and communication."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """Per rank: `flops` per second, `memory_bandwidth` and `link_bandwidth` in bytes per second, `latency` in seconds.

    `link_bandwidth` is that between the `ranks_per_node` ranks of a node, `network_bandwidth` that between nodes. `message` is
    what a message between stages, or one more collective of theirs, takes beside its bytes; `memory` is in bytes (no bound
    unless it is given). The defaults are a node of 8 GPUs with a 200 Gb/s card each.

    `per_parameter_byte` and `per_saved_byte` are the prices, in seconds per microbatch, of a byte that a rank keeps (parameter,
    gradient and optimizer state follow it) and of a byte saved for backward. They are never zero: on time alone an
    all-gather followed by redundant GEMMs beats an all-reduce.
    """

    flops: float = 300e12
    memory_bandwidth: float = 1.5e12
    link_bandwidth: float = 200e9
    latency: float = 1e-9
    network_bandwidth: float = 25e9
    ranks_per_node: int = 8
    per_parameter_byte: float = 4 / 200e9
    per_saved_byte: float = 0.2 / 200e9
    message: float = 20e-6
    memory: float = math.inf
