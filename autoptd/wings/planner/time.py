"""Seconds of products, of memory-bound operators and of collectives on a cluster.

In: counts of `counts.py`, a cluster. Out: seconds, of one microbatch on one rank. Every function takes
numbers or numpy arrays of candidates alike.

    Clock(find_cluster("dgx-a100")).product(1, 2048, 9600, 25600)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoptd.wings.planner.cluster import ELEMENT_BYTES, Cluster
from autoptd.wings.planner.counts import Operator

Number = Any
# Elements: a product of 16 bits is slower where a dim is not a multiple of this.
ALIGNED = 8


@dataclass(frozen=True)
class Clock:
    """Times computation on a GPU of `cluster`."""

    cluster: Cluster
    precision: str = "bf16"

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.precision]

    @property
    def copy_rate(self) -> float:
        """Bytes/s of large memory-bound kernels."""
        return self.cluster.gpu.memory_bandwidth * self.cluster.gpu.memory_fraction

    def moved(self, nbytes: Number) -> Number:
        """Return the seconds of a kernel that moves `nbytes`."""
        return nbytes / self.copy_rate + self.cluster.gpu.kernel_seconds

    def product(self, batch: Number, m: Number, n: Number, k: Number, extra: Number = 0) -> Number:
        """Return the seconds of `batch` products [m, k] x [k, n]: a roofline whose roof knows the shape.

        The tiles of the result are dealt to the GPU's units in waves; on average the last wave is half empty.
        `extra` bytes are moved besides the factors and the result.
        """
        gpu = self.cluster.gpu
        rate = gpu.flops(self.precision) * gpu.matrix_fraction
        # At k = ramp a product reaches half of its rate.
        work = 2 * batch * m * n * k * (1 + gpu.ramp / k)
        if gpu.units:
            # The last wave of tiles is half empty on average: that is half a wave of units more.
            tiles = batch * np.maximum(m / gpu.tile, 1) * np.maximum(n / gpu.tile, 1)
            work = work * (1 + 0.5 * gpu.units / tiles)
        if self.element_bytes == 2:
            odd = np.mod(m, ALIGNED) + np.mod(n, ALIGNED) + np.mod(k, ALIGNED)
            fraction = np.where(np.asarray(batch) > 1, gpu.unaligned, gpu.unaligned_single)
            work = np.where(odd > 0, work / fraction, work)
        nbytes = self.element_bytes * batch * (m * k + k * n + m * n) + extra
        return np.maximum(work / rate, nbytes / self.copy_rate) + gpu.kernel_seconds

    def forward(self, operator: Operator) -> Number:
        """Return the seconds of an operator's forward."""
        if operator.fused is not None:
            return self._fused(operator.fused[0], operator.moved)
        return self.moved(operator.moved) if operator.product is None else self._product(operator.product)

    def backward(self, operator: Operator) -> Number:
        """Return the seconds of its backward: of a product two, of which the weight's adds to its
        gradient in float32.
        """
        if operator.fused is not None:
            return self._fused(operator.fused[1], operator.back)
        if operator.product is None:
            return self.moved(operator.back)
        batch, m, n, k = operator.product
        # The weight's gradient is read and written in float32 where the product would write 16 bits.
        extra = 6 * n * k if operator.has_weight else 0
        return self._product((batch, m, k, n)) + self._product((batch, n, k, m), extra)

    def forwards(self, operators: Iterable[Operator]) -> Number:
        return sum(self.forward(operator) for operator in operators)

    def backwards(self, operators: Iterable[Operator]) -> Number:
        return sum(self.backward(operator) for operator in operators)

    def _product(self, sizes: tuple[Number, Number, Number, Number], extra: Number = 0) -> Number:
        return self.product(*sizes, extra)

    def _fused(self, flops: Number, nbytes: Number) -> Number:
        software, gpu = self.cluster.software, self.cluster.gpu
        rate = gpu.flops(self.precision) * software.flash_fraction
        return np.maximum(software.causal * flops / rate, nbytes / self.copy_rate) + gpu.kernel_seconds
