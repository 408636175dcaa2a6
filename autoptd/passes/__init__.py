"""Graph to graph, one file a pass: annotate, communicate, find_fusions, cut, localize, substitute, hook_gemms, mark_owned.

What they share lies in folders: `ops` (what is known of an operator), `axes` (which dims run together), `solve` (the types
over a mesh axis), `stages` (where to cut, and what fits).
"""

from autoptd.passes.annotate import annotate, describe
from autoptd.passes.communicate import check_connected, communicate, conversion_row
from autoptd.passes.cut import cut
from autoptd.passes.fusion import Groups, find_fusions, substitute
from autoptd.passes.hook_gemms import adds_to_gradient, hook_gemms
from autoptd.passes.localize import localize
from autoptd.passes.ops.costs import backward_flops, count_work, flops
from autoptd.passes.ops.unlisted import register_rule
from autoptd.passes.own import mark_owned
from autoptd.passes.solve.assign import Assignment
from autoptd.passes.solve.explain import explain
from autoptd.passes.solve.fallbacks import fallbacks, unlisted_operators
from autoptd.passes.stages.memory import price_memory
from autoptd.passes.weigh import weigh

__all__ = [
    "Assignment",
    "Groups",
    "adds_to_gradient",
    "annotate",
    "backward_flops",
    "check_connected",
    "communicate",
    "conversion_row",
    "count_work",
    "cut",
    "describe",
    "explain",
    "fallbacks",
    "find_fusions",
    "flops",
    "hook_gemms",
    "localize",
    "mark_owned",
    "price_memory",
    "register_rule",
    "substitute",
    "unlisted_operators",
    "weigh",
]
