"""The adapters of PEFT in a running model, saved into folders and loaded from them.

In: the running ranks, and the user's model. Out: a folder that `peft.PeftModel.from_pretrained` reads; or its
values in the running model. Both calls are made by all ranks.

    pm.save_adapter("adapters/mine")
    pm.load_adapter("adapters/mine")
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
from autoptd.model.run import Run
from autoptd.program.specs import ParamSpec
from autoptd.runtime.folders.read_folder import Folder, headers, library
from autoptd.runtime.folders.save_pretrained import CONFIG, WEIGHTS, Contents, save_adapter
from autoptd.runtime.params.parts import dtype_of, read_shard
from autoptd.runtime.step.launch import Rank, check_same_source
from autoptd.runtime.world.agree import agree, attempted
from autoptd.subject.match_folder import counted, misfits

SAVE, LOAD = "pm.save_adapter", "pm.load_adapter"


class Adapters:
    """The adapters of a model; those count as active that are when this is made. `model` is None for a loaded
    program.
    """

    def __init__(self, run: Run, model: nn.Module | None) -> None:
        self._run, self._has_model = run, model is not None
        self._path, self._module = "", None
        # The outermost module with adapters: a PeftModel, or a model of transformers that has some.
        for path, module in [] if model is None else model.named_modules():
            if getattr(module, "peft_config", None) and hasattr(module, "active_adapters"):
                self._path, self._module = path, module
                break
        # A property of PEFT's models, a method of those of transformers.
        active: Any = [] if self._module is None else self._module.active_adapters
        active = active() if callable(active) else active
        self._active = [active] if isinstance(active, str) else list(active)

    def save(self, folder: str | Path, adapter: str | None = None) -> None:
        """Write an adapter as PEFT's `save_pretrained` does: `peft.PeftModel.from_pretrained(base, folder)`
        reads it.

        The active one, or the one called `adapter`: adapter_config.json and adapter_model.safetensors, the
        names and values of the model on one device. Rank 0 writes; what an earlier save wrote there stays
        until this one is complete. Warns of trained parameters that do not belong to the adapter: `save`
        keeps those. PlanError for a model without adapters; RuntimeFault on all ranks when rank 0 cannot
        write. Collective.
        """
        run = self._run
        ranks, specs = run.settled("save_adapter"), self._specs()
        found = run.agreed(SAVE, lambda: self._named(SAVE, adapter))
        # Rank 0's: which embeddings PEFT adds depends on files of the base, which other nodes may not have.
        listed = attempted(found.names if ranks.has_rank_0 else dict)
        buffers = {name: x.cpu() for name, x in run.buffers.values.items()} if ranks.has_rank_0 else {}

        def save(rank: Rank) -> dict[str, str]:
            own = agree(rank.world, SAVE, listed)
            names: dict[str, str] = rank.world.everyone().gather_objects(own, SAVE)[0]
            params = {key: specs[name] for key, name in names.items() if name in specs}
            # Two names of one buffer get separate memory: safetensors refuses shared tensors.
            others = {key: buffers[name].clone() for key, name in names.items() if name in buffers}
            save_adapter(rank.params, Contents(params, others, list(names)), Path(folder), found.write_config)
            return names

        names = ranks.run(SAVE, save)
        # With several adapters, another one may be the trained one.
        if ranks.has_rank_0 and found.is_only:
            self._warn_of_others(found, set(names.values()))

    def load(self, folder: str | Path, adapter: str | None = None) -> None:
        """Load an adapter that `save_adapter`, or PEFT, wrote; every rank reads its own part. Collective.

        Into the active one, or the one called `adapter`. The state of optimizers does not change. Everything
        is checked, and read, before anything is changed: PlanError for missing files, another kind of
        adapter, other settings (r, lora_alpha), or an adapter for another base; RuntimeFault on all ranks
        when one cannot read.
        """
        run = self._run
        ranks = run.started("load_adapter").unrecorded
        found = run.agreed(LOAD, lambda: self._opened(Path(folder), adapter))
        ranks.run(LOAD, lambda rank: check_same_source(found, rank.world))
        parts: dict[int, list[tuple[ParamSpec, torch.Tensor]]] = {}

        def read(rank: Rank) -> None:
            reader, local = found.reader(), rank.params.local
            specs = [spec for spec in rank.params.specs if spec.name in local]
            wanted = [spec for spec in specs if any(map(reader.has, spec.aliases))]
            parts[rank.world.rank] = agree(
                rank.world, LOAD, lambda: [(spec, read_shard(spec, reader, rank.world)) for spec in wanted]
            )

        ranks.run(LOAD, read)
        brought = run.agreed(LOAD, lambda: self._buffers_in(found))

        @torch.no_grad()
        def load(rank: Rank) -> None:
            # A gather that is under way would overwrite the loaded values.
            rank.params.wait()
            for spec, part in parts[rank.world.rank]:
                rank.params.load(spec, part)

        with run.overwriting(LOAD, brought, f"loading {str(folder)!r}"):
            ranks.run(LOAD, load)

    def check_folder(self, site: str) -> None:
        """Raise PlanError where the model is one with adapters: its names are not those that
        `from_pretrained` looks for.
        """
        if self._module is None or self._path:
            return
        fact = "the model has adapters of PEFT, and from_pretrained would find none of its names, and draw random weights"
        remedy = "pm.save_adapter(folder), which writes what PEFT does"
        if is_wrapped(self._module):
            remedy += "; for all weights in one, weights = pm.state_dict() on every rank, and on rank 0 "
            remedy += "model.load_state_dict(weights) and model.merge_and_unload().save_pretrained(folder)"
        raise PlanError(site, fact, remedy)

    def _named(self, site: str, name: str | None) -> Adapter:
        """Return the adapter `name`, else the active one; PlanError where there is none, or no single one."""
        if not self._has_model:
            fact = "the program was loaded from a file, which says nothing of adapters"
            raise PlanError(site, fact, "autoptd.parallelize(model, ...)")
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

    def _warn_of_others(self, adapter: Adapter, kept: set[str]) -> None:
        """Warn of parameters that are trained and no part of an adapter."""
        specs = [spec for spec in self._run.program.params if spec.requires_grad]
        if lost := [spec.name for spec in specs if not kept.intersection((spec.name, *spec.aliases))]:
            fact = f"trained, and no part of adapter {adapter.name!r} as PEFT saves it: {first_few(lost)}"
            warnings.warn(f"{SAVE}: {fact}; modules_to_save= of its config, or pm.save", stacklevel=4)

    def _specs(self) -> dict[str, ParamSpec]:
        """Return what parameters are, by all their names."""
        return {name: spec for spec in self._run.program.params for name in (spec.name, *spec.aliases)}

    def _opened(self, folder: Path, name: str | None) -> Folder:
        wanted = dict(self._run.buffers.values)
        for key, spec in self._specs().items():
            wanted[key] = torch.empty(spec.shape, dtype=dtype_of(spec.dtype), device="meta")
        return open_adapter(folder, self._named(LOAD, name), wanted)

    def _buffers_in(self, folder: Folder) -> dict[str, torch.Tensor]:
        """Return the buffers that an adapter's folder brings."""
        reader, buffers = folder.reader(), self._run.buffers
        return buffers.values_of({key: reader.whole(key) for key in buffers.values if reader.has(key)})


# Fields of a config that say where an adapter came from, or how its values were first drawn: no forward reads
# them. Of dropout, which training alone has, the model keeps its own.
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
    """An adapter of a model; `site` is the call that asked for it, and `path` is that of its `module` in the
    model.
    """

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

        `embeddings` says whether those of the base are among them; "auto" asks files of the base, perhaps
        over the network, whether they were resized. PlanError for kinds of adapters whose folder holds
        anything but parameters and buffers.
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

    `wanted` are all tensors of the model, which may be on meta. PlanError, before any value is read, where a
    file is missing, or the adapter is of another kind, of other settings, or of another base.
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
