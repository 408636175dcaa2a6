"""The keyword `shapes`: how a run handles batches with other lengths or rows than `example_inputs`.

In: "bucket" or `Buckets`, as `Shapes` of options/parts.py has it. Out: the lengths to which batches are
padded.

    bucket_lengths("bucket", 1024, unit=2)              # (64, 128, 256, 512, 1024)
    bucket_lengths(Buckets((512, 1024)), 1024, unit=2)  # (512, 1024)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoptd.errors import PlanError

EXACT, BUCKET = "exact", "bucket"
# Default of `max_programs`: each program keeps its graphs and emitted files in memory.
MAX_PROGRAMS = 16
# The smallest bucket of "bucket", as a part of the largest: shorter batches are hardly faster.
SMALLEST_PART = 16


@dataclass(frozen=True)
class Buckets:
    """The lengths to which batches are padded: `parallelize(shapes=autoptd.Buckets((512, 1024, 2048)))`.

    A batch takes the smallest length that holds it, and is padded at its end. Labels are padded with the
    `ignore_index` of the loss, found in the model; everything else with 0, or with the number in `pad` for an
    argument's name. For every bucket, the unmodified model is run with and without padding, to check that
    loss and all gradients are equal; `check=False` skips this.
    """

    lengths: Sequence[int]
    pad: Mapping[str, float] = field(default_factory=dict)
    check: bool = True

    def __post_init__(self) -> None:
        lengths = self.lengths
        is_list = isinstance(lengths, Sequence) and not isinstance(lengths, str) and len(lengths) > 0
        if not is_list or not all(type(length) is int and length > 0 for length in lengths):
            raise PlanError(
                f"Buckets({lengths!r})", "must be positive integers", "for example Buckets((512, 1024))"
            )


def bucket_lengths(shapes: str | Buckets, length: int, unit: int) -> tuple[int, ...]:
    """Return the lengths to which batches are padded, ascending; for "bucket", halves of the example's
    `length` that `unit` divides, down to a 16th.

    PlanError if the example has none of the given lengths.
    """
    if isinstance(shapes, Buckets):
        lengths = tuple(sorted(set(shapes.lengths)))
        if length not in lengths:
            fact = f"has {length} tokens, which is not one of the buckets {lengths}"
            raise PlanError("example_inputs", fact, f"an example with {lengths[-1]} tokens")
        return lengths
    found = [length]
    while found[-1] % 2 == 0 and found[-1] // 2 % unit == 0 and 2 * length <= found[-1] * SMALLEST_PART:
        found.append(found[-1] // 2)
    return tuple(reversed(found))


__all__ = ["BUCKET", "EXACT", "MAX_PROGRAMS", "Buckets", "bucket_lengths"]
