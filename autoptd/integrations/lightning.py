"""A strategy of Lightning: its Trainer trains an unmodified LightningModule over t*p*d ranks.

In: the keywords of `autoptd.parallelize`. Out: the losses, learning rates, weights and checkpoints of a Trainer in one
process with the same loaders.

    from autoptd.integrations.lightning import Strategy

    trainer = lightning.Trainer(strategy=Strategy(t=2, p=2, d=2), max_steps=1000)
    trainer.fit(module, loader)

Every process reads whole batches, as one process would; its ranks compute their rows of them. The steps of the module
are traced, and compiled for their first batch. `strategy.ranks` is the running model; the module has the
weights from before training until that ends.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoptd.api import ParallelModel, parallelize
from autoptd.errors import PlanError, RuntimeFault
from autoptd.integrations.around_loops import fetch_weights, kept_random_state
from autoptd.options import flat, make_options
from autoptd.runtime.checks.inputs import batch_is_due
from autoptd.runtime.params.fingerprint import fingerprint_of_values
from autoptd.runtime.step.launch import is_launched
from autoptd.runtime.step.microbatches import flatten
from autoptd.runtime.world.rendezvous import init_default_group, join_launch, store_of_group

try:
    import lightning.pytorch as pl
    from lightning.fabric.utilities.apply_func import apply_to_collection
    from lightning.fabric.utilities.data import _auto_add_worker_init_fn
    from lightning.pytorch.plugins import Precision
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

    from autoptd.integrations.lightning_checks import check_last_batch, check_trainer
    from autoptd.integrations.lightning_optimizer import become, optimizer_of_ranks
    from autoptd.integrations.lightning_steps import (
        TRAINING,
        as_forward,
        follow,
        found_of,
        log_values,
        rows_of,
    )
except ImportError as error:
    fact = f"lightning cannot be imported ({error})"
    raise PlanError("autoptd.integrations.lightning", fact, 'pip install "autoptd[lightning]"') from error

PRECISION = {"32-true": None, "bf16-mixed": "bf16-mixed", "bf16-true": "bf16"}
FP16 = "Strategy(precision='fp16-mixed'), with a loss scale of AutoPTD"
OTHERWISE = {"16-mixed": FP16, "16-true": FP16, "64-true": "module.double(), and float64 inputs"}
# What a warning of a trace says of a list in the module.
COLLECTS = "by the forward, which no rank does"


class Strategy(pl.strategies.Strategy):
    """Runs the module of a Trainer on the ranks of `parallelize(module, **parallel)`.

    PlanError before training for what would not be as in one process: see `autoptd.integrations.lightning_checks`. All
    processes make every call.
    """

    def __init__(self, **parallel: Any) -> None:
        super().__init__()
        for name in {"example_inputs", "loss_fn"} & parallel.keys():
            raise PlanError(
                f"Strategy({name}=)", "batches and losses are those of the module", "leave it out"
            )
        if "auto" in (parallel.get("t"), parallel.get("p"), parallel.get("d")):
            raise PlanError('Strategy: "auto"', "there is no batch yet", "autoptd.plan(...), and its degrees")
        join_launch(parallel.get("backend"))
        self.settings = {"shapes": "exact", **parallel}
        self.options = make_options(**flat({k: v for k, v in self.settings.items() if k != "weights"}))
        self.is_process = is_launched(self.options.mesh, parallel.get("backend"))
        # The norm of the gradients of the last update, with gradient_clip_val=; inf does not clip.
        self.grad_norm: torch.Tensor | None = None
        self.pm: ParallelModel | None = None
        # The module that is traced, what its training step logs, and the evaluations that were compiled.
        self._view: Any = None
        self._logged: list[str] = []
        self._evaluated: set[tuple[str, int]] = set()
        # The checkpoint that was read last, and whether the ranks start from it.
        self._read, self._resumes = "", False
        self._zero_grad: Callable[[], None] = lambda: None
        # Whether the module has the weights of the ranks, and whether Lightning would try the validation first.
        self._is_fetched, self._tries = True, False

    @property
    def ranks(self) -> ParallelModel:
        """The running model; PlanError before there is one."""
        if self.pm is None:
            raise PlanError(
                "strategy.ranks", "they start with the first batch", "on_train_batch_end, or later"
            )
        return self.pm

    # processes

    @property
    def root_device(self) -> torch.device:
        """Where batches and logged values are."""
        if not isinstance(self.accelerator, pl.accelerators.CUDAAccelerator):
            return torch.device("cpu")
        return torch.device(self.settings.get("device") or f"cuda:{os.environ.get('LOCAL_RANK', 0)}")

    @property
    def global_rank(self) -> int:
        return int(os.environ["RANK"]) if self.is_process else 0

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.pm is not None:
            self.pm.close()
            self.pm = None
        is_gpu = self.root_device.type == "cuda"
        if is_gpu and not self.is_process:
            self.settings.setdefault("device", str(self.root_device))
        if self.is_process:
            backend = self.settings.setdefault("backend", "nccl" if is_gpu else "gloo")
            # Loggers and callbacks agree on their folders before the ranks start.
            if not dist.is_initialized():
                seconds = self.options.ranks.timeout
                init_default_group(backend, store_of_group(seconds), timedelta(seconds=seconds + 30))

    def barrier(self, name: str | None = None) -> None:
        if self.is_process:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        found = [obj]
        if self.is_process:
            dist.broadcast_object_list(found, src)
        return found[0]

    def reduce(self, tensor: Any, *_: Any, **__: Any) -> Any:
        """Return the value, which all processes have."""
        return tensor

    def all_gather(self, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Return the value, which all processes have."""
        return tensor

    def process_dataloader(self, dataloader: Any) -> Any:
        # Lightning would seed the workers of each process differently.
        _auto_add_worker_init_fn(dataloader, 0)
        return dataloader

    def model_to_device(self) -> None:
        """Leave the module where it is: each rank copies its part of it."""

    # a run

    @property
    def precision_plugin(self) -> Precision:
        return self._plugin

    @precision_plugin.setter
    def precision_plugin(self, given: Precision | None) -> None:
        self._plugin = RankPrecision(self, given or Precision())

    def setup(self, trainer: pl.Trainer) -> None:
        check_trainer(trainer)
        # Before the first update instead: the model is compiled for a batch of training.
        self._tries, trainer.num_sanity_val_steps = self._tries or trainer.num_sanity_val_steps != 0, 0
        self._resumes, self._evaluated, self._is_fetched = False, set(), True
        self._view = as_forward(trainer.lightning_module)
        if not any(isinstance(callback, FetchFirst) for callback in trainer.callbacks):
            trainer.callbacks.insert(0, FetchFirst())
        super().setup(trainer)

    def _start(self, call: Mapping[str, Any]) -> None:
        """Start the ranks for a first batch. Collective."""
        module = self.lightning_module
        with kept_random_state(), self._without_lists(), torch.enable_grad():
            self.pm = parallelize(self._view, example_inputs=call, **self.settings)
        self._is_fetched = False
        if module.trainer.state.fn != TrainerFn.FITTING:
            return
        (given,) = self.optimizers
        self._optimizer = made = optimizer_of_ranks(self.pm, module, given)
        if self._resumes:
            with kept_random_state():
                self.pm.load(folder_of(self._read), made)
        # Lightning does so between forward and backward, which are one here: `training_step` has done it.
        self._zero_grad = made.zero_grad
        vars(made)["zero_grad"] = lambda *_, **__: None
        become(given, made)

    @contextmanager
    def _without_lists(self) -> Iterator[None]:
        """Raise PlanError where a step that is compiled collects values in the module, which ranks do not."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            yield
        for each in caught:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        # The first process looks at the module for all of them.
        if texts := self.broadcast([str(each.message) for each in caught if COLLECTS in str(each.message)]):
            remedy = "return or log it, and collect in on_validation_batch_end or a callback"
            raise PlanError("LightningModule", texts[0], remedy)

    def fetch(self) -> None:
        """Write the trained weights into the module of every process. Collective."""
        if self.pm is not None:
            fetch_weights(self.pm, self.lightning_module, "the module", self.root_device)
            self._is_fetched = True

    def teardown(self) -> None:
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # steps

    def _call(self, step: str, batch: Any, *others: Any) -> dict[str, Any]:
        """Return the arguments of the traced forward, without the number of the batch."""
        follow(self._view, self.lightning_module)
        batch = dict(batch) if isinstance(batch, UserDict) else batch
        parts = self.lightning_module.trainer.accumulate_grad_batches if step == TRAINING else 1
        loader = others[1] if len(others) > 1 else 0
        return {"batch": batch, "step": step, "count": len(others), "loader": loader, "parts": parts}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.pm is None:
            options = self.options
            check_last_batch(
                self.lightning_module.trainer, options.mesh.replicas * (options.num_microbatches or 1)
            )
            self._start(self._training_call(batch))
            self._try_validation()

    def _try_validation(self) -> None:
        """Evaluate a first batch, so that an error of it comes before training. Collective."""
        module = self.lightning_module
        loop = module.trainer.fit_loop.epoch_loop.val_loop
        loaders = loop._combined_loader if self._tries and module.trainer.enable_validation else None
        # A loader, and what a module does to its batches, may draw numbers.
        with kept_random_state():
            for batch, number, loader in () if loaders is None else islice(loaders, 1):
                batch = module._on_before_batch_transfer(self.precision_plugin.convert_input(batch), loader)
                batch = self.batch_to_device(batch, dataloader_idx=loader)
                place = loop._build_kwargs(batch, number, loader if len(loaders.flattened) > 1 else None)
                self._found(
                    "validation_step", *loop._build_step_args_from_hook_kwargs(place, "validation_step")
                )

    def _training_call(self, batch: Any) -> dict[str, Any]:
        step = self.lightning_module.training_step
        return self._call(TRAINING, batch, *[0] * is_param_in_hook_signature(step, "batch_idx", min_args=2))

    def training_step(self, *args: Any, **_: Any) -> torch.Tensor:
        """Run a batch forward and backward, and log what the module does; return the loss, without a graph."""
        module, pm, call = self.lightning_module, self.ranks, self._call(TRAINING, *args)
        number, batch = module.trainer.fit_loop.epoch_loop.batch_idx, call["batch"]
        if number % call["parts"] == 0:
            self._zero_grad()
        if number == 0:
            # A hook may have set what the step reads.
            pm.sizes.check_changes(f"epoch {module.current_epoch}")
        self._check_same(batch)
        loss = pm.step(**pm.local_batch(**call)).to(self.root_device) * call["parts"]
        while not self._view.noted.empty():
            self._logged = self._view.noted.get()
        log_values(module, dict.fromkeys(self._logged, loss), rows_of(batch))
        return loss

    def _check_same(self, batch: Any) -> None:
        """Raise RuntimeFault on all ranks where processes read different batches, from time to time."""
        step = self.ranks.clock.calls + 1
        if not self.is_process or not batch_is_due(step, self.options.ranks.check_every):
            return
        tensors = [x.cpu() for x in flatten((), {"batch": batch})[0] if isinstance(x, torch.Tensor)]
        read: list[Any] = [None] * self.options.mesh.size
        dist.all_gather_object(read, fingerprint_of_values({str(i): x for i, x in enumerate(tensors)}))
        if different := [rank for rank, other in enumerate(read) if other != read[0]]:
            fact = f"ranks {different} read another batch than rank 0"
            raise RuntimeFault(
                f"step {step}", fact, "the same dataset and seed on all; no DistributedSampler"
            )

    def backward(self, closure_loss: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Return the loss: `training_step` has run backward."""
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **keywords: Any) -> Any:
        """Run the closure before the update: ranks hand gradients over before an optimizer would call it."""
        loss, module = closure(), self.lightning_module
        module.clip_gradients(
            optimizer, module.trainer.gradient_clip_val, module.trainer.gradient_clip_algorithm
        )
        optimizer.step(**keywords)
        return loss

    def validation_step(self, *args: Any, **_: Any) -> Any:
        return self._evaluate("validation_step", *args)

    def test_step(self, *args: Any, **_: Any) -> Any:
        return self._evaluate("test_step", *args)

    def _evaluate(self, step: str, *args: Any) -> Any:
        """Log what a step logs of a batch, and return what it returns."""
        return log_values(self.lightning_module, self._found(step, *args), rows_of(args[0]))

    def _found(self, step: str, *args: Any) -> dict[str, torch.Tensor]:
        """Return what a step logs and returns of a batch, under the settings of that. Collective."""
        call, module = self._call(step, *args), self.lightning_module
        form = (step, call["loader"])
        # Programs are compiled as for training.
        with torch.inference_mode(False), torch.no_grad():
            call = apply_to_collection(call, torch.Tensor, trainable)
            if self.pm is None:
                self._start(self._training_call(call["batch"]) if is_overridden(TRAINING, module) else call)
            local = self.ranks.local_batch(**call)
            with nullcontext() if form in self._evaluated else self._without_lists():
                _, found = self.ranks.eval_step(**local, outputs=found_of, everywhere=True)
        self._evaluated.add(form)
        return {how: x.to(self.root_device) for how, x in found.items()}

    # checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights: of the ranks while they train, and only in the first process."""
        return super().lightning_module_state_dict() if self._is_fetched else self.ranks.state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the settings of the optimizer; its state is in the folder of the ranks."""
        return {"param_groups": [{**group, "params": []} for group in optimizer.param_groups]}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        # One with the weights alone has no states; before the first batch, nor have the ranks.
        if "optimizer_states" in checkpoint and self.pm is not None:
            self.ranks.save(folder_of(filepath), self._optimizer)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        folder = folder_of(filepath)
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(folder, ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self._read = checkpoint_path
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take the settings, which callbacks read; the ranks load their state when they start."""
        folder = folder_of(self._read)
        if not folder.is_dir():
            fact = f"there is no {folder.name} with the state of ranks"
            raise PlanError(f"ckpt_path={self._read}", fact, "load_from_checkpoint, for its weights")
        groups = checkpoint["optimizer_states"][0]["param_groups"]
        for group, saved in zip(self.optimizers[0].param_groups, groups, strict=True):
            group.update({key: x for key, x in saved.items() if key != "params"})
        self._resumes = True


