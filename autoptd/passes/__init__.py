"""Graph to graph, one file a pass: annotate, communicate, cut, localize, hooks; and the axis table (`rules.py`)."""

from autoptd.passes.annotate import annotate, describe
from autoptd.passes.assign import Assignment
from autoptd.passes.communicate import check_connected, communicate, conversion_row
from autoptd.passes.costs import backward_flops, count_work, flops
from autoptd.passes.cut import cut
from autoptd.passes.explain import explain
from autoptd.passes.fallbacks import fallbacks, unlisted_operators
from autoptd.passes.fusion import Groups, find_fusions, substitute
from autoptd.passes.hooks import adds_to_gradient, hook_gemms
from autoptd.passes.localize import Sizes, local_shape, localize
from autoptd.passes.memory import price_memory
from autoptd.passes.own import mark_owned
from autoptd.passes.unlisted import register_rule
from autoptd.passes.weigh import weigh

__all__ = [
    "Assignment",
    "Groups",
    "Sizes",
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
    "local_shape",
    "localize",
    "mark_owned",
    "price_memory",
    "register_rule",
    "substitute",
    "unlisted_operators",
    "weigh",
]
