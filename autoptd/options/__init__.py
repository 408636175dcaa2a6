"""What a user may ask for: keywords, their defaults and choices; the records that group rare ones; the
checked request.
"""

from autoptd.options.buckets import Buckets
from autoptd.options.keyword import NOT_YET, Keyword
from autoptd.options.options import PRECISIONS, Options
from autoptd.options.parts import (
    DELAYS,
    MAX_SCALE,
    ContextParallel,
    Fuse,
    LinearHooks,
    LossScale,
    RankOptions,
    Recompute,
    Shapes,
    Zero,
)
from autoptd.options.spelling import KEYWORDS, flat, grouped, make_options, settings

__all__ = [
    "DELAYS",
    "KEYWORDS",
    "MAX_SCALE",
    "NOT_YET",
    "PRECISIONS",
    "Buckets",
    "ContextParallel",
    "Fuse",
    "Keyword",
    "LinearHooks",
    "LossScale",
    "Options",
    "RankOptions",
    "Recompute",
    "Shapes",
    "Zero",
    "flat",
    "grouped",
    "make_options",
    "settings",
]
