"""What `plan.json` says: the decisions, by the model's own names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoptd.batch import Batch
from autoptd.ir.fallback import Fallback
from autoptd.ir.layout import Layout
from autoptd.ir.mesh import ORDER
from autoptd.ir.sub_axes import base
from autoptd.options import KEYWORDS, Options
from autoptd.program.costs import Cut
from autoptd.program.specs import ParamSpec
from autoptd.records.fallbacks import any_layer, merged_fallbacks


def plan_record(
    options: Options,
    batch: Batch,
    cut: Cut,
    params: tuple[ParamSpec, ...],
    fallbacks: Sequence[Fallback],
    weighed: dict[str, Any] | None,
) -> dict[str, Any]:
    """What `plan.json` says: the decisions, by the model's own names."""
    layers: dict[str, set[Layout]] = {}
    for one in params:
        layers.setdefault(any_layer(one.name), set()).add(one.storage.layout)
    shard = {}  # layers that are sharded alike are one pattern
    for one in params:
        pattern = any_layer(one.name) if len(layers[any_layer(one.name)]) == 1 else one.name
        if one.use.layout.shards:
            axis, kind = one.use.layout.shards[0]
            shard[pattern] = {"pattern": pattern, "dim": kind.dim, "axis": base(axis)}
    order = {} if options.order == ORDER else {"order": options.order}
    return {
        "version": 1,
        "mesh": {**options.mesh.degrees, "v": options.v, **order},
        "num_microbatches": batch.num_microbatches,
        "schedule": str(options.schedule),
        "options": {name: getattr(options, name) for name, keyword in KEYWORDS.items() if keyword.is_planned},
        "cut": list(cut.after),
        "shard": [*shard.values(), *(dict(one) for one in options.plan.shard if one.get("dim") is None)],
        "fallbacks": merged_fallbacks(fallbacks),
        **({"weighed": weighed} if weighed else {}),
    }
