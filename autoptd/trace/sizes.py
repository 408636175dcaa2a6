"""Report operators with data-dependent result sizes, and alternatives with a known size.

In: the calls of a forward that is being traced. Out: for an error that torch.export raises for such a size, the
operator that made it, and its line; the error itself only has the line that needed a number.

    sizes.see(torch.bincount, made)      # of shape [u0]
    sizes.refusal(error)                 # net.py:12: the size of bincount's result depends on the values of a tensor
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autoptd.errors import TraceError
from autoptd.trace.users import users_line

COUNTS = (
    "F.one_hot(labels.flatten(), num_classes).sum(0), whose size does not depend on the labels; of weights, "
)
COUNTS += "(F.one_hot(labels, num_classes) * weights[:, None]).sum(0)"
ROWS = "torch.where(mask[:, None], x, 0).sum() / mask.sum() for a mean of x[mask], labels of -100 (ignore_index) for a loss of "
ROWS += "some rows, mask.sum() for their number; of a mask that never changes, its indices as a buffer; for the experts of "
ROWS += 'transformers, from_config(config, experts_implementation="grouped_mm")'
DISTINCT = "F.one_hot(labels.flatten(), num_classes).sum(0), whose entries above 0 are the values that occur"
REPEATS = (
    "output_size=, where the sum of the repeats is known; rows of a batch are repeated in the data loader"
)
CLASSES = "F.one_hot(labels, num_classes)"
OTHERS = "use torch.where or a mask of fixed size"
# By the names of torch functions and aten operators.
REMEDIES = {"bincount": COUNTS, "repeat_interleave": REPEATS, "one_hot": CLASSES}
REMEDIES |= dict.fromkeys(("nonzero", "nonzero_numpy", "argwhere", "where", "masked_select", "index"), ROWS)
REMEDIES |= dict.fromkeys(("unique", "_unique2", "unique_dim", "unique_consecutive"), DISTINCT)
# Names under which indexing and `torch.unique` appear.
CALLED = {
    "__getitem__": "index",
    "_return_output": "unique",
    "_return_inverse": "unique",
    "_return_counts": "unique",
}


class Sizes:
    """Record the operators that made symbolic sizes, and their lines, by symbol."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[str, str]] = {}

    def see(self, func: Any, made: Any) -> None:
        """Record the symbolic sizes that a call has made."""
        name = getattr(func, "__name__", "")
        name = CALLED.get(name, name)
        if name not in REMEDIES:
            return
        for piece in made if isinstance(made, (tuple, list)) else (made,):
            for size in piece.shape if isinstance(piece, Tensor) else ():
                if isinstance(size, torch.SymInt):
                    self._made[str(size)] = name, users_line()

    def refusal(self, error: Exception, called: Callable[..., Any] | None, line: str) -> TraceError | None:
        """Return the error if torch.export failed in `line`, in the function `called`, for want of a size."""
        found = [self._made[symbol] for symbol in re.findall(r"\bu\d+\b", str(error)) if symbol in self._made]
        name = getattr(called, "__name__", "")
        if not found and name in REMEDIES:
            found = [(name, line)]
        return size_error(*found[0]) if found else None


def size_error(name: str, site: str) -> TraceError:
    """Return the error for an operator whose result has an unknown size."""
    bare = name.removeprefix("aten.")
    fact = f"the size of {bare}'s result depends on the values of a tensor"
    return TraceError(site, fact, REMEDIES.get(bare, OTHERS))


__all__ = ["Sizes", "size_error"]