class FetchFirst(pl.Callback):
    """Lets other callbacks, and the hook of the module, find the trained weights when training ends."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.strategy.fetch()


class RankPrecision(Precision):
    """The precision of the ranks in place of Lightning's, which would act on the module."""

    def __init__(self, strategy: Strategy, given: Precision) -> None:
        site = f"Trainer(precision={given.precision!r})"
        if given.precision not in PRECISION:
            remedy = OTHERWISE.get(given.precision, f"one of {', '.join(map(repr, PRECISION))}")
            raise PlanError(site, "ranks do not compute as Lightning does with it", remedy)
        wanted = PRECISION[given.precision]
        if wanted and strategy.settings.setdefault("precision", wanted) != wanted:
            raise PlanError(
                site, f"is not Strategy(precision={strategy.settings['precision']!r})", "one of them"
            )
        self.strategy, self.precision, self.convert_input = strategy, given.precision, given.convert_input

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        self.strategy.grad_norm = self.strategy.ranks.clip_grad_norm_(clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        self.strategy.ranks.clip_grad_value_(clip_val)


def trainable(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor that autograd can use: those of trainer.validate are made in inference mode."""
    return x.clone() if x.is_inference() else x


def folder_of(checkpoint: Any) -> Path:
    """Return the folder with the exact state of ranks that belongs to a checkpoint of Lightning."""
    # A link, such as last.ckpt, has that of its target.
    path = Path(checkpoint).resolve()
    return path.with_name(f"{path.name}.ranks")
