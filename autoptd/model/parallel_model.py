"""What `parallelize` returns: the user's model, running on t*p*d ranks.

In: a program, options, and the model's state dict; or a compiler, for the arguments of the first step. Out:
an object with the training loop's verbs, under the model's own parameter names. Its parts have names:
`state`, `checkpoints`, `sizes`, `adapters`, `clock`. Calls marked *collective* are made by all ranks.

    pm = ParallelModel(program, options, model.state_dict())
    opt = pm.optimizer(torch.optim.AdamW, lr=3e-4)
    loss = pm.step(*pm.local_batch(x, y)); pm.clip_grad_norm_(1.0); opt.step(); opt.zero_grad()

`INSTEAD` lists attributes that scripts expect of an `nn.Module`, of DDP or of a trainer, and the calls to use
instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, ParamSpec, Self, TypeVar

import torch
from torch import nn

from autoptd.errors import PlanError
from autoptd.ir.mesh import Coordinate
from autoptd.model.adapters import Adapters
from autoptd.model.checkpointer import Checkpointer
from autoptd.model.checkpoints import Checkpoints
from autoptd.model.measurements import Draw, Measurements
from autoptd.model.run import Clock, ModelCompiler, Run
from autoptd.model.sizes import Programs
from autoptd.model.state import State
from autoptd.model.steps import Calls, Steps
from autoptd.model.updates import Updates
from autoptd.options import Options
from autoptd.program.program import Program
from autoptd.program.sources import FolderFormat, Source

P = ParamSpec("P")
R = TypeVar("R")


def part_verb(part: str, verb: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return a method that calls `verb` of a model's part."""

    @wraps(verb)
    def call(self: ParallelModel, *args: P.args, **kwargs: P.kwargs) -> R:
        return verb(getattr(self, part), *args, **kwargs)

    return call


_MODES = "pm.step(...) trains in the modes that modules had at parallelize, pm.eval_step(...) evaluates in eval mode"
_STEP = "loss = pm.step(*pm.local_batch(x, y)): forward and backward; without gradients pm.eval_step(...)"
_DEVICE = "parallelize(..., device=...), and under torchrun each rank's own GPU"
_DTYPE = "parallelize(..., precision='bf16-mixed'), or the model in this dtype before parallelize"
_MODEL = "the model that was handed to parallelize, whose modules do not change"
_TRAINER = "for a Trainer of transformers: autoptd.integrations.transformers.Trainer(model, args, parallel={'t': 2, 'p': 2})"
_BEFORE = "call it on the model, before parallelize"
_WEIGHTS = "weights = pm.state_dict() on every rank, and on rank 0 model.load_state_dict(weights), and then the model itself"
INSTEAD = {
    **dict.fromkeys(("train", "eval", "training"), _MODES),
    **dict.fromkeys(("forward", "backward", "loss", "train_step", "train_batch", "training_step"), _STEP),
    **dict.fromkeys(("validation_step", "eval_batch", "evaluate"), "pm.eval_step(*pm.local_batch(x, y))"),
    **dict.fromkeys(("cuda", "cpu", "to_empty", "device"), _DEVICE),
    # transformers.Trainer(model=pm), and accelerator.unwrap_model(pm).
    "to": f"{_DEVICE}; {_TRAINER}",
    "_modules": f"leave pm out of accelerate, which would save no weights; {_TRAINER}",
    **dict.fromkeys(("half", "float", "double", "bfloat16", "type", "dtype"), _DTYPE),
    **dict.fromkeys(("children", "named_children", "module", "config"), _MODEL),
    # DDP and FSDP ask for them.
    **dict.fromkeys(
        ("modules", "named_modules"), f"{_MODEL}; DDP and FSDP are left out: d= makes the replicas"
    ),
    **dict.fromkeys(("requires_grad_", "register_forward_hook", "register_buffer", "apply"), _BEFORE),
    **dict.fromkeys(("generate", "predict", "push_to_hub", "merge_and_unload", "merge_adapter"), _WEIGHTS),
    **dict.fromkeys(("buffers", "named_buffers"), "pm.state_dict(), which has the buffers as well"),
    "configure_optimizers": "pm.optimizer(torch.optim.AdamW, params=groups, lr=...): groups take names, globs, and parameters "
    "of the model",
    "zero_grad": "optimizer.zero_grad() of optimizer = pm.optimizer(torch.optim.AdamW, lr=...)",
    **dict.fromkeys(
        ("no_sync", "require_backward_grad_sync", "set_requires_gradient_sync"),
        "one pm.step of the whole batch; parallelize(..., num_microbatches=) divides it",
    ),
    # A model that torch.compile has wrapped is refused.
    "compile": "parallelize(..., fuse='inductor'), which compiles the stages",
    **dict.fromkeys(
        ("gradient_checkpointing_enable", "set_grad_checkpointing"),
        "parallelize(..., recompute='full' or 'selective'), or the model's own checkpoints, enabled before parallelize",
    ),
    **dict.fromkeys(
        ("register_full_backward_hook", "register_backward_hook"), "change parameter.grad after pm.step"
    ),
    **dict.fromkeys(("clip_grad_norm", "clip_gradients"), "pm.clip_grad_norm_(max_norm)"),
    "clip_grad_value": "pm.clip_grad_value_(clip_value)",
    **dict.fromkeys(
        ("save_checkpoint", "save_state"), "pm.save(folder, optimizer=optimizer), or pm.checkpointer(...)"
    ),
    **dict.fromkeys(
        ("load_checkpoint", "load_state", "from_pretrained"), "pm.load(folder, optimizer=optimizer)"
    ),
}


