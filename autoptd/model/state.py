"""The state of a running model: full tensors by the model's own names, folders of weights, checkpoints.

In: the ranks of this process. Out: state dicts and gradients; a folder of Hugging Face's format; checkpoints that any mesh
reads. Calls marked *collective* are made by all ranks.

    pm.save("ckpts/step-1000", optimizer=opt, extra={"scheduler": scheduler})
    pm.load("ckpts/step-1000", optimizer=opt, extra={"scheduler": scheduler})
    pm.state_dict()["lm_head.weight"]
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autoptd.errors import PlanError, a_type, with_article
from autoptd.model.started_model import StartedModel
from autoptd.runtime.checkpoint import check
from autoptd.runtime.checkpoint.commit import path_of
from autoptd.runtime.checkpoint.extra import Place, check_extra, own_state, read_extra, restore
from autoptd.runtime.checkpoint.foreign import open_any
from autoptd.runtime.checkpoint.groups import (
    check_optimizer,
    group_objects,
    optimizer_record,
    set_groups,
    takes_state,
    warn_of_others,
)
from autoptd.runtime.checkpoint.manifest import EXTRA, read_checked
from autoptd.runtime.checkpoint.read import Checkpoint
from autoptd.runtime.checkpoint.restore import Restoration, agree, attempted
from autoptd.runtime.checkpoint.save import Contents, about_program, save_rank, tied_names, with_losses
from autoptd.runtime.checks import copies as check_copies
from autoptd.runtime.checks import settings as check_settings
from autoptd.runtime.checks import state as check_state
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
from autoptd.runtime.step.model_buffers import LOAD_THEM_BEFORE, copy_buffers

SAVE, LOAD = "pm.save", "pm.load"


class LoadResult(NamedTuple):
    """Names that a state dict lacked, and names that it had too many; both empty when strict."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Opened(NamedTuple):
    """A checkpoint that was checked, and what it holds beside tensors of the model."""

    checkpoint: Checkpoint
    names: LoadResult
    extra: Mapping[str, Any]
    takes_state: bool


