"""Facts of a compiled graph as plain records, for `Program` and the files in `out/`."""

from autoptd.compiler.records.collectives import buckets_of_ranks, collectives
from autoptd.compiler.records.header import about_stages
from autoptd.compiler.records.outputs import output_specs
from autoptd.compiler.records.plan import costs_of, merged_fallbacks, plan_record
from autoptd.compiler.records.specs import (
    crossing_links,
    crossing_spec,
    dropout_specs,
    input_specs,
    param_specs,
    stage_spec,
    update_parts,
)

__all__ = [
    "about_stages",
    "buckets_of_ranks",
    "collectives",
    "costs_of",
    "crossing_links",
    "crossing_spec",
    "dropout_specs",
    "input_specs",
    "merged_fallbacks",
    "output_specs",
    "param_specs",
    "plan_record",
    "stage_spec",
    "update_parts",
]
