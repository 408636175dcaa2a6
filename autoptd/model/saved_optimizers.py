"""The optimizers whose state a checkpoint has: one as a rule, or several over disjoint parameters.

In: what `pm.save` and `pm.load` are given. Out: one record of their classes and groups for all of them, as JSON; one state
by tensor; and the settings of a record back in their groups.

    made = as_optimizers([muon, adamw], held, "pm.save")
    made.record()["class"]                          # "Muon, AdamW"
    made.check(record, True, "pm.load"); made.resume(record, "pm.load")
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from autoptd.errors import PlanError, a_type, with_article
from autoptd.runtime.checkpoint.manifest import GROUPS, decode, encode, without_numpy
from autoptd.runtime.params.optimizer import NamedOptimizer, check_groups

# What `optimizer=` takes.
Given = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
# Settings of how an update is computed, not of its result: they depend on the machine, and are not restored.
HOW = ("fused", "foreach", "capturable", "differentiable")


def as_optimizers(given: Given, held: Collection[int], site: str) -> Optimizers | None:
    """Return one or several optimizers; None for none. PlanError for one over other ranks than those with ids `held`."""
    if given is None:
        return None
    made: list[NamedOptimizer] = []
    for one in given if isinstance(given, (list, tuple)) else [given]:
        if not isinstance(one, NamedOptimizer) or not any(id(rank) in held for rank in one.binding.ranks):
            fact = f"is {a_type(one)} over other tensors than those of this model"
            remedy = "an optimizer made by pm.optimizer(...), or a list of such"
            raise PlanError(f"{site}(optimizer=)", fact, remedy)
        made.append(one)
    names = [name for one in made for group in one.binding.groups for name in group]
    if not made or len(set(names)) < len(names):
        fact = "is a list of optimizers that share parameters" if made else "is an empty list"
        raise PlanError(f"{site}(optimizer=)", fact, "optimizers over disjoint parameters")
    return Optimizers(made)


class Optimizers:
    """Optimizers over disjoint parameters, whose groups are counted together, in order."""

    def __init__(self, made: Sequence[NamedOptimizer]) -> None:
        self.made = list(made)
        self.name = ", ".join(type(one).__name__ for one in made)

    def state(self) -> dict[torch.Tensor, dict[str, Any]]:
        """Return the state of all of them, by tensor."""
        found: dict[torch.Tensor, dict[str, Any]] = {}
        for one in self.made:
            found |= one.state
        return found

    def set_state(self, state: Mapping[torch.Tensor, dict[str, Any]]) -> None:
        """Set the state of each of them from that of all, without entries for tensors that are not there."""
        for one in self.made:
            for x in chain.from_iterable(group["params"] for group in one.param_groups):
                if x in state:
                    one.state[x] = state[x]
                else:
                    one.state.pop(x, None)

    def homes(self, rank: int) -> dict[str, torch.Tensor | None]:
        """Return the parameters that are stepped as a whole: the tensor, or None where its home is another rank."""
        found: dict[str, torch.Tensor | None] = {}
        for one in self.made:
            if one.binding.homes:
                found |= dict.fromkeys(chain.from_iterable(one.binding.groups))
                found |= one.binding.homes[rank].stored
        return found

    def record(self) -> dict[str, Any]:
        """Return classes, groups and loss scale; PlanError for a setting that JSON cannot restore."""
        groups = []
        for number, group in enumerate(self._groups()):
            site = f"optimizer group {number}"
            groups.append({key: encode(value, f"{site}: {key}") for key, value in group.items()})
        scale = self.made[0].loss_scale
        return {
            "class": self.name,
            "groups": groups,
            # All of them skip the same steps.
            "skipped": self.made[0].skipped,
            "loss_scale": None if scale is None else scale.state_dict(),
        }

    def objects(self) -> dict[str, Any]:
        """Return the settings of the groups for other programs, by their names in torch.distributed.checkpoint."""
        objects: dict[str, Any] = {}
        for number, group in enumerate(self._groups()):
            objects |= {f"{GROUPS}{number}.{key}": without_numpy(value) for key, value in group.items()}
        return objects

    def _groups(self) -> list[dict[str, Any]]:
        return [group for one in self.made for group in one.named_groups()]

    def check(self, record: Mapping[str, Any], strict: bool, site: str) -> None:
        """Raise PlanError unless they have the saved classes, and the same parameters in their groups."""
        # Other programs do not save the class.
        if strict and record["class"] not in (None, self.name):
            fact = f"has the state of {with_article(record['class'])}, not of {with_article(self.name)}"
            remedy = f"pm.optimizer(torch.optim.{record['class']}, ...)"
            if ", " in record["class"] + self.name:
                remedy = f"optimizer=[...] with those of {record['class']}, in this order"
            raise PlanError(site, fact, f"{remedy}; or strict=False, which loads what fits")
        own = [names for one in self.made for names in one.binding.groups]
        check_groups(record["groups"], own, site)

    def takes_state(self, record: Mapping[str, Any], site: str) -> bool:
        """Tell whether the saved state is of the same class or a compatible one; otherwise warn."""
        both = {record["class"], self.name}
        if None in both or len(both) == 1 or both == {"Adam", "AdamW"}:
            return True
        saved, ours = with_article(record["class"]), with_article(self.name)
        text = f"the state of {saved} does not fit {ours}, whose state is left unchanged"
        warnings.warn(f"{site}: {text}", stacklevel=4)
        return False

    def resume(self, record: Mapping[str, Any], site: str) -> None:
        """Restore the learning rates and all other settings of the groups."""
        unknown, missing = dict[str, None](), dict[str, None]()
        groups = [group for one in self.made for group in one.param_groups]
        for group, saved in zip(groups, record["groups"], strict=True):
            for key, value in saved.items():
                if key != "params" and key not in HOW:
                    unknown |= {} if key in group else {key: None}
                    group[key] = decode(value)
            missing |= dict.fromkeys(key for key in group if key not in saved and key not in HOW)
        if unknown or missing:
            text = [f"set {', '.join(unknown)}, which this {self.name} did not have"] * bool(unknown)
            text += [f"left {', '.join(missing)} unchanged: not in the checkpoint"] * bool(missing)
            why = "there was a scheduler only then, or there is one only now; or torch has another version"
            warnings.warn(f"{site}: {' and '.join(text)}: {why}", stacklevel=2)
        for one in self.made:
            one.skipped = record.get("skipped", 0)
        scale = self.made[0].loss_scale
        if scale is not None and record.get("loss_scale"):
            scale.load_state_dict(record["loss_scale"])

    def warn_of_others(self, others: Iterable[Any], extra: Collection[Any]) -> None:
        """Warn of other optimizers, over other parameters, whose state is not saved."""
        mine = {id(x) for one in self.made for group in one.param_groups for x in group["params"]}
        for other in others:
            is_saved = any(other is item for item in (*self.made, *extra))
            if not is_saved and any(id(x) not in mine for x in other.state):
                text = f"the state of another {type(other).__name__} over other parameters is not saved"
                warnings.warn(f"pm.save: {text}: pass optimizer=[...] with all of them", stacklevel=3)
