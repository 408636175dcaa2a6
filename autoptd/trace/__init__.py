"""nn.Module -> TRACED graph: capture the model's loss faithfully, or say why not."""

from autoptd.trace.capture import Captured, capture
from autoptd.trace.dropouts import dropouts
from autoptd.trace.evaluation import is_training_without_dropout
from autoptd.trace.faithful import compare
from autoptd.trace.masks import given_masks

__all__ = ["Captured", "capture", "compare", "dropouts", "given_masks", "is_training_without_dropout"]
