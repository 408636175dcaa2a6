"""The bytes that a rank holds per element of a parameter, by purpose.

In: the sizes of its dtypes, and the number of replicas that divide its storage. Out: bytes per element, in
AdamW's terms.

| recipe                           | parameter | gradient | master | moments | sum, k replicas |
|----------------------------------|-----------|----------|--------|---------|-----------------|
| float32                          | 4         | 4        | -      | 8       | 16              |
| float32, zero=1                  | 4         | 4        | -      | 8 / k   | 8 + 8 / k       |
| precision="bf16"                 | 2         | 4        | 4      | 8       | 18              |
| precision="bf16", zero=1         | 2         | 4        | 4 / k  | 8 / k   | 6 + 12 / k      |

    state_bytes(use=2, storage=4, sums=4, has_master=True, parts=8).total        # 7.5
"""

from __future__ import annotations

from typing import NamedTuple


class StateBytes(NamedTuple):
    """Bytes per element of a trained parameter."""

    parameter: float
    gradient: float
    master: float
    # AdamW's two moments.
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameter + self.gradient + self.master + self.optimizer


def state_bytes(
    use: int,
    storage: int,
    sums: int,
    *,
    has_master: bool = False,
    has_main_grad: bool = False,
    parts: int = 1,
) -> StateBytes:
    """Count the bytes per element: `use`, `storage` and `sums` are the sizes of the dtypes in which stages
    compute, the optimizer steps and gradients accumulate.

    `has_main_grad`: there is a gradient in the dtype of the parameter, too. `parts`: the number of ranks that
    divide the optimizer's state.
    """
    gradient = sums + (use if has_main_grad else 0)
    return StateBytes(use, gradient, storage / parts if has_master else 0, 2 * storage / parts)


__all__ = ["StateBytes", "state_bytes"]
