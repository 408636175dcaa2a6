"""What `parallelize` returns: the user's model, running on t*p*d ranks.

In: a program (or a way to compile one from the first step's arguments), options, and the model's state dict. Out: an object
with the training loop's verbs, under the model's own parameter names. Calls marked *collective* are made by all ranks.

    pm = ParallelModel(program, options, model.state_dict())
    opt = pm.optimizer(torch.optim.AdamW, lr=3e-4)
    loss = pm.step(*pm.local_batch(x, y)); pm.clip_grad_norm_(1.0); opt.step(); opt.zero_grad()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from autoptd.compat import tree_map
from autoptd.errors import PlanError
from autoptd.ir.buffers import SharedBuffers
from autoptd.ir.mesh import Coordinate
from autoptd.options import Options
from autoptd.program.program import Picture, Program
from autoptd.runtime import check_batch, check_copies, check_state
from autoptd.runtime.batch import CallForm, check_call, cut, flatten, take_rows
from autoptd.runtime.devices import device_of_ranks
from autoptd.runtime.gradients import clip_gradients
from autoptd.runtime.launch import LocalRanks, ProcessRank, Rank, RunningRanks, is_launched, own_rank
from autoptd.runtime.optimizer import make_optimizer
from autoptd.runtime.parameters import check_loaded, gather_gradients, gather_parameters, load_parameters
from autoptd.runtime.read_folder import Folder
from autoptd.runtime.record import Record, recording
from autoptd.runtime.save_pretrained import FolderFormat, contents_of, parse_size, save_folder
from autoptd.runtime.stepclock import StepTimes, measured
from autoptd.runtime.timeline import Span
from autoptd.viz import graph_picture

# Args, kwargs, compare trace and model once?
Compile = Callable[[tuple[Any, ...], dict[str, Any], bool], Program]
# Args, kwargs, the program that trains.
CompileEval = Callable[[tuple[Any, ...], dict[str, Any], Program], Program]
Draw = Callable[[Program, Path, Sequence[Span]], None]
# The model has these buffers meanwhile.
Holding = Callable[[Mapping[str, torch.Tensor]], AbstractContextManager[None]]


def is_local(options: Options) -> bool:
    """Whether all ranks run in this process, so that `step` takes the global batch; PlanError for a world that cannot be."""
    return not is_launched(options.mesh, options.backend)


class LoadResult(NamedTuple):
    """Names that a state dict lacked, and names that it had too many; both empty when strict."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class ParallelModel:
    """A model on t*p*d ranks. With `backend="local"` they are threads of this process, else this process is one of them.

    `program` is the compiled model, or None: see `lazy`. `state` is the model's state dict: its parameters, and persistent
    buffers. With `weights` the parameters' values are those of this folder instead; `format` says how the model is saved as
    one. `compile_eval` compiles for the first `eval_step`, on the layout of the program that trains; without it, evaluation
    runs that program's forward. Both compile the model while it is `holding` the buffers of now. `draw` adds pictures to
    `show`. `arguments` are the names of the model's own, by which a call is bound that passes them in another way than the
    first one. `shared` says which of the model's buffers share their memory. Collective.
    """

    def __init__(
        self,
        program: Program | None,
        options: Options,
        state: Mapping[str, torch.Tensor],
        *,
        compile: Compile | None = None,
        compile_eval: CompileEval | None = None,
        holding: Holding | None = None,
        draw: Draw | None = None,
        weights: Folder | None = None,
        format: FolderFormat | None = None,
        arguments: Sequence[str] = (),
        shared: SharedBuffers | None = None,
    ) -> None:
        self.options = options
        self._is_process = not is_local(options)
        self._arguments = tuple(arguments)
        # Of the compiled call.
        self._form: CallForm | None = None
        # Of `step`: what all ranks have in common, as `steps` may be set.
        self._calls = 0
        self._evaluations = 0
        self._state = {name: x.detach() for name, x in state.items()}
        self._names = list(self._state)
        self._compile, self._compile_eval, self._draw = compile, compile_eval, draw
        self._holding = holding or nullcontext
        # Stands in for the (args, kwargs) that were compiled for.
        self._call: Any = None
        self._weights, self._format = weights, format or FolderFormat()
        self._shared = shared or SharedBuffers()
        self._program: Program | None = None
        self._eval_program: Program | None = None
        self._ranks: RunningRanks | None = None
        # What the state dict holds besides parameters: persistent buffers.
        self._others: dict[str, torch.Tensor] = {}
        # Those of them that were loaded since.
        self._loaded: set[str] = set()
        if program is not None:
            self._start(program)

    @classmethod
    def lazy(
        cls, compile: Compile, options: Options, state: Mapping[str, torch.Tensor], **keywords: Any
    ) -> ParallelModel:
        """Return a model that is compiled by `compile_now`, else at the first step, for the arguments given there."""
        return cls(None, options, state, compile=compile, **keywords)

    def compile_now(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compile for what `step` will take, and start the ranks. Collective."""
        if self._compile is None:
            raise PlanError("compile_now", "there is nothing to compile", "use ParallelModel.lazy")
        self._call = tree_map(_stand_in, (args, kwargs))
        with self._holding(self._state):
            program = self._compile(args, kwargs, True)
        self._start(program)
        self._form = CallForm(self._arguments, len(args), tuple(kwargs))

    # training

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run all microbatches forward and backward; return the detached loss of the global batch (0-d). Collective.

        Takes what `example_inputs` holds: the global batch with `backend="local"`, this replica's rows under torchrun.
        Gradients are added to `parameter.grad` until `zero_grad`. A NaN loss raises RuntimeFault on all ranks, and adds none;
        on CUDA it is seen in the next step, when its own gradients were handed over.
        """
        if torch.is_inference_mode_enabled():
            raise PlanError(
                "pm.step", "inference_mode is on around it: there would be no gradients", "leave it off here"
            )
        program, ranks = self._running(args, kwargs)
        args, kwargs = self._arranged(args, kwargs)
        check_call(program, args, kwargs, ranks.replicas)
        self._calls += 1
        call = self._calls

        def step(rank: Rank) -> torch.Tensor:
            names, replica = rank.executor.inputs, ranks.replica_of(rank)
            batch = cut(program, args, kwargs, names, replica, rank.world.device)
            return rank.executor.step(batch, self.options.nan)

        if check_copies.is_due(call, self.options.check_every):
            ranks.unrecorded.run(check_copies.SITE, lambda rank: check_copies.check_copies(rank.params, call))
        with self._batch_checked(ranks, "step", call, flatten(args, kwargs)[0]):
            return ranks.run("step", step)

    def measured_step(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, tuple[StepTimes, ...]]:
        """`step`, and where its time went on every rank: computing, in collectives, waiting; its peak memory. Collective.

        Steps measured like this take somewhat longer; on CUDA the times are the device's own, by events.
        """

        def step(ranks: RunningRanks) -> torch.Tensor:
            return self.step(*args, **kwargs)

        return measured(self._started("measured_step"), step)

    @property
    def steps(self) -> int:
        """How often `step` was called: its number draws the dropout masks. Set it, on all ranks, when a run is resumed."""
        return self._started("steps").here[0].executor.steps

    @steps.setter
    def steps(self, count: int) -> None:
        for rank in self._started("steps").here:
            rank.executor.steps = count

    def eval_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the loss of the global batch without gradients, the model in eval mode. Collective."""
        trained, ranks = self._running(args, kwargs)
        args, kwargs = self._arranged(args, kwargs)
        if self._eval_program is None and self._compile_eval is not None:
            with self._holding(self._buffers_now(ranks)):
                self._eval_program = self._compile_eval(args, kwargs, trained)
            if self._eval_program is not trained:
                self._attach_evaluator(ranks, self._eval_program)
        program = self._eval_program or trained
        check_call(program, args, kwargs, ranks.replicas)
        self._evaluations += 1

        def evaluate(rank: Rank) -> torch.Tensor:
            names, replica = rank.evaluator.inputs, ranks.replica_of(rank)
            return rank.evaluator.evaluate(cut(program, args, kwargs, names, replica, rank.world.device))

        with self._batch_checked(ranks, "eval_step", self._evaluations, flatten(args, kwargs)[0]):
            return ranks.run("eval_step", evaluate)

    @contextmanager
    def _batch_checked(self, ranks: RunningRanks, call: str, count: int, leaves: Sequence[Any]) -> Iterator[None]:
        """Where it is due, around this process' `count`-th call of its kind: do the ranks of a replica read the same?"""
        # In local there is but one.
        if not self._is_process or not check_batch.is_due(count, self.options.check_every):
            yield
            return

        def start(rank: Rank) -> check_batch.BatchCheck:
            number = rank.executor.steps + 1 if call == "step" else count
            return check_batch.BatchCheck(rank.world, call, number, leaves)

        check = ranks.unrecorded.run(check_batch.SITE, start)
        yield
        ranks.unrecorded.run(check_batch.SITE, lambda rank: check.finish())

    def local_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Cut a global batch to the rows that `step` takes here: this replica's under torchrun, all of them in local.

        Returns the positional arguments as a tuple, or keyword arguments as a dict; given both, the pair of the two:
        `pm.step(*pm.local_batch(x, y))`, `pm.step(**pm.local_batch(ids=x))`.
        """
        if self._is_process:
            args, kwargs = self._arranged(args, kwargs)
            args, kwargs = take_rows(
                self._program, args, kwargs, self.options.mesh.replicas, self.options.mesh.replica_of(self._rank)
            )
        if args and kwargs:
            return args, kwargs
        return kwargs or args

    def optimizer(
        self, cls: type[torch.optim.Optimizer], params: Iterable[Any] | None = None, **keywords: Any
    ) -> torch.optim.Optimizer:
        """Return a real `cls` over the local parameters: learning-rate schedulers work on it. Collective.

        `params` takes names, globs, tensors and (name, tensor) pairs, or group dicts of such; None is all. Elementwise classes
        only. Its `state_dict` speaks original names and full tensors, and is collective. In local it steps all ranks at once.
        Adam, AdamW and SGD take torch's fused form unless `fused=`, `foreach=`, `capturable=` or `differentiable=` is given.
        """
        ranks = self._started("optimizer")

        def run(fn: Callable[[Any], Any]) -> Any:
            return ranks.run("optimizer", lambda rank: fn(rank.params))

        return make_optimizer(cls, [rank.params for rank in ranks.here], run, params, **keywords)

    def optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return `optimizer.state_dict()`: full tensors by original names on rank 0, {} elsewhere. Collective."""
        return optimizer.state_dict()

    def load_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Load what `optimizer_state_dict` returned; every rank passes all of it."""
        optimizer.load_state_dict(dict(state_dict))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the global 2-norm of all gradients, each parameter counted once; return the norm before. Collective."""
        ranks = self._started("clip_grad_norm_")
        return ranks.run("clip_grad_norm_", lambda rank: clip_gradients(rank.params, max_norm, norm_type))

    # parameters and state

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (first original name, local tensor) of the parameters of this rank, number of dims kept.

        In local: those of all ranks, one rank after the other, so that what a loop over them changes is changed on every rank;
        a name comes once for every rank that has a part or a copy. `rank_parameters` has those of one rank.
        """
        for rank in self._started("named_parameters").here:
            yield from rank.params.local.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the tensors of `named_parameters`."""
        return (parameter for _, parameter in self.named_parameters())

    def rank_parameters(self, rank: int) -> dict[str, nn.Parameter]:
        """Return the local parameters of one rank of this process, by first original name."""
        found = [one for one in self._started("rank_parameters").here if one.world.rank == rank]
        if not found:
            raise PlanError("rank_parameters", f"rank {rank} is not in this process", "a rank of this process")
        return dict(found[0].params.local)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return full CPU tensors under all original names, persistent buffers too, on rank 0 ({} elsewhere). Collective."""
        ranks = self._started("state_dict")
        found = ranks.run("state_dict", lambda rank: gather_parameters(rank.params))
        if not ranks.has_rank_0:
            return {}
        found |= {name: x.to("cpu", copy=True) for name, x in self._others.items()}
        # In the model's order.
        return {name: found[name] for name in dict.fromkeys([*self._names, *found])}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True) -> LoadResult:
        """Load full tensors by original names: those of `state_dict` or of the unmodified model. Every rank passes all.

        PlanError, and nothing is loaded, where a buffer has other values than the program relies on (a mask that was proven
        causal, and is not read any more): load those into the model, before `parallelize`.
        """
        ranks = self._started("load_state_dict")
        if self._is_process:
            ranks.unrecorded.run(check_state.SITE, lambda rank: check_state.check_state(rank.world, state_dict))
        missing, unexpected = check_loaded(self.program, self._others, state_dict)
        if strict and (missing or unexpected):
            fact = f"missing {missing or 'nothing'}, unexpected {unexpected or 'nothing'}"
            raise PlanError("load_state_dict", fact, "a state dict of this model, or strict=False")
        buffers = {
            name: x.detach().to(own) for name, own in self._others.items() if (x := state_dict.get(name)) is not None
        }
        buffers = self._shared.complete(buffers)
        self._check_overlaps(buffers)
        self._hold_to(buffers, ranks)
        _copy_buffers(self._others, buffers)
        self._loaded |= buffers.keys()

        def load(rank: Rank) -> None:
            load_parameters(rank.params, state_dict)
            for executor in {rank.executor, rank.evaluator}:
                _copy_buffers(executor.buffers, buffers)

        ranks.run("load_state_dict", load)
        return LoadResult(missing, unexpected)

    def _check_overlaps(self, buffers: Mapping[str, torch.Tensor]) -> None:
        """PlanError for another value of a buffer over which something else lies: the ranks hold copies of both."""
        for name in self._shared.overlaps.keys() & buffers.keys() & self._others.keys():
            if not torch.equal(buffers[name], self._others[name]):
                fact = f"brings another value of {name}, which shares its memory with {self._shared.overlaps[name]}"
                remedy = "load it before: model.load_state_dict(...), then parallelize(model, ...)"
                raise PlanError("load_state_dict", fact, remedy)

    def _hold_to(self, buffers: Mapping[str, torch.Tensor], ranks: RunningRanks) -> None:
        """Make sure that what was proven of buffers holds for other values, by compiling again; PlanError where it does not.

        An evaluation of other values is compiled again when it is next asked for.
        """
        program = self.program
        if self._eval_program is not None and self._eval_program.differing(buffers):
            self._eval_program = None
        changed = program.differing(buffers)
        if not changed:
            return
        if self._compile is not None:
            args, kwargs = self._call
            with self._holding({**self._buffers_now(ranks), **buffers}):
                again = self._compile(args, kwargs, False)
            if replace(again, looked_at=()).fingerprint() == replace(program, looked_at=()).fingerprint():
                self._program = replace(program, looked_at=again.looked_at)
                return
        what = "is another model with these values" if self._compile is not None else "was compiled for others"
        fact = f"brings other values of {', '.join(changed)}, which were read while compiling: the program {what}"
        raise PlanError(
            "load_state_dict", fact, "load them before: model.load_state_dict(...), then parallelize(model, ...)"
        )

    def _buffers_now(self, ranks: RunningRanks) -> dict[str, torch.Tensor]:
        """The model's buffers, as training has them."""
        return self._shared.complete({**self._others, **ranks.here[0].executor.buffers})

    def _attach_evaluator(self, ranks: RunningRanks, program: Program) -> None:
        """Let evaluations run `program`, with the buffers of now. Collective."""
        # Of buffers that were never loaded, and that training does not use, rank 0's values are in the program.
        names = self._loaded | (self._others.keys() & self.program.buffers.keys())
        buffers = {name: x for name, x in self._buffers_now(ranks).items() if name in names}
        if changed := program.differing(buffers):
            fact = f"was compiled for other values of {', '.join(changed)} than were loaded"
            raise PlanError(
                "eval_step", fact, "load them before: model.load_state_dict(...), then parallelize(model, ...)"
            )
        ranks.attach_evaluator(program)
        for rank in ranks.here:
            _copy_buffers(rank.evaluator.buffers, buffers)

    def save_pretrained(self, folder: str | Path, max_shard_size: int | str = "5GB") -> None:
        """Write the model as Hugging Face's `save_pretrained` does: safetensors under the original names, and its config.

        Files hold at most `max_shard_size` bytes; rank 0 writes them, and holds one at a time. What an earlier save wrote there
        stays complete until this one is. RuntimeFault on all ranks when rank 0 cannot write. Collective.
        """
        limit = parse_size(max_shard_size)
        ranks, how, specs = self._started("save_pretrained"), self._format, self.program.params
        others = {name: x.cpu().contiguous() for name, x in self._others.items()}
        what = contents_of(specs, others, self._names, how)
        ranks.run("save_pretrained", lambda rank: save_folder(rank.params, what, Path(folder), limit, how))

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return full CPU gradients under all original names on rank 0 ({} elsewhere); absent where none. Collective."""
        return self._started("gradients").run("gradients", lambda rank: gather_gradients(rank.params))

    # the rest

    @property
    def program(self) -> Program:
        """The compiled program."""
        self._started("program")
        assert self._program is not None
        return self._program

    @contextmanager
    def record(self) -> Iterator[Record]:
        """Record what the ranks of this process do in a `with` block, as it is executed.

        `record.collectives`: every collective and send with its kind, mesh axis, payload bytes, group size, phase, site and
        reason. `record.flops`: matrix products in FLOPs and other operators in elements, by stage, phase and module, and
        whether every tensor rank computes the same. `record.spans`: start and end of every action, on CUDA the
        device's. Steps run slower meanwhile.
        """
        ranks = self._started("record")
        with recording(ranks) as (recorded, record):
            self._ranks = recorded
            try:
                yield record
            finally:
                self._ranks = ranks

    @property
    def coordinate(self) -> Coordinate:
        """This rank's place on the mesh; rank 0's in local."""
        return self.options.mesh.coordinate(self._rank)

    @property
    def _rank(self) -> int:
        """This process's rank; the first one where they are all here."""
        return own_rank() if self._is_process else 0

    def show(self, folder: str | Path | None = None, record: Record | None = None) -> Picture:
        """Return the picture of the graph (of a loaded program, of its stages); notebooks show it.

        With `folder`, write the program and all its pictures there (rank 0 only).
        With `record`, that of a step, its schedule chart and trace have what was executed beside what was simulated.
        """
        program = self.program
        if folder is not None and self.coordinate == Coordinate():
            program.save(folder)
            if self._draw is not None:
                self._draw(program, Path(folder), record.spans if record else ())
        return program.graph() if program.painter else graph_picture(program, "model")

    def close(self) -> None:
        """Stop the ranks (threads, or the process group if it was made here); no call may follow."""
        if self._ranks is not None:
            self._ranks.close()

    def _running(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Program, RunningRanks]:
        """The program and its ranks; compiles for this call if there is no program yet."""
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            fact = "autocast is on around it, and the compiled model does not follow it"
            raise PlanError("pm.step", fact, "leave autocast off; cast the model before parallelize")
        if self._program is None:
            self.compile_now(args, kwargs)
        assert self._program is not None and self._ranks is not None
        self._ranks.check_equal_copies()
        return self._program, self._ranks

    def _arranged(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call in the form of the compiled one, where that is known."""
        return self._form.arrange(args, kwargs) if self._form else (args, kwargs)

    def _start(self, program: Program) -> None:
        options = self.options
        program = self._with_buffers(program)
        if self._is_process:
            start: Callable[..., RunningRanks] = partial(ProcessRank, backend=options.backend)
            device = options.device
        else:
            start = LocalRanks
            device = str(device_of_ranks(self._state.values(), options.device, "local"))
        self._ranks = start(program, self._weights or self._state, device=device, timeout=options.timeout)
        self._program = program
        # The model's own tensors are not needed any more.
        self._state = {}

    def _with_buffers(self, program: Program) -> Program:
        """The program with the state's buffers in it; PlanError where it was compiled for other values."""
        parameters = {name for spec in program.params for name in (spec.name, *spec.aliases)}
        reader = self._weights.reader() if self._weights is not None else None
        for name, x in self._state.items():
            if name in parameters:
                continue
            if x.is_meta and reader is not None and reader.has(name):
                x = reader.whole(name).to(x.dtype)
            self._others[name] = (program.buffers.get(name, x) if x.is_meta else x).clone()
        if changed := program.differing(self._others):
            fact = f"the program was compiled for other values of {', '.join(changed)} than the model has"
            raise PlanError("model", fact, "compile it for this model")
        ours = {name: self._others.get(name, x).to(x.dtype) for name, x in program.buffers.items()}
        return replace(program, buffers=ours)

    def _started(self, what: str) -> RunningRanks:
        if self._ranks is None:
            fact = "the model is compiled at the first step, there are no ranks yet"
            raise PlanError(f"pm.{what}", fact, "pass example_inputs= to parallelize")
        return self._ranks


@torch.no_grad()
def _copy_buffers(into: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    for name in into.keys() & values.keys():
        into[name].copy_(values[name])


def _stand_in(leaf: Any) -> Any:
    """A tensor that a call can be compiled for, without memory."""
    return leaf.new_zeros(()).expand_as(leaf) if isinstance(leaf, torch.Tensor) else leaf
