"""Emit a LOCAL graph as source text: one readable Python file per stage, and one of shared methods."""

from autoptd.codegen.body import collective_bytes, conversion_work, origin_text
from autoptd.codegen.counts import COUNT_SITE, batch_sums, count_conversions, counted_losses
from autoptd.codegen.files import About, ProgramFiles, StageFile, write_program
from autoptd.codegen.layers import own_layers
from autoptd.codegen.parts import Crossing, crossings

__all__ = [
    "COUNT_SITE",
    "About",
    "Crossing",
    "ProgramFiles",
    "StageFile",
    "batch_sums",
    "collective_bytes",
    "conversion_work",
    "count_conversions",
    "counted_losses",
    "crossings",
    "origin_text",
    "own_layers",
    "write_program",
]
