"""Checkpoints of a running model: `pm.save` and `pm.load`, with the settings of its optimizer.

In: the running ranks. Out: a folder that any mesh loads; the model, the optimizer and other objects in
their saved state. Calls marked *collective* are made by all ranks.

    pm.save("ckpts/step-1000", optimizer=opt, extra={"scheduler": scheduler})
    pm.load("ckpts/step-1000", optimizer=opt, extra={"scheduler": scheduler})
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autoptd.errors import PlanError, with_article
from autoptd.model.run import LoadResult, Run
from autoptd.model.saved_optimizers import Given, Optimizers, as_optimizers
from autoptd.options import settings
from autoptd.program.about import about_program, tied_names
from autoptd.program.program import Program
from autoptd.runtime.checkpoint.commit import path_of
from autoptd.runtime.checkpoint.extra import Place, check_extra, own_state, read_extra, restore_extra
from autoptd.runtime.checkpoint.manifest import EXTRA, read_checked
from autoptd.runtime.checkpoint.read import Checkpoint, open_any
from autoptd.runtime.checkpoint.restore import (
    Restoration,
    check_fingerprint,
    check_model,
    check_optimizer_state,
)
from autoptd.runtime.checkpoint.save import Contents, save_rank
from autoptd.runtime.step.launch import Rank, RunningRanks, check_same_source
from autoptd.runtime.world.agree import agree, attempted

SAVE, LOAD = "pm.save", "pm.load"


class Opened(NamedTuple):
    """A checkpoint that was checked, and its content besides tensors of the model."""

    checkpoint: Checkpoint
    names: LoadResult
    extra: Mapping[str, Any]
    takes_state: bool


class Checkpoints:
    """Saves and loads a running model."""

    def __init__(self, run: Run) -> None:
        self.run = run
        # The calls that have warned of unused gradients.
        self._warned: set[str] = set()
        # The description of a program, which is computed once.
        self._about: tuple[Program, dict[str, Any]] | None = None

    def save(
        self,
        folder: str | Path,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a checkpoint into `folder`, which any mesh loads; return when it is complete. Collective.

        It has the stored parameters, persistent buffers, the state of `optimizer` (one, or a list), `steps`, the
        loss scale, random numbers, and of each object in `extra` (schedulers, loaders) its `state_dict`; no gradients.
        Whenever the run ends, `folder` holds the checkpoint that it had before, or this one. It is a folder
        of torch.distributed.checkpoint as well. PlanError or RuntimeFault on all ranks if one cannot write.
        """
        ranks = self.run.settled("save")
        self.warn_of_gradients(SAVE, "no checkpoint has them: save after optimizer.step()")
        first = ranks.here[0].world.rank

        def prepare() -> tuple[Contents, bytes]:
            made = self.own(optimizer, SAVE)
            if made is not None:
                made.warn_of_others(self.run.optimizers.values(), (extra or {}).values())
            contents = self.contents(made).with_losses(self.run.clock.losses)
            return contents, own_state(extra or {}, ranks.here[0].world.device)

        # Once for all ranks of this process; if it raises, all ranks raise the same.
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
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        extra: Mapping[str, Any] | None = None,
        strict: bool = True,
    ) -> LoadResult:
        """Load a checkpoint, of any mesh, and resume from it. Collective.

        Takes what `save` takes. Everything is checked before anything is changed: PlanError for another
        model, another optimizer, or files that are not whole. With strict=False, what fits is loaded.
        RuntimeFault where bytes of a file were changed: the model then has to load another checkpoint before
        it goes on.
        """
        run = self.run
        ranks = run.started("load", even_unusable=True).unrecorded
        what = "the next ones will be added to them: call optimizer.zero_grad() first"
        self.warn_of_gradients(LOAD, what)
        found = run.agreed(LOAD, lambda: self._opened(path_of(folder, LOAD), optimizer, extra or {}, strict))
        ranks.run(LOAD, lambda rank: check_same_source(found.checkpoint, rank.world))
        optimizers = self.own(optimizer, LOAD) if found.takes_state else None
        state = None if optimizers is None else optimizers.state()
        brought = self._read_buffers(found.checkpoint, ranks)

        def spread(rank: Rank) -> None:
            homes = {} if optimizers is None else optimizers.homes(rank.world.rank)
            plan = Restoration(found.checkpoint, rank.params, state, homes)
            agree(rank.world, LOAD, plan.read)
            plan.spread()

        with run.overwriting(LOAD, brought, f"loading {str(folder)!r}"):
            run.clock.exchanges += 1
            ranks.run(LOAD, spread)
            ranks.run(LOAD, lambda rank: check_fingerprint(found.checkpoint, rank.params))
            if optimizers is not None and state is not None:
                optimizers.set_state(state)
            self._resume(found, optimizers, extra or {}, ranks)
        return found.names

    def contents(self, optimizers: Optimizers | None) -> Contents:
        """Return the description of the run, and the content besides parameters."""
        program, buffers = self.run.program, self.run.buffers
        # Once per program: a save must not wait for it.
        if self._about is None or self._about[0] is not program:
            asked = {
                key: str(value) for key, value in settings(self.run.options).items() if value is not None
            }
            self._about = (program, {**about_program(program), "options": asked})
        about = {"steps": self.run.clock.steps, **self._about[1], "buffers": list(buffers.values)}
        if optimizers is None:
            return Contents(about, tied_names(program), buffers=buffers.saved())
        about["optimizer"] = optimizers.record()
        homes = {rank.world.rank: optimizers.homes(rank.world.rank) for rank in self._here}
        state = optimizers.state()
        return Contents(about, tied_names(program), optimizers.objects(), buffers.saved(), state, homes)

    def own(self, given: Given, site: str) -> Optimizers | None:
        """Return one or several optimizers; None for none, PlanError for one that is not of this model."""
        return as_optimizers(given, {id(rank.params) for rank in self._here}, site)

    @property
    def _here(self) -> list[Rank]:
        return self.run.started("save", even_unusable=True).here

    def _opened(self, folder: Path, optimizer: Given, extra: Mapping[str, Any], strict: bool) -> Opened:
        """Open a checkpoint and check it against the model, the optimizer, and `extra`."""
        program = self.run.program
        tied = [spec.aliases for spec in program.params if len(spec.aliases) > 1]
        checkpoint = open_any(folder).named(tied)
        manifest = checkpoint.manifest
        names = check_model(checkpoint, program, self.run.buffers.values, strict)
        saved, takes = manifest.optimizer, False
        if (own := self.own(optimizer, LOAD)) is not None:
            if saved is None:
                fact = f"{checkpoint.path} has no state of an optimizer"
                raise PlanError(LOAD, fact, "pm.load(folder) without optimizer=, to continue with a new one")
            check_optimizer_state(program, manifest)
            own.check(saved, strict, LOAD)
            takes = own.takes_state(saved, LOAD)
        elif saved is not None and strict:
            fact = f"{checkpoint.path} has the state of {with_article(saved['class'])}, which would be lost"
            raise PlanError(LOAD, fact, "optimizer=pm.optimizer(...); or strict=False for the weights alone")
        # A checkpoint of another program has neither.
        content: Mapping[str, Any] = {"extra": {}, "random": None}
        if EXTRA in manifest.files:
            data = read_checked(checkpoint.path, manifest, EXTRA)
            content = read_extra(data, str(checkpoint.path / EXTRA))
        check_extra(content, extra, self._place())
        return Opened(checkpoint, LoadResult(*names), content, takes)

    def warn_of_gradients(self, site: str, what: str) -> None:
        """Warn once per site of gradients that no `optimizer.step()` has used, as when a loop accumulates
        them.
        """
        ranks = self.run.started("save", even_unusable=True)
        if site in self._warned or not any(rank.params.has_unused_gradients for rank in ranks.here):
            return
        self._warned.add(site)
        if ranks.has_rank_0:
            text = f"{site}: there are gradients that no optimizer.step() has used; {what}"
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

    def _resume(
        self,
        found: Opened,
        optimizers: Optimizers | None,
        extra: Mapping[str, Any],
        ranks: RunningRanks,
    ) -> None:
        """Restore all but tensors: optimizer settings, `steps`, losses, random numbers, `extra`."""
        manifest, clock = found.checkpoint.manifest, self.run.clock
        if optimizers is not None and manifest.optimizer is not None:
            optimizers.resume(manifest.optimizer, LOAD)
        clock.steps = int(manifest.about.get("steps", clock.steps))
        clock.losses.clear()
        clock.losses.extend(
            torch.tensor(loss, dtype=torch.float64, device="cpu") for loss in manifest.about.get("losses", ())
        )
        restore_extra(found.extra, extra, self._place(), ranks.here[0].world.device)
