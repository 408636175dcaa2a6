"""nn.Module -> TRACED graph: capture the model's loss faithfully, or say why not."""

from autoptd.trace.capture import Captured, capture
from autoptd.trace.dropouts import dropouts
from autoptd.trace.evaluation import is_training_without_dropout, seen_as_evaluation
from autoptd.trace.faithful import compare
from autoptd.trace.masks import given_masks
from autoptd.trace.state import check_state_dict
from autoptd.trace.storage import check_storage

__all__ = [
    "Captured",
    "capture",
    "check_state_dict",
    "check_storage",
    "compare",
    "dropouts",
    "given_masks",
    "is_training_without_dropout",
    "seen_as_evaluation",
]
