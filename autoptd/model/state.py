"""Full tensors of a running model, by the model's own names: state dicts, gradients, folders of weights.

In: the running ranks. Out: state dicts and gradients on rank 0; a folder of Hugging Face's format. Calls
marked *collective* are made by all ranks.

    pm.state_dict()["lm_head.weight"]
    pm.save_pretrained("out/")
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from autoptd.errors import PlanError
from autoptd.model.run import LoadResult, Run
from autoptd.program.sources import FolderFormat
from autoptd.runtime.checks.agreement import STATE
from autoptd.runtime.checks.inputs import check_state
from autoptd.runtime.folders.save_pretrained import contents_of, parse_size, save_folder
from autoptd.runtime.params.fingerprint import fingerprint_of_model
from autoptd.runtime.params.full_values import (
    check_loaded,
    gather_gradients,
    gather_parameters,
    load_parameters,
)

SAVE, LOAD = "pm.save", "pm.load"


class State:
    """The tensors of a running model; `format` says how they are saved for Hugging Face's `from_pretrained`,
    and `check_folder(site)` raises PlanError for a model that this cannot read."""

    def __init__(self, run: Run, check_folder: Callable[[str], None], format: FolderFormat) -> None:
        self.run, self._check_folder, self._format = run, check_folder, format

    def fingerprint(self) -> str:
        """Return 64 bits of all stored parameters, as text. Collective.

        The same on every mesh for the same values; one flipped bit, or two swapped rows, change it.
        `fingerprint_of_values(dict(model.named_parameters()))` of autoptd.runtime.params.fingerprint computes
        it on one device.
        """
        ranks = self.run.settled("fingerprint").unrecorded
        return ranks.run("fingerprint", lambda rank: fingerprint_of_model(rank.params))

    # full tensors

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return full CPU tensors under all original names, persistent buffers too, on rank 0 ({} elsewhere).

        Collective.
        """
        ranks = self.run.settled("state_dict")
        found = ranks.run("state_dict", lambda rank: gather_parameters(rank.params))
        if not ranks.has_rank_0:
            return {}
        # Copies: who changes a state dict must not change the model.
        found |= {name: x.to("cpu", copy=True) for name, x in self.run.buffers.values.items()}
        # In the model's order.
        return {name: found[name] for name in dict.fromkeys([*self.run.names, *found])}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True) -> LoadResult:
        """Load full tensors by original names: those of `state_dict` or of the unmodified model.

        Every rank passes all.

        PlanError, and nothing is loaded, where a buffer has other values than the program relies on (a mask
        that was proven causal, and is not read any more): load those into the model, before `parallelize`.
        """
        run = self.run
        ranks = run.started("load_state_dict")
        if run.is_process:
            ranks.unrecorded.run(STATE, lambda rank: check_state(rank.world, state_dict))
        missing, unexpected = check_loaded(run.program, run.buffers.values, state_dict)
        if strict and (missing or unexpected):
            fact = f"missing {missing or 'nothing'}, unexpected {unexpected or 'nothing'}"
            raise PlanError("load_state_dict", fact, "a state dict of this model, or strict=False")
        brought = run.buffers.values_of(state_dict)
        with run.overwriting("load_state_dict", brought):
            run.clock.exchanges += 1
            ranks.run("load_state_dict", lambda rank: load_parameters(rank.params, state_dict))
        return LoadResult(missing, unexpected)

    def save_pretrained(self, folder: str | Path, max_shard_size: int | str = "5GB") -> None:
        """Write the model as Hugging Face's `save_pretrained` does: safetensors under the original names, and
        its config.

        Files hold at most `max_shard_size` bytes; rank 0 writes them, and holds one at a time. What an
        earlier save wrote there stays complete until this one is. RuntimeFault on all ranks when rank 0
        cannot write; PlanError for a model with adapters, see `save_adapter`. Collective.
        """
        limit = parse_size(max_shard_size)
        self._check_folder("pm.save_pretrained")
        run, how = self.run, self._format
        ranks = run.settled("save_pretrained")
        others = {name: x.cpu().contiguous() for name, x in run.buffers.values.items()}
        what = contents_of(run.program.params, others, run.names, how)
        for remark in how.remarks if ranks.here[0].world.rank == 0 else ():
            warnings.warn(f"save_pretrained: {remark}", stacklevel=3)
        ranks.run("save_pretrained", lambda rank: save_folder(rank.params, what, Path(folder), limit, how))

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return full CPU gradients under all original names on rank 0 ({} elsewhere); absent where none.

        Collective.
        """
        return self.run.started("gradients").run("gradients", lambda rank: gather_gradients(rank.params))
