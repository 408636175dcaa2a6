"""The state of a running model: full tensors by the model's own names, folders of weights, checkpoints.

In: the running ranks. Out: state dicts and gradients; a folder of Hugging Face's format; checkpoints that any mesh
reads. Calls marked *collective* are made by all ranks.

    pm.save("ckpts/step-1000", optimizer=opt, extra={"scheduler": scheduler})
    pm.load("ckpts/step-1000", optimizer=opt, extra={"scheduler": scheduler})
    pm.state_dict()["lm_head.weight"]
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autoptd.errors import PlanError, a_type, with_article
from autoptd.model.adapters import Adapters
from autoptd.model.run import Run
from autoptd.model.sizes import Programs
from autoptd.options import settings
from autoptd.program.about import about_program, tied_names
from autoptd.program.folder_format import FolderFormat
from autoptd.program.program import Program
from autoptd.runtime.checkpoint.commit import path_of
from autoptd.runtime.checkpoint.extra import (
    Place,
    check_extra,
    check_optimizer,
    group_objects,
    optimizer_record,
    own_state,
    read_extra,
    restore_extra,
    set_groups,
    takes_state,
    warn_of_others,
)
from autoptd.runtime.checkpoint.manifest import EXTRA, read_checked
from autoptd.runtime.checkpoint.read import Checkpoint, open_any
from autoptd.runtime.checkpoint.restore import (
    Restoration,
    check_fingerprint,
    check_model,
    check_optimizer_state,
)
from autoptd.runtime.checkpoint.save import Contents, save_rank
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
from autoptd.runtime.params.optimizer import NamedOptimizer
from autoptd.runtime.step.launch import Rank, RunningRanks, check_same_source
from autoptd.runtime.world.agree import agree, attempted

SAVE, LOAD = "pm.save", "pm.load"


class LoadResult(NamedTuple):
    """Names that a state dict lacked, and names that it had too many; both empty when strict."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Opened(NamedTuple):
    """A checkpoint that was checked, and what it holds besides tensors of the model."""

    checkpoint: Checkpoint
    names: LoadResult
    extra: Mapping[str, Any]
    takes_state: bool


