"""Graph to graph, one file a pass: annotate, communicate, split_tokens, bubble_up_slices, read_windows, find_fusions, cut,
localize, substitute, group_rows, keep, hook_gemms, mark_owned.

What they share lies in folders: `ops` (what is known of an operator), `axes` (which dims run together), `solve` (the types
over a mesh axis), `stages` (where to cut, and what fits).
"""

from autoptd.passes.annotate import annotate
from autoptd.passes.bubble_up import bubble_up_slices
from autoptd.passes.buffer_updates import split_updates
from autoptd.passes.communicate import check_connected, communicate, conversion_row
from autoptd.passes.context import Context, Findings
from autoptd.passes.cut import cut
from autoptd.passes.dump import describe
from autoptd.passes.explain_kept import explain_kept
from autoptd.passes.fusion.chain import Groups
from autoptd.passes.fusion.fuse import find_fusions, substitute
from autoptd.passes.group_rows import group_rows
from autoptd.passes.hook_gemms import adds_to_gradient, hook_gemms
from autoptd.passes.inplace_sums import mark_owned
from autoptd.passes.keep import keep
from autoptd.passes.localize import localize
from autoptd.passes.ops.costs import backward_flops, count_work, flops
from autoptd.passes.ops.unlisted import register_rule
from autoptd.passes.plan_cost import weigh, weigh_known
from autoptd.passes.runner import Form, Pass, Record, run_passes, up_to
from autoptd.passes.solve.assign import Assignment
from autoptd.passes.solve.batch import MixedSamples, RepeatedLayer
from autoptd.passes.solve.explain import explain_split
from autoptd.passes.solve.fallbacks import unlisted_operators
from autoptd.passes.solve.microbatch_losses import MARK
from autoptd.passes.solve.row_groups import RowGroups
from autoptd.passes.split_tokens import split_tokens
from autoptd.passes.windows import read_windows

__all__ = [
    "MARK",
    "Assignment",
    "Context",
    "Findings",
    "Form",
    "Groups",
    "MixedSamples",
    "Pass",
    "Record",
    "RepeatedLayer",
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
