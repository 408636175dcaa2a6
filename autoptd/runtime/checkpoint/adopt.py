"""Convert files of other programs into a checkpoint: a file of torch.save, or a folder of safetensors.

In: `{"model": ..., "optimizer": ...}` or a state dict in a file; or a folder of Hugging Face's format, for
weights alone. Out: a folder that `pm.load`, `weights=` and `autoptd checkpoint` accept, on any mesh. One
process, no model.

    content = from_torch(Path("model.pt"))
    write_checkpoint(content, Path("ckpts/step-0"))

Files are mapped, not read into memory: a tensor is in memory while it is written. Nothing is unpickled but
tensors and plain values. Without a model, the manifest has names, shapes and dtypes: `pm.load` cannot compare
atoms, operators and fingerprints.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from autoptd.errors import PlanError, a_type
from autoptd.runtime.checkpoint.commit import begin, finish, new_token
from autoptd.runtime.checkpoint.extra import dumped, first_line
from autoptd.runtime.checkpoint.manifest import GROUPS, Staged, StagedTensor, encode
from autoptd.runtime.checkpoint.stage import write_rank
from autoptd.runtime.folders.disk import remove_folder
from autoptd.runtime.folders.read_folder import open_file, open_folder

MODEL_KEY, OPTIMIZER_KEYS = "model", ("optimizer", "optim")
# The content of `extra.pt` without states.
NO_EXTRA: dict[str, Any] = {"extra": {}, "random": None, "replicas": 1}
OTHERS_REMEDY = "do not use this file, unless you know who wrote it"


@dataclass
class Content:
    """The content of a checkpoint: tensors by name, the optimizer's state by name, its groups.

    `ties` maps the first name of tied tensors to all their names; `left` lists the entries that are ignored.
    """

    source: str
    model: dict[str, torch.Tensor]
    ties: dict[str, list[str]] = field(default_factory=dict)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] | None = None
    left: list[str] = field(default_factory=list)


def from_hf(folder: Path) -> Content:
    """Open a folder of Hugging Face's format."""
    opened = open_folder(folder)
    paths = {entry.file for entry in opened.entries.values()}
    files = {path: open_file(path) for path in paths}
    model = {}
    for name, entry in opened.entries.items():
        if entry.dtype is None:
            raise PlanError(f"{entry.file}: {name}", "has a dtype that torch does not have", "another dtype")
        model[name] = files[entry.file].get_tensor(entry.name)
    return Content(str(folder), model)


def from_torch(file: Path) -> Content:
    """Open a file of torch.save; PlanError if it would run code, or holds something else."""
    saved = load_mapped(file)
    nested = isinstance(saved, Mapping) and isinstance(saved.get(MODEL_KEY), Mapping)
    model = saved[MODEL_KEY] if nested else saved
    check_model(model, str(file))
    ties = tied(model)
    again = {name for first, names in ties.items() for name in names if name != first}
    content = Content(str(file), {name: x for name, x in model.items() if name not in again}, ties)
    if nested:
        key = next((key for key in OPTIMIZER_KEYS if key in saved), None)
        content.left = [str(name) for name in saved if name not in (MODEL_KEY, key)]
        if key is not None:
            set_optimizer(content, saved[key])
    return content


def load_mapped(file: Path) -> Any:
    site = str(file)
    if not file.is_file():
        raise PlanError(site, "is not a file", "a file that torch.save wrote")
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        fact = f"cannot be read without unpickling code: {first_line(error)}"
        raise PlanError(site, fact, OTHERS_REMEDY) from error
    except (RuntimeError, OSError, EOFError, ValueError) as error:
        fact = f"cannot be read: {first_line(error)}"
        raise PlanError(site, fact, "a file that torch.save wrote, in its current format") from error


def check_model(model: Any, site: str) -> None:
    """Raise PlanError unless `model` is a state dict of dense tensors."""
    remedy = 'torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)'
    if not isinstance(model, Mapping) or not model:
        raise PlanError(site, "does not hold a state dict", remedy)
    for name, x in model.items():
        if not isinstance(name, str) or not isinstance(x, torch.Tensor):
            raise PlanError(site, f"has {a_type(x)} under {name!r}, not a tensor", remedy)
        if x.layout != torch.strided or x.is_quantized:
            raise PlanError(site, f"has {name}, which is sparse or quantized", "dense tensors")


