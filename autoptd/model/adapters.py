"""Adapters of PEFT in a model: which there are, and how their folders name what the model has.

In: the user's model. Out: an adapter by name: its config, and the name in the model of each tensor in its folder; a folder
that was opened and fits.

    adapter = Adapters(model).named("pm.save_adapter")
    adapter.names()["base_model.model.lm_head.lora_A.weight"]    # "base_model.model.lm_head.lora_A.default.weight"

Names come from PEFT itself, whose rule differs by kind of adapter: it is given tensors without memory, and says what it would
write of them. PEFT is imported where a model of it was found, nowhere else.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from autoptd.errors import PlanError
from autoptd.runtime.folders.read_folder import Folder, headers, library
from autoptd.runtime.folders.save_adapter import CONFIG, WEIGHTS
from autoptd.subject.match_folder import counted, misfits

# Fields of a config that say where an adapter came from, or how its values were first drawn: no forward reads them. Of dropout,
# which training alone has, the model keeps its own.
ORIGIN = {
    "arrow_config",
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "inference_mode",
    "init_ia3_weights",
    "init_weights",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "peft_version",
    "prompt_tuning_init",
    "prompt_tuning_init_text",
    "revision",
    "runtime_config",
    "task_type",
    "tokenizer_kwargs",
    "tokenizer_name_or_path",
}
# Which modules have an adapter: names and shapes of tensors say it, however it was written.
PLACES = {"exclude_modules", "feedforward_modules", "layers_pattern", "layers_to_transform", "target_modules"}
# Of `init_lora_weights`: these leave the base's weights as they are, others subtract from them.
PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")

# How many names an error lists.
FEW = 3


@dataclass(frozen=True)
class Adapter:
    """An adapter of a model; `site` is the call that asked for it, and `path` is that of its `module` in the model."""

    site: str
    name: str
    config: Any
    path: str
    module: nn.Module

    @property
    def is_only(self) -> bool:
        """Tell whether the model has no other adapter."""
        return len(self.module.peft_config) == 1  # type: ignore[arg-type]

    def names(self, embeddings: bool | Literal["auto"] = "auto") -> dict[str, str]:
        """Return the model's names of tensors by those in the folder.

        `embeddings` says whether those of the base are among them; "auto" asks files of the base, perhaps over the network,
        whether they were resized. PlanError for kinds of adapters whose folder holds anything but parameters and buffers.
        """
        prefix, module, config = f"{self.path}." if self.path else "", self.module, self.config
        if config.is_prompt_learning:
            if config.peft_type != "PROMPT_TUNING":
                raise self._unlike(f"what an encoder computes ({config.peft_type.value})")
            return {"prompt_embeddings": f"{prefix}prompt_encoder.{self.name}.embedding.weight"}
        from peft import get_peft_model_state_dict

        empty = {key: torch.empty_like(x, device="meta") for key, x in module.state_dict().items()}
        name_of = {id(x): key for key, x in empty.items()}
        with warnings.catch_warnings():
            # They are about keywords of `save_pretrained`.
            warnings.simplefilter("ignore")
            written = get_peft_model_state_dict(
                module, state_dict=dict(empty), adapter_name=self.name, save_embedding_layers=embeddings
            )
        if made := [key for key, x in written.items() if id(x) not in name_of]:
            raise self._unlike(counted(made))
        # As `save_pretrained` of transformers, for adapters that its models have without a wrapper.
        outer = "" if _is_wrapped(module) else "base_model.model."
        return {f"{outer}{key}": prefix + name_of[id(x)] for key, x in written.items()}

    def _unlike(self, what: str) -> PlanError:
        fact = f"its folder holds what is no parameter of it: {what}"
        return PlanError(
            f"{self.site}: adapter {self.name!r}", fact, "pm.state_dict() into the model, and save that"
        )

    def write_config(self, folder: Path) -> None:
        """Write adapter_config.json, as the `save_pretrained` of PEFT does."""
        # A copy: the user's own config stays in training's mode.
        config = copy.deepcopy(self.config)
        config.inference_mode = True
        base = self.module
        if _is_wrapped(base):
            base = base.base_model if config.is_prompt_learning else base.base_model.model  # type: ignore[assignment, union-attr]
        if config.base_model_name_or_path is None:
            config.base_model_name_or_path = base.__dict__.get("name_or_path") or None
        origin = None
        if config.task_type is None:
            origin = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
        config.save_pretrained(str(folder), auto_mapping_dict=origin)


class Adapters:
    """The adapters of a model, of which those count that are active when this is made."""

    def __init__(self, model: nn.Module) -> None:
        self._path, self._module = _adapted(model)
        self._active = [] if self._module is None else _active(self._module)

    def named(self, site: str, name: str | None = None) -> Adapter:
        """Return the adapter `name`, else the active one; PlanError where there is none, or no single one."""
        if self._module is None:
            fact = "the model has no adapters of PEFT"
            raise PlanError(site, fact, "hand what peft.get_peft_model returns to parallelize")
        configs: Mapping[str, Any] = self._module.peft_config  # type: ignore[assignment]
        remedy = f"adapter= one of {', '.join(map(repr, configs))}"
        if name is None:
            if len(self._active) != 1:
                fact = f"{len(self._active)} adapters are active: {', '.join(self._active) or 'none'}"
                raise PlanError(site, fact, remedy)
            name = self._active[0]
        if name not in configs:
            raise PlanError(site, f"the model has no adapter {name!r}", remedy)
        return Adapter(site, name, configs[name], self._path, self._module)

    def check_folder(self, site: str) -> None:
        """Raise PlanError where the model is one with adapters: its names are not those that `from_pretrained` looks for."""
        if self._module is None or self._path:
            return
        fact = "the model has adapters of PEFT, and from_pretrained would find none of its names, and draw random weights"
        remedy = "pm.save_adapter(folder), which writes what PEFT does"
        if _is_wrapped(self._module):
            remedy += "; for all weights in one, weights = pm.state_dict() on every rank, and on rank 0 "
            remedy += "model.load_state_dict(weights) and model.merge_and_unload().save_pretrained(folder)"
        raise PlanError(site, fact, remedy)


def _adapted(model: nn.Module) -> tuple[str, nn.Module | None]:
    """Return the outermost module with adapters and its path: a PeftModel, or a model of transformers that has some."""
    for path, module in model.named_modules():
        if getattr(module, "peft_config", None) and hasattr(module, "active_adapters"):
            return path, module
    return "", None


def _is_wrapped(module: nn.Module) -> bool:
    return hasattr(module, "get_base_model")


def _active(module: nn.Module) -> list[str]:
    # A property of PEFT's models, a method of those of transformers.
    found: Any = module.active_adapters
    found = found() if callable(found) else found
    return [found] if isinstance(found, str) else list(found)


def open_adapter(path: Path, adapter: Adapter, wanted: Mapping[str, torch.Tensor]) -> Folder:
    """Return the tensors of an adapter's folder under the model's names.

    `wanted` are all tensors of the model, which may be on meta. PlanError, before any value is read, where a file is
    missing, or the adapter is of another kind, of other settings, or of another base.
    """
    site = f"{adapter.site}({str(path)!r})"
    remedy = "a folder that pm.save_adapter or save_pretrained of PEFT has written"
    if not path.is_dir():
        raise PlanError(site, "there is no such folder", remedy)
    if lost := [name for name in (CONFIG, WEIGHTS) if not (path / name).is_file()]:
        if lost == [WEIGHTS] and (path / "adapter_model.bin").exists():
            remedy = "convert adapter_model.bin once, by from_pretrained and save_pretrained of PEFT"
        raise PlanError(site, f"holds no {' and no '.join(lost)}", remedy)
    library()
    if fact := _other_config(path, adapter):
        remedy = f"an adapter like {adapter.name!r} of the model, or a model made with this one's config"
        raise PlanError(site, fact, remedy)
    try:
        entries = headers(path / WEIGHTS)
    except PlanError as error:
        raise PlanError(site, f"{WEIGHTS} {error.fact}", error.remedy) from error
    own = adapter.names(embeddings=False)
    # Files may hold embeddings of the base besides, where these were resized.
    names = {**adapter.names(embeddings=True), **own}
    folder = Folder(path, entries).renamed(names)
    missing = [name for name in own if name not in entries]
    unexpected = [name for name in entries if name not in names]
    facts = []
    if missing:
        facts.append(f"missing: {first_few(missing)}")
    if unexpected:
        facts.append(f"unexpected: {first_few(unexpected)}")
    wrong: list[str] = []
    for name in folder.entries.keys() & wanted.keys():
        wrong += misfits(name, wanted[name], folder)
    if wrong:
        facts.append(_few(sorted(wrong), "; "))
    if facts:
        fact = f"is an adapter for another base: {'; '.join(facts)}"
        raise PlanError(site, fact, "an adapter that was trained on this model, of these modules")
    return folder


def first_few(names: Sequence[str]) -> str:
    """List names, each once for all its numbers, and how many more there are."""
    return _few(counted(names).split(", "), ", ")


def _few(items: Sequence[str], between: str) -> str:
    more = [f"and {len(items) - FEW} more"] if len(items) > FEW else []
    return between.join([*items[:FEW], *more])


def _other_config(path: Path, adapter: Adapter) -> str:
    """Say what keeps an adapter's config from being the model's, "" where nothing does."""
    own = adapter.config
    try:
        kind = json.loads((path / CONFIG).read_text()).get("peft_type")
        if kind != own.peft_type.value:
            return f"is of type {kind}, and the model's adapter {adapter.name!r} of {own.peft_type.value}"
        # PEFT's own reader: it knows what fields that are not in the file stand for.
        other = type(own).from_pretrained(str(path))
    except Exception as error:
        return f"{CONFIG} cannot be read: {type(error).__name__}: {error}"
    different = []
    for field in dataclasses.fields(own):
        mine, theirs = getattr(own, field.name), getattr(other, field.name, None)
        if field.name not in ORIGIN | PLACES and not _is_alike(field.name, mine, theirs):
            different.append(f"{field.name}={theirs!r}, not {mine!r}")
    return (
        f"has other settings than the model's adapter {adapter.name!r}: {', '.join(different)}"
        if different
        else ""
    )


def _is_alike(field: str, mine: Any, theirs: Any) -> bool:
    if field == "init_lora_weights" and mine in PLAIN_STARTS and theirs in PLAIN_STARTS:
        return True
    # {} and None, sets and lists: JSON has but one of each.
    mine, theirs = _plain(mine), _plain(theirs)
    return bool(mine == theirs) or (not mine and not theirs and mine is not False and theirs is not False)


def _plain(x: Any) -> Any:
    return sorted(x, key=repr) if isinstance(x, (set, frozenset, list, tuple)) else x


__all__ = ["Adapter", "Adapters", "first_few", "open_adapter"]