class StatefulModel(StartedModel):
    """A running model whose state is saved and loaded."""

    @property
    def steps(self) -> int:
        """How often `step` was called, whose number draws the dropout masks; set it on all ranks to resume a run."""
        return 0 if self._ranks is None else self._ranks.here[0].executor.steps

    @steps.setter
    def steps(self, count: int) -> None:
        if not hasattr(count, "__index__") or count < 0:
            raise PlanError(
                f"pm.steps={count!r}", "is no whole number of at least 0", "for example pm.steps = 0"
            )
        self._set_steps(operator.index(count), self._started("steps"))

    def _set_steps(self, count: int, ranks: RunningRanks) -> None:
        self._jumps += 1
        for rank in ranks.here:
            rank.executor.steps = count

    # checkpoints

    def save(
        self,
        folder: str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a checkpoint into `folder`, which any mesh loads; return when it is complete. Collective.

        It has the parameters as they are stored, persistent buffers, the state of `optimizer`, `steps`, the loss scale,
        random numbers, and of each object in `extra` (schedulers, loaders) its `state_dict`; no gradients. Whenever the
        run ends, `folder` holds the checkpoint that it had before, or this one. It is a folder of
        torch.distributed.checkpoint as well. PlanError or RuntimeFault on all ranks if one cannot write.
        """
        ranks = self._settled("save")
        self._warn_of_gradients(SAVE, ranks, "no checkpoint has them: save after optimizer.step()")
        first = ranks.here[0].world.rank

        def prepare() -> tuple[Contents, bytes]:
            made = None if optimizer is None else self._own(optimizer, SAVE)
            if made is not None:
                warn_of_others(made, self._living_optimizers(), (extra or {}).values())
            return with_losses(self._contents(made), self._losses), own_state(
                extra or {}, ranks.here[0].world.device
            )

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
        """Load a checkpoint, of any mesh, and go on where it was saved. Collective.

        Takes what `save` takes. Everything is checked before anything is changed: PlanError for another model, another
        optimizer, or files that are not whole. With strict=False, what fits is loaded. RuntimeFault where bytes of a file
        were changed: the model then has to load another checkpoint before it goes on.
        """
        ranks = self._started("load", even_unusable=True).unrecorded
        what = "they stay, and the next ones are added: call optimizer.zero_grad() first"
        self._warn_of_gradients(LOAD, ranks, what)
        opened = attempted(lambda: self._opened(path_of(folder, LOAD), optimizer, extra or {}, strict))
        found = ranks.run(LOAD, lambda rank: agree(rank.world, LOAD, opened))
        ranks.run(LOAD, lambda rank: check_same_source(found.checkpoint, rank.world))
        optimizer = optimizer if found.takes_state else None
        # Before parameters: if their values are refused, none has changed.
        brought = self._read_buffers(found.checkpoint, ranks)
        self._hold_to(brought, ranks)
        self._note_exchange()
        self._release()
        self._unusable = f"loading {str(folder)!r} did not end"
        self._buffers.load(brought)

        def run(rank: Rank) -> None:
            plan = Restoration(found.checkpoint, rank.params, None if optimizer is None else optimizer.state)
            agree(rank.world, LOAD, plan.read)
            plan.spread()
            for executor in rank.executors:
                copy_buffers(executor.buffers, brought)

        ranks.run(LOAD, run)
        ranks.run(LOAD, lambda rank: check.check_fingerprint(found.checkpoint, rank.params))
        self._go_on(found, optimizer, extra or {}, ranks)
        self._unusable = ""
        return found.names

    def _contents(self, optimizer: NamedOptimizer | None) -> Contents:
        """Return what this process says of the run."""
        program, options = self.program, self.options
        # Of the program once: a save must not wait for it.
        if self._told is None or self._told[0] is not program:
            self._told = (program, about_program(program, options))
        steps = self._started("save").here[0].executor.steps
        about = {"steps": steps, **self._told[1], "buffers": list(self._buffers.values)}
        if optimizer is None:
            return Contents(about, tied_names(program), buffers=self._buffers.saved())
        about["optimizer"] = optimizer_record(optimizer)
        objects = group_objects(optimizer)
        return Contents(about, tied_names(program), objects, self._buffers.saved(), optimizer.state)

    def _own(self, optimizer: torch.optim.Optimizer, site: str) -> NamedOptimizer:
        """Return the optimizer; PlanError for one that is not of this model."""
        if isinstance(optimizer, NamedOptimizer):
            held = {id(params) for params in optimizer.binding.ranks}
            if any(id(rank.params) in held for rank in self._started("save", even_unusable=True).here):
                return optimizer
        fact = f"is {a_type(optimizer)} over other tensors than those of this model"
        raise PlanError(f"{site}(optimizer=)", fact, "one that pm.optimizer(...) has made")

    def _opened(
        self, folder: Path, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any], strict: bool
    ) -> Opened:
        """Open a checkpoint and check it against the model, the optimizer, and `extra`."""
        tied = [spec.aliases for spec in self.program.params if len(spec.aliases) > 1]
        checkpoint = open_any(folder).named(tied)
        manifest = checkpoint.manifest
        names = check.check_model(checkpoint, self.program, self._buffers.values, strict)
        saved, takes = manifest.optimizer, False
        if optimizer is not None:
            if saved is None:
                fact = f"{checkpoint.path} has no state of an optimizer"
                raise PlanError(LOAD, fact, "pm.load(folder) without optimizer=, to go on with a new one")
            check.check_state(self.program, manifest)
            own = self._own(optimizer, LOAD)
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

    def _warn_of_gradients(self, site: str, ranks: RunningRanks, what: str) -> None:
        """Warn once at each site where gradients wait for an `optimizer.step()`, as between steps that add up."""
        if site in self._told_gradients or not any(rank.params.has_unused_gradients for rank in ranks.here):
            return
        self._told_gradients.add(site)
        if ranks.has_rank_0:
            text = f"{site}: there are gradients that no optimizer.step() has used, and {what}"
            warnings.warn(f"{text}; num_microbatches= accumulates within a step", stacklevel=3)

    def _place(self) -> Place:
        mesh = self.options.mesh
        if not self._is_process:
            return Place(0, 1, 0, 1)
        return Place(self._rank, mesh.size, mesh.replica_of(self._rank), mesh.replicas)

    def _read_buffers(self, checkpoint: Checkpoint, ranks: RunningRanks) -> dict[str, torch.Tensor]:
        """Return the buffers that a checkpoint brings: rank 0 reads them."""
        known = {name: x for name, x in self._buffers.values.items() if name in checkpoint.names}

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

        return self._buffers.values_of(ranks.run(LOAD, run))

    def _go_on(
        self,
        found: Opened,
        optimizer: torch.optim.Optimizer | None,
        extra: Mapping[str, Any],
        ranks: RunningRanks,
    ) -> None:
        """Set what is no tensor of the model: the settings of groups, `steps`, losses, random numbers, `extra`."""
        manifest = found.checkpoint.manifest
        if isinstance(optimizer, NamedOptimizer) and manifest.optimizer is not None:
            set_groups(optimizer, manifest.optimizer)
        self._set_steps(int(manifest.about.get("steps", self.steps)), ranks)
        self._losses.clear()
        self._losses.extend(
            torch.tensor(loss, dtype=torch.float64, device="cpu") for loss in manifest.about.get("losses", ())
        )
        restore(found.extra, extra, self._place(), ranks.here[0].world.device)

    def _compare_copies(self) -> None:
        """Raise RuntimeFault on all ranks where copies of parameters or of their state differ, or settings of optimizers.

        Collective.
        """
        states, call = [made.state for made in self._living_optimizers()], self._calls
        ranks = self._started("step").unrecorded
        ranks.run(check_copies.SITE, lambda rank: check_copies.check_copies(rank.params, states, call))
        if self._is_process:
            # By the number in which all ranks made them; ranks as threads share one optimizer.
            made = {number: found for number, ref in enumerate(self._optimizers) if (found := ref())}
            ranks.run(check_copies.SITE, lambda rank: check_settings.check_settings(rank.world, made, call))

    def fingerprint(self) -> str:
        """Return 64 bits of all parameters as they are stored, as text. Collective.

        The same on every mesh, for the same values: one flipped bit, or two rows in each other's place, change it.
        `fingerprint_of_values(dict(model.named_parameters()))` of autoptd.runtime.params.fingerprint is that of one device.
        """
        ranks = self._settled("fingerprint").unrecorded
        return ranks.run("fingerprint", lambda rank: fingerprint_of_model(rank.params))

    # full tensors

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return full CPU tensors under all original names, persistent buffers too, on rank 0 ({} elsewhere).

        Collective.
        """
        ranks = self._settled("state_dict")
        found = ranks.run("state_dict", lambda rank: gather_parameters(rank.params))
        if not ranks.has_rank_0:
            return {}
        # Copies: who changes a state dict must not change the model.
        found |= {name: x.to("cpu", copy=True) for name, x in self._buffers.values.items()}
        # In the model's order.
        return {name: found[name] for name in dict.fromkeys([*self._names, *found])}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True) -> LoadResult:
        """Load full tensors by original names: those of `state_dict` or of the unmodified model.

        Every rank passes all.

        PlanError, and nothing is loaded, where a buffer has other values than the program relies on (a mask
        that was proven causal, and is not read any more): load those into the model, before `parallelize`.
        """
        ranks = self._started("load_state_dict")
        if self._is_process:
            ranks.unrecorded.run(
                check_state.SITE, lambda rank: check_state.check_state(rank.world, state_dict)
            )
        missing, unexpected = check_loaded(self.program, self._buffers.values, state_dict)
        if strict and (missing or unexpected):
            fact = f"missing {missing or 'nothing'}, unexpected {unexpected or 'nothing'}"
            raise PlanError("load_state_dict", fact, "a state dict of this model, or strict=False")
        self._note_exchange()
        self._release()
        # Buffers first: if they are refused, no parameter has changed yet.
        brought = self._buffers.values_of(state_dict)
        self._hold_to(brought, ranks)
        self._buffers.load(brought)

        def load(rank: Rank) -> None:
            load_parameters(rank.params, state_dict)
            for executor in rank.executors:
                copy_buffers(executor.buffers, brought)

        ranks.run("load_state_dict", load)
        return LoadResult(missing, unexpected)

    def _hold_to(self, brought: Mapping[str, torch.Tensor], ranks: RunningRanks) -> None:
        """Make sure that what was proven of buffers holds for other values, by compiling again.

        Else PlanError.

        An evaluation of other values is compiled again at the next `eval_step`.
        """
        self._hold_first_to(brought, ranks)
        self._programs.forget(brought, self.program, ranks)

    def _hold_first_to(self, brought: Mapping[str, torch.Tensor], ranks: RunningRanks) -> None:
        program = self.program
        changed = program.differing(brought)
        if not changed:
            return
        compiler = self._compiler
        if compiler is not None and self._call is not None:
            call, replicas = self._call
            with compiler.subject.holding({**self._buffers.now(ranks), **brought}):
                again = self._followed(compiler.for_training(call, replicas, check=False))
            # The same program came out: only the digests of what was read are new.
            if replace(again, looked_at=()).fingerprint() == replace(program, looked_at=()).fingerprint():
                self._program = replace(program, looked_at=again.looked_at)
                return
        what = "is another model with these values" if compiler is not None else "was compiled for others"
        fact = f"brings other values of {', '.join(changed)}, which were read while compiling: the program {what}"
        raise PlanError("load_state_dict", fact, LOAD_THEM_BEFORE)

    def save_pretrained(self, folder: str | Path, max_shard_size: int | str = "5GB") -> None:
        """Write the model as Hugging Face's `save_pretrained` does: safetensors under the original names, and
        its config.

        Files hold at most `max_shard_size` bytes; rank 0 writes them, and holds one at a time. What an
        earlier save wrote there stays complete until this one is. RuntimeFault on all ranks when rank 0
        cannot write; PlanError for a model with adapters, see `save_adapter`. Collective.
        """
        limit = parse_size(max_shard_size)
        if self._adapters is not None:
            self._adapters.check_folder("pm.save_pretrained")
        ranks, how, specs = self._settled("save_pretrained"), self._format, self.program.params
        others = {name: x.cpu().contiguous() for name, x in self._buffers.values.items()}
        what = contents_of(specs, others, self._names, how)
        for remark in how.remarks if ranks.here[0].world.rank == 0 else ():
            warnings.warn(f"save_pretrained: {remark}", stacklevel=2)
        ranks.run("save_pretrained", lambda rank: save_folder(rank.params, what, Path(folder), limit, how))

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return full CPU gradients under all original names on rank 0 ({} elsewhere); absent where none.

        Collective.
        """
        return self._started("gradients").run("gradients", lambda rank: gather_gradients(rank.params))


__all__ = ["LoadResult", "StatefulModel"]
