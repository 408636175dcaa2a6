"""Call a model and leave it as it was: what the call changed is looked at, and refused unless it is a cache.

In: a model, a loss function and a call. Out: the loss; the model as before it, without fake tensors in it
where it was traced. A cache is what the first call makes and the second one finds, the same for every batch:
a mask, a table of sines.

    watched = Watched(model, loss_fn)
    loss = watched(*args, **kwargs)
    check_changes(watched, args, kwargs)      # TraceError: layers.0.calls: is changed by the forward (0 before it, 1 after it)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.compat import FakeTensor, tree_leaves, tree_map
from autoptd.trace.loss import WithLoss
from autoptd.trace.masks import any_mask, given_masks
from autoptd.trace.state import RANDOM, Change, State


class Watched(WithLoss):
    """The model and its loss, left as they were by every call; `seen` says what the last one has changed.

    `around` makes a context for the forward alone.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        super().__init__(model, loss_fn)
        self.seen, self.around = Seen(), around

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        before = State.of_call(self.model, self.loss_fn)
        # Every call is traced, and run, as a first one.
        before.clear_caches()
        try:
            with self.around():
                loss = super().forward(*args, **kwargs)
                self.seen.assigned = before.take_assigned()
                return loss
        finally:
            # Also where the forward failed: fake tensors must not stay in the user's model.
            after = State.of_call(self.model, self.loss_fn)
            self.seen.changes = before.changes(after)
            replaced = [
                path for path, tensor in before.tensors.items() if after.tensors.get(path) is not tensor
            ]
            self.seen.replaced = {path: before.tensors[path] for path in replaced}
            before.restore()


class Seen:
    """What a call has changed, tensors that were attributes before and are none after it, and what buffers were assigned.

    One object for all calls.
    """

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.replaced: dict[str, Tensor] = {}
        self.assigned: dict[str, Tensor] = {}


def check_changes(watched: Watched, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse what the last call has changed, unless it was a cache: what the first call makes and the second
    one finds.
    """
    changes = watched.seen.changes
    if not changes:
        return
    # Random numbers are never a cache, though a second call may leave the same state by chance.
    drawn = [change for change in changes if change.path in RANDOM]
    again = drawn or _changes_of_second_call(watched, args, kwargs)
    if again:
        raise next((change for change in changes if change.path == again[0].path), again[0]).refuse()


def _changes_of_second_call(watched: Watched, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Change]:
    """Call twice without restoring in between: what the second call changes once more.

    All is refused where the first call leaves something that another batch would have made otherwise: a call
    on the first row alone, and one on the last, must give what they give to a model that has seen nothing.
    (The largest entry of the batch is in one of them at most.)
    """
    model, loss_fn = watched.model, watched.loss_fn
    twin = WithLoss(model, loss_fn)
    before = State.of_call(model, loss_fn)
    first = next(model.parameters(), None)
    fake = first.fake_mode if isinstance(first, FakeTensor) else None
    # Parameters that are fake cannot meet a batch that is real.
    if fake is not None:
        args, kwargs = tree_map(lambda x: fake.from_tensor(x) if _is_real(x) else x, (args, kwargs))
    has_values = first is None or not (first.is_meta or fake)

    def run(call: Any) -> Tensor:
        with torch.no_grad(), fake or nullcontext(), given_masks(any_mask) if has_values else nullcontext():
            loss = twin(*call[0], **call[1])
        # Updates of buffers are in the graph.
        before.take_assigned()
        return loss

    try:
        run((args, kwargs))
        between = State.of_call(model, loss_fn)
        run((args, kwargs))
        found = between.changes(State.of_call(model, loss_fn))
        if found or not has_values:
            return found
        # A cache made of values (the largest entry, say) is right for its own batch only: try two others.
        for row in (0, -1):
            others = tree_map(
                partial(_one_row, row=row, sizes=_leading_sizes((args, kwargs))), (args, kwargs)
            )
            later = run(others)
            before.restore()
            if not torch.equal(later.nan_to_num(), run(others).nan_to_num()):
                return before.changes(between)
            before.restore()
            run((args, kwargs))
        return []
    finally:
        before.restore()


def _leading_sizes(call: Any) -> list[int]:
    return [
        leaf.shape[0]
        for leaf in tree_leaves(call)
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] > 1
    ]


def _one_row(leaf: Any, row: int, sizes: list[int]) -> Any:
    """One row of what is as long as the batch (most tensors are), in the place of all."""
    is_batch = (
        isinstance(leaf, Tensor)
        and leaf.dim() > 0
        and leaf.shape[0] == max(sizes, key=sizes.count, default=0)
    )
    return leaf[row].expand_as(leaf).clone() if is_batch else leaf


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, FakeTensor)
