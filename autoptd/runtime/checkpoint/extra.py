"""Save and restore states besides the model and the optimizer: schedulers, data loaders, random number generators.

In: objects with `state_dict` and `load_state_dict`, by name. Out: `extra.pt`, which `torch.load(weights_only=True)`
reads. It can hold tensors, numbers, strings, lists, tuples and dicts; other values are refused when they are saved.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoptd.errors import PlanError, a_type

SAVE, LOAD = "pm.save", "pm.load"
# Placeholder for a state that rank 0 saves in full.
OF_RANK_0 = "autoptd: of rank 0"


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
        if isinstance(item, torch.optim.Optimizer) and not states[name]:
            # One of `pm.optimizer`, whose full state is on rank 0.
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
            remedy = "the same d; or a loader of global batches, with pm.local_batch"
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
