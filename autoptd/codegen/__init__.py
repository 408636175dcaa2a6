"""Emit a LOCAL graph as source text: one readable Python file per stage, and one of shared methods."""

from autoptd.codegen.comments import collective_bytes, conversion_work, origin_text
from autoptd.codegen.counts import COUNT_SITE, batch_sums, count_conversions, counted_losses
from autoptd.codegen.parts import Crossing, crossings
from autoptd.codegen.program_files import ProgramFiles, write_program
from autoptd.codegen.stage_file import About, StageFile

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
    "write_program",
]