class State:
    """What a running model holds; `format` says how it is saved for Hugging Face's `from_pretrained`."""

    def __init__(self, run: Run, sizes: Programs, adapters: Adapters, format: FolderFormat) -> None:
        self.run, self._sizes, self._adapters, self._format = run, sizes, adapters, format
        # The calls that have warned of gradients that wait for an update.
        self._told_gradients: set[str] = set()
        # What checkpoints say of a program, once it was asked for.
        self._about: tuple[Program, dict[str, Any]] | None = None

    # checkpoints

    def save(
        self,
        folder: str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a checkpoint into `folder`, which any mesh loads; return when it is complete. Collective.

        It has the stored parameters, persistent buffers, the state of `optimizer`, `steps`, the loss scale,
        random numbers, and of each object in `extra` (schedulers, loaders) its `state_dict`; no gradients. Whenever the
        run ends, `folder` holds the checkpoint that it had before, or this one. It is a folder of
        torch.distributed.checkpoint as well. PlanError or RuntimeFault on all ranks if one cannot write.
        """
        ranks = self.run.settled("save")
        self.warn_of_gradients(SAVE, "no checkpoint has them: save after optimizer.step()")
        first = ranks.here[0].world.rank

        def prepare() -> tuple[Contents, bytes]:
            made = None if optimizer is None else self.own(optimizer, SAVE)
            if made is not None:
                warn_of_others(made, self.run.optimizers.values(), (extra or {}).values())
            contents = self.contents(made).with_losses(self.run.clock.losses)
            return contents, own_state(extra or {}, ranks.here[0].world.device)

        # Once for all ranks of this process; what it raises, all ranks raise.
        contents = attempted(prepare)

        def run(rank: Rank) -> None:
            def own() -> tuple[Contents, bytes | None]:
                found, state = contents()
                return found, state if rank.world.rank == first else None

            save_rank(rank.params, folder, own)

        ranks.unrecorded.run(SAVE, run)

    def load(
        self,
        folder: str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        extra: Mapping[str, Any] | None = None,
        strict: bool = True,
    ) -> LoadResult:
        """Load a checkpoint, of any mesh, and resume from it. Collective.

        Takes what `save` takes. Everything is checked before anything is changed: PlanError for another model, another
        optimizer, or files that are not whole. With strict=False, what fits is loaded. RuntimeFault where bytes of a file
        were changed: the model then has to load another checkpoint before it goes on.
        """
        run = self.run
        ranks = run.started("load", even_unusable=True).unrecorded
        what = "they stay, and the next ones are added: call optimizer.zero_grad() first"
        self.warn_of_gradients(LOAD, what)
        found = run.agreed(LOAD, lambda: self._opened(path_of(folder, LOAD), optimizer, extra or {}, strict))
        ranks.run(LOAD, lambda rank: check_same_source(found.checkpoint, rank.world))
        optimizer = optimizer if found.takes_state else None
        # Before parameters: if their values are refused, none has changed.
        brought = self._read_buffers(found.checkpoint, ranks)
        self._sizes.hold_to(brought)
        run.clock.exchanges += 1

        def spread(rank: Rank) -> None:
            plan = Restoration(found.checkpoint, rank.params, None if optimizer is None else optimizer.state)
            agree(rank.world, LOAD, plan.read)
            plan.spread()

        with run.overwriting(LOAD, brought, f"loading {str(folder)!r}"):
            ranks.run(LOAD, spread)
            ranks.run(LOAD, lambda rank: check_fingerprint(found.checkpoint, rank.params))
            self._go_on(found, optimizer, extra or {}, ranks)
        return found.names

    def contents(self, optimizer: NamedOptimizer | None) -> Contents:
        """Return what this process says of the run."""
        program, buffers = self.run.program, self.run.buffers
        # Of the program once: a save must not wait for it.
        if self._about is None or self._about[0] is not program:
            asked = {
                key: str(value) for key, value in settings(self.run.options).items() if value is not None
            }
            self._about = (program, {**about_program(program), "options": asked})
        about = {"steps": self.run.clock.steps, **self._about[1], "buffers": list(buffers.values)}
        if optimizer is None:
            return Contents(about, tied_names(program), buffers=buffers.saved())
        about["optimizer"] = optimizer_record(optimizer)
        objects = group_objects(optimizer)
        return Contents(about, tied_names(program), objects, buffers.saved(), optimizer.state)

    def own(self, optimizer: torch.optim.Optimizer, site: str) -> NamedOptimizer:
        """Return the optimizer; PlanError for one that is not of this model."""
        if isinstance(optimizer, NamedOptimizer):
            held = {id(params) for params in optimizer.binding.ranks}
            if any(id(rank.params) in held for rank in self.run.started("save", even_unusable=True).here):
                return optimizer
        fact = f"is {a_type(optimizer)} over other tensors than those of this model"
        raise PlanError(f"{site}(optimizer=)", fact, "one that pm.optimizer(...) has made")

    def _opened(
        self, folder: Path, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any], strict: bool
    ) -> Opened:
        """Open a checkpoint and check it against the model, the optimizer, and `extra`."""
        program = self.run.program
        tied = [spec.aliases for spec in program.params if len(spec.aliases) > 1]
        checkpoint = open_any(folder).named(tied)
        manifest = checkpoint.manifest
        names = check_model(checkpoint, program, self.run.buffers.values, strict)
        saved, takes = manifest.optimizer, False
        if optimizer is not None:
            if saved is None:
                fact = f"{checkpoint.path} has no state of an optimizer"
                raise PlanError(LOAD, fact, "pm.load(folder) without optimizer=, to continue with a new one")
            check_optimizer_state(program, manifest)
            own = self.own(optimizer, LOAD)
            check_optimizer(own, saved, strict)
            takes = takes_state(own, saved)
        elif saved is not None and strict:
            fact = f"{checkpoint.path} has the state of {with_article(saved['class'])}, which would be lost"
            raise PlanError(LOAD, fact, "optimizer=pm.optimizer(...); or strict=False for the weights alone")
        # Another program's has neither.
        content: Mapping[str, Any] = {"extra": {}, "random": None}
        if EXTRA in manifest.files:
            data = read_checked(checkpoint.path, manifest, EXTRA)
            content = read_extra(data, str(checkpoint.path / EXTRA))
        check_extra(content, extra, self._place())
        return Opened(checkpoint, LoadResult(*names), content, takes)

    def warn_of_gradients(self, site: str, what: str) -> None:
        """Warn once at each site where gradients wait for an `optimizer.step()`, as between steps that add up."""
        ranks = self.run.started("save", even_unusable=True)
        if site in self._told_gradients or not any(rank.params.has_unused_gradients for rank in ranks.here):
            return
        self._told_gradients.add(site)
        if ranks.has_rank_0:
            text = f"{site}: there are gradients that no optimizer.step() has used, and {what}"
            warnings.warn(f"{text}; num_microbatches= accumulates within a step", stacklevel=4)

    def _place(self) -> Place:
        run = self.run
        return Place(run.rank, run.options.mesh.size, *run.share) if run.is_process else Place(0, 1, 0, 1)

    def _read_buffers(self, checkpoint: Checkpoint, ranks: RunningRanks) -> dict[str, torch.Tensor]:
        """Return the buffers that a checkpoint brings: rank 0 reads them."""
        known = {name: x for name, x in self.run.buffers.values.items() if name in checkpoint.names}

        def run(rank: Rank) -> dict[str, torch.Tensor]:
            reader = checkpoint.reader()
            read = agree(
                rank.world, LOAD, lambda: {n: reader.whole(n) for n in known if rank.world.rank == 0}
            )
            values = {}
            for name, own in known.items():
                x = read.get(name, own).to(rank.world.device, own.dtype)
                values[name] = rank.world.everyone().broadcast(x, f"load {name}").to(own.device)
            return values

        return self.run.buffers.values_of(ranks.run(LOAD, run))

    def _go_on(
        self,
        found: Opened,
        optimizer: torch.optim.Optimizer | None,
        extra: Mapping[str, Any],
        ranks: RunningRanks,
    ) -> None:
        """Set everything but the tensors of the model: the settings of groups, `steps`, losses, random numbers, `extra`."""
        manifest, clock = found.checkpoint.manifest, self.run.clock
        if isinstance(optimizer, NamedOptimizer) and manifest.optimizer is not None:
            set_groups(optimizer, manifest.optimizer)
        clock.steps = int(manifest.about.get("steps", clock.steps))
        clock.losses.clear()
        clock.losses.extend(
            torch.tensor(loss, dtype=torch.float64, device="cpu") for loss in manifest.about.get("losses", ())
        )
        restore_extra(found.extra, extra, self._place(), ranks.here[0].world.device)

    def fingerprint(self) -> str:
        """Return 64 bits of all stored parameters, as text. Collective.

        The same on every mesh, for the same values: one flipped bit, or two rows in each other's place, change it.
        `fingerprint_of_values(dict(model.named_parameters()))` of autoptd.runtime.params.fingerprint is that of one device.
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
        run.clock.exchanges += 1
        # Buffers first: if they are refused, no parameter has changed yet.
        brought = run.buffers.values_of(state_dict)
        self._sizes.hold_to(brought)
        with run.overwriting("load_state_dict", brought):
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
        self._adapters.check_folder("pm.save_pretrained")
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


__all__ = ["LoadResult", "State"]
