"""The batches of one update as one batch, since a pipeline needs all of them in one step.

In: batches as a collator makes them. Out: one mapping with the rows of all, of one length, which ranks can divide.

    batch = with_rows(merged(batches, pad_token=0), multiple=4)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autoptd.errors import PlanError

IGNORED = -100
# What fills up a row; the mask must be there as well.
PADDING = {"labels": IGNORED, "attention_mask": 0, "token_type_ids": 0}
SITE = "gradient_accumulation_steps"


def merged(batches: Sequence[Mapping[str, Any]], pad_token: int) -> dict[str, Any]:
    """Return one batch with the rows of all, in order; PlanError where they do not fit together."""
    first = dict(batches[0])
    if len(batches) == 1:
        return first
    if any(batch.keys() != first.keys() for batch in batches):
        fact = f"batches of one update have different keys: {sorted({*first} ^ {*batches[-1]})}"
        raise PlanError(SITE, fact, "a collator that returns the same keys each time")
    found = {}
    for name in first:
        values = [batch[name] for batch in batches]
        if all(isinstance(value, torch.Tensor) and value.ndim for value in values):
            found[name] = _rows_of(name, values, {"input_ids": pad_token, **PADDING}, first)
        elif all(type(value) is type(first[name]) and bool(value == first[name]) for value in values):
            found[name] = first[name]
        else:
            fact = f"{name} differs between the batches of one update, and is not a tensor of rows"
            raise PlanError(SITE, fact, "leave it out of the batch, or accumulate 1 step")
    return found


def _rows_of(
    name: str, values: list[torch.Tensor], fills: Mapping[str, int], batch: Mapping[str, Any]
) -> torch.Tensor:
    shapes = {value.shape[1:] for value in values}
    if len(shapes) == 1:
        return torch.cat(values)
    if name not in fills or "attention_mask" not in batch or {len(shape) for shape in shapes} != {1}:
        lengths = sorted(tuple(shape) for shape in shapes)
        fact = f"{name} has rows of different shapes {lengths} in the batches of one update"
        raise PlanError(SITE, fact, "pad them to one length in the collator, with an attention_mask")
    longest = max(value.shape[1] for value in values)
    pad = torch.nn.functional.pad
    return torch.cat([pad(value, (0, longest - value.shape[1]), value=fills[name]) for value in values])


def rows_in(batch: Mapping[str, Any]) -> int:
    """Return the number of rows of a batch: of its first tensor."""
    return next(len(value) for value in batch.values() if isinstance(value, torch.Tensor) and value.ndim)


def widths_of(batch: Mapping[str, Any]) -> list[torch.Size]:
    """Return the shape of a row of each tensor."""
    return [value.shape[1:] for value in batch.values() if isinstance(value, torch.Tensor) and value.ndim]


def with_rows(batch: Mapping[str, Any], multiple: int) -> dict[str, Any]:
    """Return a batch whose number of rows is a multiple: copies of the first row, with ignored labels, are added.

    PlanError where labels cannot be ignored.
    """
    rows = rows_in(batch)
    missing = -rows % multiple
    if not missing:
        return dict(batch)
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
        fact = f"the last batch has {rows} rows, which do not divide into {multiple} parts, and labels that cannot be ignored"
        raise PlanError("dataloader_drop_last=False", fact, "dataloader_drop_last=True")
    found = dict(batch)
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and value.ndim and len(value) == rows:
            copies = value[:1].expand(missing, *value.shape[1:])
            copies = torch.full_like(copies, IGNORED) if name == "labels" else copies
            found[name] = torch.cat([value, copies])
    return found
