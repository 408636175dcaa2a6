"""nn.Module -> TRACED graph: capture the model's loss faithfully, or say why not."""

from autoptd.trace.capture import Captured, capture
from autoptd.trace.faithful import compare
from autoptd.trace.masks import given_masks
from autoptd.trace.storage import check_storage

__all__ = ["Captured", "capture", "check_storage", "compare", "given_masks"]
