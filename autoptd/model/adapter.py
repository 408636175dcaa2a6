"""An adapter of PEFT in a model, and its folder: how that names what the model has.

In: the module that has adapters, and the name of one. Out: its config, and the name in the model of each tensor in its folder;
a folder that was opened and fits.

    adapter = Adapter("pm.save_adapter", "default", config, path="", module=model)
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
# Of `init_lora_weights`: these leave the base's weights unchanged, others subtract from them.
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
        outer = "" if is_wrapped(module) else "base_model.model."
        return {f"{outer}{key}": prefix + name_of[id(x)] for key, x in written.items()}

    def _unlike(self, what: str) -> PlanError:
        fact = f"its folder holds values that are not parameters of it: {what}"
        return PlanError(
            f"{self.site}: adapter {self.name!r}", fact, "pm.state_dict() into the model, and save that"
        )

    def write_config(self, folder: Path) -> None:
        """Write adapter_config.json, as the `save_pretrained` of PEFT does."""
        # A copy: the user's own config stays in training's mode.
        config = copy.deepcopy(self.config)
        config.inference_mode = True
        base = self.module
        if is_wrapped(base):
            base = base.base_model if config.is_prompt_learning else base.base_model.model  # type: ignore[assignment, union-attr]
        if config.base_model_name_or_path is None:
            config.base_model_name_or_path = base.__dict__.get("name_or_path") or None
        origin = None
        if config.task_type is None:
            origin = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
        config.save_pretrained(str(folder), auto_mapping_dict=origin)


def is_wrapped(module: nn.Module) -> bool:
    """Tell whether a module is PEFT's own wrapper, not a model of transformers that has adapters."""
    return hasattr(module, "get_base_model")


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


__all__ = ["Adapter", "first_few", "is_wrapped", "open_adapter"]
