"""Three steps of a run over gloo beside one device: the largest differences, and the collectives that were executed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.model.parallel_model import ParallelModel
from autoptd.program.calls import Call, expected_calls


def differences(
    pm: ParallelModel, reference: nn.Module, inputs: Sequence[Any], mine: Sequence[Any]
) -> tuple[dict[str, float], list[Call]]:
    """`inputs` are the global batch, `mine` this replica's rows. RuntimeError where other collectives run than are told."""
    ours, theirs = pm.optimizer(torch.optim.SGD, lr=0.1), torch.optim.SGD(reference.parameters(), lr=0.1)
    worst = {"loss": 0.0, "norm": 0.0, "parameter": 0.0}
    for _ in range(3):
        wanted: Tensor = reference(*inputs)
        wanted.backward()
        with pm.record() as record:
            loss = pm.step(*mine)
        if Counter(record.collectives) != expected_calls(pm.program, torch.distributed.get_rank()):
            raise RuntimeError(f"executed were {record.collectives}")
        worst["loss"] = max(worst["loss"], abs(float(loss - wanted.detach())))
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        worst["norm"] = max(worst["norm"], abs(float(pm.clip_grad_norm_(0.5) - norm)))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    state = pm.state_dict()
    for name, p in reference.named_parameters() if state else ():
        worst["parameter"] = max(worst["parameter"], float((state[name] - p.detach()).abs().max()))
    return worst, list(record.collectives)
