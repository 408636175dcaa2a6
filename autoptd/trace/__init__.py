"""nn.Module -> TRACED graph: capture the model's loss faithfully, or say why not.

| step | files |
|------|-------|
| call the model, find its loss, restore it after | `loss`, `watched`, `changed_buffers` |
| record the Python state that it writes | `writes`, on `instructions`, `calls`, `users`; `changes` reports it |
| trace it, refusing what no graph does | `capture`, `record`, with `watch`, `functions`, `tensor_values`, `autocast` |
| bring the graph into a normal form | `normalize`, with `functionalize`, `draws`, `statistics`, `experts`, `new_nodes` |
| compare the graph with the model | `faithful`, on `differences`; `padding` for padded batches; `own_failure` |
| trace it again: eval mode, later | `evaluation`, `again`; `reads` finds state that has changed since |
| choose the dtype in which it computes | `precision` |
"""

from autoptd.subject.module import check_device, check_module, has_values
from autoptd.trace.again import Traced
from autoptd.trace.autocast import OFF, Autocast
from autoptd.trace.capture import Captured, capture, capture_again
from autoptd.trace.changed_buffers import updated_buffers
from autoptd.trace.draws import draws, given_masks, written_out_attention
from autoptd.trace.evaluation import evaluating, in_modes, is_training_without_dropout, modes_of
from autoptd.trace.faithful import compare
from autoptd.trace.loss import LossAndOutputs, Outputs, WithLoss
from autoptd.trace.own_failure import own_failure
from autoptd.trace.padding import compare_padded
from autoptd.trace.precision import (
    COMPUTE_DTYPES,
    Narrowing,
    Widen,
    autocast_of,
    check_precision,
    computing_in,
    in_float64,
    widen_inputs,
    widen_model,
)
from autoptd.trace.reads import Difference, Snapshot, Stamp

__all__ = [
    "COMPUTE_DTYPES",
    "OFF",
    "Autocast",
    "Captured",
    "Difference",
    "LossAndOutputs",
    "Narrowing",
    "Outputs",
    "Snapshot",
    "Stamp",
    "Traced",
    "Widen",
    "WithLoss",
    "autocast_of",
    "capture",
    "capture_again",
    "check_device",
    "check_module",
    "check_precision",
    "compare",
    "compare_padded",
    "computing_in",
    "draws",
    "evaluating",
    "given_masks",
    "has_values",
    "in_float64",
    "in_modes",
    "is_training_without_dropout",
    "modes_of",
    "own_failure",
    "updated_buffers",
    "widen_inputs",
    "widen_model",
    "written_out_attention",
]
