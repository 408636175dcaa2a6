"""What TRL computes from the logits of a causal model, as functions that are compiled as parts of the model.

In: logits, and labels that are not shifted. Out: the sums of an evaluation, with its predictions; or a loss.

    loss, found = pm.eval_step(**batch, outputs=TokenScores(None))
    accuracy = found["right"] / found["tokens"]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autoptd.integrations.accumulated import IGNORED
from autoptd.integrations.predictions import Predictions


@dataclass(frozen=True)
class TokenScores:
    """Sums of the entropies and of the right choices of a call, and its predictions if they are asked for."""

    predictions: Predictions | None

    def __call__(self, output: Any, **call: Any) -> dict[str, torch.Tensor]:
        logits, labels = output.logits[:, :-1].float(), call["labels"][:, 1:]
        is_label, logs = labels != IGNORED, logits.log_softmax(-1)
        entropies = -(logs.exp() * logs).sum(-1)
        found = {"entropy": (entropies * is_label).sum(), "tokens": is_label.sum()}
        found["right"] = ((logits.argmax(-1) == labels) & is_label).sum()
        more = {} if self.predictions is None else self.predictions({"logits": output.logits}, **call)
        return {**found, **more}


def dft_loss(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, num_items_in_batch: Any = None, **_: Any
) -> torch.Tensor:
    """Return the loss of dynamic fine-tuning (https://arxiv.org/abs/2508.05629): each token's, times its probability."""
    wanted = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    is_label = wanted != IGNORED
    logs = logits.float().log_softmax(-1).gather(-1, wanted.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    losses = -logs * logs.exp().detach() * is_label
    return losses.sum() / (is_label.sum() if num_items_in_batch is None else num_items_in_batch)
