"""Save and restore an optimizer's class, the settings of its groups, and the loss scale.

In: an optimizer made by `pm.optimizer`. Out: JSON, and for other programs the same settings as Python
objects; on loading, the restored settings of the groups. `stage.py` and `restore.py` handle the tensors of
its state.

    record = optimizer_record(optimizer, stateless={"head.bias": "has had no gradient"})
    check_optimizer(optimizer, record, strict=True)
    set_groups(optimizer, record)
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from autoptd.errors import PlanError, with_article
from autoptd.runtime.checkpoint.manifest import GROUPS
from autoptd.runtime.checkpoint.values import decode, encode, without_numpy
from autoptd.runtime.params.optimizer import NamedOptimizer

SITE = "pm.load"
# How an update is computed, not what it computes: that is this machine's, not the one's that saved.
HOW = ("fused", "foreach", "capturable", "differentiable")


def class_name(optimizer: NamedOptimizer) -> str:
    return type(optimizer).__name__


def optimizer_record(optimizer: NamedOptimizer) -> dict[str, Any]:
    """Return an optimizer's record without its state; PlanError for a setting that JSON cannot restore."""
    groups = []
    for number, group in enumerate(optimizer.named_groups()):
        site = f"optimizer group {number}"
        groups.append({key: encode(value, f"{site}: {key}") for key, value in group.items()})
    scale = optimizer.loss_scale
    return {
        "class": class_name(optimizer),
        "groups": groups,
        "skipped": optimizer.skipped,
        "loss_scale": None if scale is None else scale.state_dict(),
    }


def group_objects(optimizer: NamedOptimizer) -> dict[str, Any]:
    """Return the settings of the groups by their names in torch.distributed.checkpoint."""
    objects: dict[str, Any] = {}
    for number, group in enumerate(optimizer.named_groups()):
        objects |= {f"{GROUPS}{number}.{key}": without_numpy(value) for key, value in group.items()}
    return objects


def takes_state(optimizer: NamedOptimizer, record: Mapping[str, Any]) -> bool:
    """Tell whether an optimizer can use the saved state, of the same or a compatible class; else warn."""
    both = {record["class"], class_name(optimizer)}
    if None in both or len(both) == 1 or both == {"Adam", "AdamW"}:
        return True
    saved, ours = with_article(record["class"]), with_article(class_name(optimizer))
    text = f"the state of {saved} is none of {ours}, which is left as it is"
    warnings.warn(f"{SITE}: {text}", stacklevel=4)
    return False


def warn_of_others(optimizer: NamedOptimizer, others: Iterable[Any], extra: Collection[Any]) -> None:
    """Warn of optimizers of other parameters, which have a state that is not saved."""
    mine = {id(x) for group in optimizer.param_groups for x in group["params"]}
    for other in others:
        is_saved = other is optimizer or any(other is item for item in extra)
        if not is_saved and any(id(x) not in mine for x in other.state):
            text = f"the state of another {class_name(other)} over other parameters is not saved"
            warnings.warn(f"pm.save: {text}: give it in extra=, by a name", stacklevel=3)


def check_optimizer(optimizer: NamedOptimizer, record: Mapping[str, Any], strict: bool) -> None:
    """Raise PlanError unless the optimizer is of the class that was saved, with the same parameters in its groups."""
    # None: another program's, which did not say.
    if strict and record["class"] not in (None, class_name(optimizer)):
        fact = f"has the state of {with_article(record['class'])}, and is loaded into {with_article(class_name(optimizer))}"
        remedy = f"pm.optimizer(torch.optim.{record['class']}, ...); or strict=False, which takes what fits"
        raise PlanError(SITE, fact, remedy)
    optimizer.check_saved(record["groups"], SITE)


def set_groups(optimizer: NamedOptimizer, record: Mapping[str, Any]) -> None:
    """Restore the learning rates and all other settings of the groups."""
    unknown, missing = dict[str, None](), dict[str, None]()
    for group, saved in zip(optimizer.param_groups, record["groups"], strict=True):
        for key, value in saved.items():
            if key != "params" and key not in HOW:
                unknown |= {} if key in group else {key: None}
                group[key] = decode(value)
        missing |= dict.fromkeys(key for key in group if key not in saved and key not in HOW)
    if unknown or missing:
        text = [f"took {', '.join(unknown)}, which this {class_name(optimizer)} did not have"] * bool(unknown)
        text += [f"left {', '.join(missing)} as they are, which were not saved"] * bool(missing)
        why = "a scheduler was there only then, or only now; or it was another version of torch"
        warnings.warn(f"{SITE}: {' and '.join(text)}: {why}", stacklevel=2)
    optimizer.skipped = record.get("skipped", 0)
    if optimizer.loss_scale is not None and record.get("loss_scale"):
        optimizer.loss_scale.load_state_dict(record["loss_scale"])


__all__ = ["check_optimizer", "group_objects", "optimizer_record", "set_groups"]
