"""Define the graph-to-graph passes: `PASSES` lists them all, in order.

Their code is here and in folders: `ops` (facts about an operator), `axes` (which dims are split together), `solve`
(the types over a mesh axis), `tokens` (for ranks that divide tokens), `fusion`, `stages` (where to cut, and which
plans fit), `kept` (the values that are kept for backward).
"""

from __future__ import annotations

from typing import Any

from autoptd.passes.annotate import annotate
from autoptd.passes.communicate import communicate
from autoptd.passes.cut import cut
from autoptd.passes.fusion.fuse import find_fusions, substitute
from autoptd.passes.group_rows import group_rows
from autoptd.passes.hook_gemms import hook_gemms, mark_owned
from autoptd.passes.kept.keep import keep
from autoptd.passes.localize import localize
from autoptd.passes.over_batch import divide_addends, read_batch_sums, take_whole_numbers, take_whole_rows
from autoptd.passes.runner import Form, Pass, Record, describe, run_passes, up_to
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


def passes_for(ctx: Any) -> tuple[Pass, ...]:
    """Return the passes that take a TRACED graph to LOCAL for the request of a `Context`."""
    return tuple(each for each in PASSES if each.when(ctx))


__all__ = [
    "PASSES",
    "Form",
    "Pass",
    "Record",
    "annotate",
    "communicate",
    "cut",
    "describe",
    "find_fusions",
    "group_rows",
    "hook_gemms",
    "keep",
    "localize",
    "mark_owned",
    "passes_for",
    "run_passes",
    "split_tokens",
    "substitute",
    "up_to",
]
