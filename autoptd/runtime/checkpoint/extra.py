"""Save and restore state that is not in tensors by name: an optimizer's settings, schedulers, data loaders,
random numbers.

In: an optimizer made by `pm.optimizer`; objects with `state_dict` and `load_state_dict`, by name. Out: the
optimizer's class, the settings of its groups and the loss scale as JSON; and `extra.pt`, which
`torch.load(weights_only=True)` reads. It can hold tensors, numbers, strings, lists, tuples and dicts; other
values are refused when they are saved.

    record = optimizer_record(optimizer)
    set_groups(optimizer, record)

    mine = own_state({"scheduler": scheduler}, device)          # bytes of this process
    data = merged([mine, ...], replicas=[0, ...])               # of all; the content of the file
    restore_extra(read_extra(data, site), {"scheduler": scheduler}, place)

Replicas may have different states (positions in their parts of the data); equal states are stored once.
"""

from __future__ import annotations

import io
import random
import sys
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoptd.errors import PlanError, a_type, with_article
from autoptd.runtime.checkpoint.manifest import GROUPS, decode, encode, without_numpy
from autoptd.runtime.params.optimizer import NamedOptimizer

SAVE, LOAD = "pm.save", "pm.load"
# Settings of how an update is computed, not of its result: they depend on the machine, and are not restored.
HOW = ("fused", "foreach", "capturable", "differentiable")
# Placeholder for a state that rank 0 saves in full.
OF_RANK_0 = "autoptd: of rank 0"


def _class(optimizer: NamedOptimizer) -> str:
    return type(optimizer).__name__


def optimizer_record(optimizer: NamedOptimizer) -> dict[str, Any]:
    """Return the class, groups and loss scale of an optimizer; PlanError for a setting that JSON cannot
    restore.
    """
    groups = []
    for number, group in enumerate(optimizer.named_groups()):
        site = f"optimizer group {number}"
        groups.append({key: encode(value, f"{site}: {key}") for key, value in group.items()})
    scale = optimizer.loss_scale
    return {
        "class": _class(optimizer),
        "groups": groups,
        "skipped": optimizer.skipped,
        "loss_scale": None if scale is None else scale.state_dict(),
    }


def group_objects(optimizer: NamedOptimizer) -> dict[str, Any]:
    """Return the settings of the groups for other programs, by their names in torch.distributed.checkpoint."""
    objects: dict[str, Any] = {}
    for number, group in enumerate(optimizer.named_groups()):
        objects |= {f"{GROUPS}{number}.{key}": without_numpy(value) for key, value in group.items()}
    return objects


def takes_state(optimizer: NamedOptimizer, record: Mapping[str, Any]) -> bool:
    """Tell whether the saved state is of the same class as the optimizer or a compatible one; otherwise warn."""
    both = {record["class"], _class(optimizer)}
    if None in both or len(both) == 1 or both == {"Adam", "AdamW"}:
        return True
    saved, ours = with_article(record["class"]), with_article(_class(optimizer))
    text = f"the state of {saved} does not fit {ours}, whose state is left unchanged"
    warnings.warn(f"{LOAD}: {text}", stacklevel=4)
    return False


def warn_of_others(optimizer: NamedOptimizer, others: Iterable[Any], extra: Collection[Any]) -> None:
    """Warn of other optimizers, over other parameters, whose state is not saved."""
    mine = {id(x) for group in optimizer.param_groups for x in group["params"]}
    for other in others:
        is_saved = other is optimizer or any(other is item for item in extra)
        if not is_saved and any(id(x) not in mine for x in other.state):
            text = f"the state of another {_class(other)} over other parameters is not saved"
            warnings.warn(f"pm.save: {text}: pass it in extra=, under a name", stacklevel=3)


def check_optimizer(optimizer: NamedOptimizer, record: Mapping[str, Any], strict: bool) -> None:
    """Raise PlanError unless the optimizer has the saved class, and the same parameters in its groups."""
    # Other programs do not save the class.
    if strict and record["class"] not in (None, _class(optimizer)):
        fact = f"has the state of {with_article(record['class'])}, not of {with_article(_class(optimizer))}"
        remedy = f"pm.optimizer(torch.optim.{record['class']}, ...); or strict=False, which loads what fits"
        raise PlanError(LOAD, fact, remedy)
    optimizer.check_saved(record["groups"], LOAD)


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
        text = [f"set {', '.join(unknown)}, which this {_class(optimizer)} did not have"] * bool(unknown)
        text += [f"left {', '.join(missing)} unchanged: not in the checkpoint"] * bool(missing)
        why = "there was a scheduler only then, or there is one only now; or torch has another version"
        warnings.warn(f"{LOAD}: {' and '.join(text)}: {why}", stacklevel=2)
    optimizer.skipped = record.get("skipped", 0)
    if optimizer.loss_scale is not None and record.get("loss_scale"):
        optimizer.loss_scale.load_state_dict(record["loss_scale"])


@dataclass(frozen=True)
class Place:
    """This process among all processes, and its replica among all replicas."""

    process: int
    processes: int
    replica: int
    replicas: int


