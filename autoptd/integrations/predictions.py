"""What the Trainer's predictions and metrics are made of, as a function that evaluations compute on the ranks.

In: a model's output and the arguments of its call. Out: the logits of transformers, by number: those parts of the output
that are neither the loss nor ignored, or what `preprocess_logits_for_metrics` makes of them.

    outputs = Predictions(("past_key_values",), ("labels",), preprocess=None)
    loss, found = pm.eval_step(**batch, outputs=outputs, everywhere=True)
    logits = outputs.logits_of(found)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autoptd.errors import PlanError, a_type


@dataclass(frozen=True)
class Predictions:
    """Give the logits of a call.

    `ignored` are names of the output that predictions leave out, `label_names` those of labels in the call.
    """

    ignored: tuple[str, ...]
    label_names: tuple[str, ...]
    preprocess: Callable[[Any, Any], Any] | None

    def __call__(self, output: Any, **call: Any) -> dict[str, torch.Tensor]:
        if isinstance(output, Mapping):
            parts = [x for name, x in output.items() if name not in (*self.ignored, "loss") and x is not None]
        else:
            parts = list(output)[1:]
        found: Any = alone_or_all(parts)
        if self.preprocess is not None:
            labels = alone_or_all([call[name] for name in self.label_names if call.get(name) is not None])
            found = self.preprocess(found, labels)
        pieces = found if isinstance(found, (tuple, list)) else (found,)
        for piece in pieces:
            if not isinstance(piece, torch.Tensor):
                fact = f"the predictions have {a_type(piece)} among them"
                remedy = "preprocess_logits_for_metrics=, which returns tensors; or ignore_keys=[names]"
                raise PlanError("Trainer", fact, remedy)
        return {str(number): piece for number, piece in enumerate(pieces)}

    def logits_of(self, found: Mapping[str, torch.Tensor]) -> Any:
        """Return what an evaluation gave in the form of transformers: one tensor, or a tuple."""
        return alone_or_all([found[str(number)] for number in range(len(found))])


def alone_or_all(parts: list[Any]) -> Any:
    """Return the only part, or a tuple of all."""
    return parts[0] if len(parts) == 1 else tuple(parts)


__all__ = ["Predictions", "alone_or_all"]
