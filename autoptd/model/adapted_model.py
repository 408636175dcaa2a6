"""A running model whose adapters of PEFT are saved into folders, and loaded from them.

In: the ranks of this process, and the model's `Adapters`. Out: a folder that `peft.PeftModel.from_pretrained` reads; or its
values in the running model. Both calls are made by all ranks.

    pm.save_adapter("adapters/mine")
    pm.load_adapter("adapters/mine")
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

from autoptd.errors import PlanError
from autoptd.model.adapters import Adapter, first_few, open_adapter
from autoptd.model.state import StatefulModel
from autoptd.program.specs import ParamSpec
from autoptd.runtime.checkpoint.restore import agree, attempted
from autoptd.runtime.folders.read_folder import Folder
from autoptd.runtime.folders.save_adapter import save_adapter
from autoptd.runtime.folders.save_pretrained import Contents
from autoptd.runtime.params.parts import dtype_of, read_shard
from autoptd.runtime.step.launch import Rank, check_same_source
from autoptd.runtime.step.model_buffers import copy_buffers

SAVE, LOAD = "pm.save_adapter", "pm.load_adapter"


class AdaptedModel(StatefulModel):
    """A running model, of which an adapter alone can be saved and loaded."""

    def save_adapter(self, folder: str | Path, adapter: str | None = None) -> None:
        """Write an adapter as PEFT's `save_pretrained` does: `peft.PeftModel.from_pretrained(base, folder)` reads it.

        The active one, or the one called `adapter`: adapter_config.json and adapter_model.safetensors, the names and values
        of the model on one device. Rank 0 writes; what an earlier save wrote there stays until this one is complete.
        Warns of what is trained and no part of the adapter: `save` keeps that. PlanError for a model without adapters;
        RuntimeFault on all ranks when rank 0 cannot write. Collective.
        """
        ranks, specs = self._settled("save_adapter"), self._specs()
        attempt = attempted(lambda: self._adapter(SAVE, adapter))
        found: Adapter = ranks.run(SAVE, lambda rank: agree(rank.world, SAVE, attempt))
        # Rank 0's: which embeddings PEFT adds depends on files of the base, which other nodes may not have.
        listed = attempted(found.names if ranks.has_rank_0 else dict)
        buffers = {name: x.cpu() for name, x in self._buffers.values.items()} if ranks.has_rank_0 else {}

        def save(rank: Rank) -> dict[str, str]:
            own = agree(rank.world, SAVE, listed)
            names: dict[str, str] = rank.world.everyone().gather_objects(own, SAVE)[0]
            params = {key: specs[name] for key, name in names.items() if name in specs}
            # Two names of one buffer, in memory of their own each: safetensors takes no other.
            others = {key: buffers[name].clone() for key, name in names.items() if name in buffers}
            save_adapter(rank.params, Contents(params, others, list(names)), Path(folder), found.write_config)
            return names

        names = ranks.run(SAVE, save)
        # Of several adapters, what is trained may be another one.
        if ranks.has_rank_0 and found.is_only:
            self._warn_of_others(found, set(names.values()))

    def load_adapter(self, folder: str | Path, adapter: str | None = None) -> None:
        """Load an adapter that `save_adapter`, or PEFT, wrote; every rank reads its own part. Collective.

        Into the active one, or the one called `adapter`. The state of optimizers stays as it is. Everything is checked, and
        read, before anything is changed: PlanError for missing files, another kind of adapter, other settings (r,
        lora_alpha), or an adapter for another base; RuntimeFault on all ranks when one cannot read.
        """
        ranks = self._started("load_adapter").unrecorded
        attempt = attempted(lambda: self._opened_adapter(Path(folder), adapter))
        found: Folder = ranks.run(LOAD, lambda rank: agree(rank.world, LOAD, attempt))
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
        attempt = attempted(lambda: self._buffers_in(found))
        brought: dict[str, torch.Tensor] = ranks.run(LOAD, lambda rank: agree(rank.world, LOAD, attempt))
        self._hold_to(brought, ranks)
        self._release()
        self._unusable = f"loading {str(folder)!r} did not end"
        self._buffers.load(brought)

        @torch.no_grad()
        def load(rank: Rank) -> None:
            # A gather that is under way would overwrite what is loaded.
            rank.params.wait()
            for spec, part in parts[rank.world.rank]:
                rank.params.load(spec, part)
            for executor in {rank.executor, rank.evaluator}:
                copy_buffers(executor.buffers, brought)

        ranks.run(LOAD, load)
        self._unusable = ""

    def _adapter(self, site: str, name: str | None) -> Adapter:
        if self._adapters is None:
            fact = "the program was loaded from a file, which says nothing of adapters"
            raise PlanError(site, fact, "autoptd.parallelize(model, ...)")
        return self._adapters.named(site, name)

    def _warn_of_others(self, adapter: Adapter, kept: set[str]) -> None:
        """Warn of parameters that are trained and no part of an adapter."""
        specs = [spec for spec in self.program.params if spec.requires_grad]
        if lost := [spec.name for spec in specs if not kept.intersection((spec.name, *spec.aliases))]:
            fact = f"trained, and no part of adapter {adapter.name!r} as PEFT saves it: {first_few(lost)}"
            warnings.warn(f"{SAVE}: {fact}; modules_to_save= of its config, or pm.save", stacklevel=3)

    def _specs(self) -> dict[str, ParamSpec]:
        """Return what parameters are, by all their names."""
        return {name: spec for spec in self.program.params for name in (spec.name, *spec.aliases)}

    def _opened_adapter(self, folder: Path, name: str | None) -> Folder:
        wanted = dict(self._buffers.values)
        for key, spec in self._specs().items():
            wanted[key] = torch.empty(spec.shape, dtype=dtype_of(spec.dtype), device="meta")
        return open_adapter(folder, self._adapter(LOAD, name), wanted)

    def _buffers_in(self, folder: Folder) -> dict[str, torch.Tensor]:
        """Return the buffers that an adapter's folder brings."""
        reader = folder.reader()
        return self._buffers.values_of(
            {key: reader.whole(key) for key in self._buffers.values if reader.has(key)}
        )


__all__ = ["AdaptedModel"]