def tied(model: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """Return the names of tensors over the same memory, by the first one."""
    names: dict[tuple[Any, ...], list[str]] = {}
    for name, x in model.items():
        if x.numel():
            place = (x.data_ptr(), x.dtype, tuple(x.shape), x.stride())
            names.setdefault(place, []).append(name)
    return {some[0]: some for some in names.values() if len(some) > 1}


def set_optimizer(content: Content, saved: Any) -> None:
    """Add an optimizer's state dict, whose parameters have names or numbers."""
    site = f"{content.source}: optimizer"
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
        raise PlanError(site, "is not the state dict of a torch optimizer", "optimizer.state_dict()")
    name_of = names_of(content, saved["param_groups"], site)
    content.groups = []
    for group in saved["param_groups"]:
        settings = {key: value for key, value in group.items() if key != "param_names"}
        content.groups.append({**settings, "params": [name_of[key] for key in group["params"]]})
    for key, record in saved["state"].items():
        if key not in name_of:
            raise PlanError(site, f"has state of {key!r}, which is not in its groups", "save it again")
        content.state[name_of[key]] = dict(record)
    for name, record in content.state.items():
        shape = content.model[name].shape
        for key, value in record.items():
            if key != "step" and isinstance(value, torch.Tensor) and value.dim() and value.shape != shape:
                fact = f"{key} of {name} has shape {tuple(value.shape)}, and {name} {tuple(shape)}"
                raise PlanError(site, fact, "the optimizer of this model, over model.parameters()")


def names_of(content: Content, groups: Any, site: str) -> dict[Any, str]:
    """Return the names of parameters by the keys of an optimizer: names, or numbers in the order of the
    model.
    """
    home = {name: first for first, names in content.ties.items() for name in names}
    keys = [key for group in groups for key in group["params"]]
    names = [name for group in groups for name in group.get("param_names", group["params"])]
    if all(isinstance(name, str) for name in names):
        if unknown := [name for name in names if home.get(name, name) not in content.model]:
            raise PlanError(
                site, f"refers to {unknown[0]!r}, which is not in the model", "the model's optimizer"
            )
        return {key: home.get(name, name) for key, name in zip(keys, names, strict=True)}
    names = list(content.model)
    if len(names) != len(keys):
        # Counters and masks are buffers, not parameters.
        names = [name for name in names if content.model[name].is_floating_point()]
    if len(groups) != 1 or len(names) != len(keys):
        fact = f"has numbers for {len(keys)} parameters in {len(groups)} groups, which do not identify {len(names)} tensors"
        remedy = (
            "names: torch.distributed.checkpoint.state_dict.get_state_dict; or pm.load_optimizer_state_dict, "
            "which knows the model"
        )
        raise PlanError(site, fact, remedy)
    return dict(zip(keys, names, strict=True))


def write_checkpoint(content: Content, folder: Path) -> None:
    """Write the folder; remove it if that fails."""
    staged = Staged(0)
    for name, x in content.model.items():
        staged.tensors.append(StagedTensor.whole(name, "", x.detach()))
    for name, record in content.state.items():
        for key, value in sorted(record.items()):
            if isinstance(value, torch.Tensor):
                staged.tensors.append(StagedTensor.whole(name, key, value.detach()))
            else:
                encoded = encode(value, f"optimizer state {key!r} of {name}")
                staged.values.setdefault(name, {})[key] = encoded
    about: dict[str, Any] = {"torch": torch.__version__, "source": content.source, "optimizer": None}
    objects: dict[str, Any] = {}
    if content.ties:
        about["names"] = content.ties
    if content.groups is not None:
        groups = []
        for number, group in enumerate(content.groups):
            groups.append(
                {key: encode(value, f"optimizer group {number}: {key}") for key, value in group.items()}
            )
            objects |= {f"{GROUPS}{number}.{key}": value for key, value in group.items()}
        about["optimizer"] = {"class": None, "groups": groups}
    part = begin(folder, new_token())
    try:
        write_rank(part, staged, objects)
        finish(part, folder, [0], about, content.ties, dumped(NO_EXTRA))
    except BaseException:
        remove_folder(part)
        raise
