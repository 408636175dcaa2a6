"""Check that a model ignores padding: find the labels of its losses, and compare padded runs.

In: a TRACED graph; a call, the same call padded, and with other tokens in the padding. Out: the arguments that
are labels, with the `ignore_index` of their loss; an error if the loss or a gradient differs.

    labels_of(graph)                                                # {"labels": -100}
    compare_padded(model, None, short, padded, others, "tokens")    # PlanError where anything differs
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from autoptd.errors import PlanError
from autoptd.ir.notes import note, op_name, ops, tensor
from autoptd.subject.call import Call
from autoptd.trace.changed_buffers import KeptBuffers
from autoptd.trace.differences import Reference
from autoptd.trace.draws import given_masks
from autoptd.trace.watched import Watched

LOSS, IGNORE_INDEX = "aten.cross_entropy_loss", -100
# By the dtype of the parameters: relative to a tensor's largest entry, and the share of the largest gradient
# that is added to it. Sums over more tokens round differently; float64 does not help, as norms may compute in
# float32.
TOLERANCE, TOLERANCE_OF_HALF = (1e-4, 1e-2), (2.0**-6, 1.0)
# Share of that tolerance if sums are over the same number of tokens.
SAME_SUMS = 1e-2


def labels_of(graph: Graph) -> dict[str, int]:
    """Return the arguments that cross-entropies read as labels, with their `ignore_index`."""
    found: dict[str, int] = {}
    for node in ops(graph):
        if op_name(node) != LOSS:
            continue
        ignored = node.args[4] if len(node.args) > 4 else node.kwargs.get("ignore_index", IGNORE_INDEX)
        for source in _sources(node.args[1]):
            found[note(source).name] = int(ignored)  # type: ignore[arg-type]
    return found


def _sources(node: Any) -> set[Node]:
    """Return the inputs that labels are computed from, except boolean ones, which are masks."""
    found, waiting, seen = set(), [node], set()
    while waiting:
        one = waiting.pop()
        if one in seen or not isinstance(one, Node) or tensor(one).dtype == torch.bool:
            continue
        seen.add(one)
        if note(one).kind == "input":
            found.add(one)
        waiting += one.all_input_nodes
    return found


def compare_padded(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    short: Call,
    padded: Call,
    others: Call,
    what: str,
    *,
    is_made_up: bool = False,
) -> None:
    """Run the model, without dropout, on a call, on the same call with padding, and with other tokens in that.

    PlanError if they differ: the first two by more than the rounding of sums over more tokens, the last two,
    whose sums have equal lengths, by more than a small share of that. The check is skipped if the numbers are made up
    (`is_made_up`) and the model fails on them, or has no finite loss.
    """
    watched, kept = Watched(model, loss_fn), KeptBuffers(model)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    is_narrow = any(p.dtype.itemsize < 4 for p in parameters.values())
    tolerance, share = TOLERANCE_OF_HALF if is_narrow else TOLERANCE

    def run(call: Call) -> torch.Tensor:
        try:
            # Every run starts from the same buffers, which a forward may update.
            kept.put_back()
            with torch.enable_grad():
                return watched(*call[0], **call[1])
        # Errors of the model: an id without a row, a negative class.
        except (RuntimeError, IndexError, ValueError) as error:
            fact = f"the model cannot run with {what}: {type(error).__name__}: {error}"
            raise PlanError(SITE, fact.splitlines()[0], REMEDY) from error

    try:
        with given_masks(keep_all):
            try:
                loss = run(short)
            except PlanError:
                if is_made_up:
                    return
                raise
            if not bool(loss.isfinite()):
                if is_made_up:
                    return
                fact = f"the loss of the batch without {what} is {loss.item()}"
                raise PlanError(SITE, fact, "a batch with labels that count")
            excess = Reference(loss, parameters, share).differences(run(padded), parameters)
            _refuse(excess, tolerance, f"the loss or its gradients change with {what}")
            excess = Reference(run(padded), parameters, share).differences(run(others), parameters)
            _refuse(excess, tolerance * SAME_SUMS, f"the model reads {what}")
    finally:
        kept.put_back()


def _refuse(excess: dict[str, float], tolerance: float, fact: str) -> None:
    """Raise PlanError for the first value above the tolerance, the loss before gradients."""
    for name, size in sorted(excess.items(), key=lambda pair: pair[0] != "loss"):
        if not size <= tolerance:
            raise PlanError(SITE, f"{fact}: {name} differs by {size:.1e} of its largest entry", REMEDY)


def keep_all(site: int, x: torch.Tensor, keep: float) -> torch.Tensor:
    """Return a dropout mask that keeps everything."""
    return torch.ones_like(x, dtype=torch.bool)


SITE = "shapes: padding"
REMEDY = (
    "make it ignore padding (labels with ignore_index, a causal or padded attention mask, pad= of autoptd.Buckets), "
    "or use shapes='exact'"
)
