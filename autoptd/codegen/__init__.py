"""LOCAL graph -> source text: one readable Python file per stage, built by a small writer."""

from autoptd.codegen.comments import origin_text
from autoptd.codegen.stage_file import Crossing, StageFile, collective_bytes, conversion_work, crossings, write_stage

__all__ = ["Crossing", "StageFile", "collective_bytes", "conversion_work", "crossings", "origin_text", "write_stage"]
