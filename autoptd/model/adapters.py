"""The adapters of PEFT in a running model, saved into folders and loaded from them.

In: the running ranks, and the user's model. Out: a folder that `peft.PeftModel.from_pretrained` reads; or its values in the
running model. Both calls are made by all ranks.

    pm.save_adapter("adapters/mine")
    pm.load_adapter("adapters/mine")
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoptd.errors import PlanError
from autoptd.model.adapter import Adapter, first_few, is_wrapped, open_adapter
from autoptd.model.run import Run
from autoptd.model.sizes import Programs
from autoptd.program.specs import ParamSpec
from autoptd.runtime.folders.read_folder import Folder
from autoptd.runtime.folders.save_adapter import save_adapter
from autoptd.runtime.folders.save_pretrained import Contents
from autoptd.runtime.params.parts import dtype_of, read_shard
from autoptd.runtime.step.launch import Rank, check_same_source
from autoptd.runtime.world.agree import agree, attempted

SAVE, LOAD = "pm.save_adapter", "pm.load_adapter"


class Adapters:
    """The adapters of a model; those count as active that are when this is made. `model` is None for a loaded program."""

    def __init__(self, run: Run, sizes: Programs, model: nn.Module | None) -> None:
        self._run, self._sizes, self._has_model = run, sizes, model is not None
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
        """Write an adapter as PEFT's `save_pretrained` does: `peft.PeftModel.from_pretrained(base, folder)` reads it.

        The active one, or the one called `adapter`: adapter_config.json and adapter_model.safetensors, the names and values
        of the model on one device. Rank 0 writes; what an earlier save wrote there stays until this one is complete.
        Warns of trained parameters that do not belong to the adapter: `save` keeps those. PlanError for a model without
        adapters; RuntimeFault on all ranks when rank 0 cannot write. Collective.
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

        Into the active one, or the one called `adapter`. The state of optimizers does not change. Everything is checked, and
        read, before anything is changed: PlanError for missing files, another kind of adapter, other settings (r,
        lora_alpha), or an adapter for another base; RuntimeFault on all ranks when one cannot read.
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
        # Before parameters: if their values are refused, none has changed.
        brought = run.agreed(LOAD, lambda: self._buffers_in(found))
        self._sizes.hold_to(brought)

        @torch.no_grad()
        def load(rank: Rank) -> None:
            # A gather that is under way would overwrite the loaded values.
            rank.params.wait()
            for spec, part in parts[rank.world.rank]:
                rank.params.load(spec, part)

        with run.overwriting(LOAD, brought, f"loading {str(folder)!r}"):
            ranks.run(LOAD, load)

    def check_folder(self, site: str) -> None:
        """Raise PlanError where the model is one with adapters: its names are not those that `from_pretrained` looks for."""
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


__all__ = ["Adapters"]