def own_state(extra: Mapping[str, Any], device: torch.device) -> bytes:
    """Return the states of this process; PlanError for an object without state, or a state that cannot be
    restored.
    """
    check_objects(extra)
    states = {}
    for name, item in extra.items():
        try:
            states[name] = item.state_dict()
        except Exception as error:
            fact = f"its state_dict raised {type(error).__name__}: {first_line(error)}"
            raise PlanError(
                f"extra[{name!r}]", fact, "an object whose state_dict() works at this point"
            ) from error
        if isinstance(item, NamedOptimizer) and not states[name]:
            # Rank 0 saves it in full.
            states[name] = OF_RANK_0
        try:
            loaded(dumped(states[name]))
        except Exception as error:
            fact = f"has a state that cannot be read without unpickling code: {first_line(error)}"
            remedy = "tensors, numbers, strings, lists, tuples and dicts in its state_dict"
            raise PlanError(f"extra[{name!r}]", fact, remedy) from error
    return dumped({"extra": states, "random": random_state(device)})


def check_objects(extra: Mapping[str, Any]) -> None:
    """Raise PlanError for an object without state."""
    for name, item in extra.items():
        if not hasattr(item, "state_dict") or not hasattr(item, "load_state_dict"):
            fact = f"is {a_type(item)}, without state_dict and load_state_dict"
            raise PlanError(f"extra[{name!r}]", fact, "an object that has both, such as a scheduler")


def dumped(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def merged(states: Sequence[bytes], replicas: Sequence[int]) -> bytes:
    """Return the content of the file: random numbers of each process, the extra states of each replica.

    `replicas` has the replica of each process whose states are used, -1 for the others.
    """
    each = [loaded(data) for data in states]
    count = max(replicas) + 1
    by_replica = [each[replicas.index(number)]["extra"] for number in range(count)]
    extra = {}
    for name, first in by_replica[0].items():
        versions = [states_of[name] for states_of in by_replica if not same(states_of[name], OF_RANK_0)]
        is_same = all(same(first, version) for version in versions)
        extra[name] = versions[:1] if is_same else versions
    return dumped({"extra": extra, "random": [state["random"] for state in each], "replicas": count})


def same(one: Any, other: Any) -> bool:
    """Tell whether two states are equal, bit by bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def read_extra(data: bytes, site: str) -> dict[str, Any]:
    """Return the content of the file; PlanError if it is damaged, or would run code."""
    try:
        content: dict[str, Any] = loaded(data)
    except Exception as error:
        fact = f"cannot be read without unpickling code: {first_line(error)}"
        raise PlanError(site, fact, "another checkpoint: AutoPTD does not write such files") from error
    return content


def check_extra(content: Mapping[str, Any], extra: Mapping[str, Any], place: Place) -> None:
    """Raise PlanError unless the file has states of all objects, for this replica."""
    saved = content["extra"]
    if missing := [name for name in extra if name not in saved]:
        fact = f"has no extra state {', '.join(missing)}; it has {', '.join(saved) or 'none'}"
        raise PlanError(LOAD, fact, "in extra= the objects that were passed to pm.save, under the same names")
    if left := [name for name in saved if name not in extra]:
        text = f"the states of {', '.join(left)} were saved as well, and extra= does not have them"
        warnings.warn(f"{LOAD}: {text}", stacklevel=3)
    for name, item in extra.items():
        if not hasattr(item, "load_state_dict"):
            fact = f"is {a_type(item)}, without load_state_dict"
            raise PlanError(f"extra[{name!r}]", fact, "the object that was saved")
        if len(saved[name]) not in (1, place.replicas):
            fact = f"has separate states of {len(saved[name])} replicas, and there are {place.replicas} now"
            remedy = (
                "the same d; or a loader of global batches, of which pm.local_batch takes this replica's rows"
            )
            raise PlanError(f"extra[{name!r}]", fact, remedy)


def restore_extra(
    content: Mapping[str, Any], extra: Mapping[str, Any], place: Place, device: torch.device
) -> None:
    """Restore the states of objects and, if the number of processes is the same, of random number generators."""
    for name, item in extra.items():
        versions = content["extra"][name]
        try:
            item.load_state_dict(versions[place.replica % len(versions)])
        except Exception as error:
            fact = f"its load_state_dict raised {type(error).__name__}: {first_line(error)}"
            remedy = "the object that was saved, of the same class and settings; then load again"
            raise PlanError(f"extra[{name!r}]", fact, remedy) from error
    saved = content["random"]
    if saved is None:
        return
    if len(saved) == place.processes:
        set_random_state(saved[place.process], device)
    elif place.process == 0:
        text = f"random states of {len(saved)} processes were saved, and there are {place.processes} processes now"
        warnings.warn(
            f"{LOAD}: {text}: their random numbers differ from those of a run without a restart", stacklevel=2
        )


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of the random number generators of torch, Python and NumPy."""
    version, words, *others = random.getstate()
    # Hundreds of numbers each: torch's unpickler takes a millisecond for a tuple of them.
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": (version, torch.tensor(words, device="cpu"), *others),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, torch.from_numpy(keys.astype("int64")), *rest)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    version, words, *others = state["python"]
    random.setstate((version, tuple(words.tolist()), *others))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, keys.numpy(), *rest))
