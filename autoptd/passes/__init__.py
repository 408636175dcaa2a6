"""Define the graph-to-graph passes, one per file: `PASSES` lists them all, in order.

Shared code is in folders: `ops` (facts about an operator), `axes` (which dims are split together), `solve`
(the types over a mesh axis), `tokens` (rewrites for ranks that divide tokens), `stages` (where to cut, and
which plans fit).
"""

from __future__ import annotations

from autoptd.ir.fusion import Groups
from autoptd.passes.annotate import annotate
from autoptd.passes.buffer_updates import split_updates
from autoptd.passes.communicate import check_connected, communicate, conversion_row
from autoptd.passes.context import Context, Findings
from autoptd.passes.cut import cut
from autoptd.passes.fusion.fuse import find_fusions, substitute
from autoptd.passes.group_rows import group_rows
from autoptd.passes.hook_gemms import adds_to_gradient, hook_gemms, mark_owned
from autoptd.passes.kept.keep import explain_kept, keep
from autoptd.passes.localize import localize
from autoptd.passes.ops.costs import backward_flops, count_work, flops
from autoptd.passes.ops.unlisted import register_rule
from autoptd.passes.over_batch import divide_addends, read_batch_sums, take_whole_numbers, take_whole_rows
from autoptd.passes.plan_cost import weigh, weigh_known
from autoptd.passes.runner import Form, Pass, Record, describe, run_passes, up_to
from autoptd.passes.solve.assign import Assignment
from autoptd.passes.solve.batch_types import MARK, MixedSamples, RowGroups
from autoptd.passes.solve.explain import explain_split
from autoptd.passes.solve.fallbacks import unlisted_operators
from autoptd.passes.tokens.attention_rewrites import copy_heads, raise_attention, read_causal, read_windows
from autoptd.passes.tokens.bubble_up import bubble_up_slices
from autoptd.passes.tokens.shift import keep_tokens
from autoptd.passes.tokens.split_tokens import split_tokens

PASSES = (
    # TRACED: rewrite the model into forms that ranks can divide.
    raise_attention,
    read_causal,
    keep_tokens,
    copy_heads,
    # Types, and conversions where they disagree.
    annotate,
    take_whole_numbers,
    communicate,
    read_batch_sums,
    take_whole_rows,
    divide_addends,
    split_tokens,
    bubble_up_slices,
    read_windows,
    find_fusions,
    # Stages, and the shapes of a rank.
    cut,
    localize,
    substitute,
    group_rows,
    # What a rank keeps, and where it adds.
    keep,
    hook_gemms,
    mark_owned,
)


def passes_for(ctx: Context) -> tuple[Pass, ...]:
    """Return the passes that take a TRACED graph to LOCAL for this request."""
    return tuple(each for each in PASSES if each.when(ctx))


__all__ = [
    "MARK",
    "PASSES",
    "Assignment",
    "Context",
    "Findings",
    "Form",
    "Groups",
    "MixedSamples",
    "Pass",
    "Record",
    "RowGroups",
    "adds_to_gradient",
    "annotate",
    "backward_flops",
    "bubble_up_slices",
    "check_connected",
    "communicate",
    "conversion_row",
    "count_work",
    "cut",
    "describe",
    "explain_kept",
    "explain_split",
    "find_fusions",
    "flops",
    "group_rows",
    "hook_gemms",
    "keep",
    "localize",
    "mark_owned",
    "passes_for",
    "read_windows",
    "register_rule",
    "run_passes",
    "split_tokens",
    "split_updates",
    "substitute",
    "unlisted_operators",
    "up_to",
    "weigh",
    "weigh_known",
]