class WrongCall(PlanError, AttributeError):
    """An attribute that a `ParallelModel` does not have; `hasattr` is False for it."""


class ParallelModel:
    """A model on t*p*d ranks.

    With `backend="local"` they are threads of this process, else this process is one of them.

    `program` is the compiled model, or None: see `lazy`. `state` is the model's state dict: its parameters,
    and persistent buffers. With `weights` the parameters' values are those of this source instead. `compiler`
    compiles for the first `eval_step`, on the layout of the program that trains, and for batches of other
    sizes; without it, evaluation runs that program's forward. `draw` makes the pictures of `show`.
    Collective.
    """

    def __init__(
        self,
        program: Program | None,
        options: Options,
        state: Mapping[str, torch.Tensor],
        *,
        compiler: ModelCompiler | None = None,
        weights: Source | None = None,
        draw: Draw | None = None,
    ) -> None:
        subject = None if compiler is None else compiler.subject
        self.options = options
        # A loop that was written for the model may change it in ways that compiled programs do not follow.
        watched = subject.given if subject is not None and program is None else None
        self.run = Run(options, state, weights, None if subject is None else subject.shared, watched)
        self.sizes = Programs(self.run, compiler, watches=watched is not None)
        self.adapters = Adapters(self.run, None if subject is None else subject.model)
        format = FolderFormat() if subject is None else subject.format
        self.state = State(self.run, self.adapters.check_folder, format)
        self.checkpoints = Checkpoints(self.run)
        names = () if subject is None else subject.arguments
        self._calls = Calls(self.run, names, is_compiled_again=compiler is not None)
        self._steps = Steps(self.run, self.sizes, self._calls)
        self._updates = Updates(self.run)
        self._measurements = Measurements(self.run, self.step, draw)
        if program is not None:
            self.run.start(program)
            self.sizes.begin((), {})

    @classmethod
    def lazy(cls, compiler: ModelCompiler, draw: Draw | None = None) -> Self:
        """Return a model that is compiled by `compile_now`, else at the first step, for the arguments given
        there.

        The user's loop is watched for what compiled programs do not follow.
        """
        subject, options = compiler.subject, compiler.options
        subject.check_values()
        return cls(None, options, subject.state(), compiler=compiler, weights=subject.source, draw=draw)

    def __repr__(self) -> str:
        """Say on a line what runs where."""
        where = "processes" if self.run.is_process else "threads"
        program = repr(self.run.compiled) if self.run.compiled else "compiled at the first step"
        return f"<{type(self).__name__} on {self.options.mesh.size} {where}: {program.strip('<>')}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise PlanError: what copy, deepcopy, pickle and torch.save ask for."""
        fact = "its parameters belong to ranks that run, and it is neither copied nor pickled"
        remedy = (
            "pm.save(folder) and pm.load(folder) for a checkpoint, torch.save(pm.state_dict(), file) for weights; for a copy "
            "or an average (AveragedModel), one of the unmodified model: before each update weights = pm.state_dict() on every "
            "rank, and on rank 0 model.load_state_dict(weights)"
        )
        raise PlanError("copy of a ParallelModel", fact, remedy)

    @property
    def program(self) -> Program:
        """The compiled program."""
        return self.run.program

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs that train, in the order in which their sizes came: with `shapes`, there may be
        several.
        """
        first = self.program
        return tuple(self.sizes.trained) or (first,)

    @property
    def clock(self) -> Clock:
        """The position of the run: its steps, how often they were set, and the last losses."""
        return self.run.clock

    @property
    def steps(self) -> int:
        """How often `step` was called, whose number draws the dropout masks; set it on all ranks to resume a
        run.
        """
        return self.run.clock.steps

    @steps.setter
    def steps(self, count: int) -> None:
        self.run.started("steps")
        self.run.clock.steps = count

    @property
    def coordinate(self) -> Coordinate:
        """This rank's place on the mesh; rank 0's in local."""
        return self.options.mesh.coordinate(self.run.rank)

    @property
    def rank(self) -> int:
        """This process's rank: 0 prints and logs. 0 in local, too."""
        return self.run.rank

    @property
    def share(self) -> tuple[int, int]:
        """Which rows of a global batch `step` takes here: (number of the replica, how many there are); (0, 1)
        in local.
        """
        return self.run.share

    def close(self) -> None:
        """Stop the ranks (threads, or the process group if it was made here); no call may follow."""
        self.run.loop.close()
        if self.run.ranks is not None:
            self.run.ranks.close()

    # checkpoints, weights and adapters

    save = part_verb("checkpoints", Checkpoints.save)
    load = part_verb("checkpoints", Checkpoints.load)
    fingerprint = part_verb("state", State.fingerprint)
    state_dict = part_verb("state", State.state_dict)
    load_state_dict = part_verb("state", State.load_state_dict)
    save_pretrained = part_verb("state", State.save_pretrained)
    gradients = part_verb("state", State.gradients)
    save_adapter = part_verb("adapters", Adapters.save)
    load_adapter = part_verb("adapters", Adapters.load)
    on_overwrite = part_verb("run", Run.on_overwrite)

    # training

    optimizer = part_verb("_updates", Updates.optimizer)
    optimizer_state_dict = part_verb("_updates", Updates.optimizer_state_dict)
    load_optimizer_state_dict = part_verb("_updates", Updates.load_optimizer_state_dict)
    clip_grad_norm_ = part_verb("_updates", Updates.clip_grad_norm_)
    clip_grad_value_ = part_verb("_updates", Updates.clip_grad_value_)
    local_batch = part_verb("_calls", Calls.local_batch)
    compile_now = part_verb("_steps", Steps.compile_now)
    step = part_verb("_steps", Steps.step)
    eval_step = part_verb("_steps", Steps.eval_step)
    check_ranks = part_verb("_steps", Steps.check_ranks)

    # measurements and pictures

    measured_step = part_verb("_measurements", Measurements.measured_step)
    memory = part_verb("_measurements", Measurements.memory)
    record = part_verb("_measurements", Measurements.record)
    show = part_verb("_measurements", Measurements.show)

    @property
    def loss_scale(self) -> float | None:
        """The loss scale of the next step with precision="fp16"; else None."""
        return None if self.run.loss_scale is None else self.run.loss_scale.value

    def checkpointer(
        self,
        folder: str | Path,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        *,
        every: int | str,
        mtbf: float | None = None,
        keep: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Checkpointer:
        """Return a checkpointer, which saves the run every few steps, keeps the last `keep` checkpoints, and
        resumes.

        For a `with` block; call its `step(loss)` after every training step. See `autoptd.model.checkpointer`.
        Collective. With `every="auto"` by Young's rule: every sqrt(2 * what a save takes, as measured *
        `mtbf`), where `mtbf` is the mean hours between two faults of the whole job.
        """
        return Checkpointer(
            self.checkpoints,
            self._steps.compare_copies,
            folder,
            optimizer,
            every=every,
            mtbf=mtbf,
            keep=keep,
            extra=extra,
        )

    # parameters

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (first original name, local tensor) of the parameters of this rank, number of dims kept.

        In local: those of all ranks, one rank after the other, so that a loop over them changes every rank. A
        name comes once for every rank that has a part or a copy: a loop that keeps state keys it by tensor,
        not by name. `rank_parameters` has those of one rank.
        """
        for rank in self.run.started("named_parameters").here:
            yield from rank.params.local.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the tensors of `named_parameters`."""
        return (parameter for _, parameter in self.named_parameters())

    def rank_parameters(self, rank: int) -> dict[str, nn.Parameter]:
        """Return the local parameters of one rank of this process, by first original name."""
        found = [held for held in self.run.started("rank_parameters").here if held.world.rank == rank]
        if not found:
            raise PlanError(
                "rank_parameters", f"rank {rank} is not in this process", "a rank of this process"
            )
        return dict(found[0].params.local)

    # attributes that it does not have

    # Hidden from type checkers, which would accept any attribute.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name in INSTEAD:
                raise WrongCall(f"pm.{name}", "a ParallelModel has no such attribute", INSTEAD[name])
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
            )

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise PlanError: a step is forward and backward at once."""
        raise PlanError(
            "pm(...)", "a ParallelModel cannot be called: its step is forward and backward at once", _STEP
        )
