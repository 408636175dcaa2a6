"""A strategy of Lightning: its Trainer trains an unmodified LightningModule over t*p*d ranks.

In: the keywords of `autoptd.parallelize`. Out: the same losses, learning rates, weights and checkpoints as the Trainer
in one process with the same loader.

    from autoptd.integrations.lightning import Strategy

    trainer = lightning.Trainer(strategy=Strategy(t=2, p=2, d=2), max_steps=1000)
    trainer.fit(module, loader)

Every process reads whole batches, as one process would; its ranks compute their rows of them. `training_step` is traced
as a part of the model, and compiled for the first batch. `strategy.ranks` is the running model; the module has the
weights from before training until it ends.
"""

from __future__ import annotations

import inspect
import os
import shutil
import warnings
from collections import UserDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoptd.api import ParallelModel, parallelize
from autoptd.errors import PlanError, RuntimeFault, a_type
from autoptd.integrations.around_loops import fetch_weights, kept_random_state, raise_all
from autoptd.options import flat, make_options
from autoptd.runtime.checks.inputs import batch_is_due
from autoptd.runtime.params.fingerprint import fingerprint_of_values
from autoptd.runtime.step.launch import is_launched
from autoptd.runtime.world.rendezvous import init_default_group, join_launch, store_of_group

try:
    import lightning.pytorch as pl
    from lightning.pytorch import callbacks as known
    from lightning.pytorch.plugins import Precision
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.model_helpers import is_overridden
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
    from torch.utils._pytree import tree_leaves, tree_map
    from torchmetrics import Metric

    from autoptd.integrations.lightning_steps import TRAINING, as_forward, follow, found_of, log_values, rows_of
except ImportError as error:
    fact = f"lightning cannot be imported ({error})"
    raise PlanError("autoptd.integrations.lightning", fact, 'pip install "autoptd[lightning]"') from error

PRECISION = {"32-true": None, "bf16-mixed": "bf16-mixed", "bf16-true": "bf16"}
# Of optimizers: how an update is computed, which is chosen for the ranks unless it was set.
HOW = ("foreach", "fused", "capturable", "differentiable")
# Hooks that see gradients, or the order of forward, backward and update.
HOOKS = "on_before_zero_grad on_before_backward on_after_backward on_before_optimizer_step".split()
METHODS = [*HOOKS, *"backward optimizer_step optimizer_zero_grad configure_gradient_clipping".split()]
CALLBACKS = {
    known.WeightAveraging: "averages the weights of the module, which ranks do not train",
    known.StochasticWeightAveraging: "averages the weights of the module, which ranks do not train",
    known.GradientAccumulationScheduler: "changes the number of accumulated batches, which is compiled",
    known.BaseFinetuning: "unfreezes parameters during training, which ranks do not follow",
    known.ModelPruning: "masks the weights of the module, which ranks do not train",
    known.LearningRateFinder: "trains a copy of the module first",
    known.BatchSizeFinder: "trains a copy of the module first",
}


class Strategy(pl.strategies.Strategy):
    """Runs the module of a Trainer on the ranks of `parallelize(module, **parallel)`.

    PlanError before training for what would not be as in one process. All processes make every call.
    """

    def __init__(self, **parallel: Any) -> None:
        super().__init__()
        for name in {"example_inputs", "loss_fn"} & parallel.keys():
            raise PlanError(
                f"Strategy({name}=)", "batches and losses are those of the module", "leave it out"
            )
        if "auto" in (parallel.get("t"), parallel.get("p"), parallel.get("d")):
            raise PlanError(
                'Strategy: "auto"', "batches are not known yet", "autoptd.plan(...), and its degrees"
            )
        join_launch(parallel.get("backend"))
        self.settings = {"shapes": "exact", **parallel}
        self.options = make_options(**flat({k: v for k, v in self.settings.items() if k != "weights"}))
        self.is_process = is_launched(self.options.mesh, parallel.get("backend"))
        self.pm: ParallelModel | None = None
        # The norm of all gradients, of the last update that was clipped.
        self.grad_norm: torch.Tensor | None = None
        self._view: Any = None
        # The settings of each self.log of training_step, and the evaluations that were compiled.
        self._logged: list[str] = []
        self._forms: set[tuple[str, Any]] = set()
        # The checkpoint that was read, and whether the first batch resumes from it.
        self._read_from, self._resumes = "", False
        # Whether the module has the weights of the ranks.
        self._is_fetched = True

    @property
    def ranks(self) -> ParallelModel:
        """The running model; PlanError before the first batch."""
        if self.pm is None:
            raise PlanError(
                "Strategy.ranks", "the ranks start with the first batch", "on_train_batch_end, or later"
            )
        return self.pm

    # places

    @property
    def root_device(self) -> torch.device:
        """Where batches and logged values are."""
        if not isinstance(self.accelerator, pl.accelerators.CUDAAccelerator):
            return torch.device("cpu")
        return torch.device(self.settings.get("device") or f"cuda:{os.environ.get('LOCAL_RANK', 0)}")

    @property
    def global_rank(self) -> int:
        """The number of this process."""
        return int(os.environ["RANK"]) if self.is_process else 0

    @property
    def is_global_zero(self) -> bool:
        return self.global_rank == 0

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.pm is not None:
            self.pm.close()
        self.pm = None
        if self.root_device.type == "cuda" and not self.is_process:
            self.settings.setdefault("device", str(self.root_device))
        elif self.is_process:
            backend = self.settings.setdefault(
                "backend", "nccl" if self.root_device.type == "cuda" else "gloo"
            )
            # Before the ranks start, loggers and callbacks agree on their folders.
            if not dist.is_initialized():
                seconds = self.options.ranks.timeout
                init_default_group(backend, store_of_group(seconds), timedelta(seconds=seconds + 30))

    def model_to_device(self) -> None:
        """Leave the module where it is: each rank copies its part of it."""

    def barrier(self, name: str | None = None) -> None:
        if self.is_process:
            dist.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        found = [obj]
        if self.is_process:
            dist.broadcast_object_list(found, src)
        return found[0]

    # Of values that all processes have, as one process would.

    def reduce(self, tensor: Any, *_: Any, **__: Any) -> Any:
        return tensor

    def all_gather(self, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tensor

    @property
    def precision_plugin(self) -> Precision:
        return self._plugin

    @precision_plugin.setter
    def precision_plugin(self, given: Precision | None) -> None:
        self._plugin = RankPrecision(self, given or Precision())

    # a run

    def setup(self, trainer: pl.Trainer) -> None:
        self._check(trainer)
        # The ranks are compiled for the first batch of training.
        trainer.num_sanity_val_steps = 0
        self._resumes, self._forms, self._is_fetched = False, set(), True
        self._view = as_forward(trainer.lightning_module)
        if not any(isinstance(each, FetchFirst) for each in trainer.callbacks):
            trainer.callbacks.insert(0, FetchFirst())
        super().setup(trainer)

    def _check(self, trainer: pl.Trainer) -> None:
        module, found = trainer.lightning_module, []
        if trainer.state.fn == TrainerFn.PREDICTING:
            found.append(
                ("trainer.predict", "ranks run up to a loss", "validation_step, which returns tensors")
            )
        if not module.automatic_optimization:
            found.append(("automatic_optimization=False", "a step is forward and backward at once", "True"))
        if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
            found.append((f"{TRAINING}(dataloader_iter)", "the batch is an argument of ranks", "batch"))
        if getattr(trainer, "_val_check_time_interval", None) is not None:
            found.append(("val_check_interval", "clocks of processes differ", "a number of batches"))
        for name in METHODS:
            if is_overridden(name, module):
                fact = "runs on the module, and gradients and weights are those of the ranks"
                found.append((name, fact, "on_train_batch_end with trainer.strategy.ranks, or .grad_norm"))
        for each in trainer.callbacks:
            name = type(each).__name__
            found += [(name, why, "leave it out") for cls, why in CALLBACKS.items() if isinstance(each, cls)]
            for hook in HOOKS:
                if is_overridden(hook, each):
                    fact = "gradients are those of the ranks"
                    found.append(
                        (f"{name}.{hook}", fact, "on_train_batch_end with trainer.strategy.grad_norm")
                    )
        for name, each in module.named_modules():
            if isinstance(each, Metric):
                fact = f"{a_type(each)} keeps its state in one process"
                found.append((name, fact, "self.log of a tensor that validation_step computes"))
        raise_all("lightning.Trainer", found)

    def _start(self, call: Mapping[str, Any]) -> None:
        """Start the ranks for a first batch. Collective."""
        self._is_fetched = False
        with kept_random_state(), self._without_lists(True), torch.enable_grad():
            self.pm = parallelize(self._view, example_inputs=call, **self.settings)
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._make_optimizer(self.optimizers[0])

    @contextmanager
    def _without_lists(self, is_new: bool) -> Iterator[None]:
        """Raise PlanError where a step that `is_new` collects values in the module, which ranks do not."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            yield
        for each in caught:
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
        texts = [
            str(each.message) for each in caught if "by the forward, which no rank does" in str(each.message)
        ]
        # The first process looks at the module for all of them.
        if is_new and (texts := self.broadcast(texts)):
            remedy = (
                "what the step logs or returns, in on_validation_batch_end, on_train_batch_end or callbacks"
            )
            raise PlanError("LightningModule", texts[0], remedy)

    def _make_optimizer(self, given: torch.optim.Optimizer) -> None:
        """Make the optimizer of configure_optimizers one of the ranks, for all who hold it: schedulers too."""
        names = {id(x): name for name, x in self.lightning_module.named_parameters()}
        groups, cls = [], type(given)
        for group in given.param_groups:
            options = {key: x for key, x in group.items() if key != "params" and (x or key not in HOW)}
            groups.append({**options, "params": [names.pop(id(x), "") for x in group["params"]]})
        trained = dict(self.lightning_module.named_parameters())
        if left := [name for name in names.values() if trained[name].requires_grad]:
            fact = f"{left[0]} and {len(left) - 1} more are trained, and in no group"
            raise PlanError(
                "configure_optimizers", fact, "requires_grad_(False) for these, before trainer.fit"
            )
        if given.state or any("" in group["params"] for group in groups):
            fact = f"returns {a_type(given)} that has state, or tensors which are not the module's"
            raise PlanError("configure_optimizers", fact, "a new optimizer over self.parameters()")
        known = inspect.signature(cls).parameters
        keywords = {key: x for key, x in given.defaults.items() if key in known and (x or key not in HOW)}
        made = self.ranks.optimizer(cls, groups, **keywords)
        if self._resumes:
            with kept_random_state():
                self.ranks.load(folder_of(self._read_from), made)
        self._optimizer, self._zero_grad = made, made.zero_grad
        # Lightning does so between forward and backward, which are one here: `training_step` has done it.
        vars(made)["zero_grad"] = lambda *_, **__: None
        if "step" in vars(given):
            # A scheduler counts its calls.
            vars(made)["step"] = vars(given)["step"]
        given.__class__, given.__dict__ = type(made), vars(made)

    # steps

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.pm is None:
            step = self.lightning_module.training_step
            has_number = is_param_in_hook_signature(step, "batch_idx", min_args=2)
            self._check_last_batch()
            self._start(self._call(TRAINING, batch, batch_idx) if has_number else self._call(TRAINING, batch))

    def _check_last_batch(self) -> None:
        """Raise PlanError if an epoch ends with rows that the ranks cannot divide."""
        trainer = self.lightning_module.trainer
        loader, pieces = (
            trainer.train_dataloader,
            self.options.mesh.replicas * (self.options.num_microbatches or 1),
        )
        sampler = getattr(loader, "batch_sampler", None)
        if type(sampler) is not torch.utils.data.BatchSampler or trainer.num_training_batches < len(loader):
            return
        rows = 0 if sampler.drop_last else len(sampler.sampler) % sampler.batch_size
        if rows % pieces:
            fact = f"the last batch of an epoch has {rows} rows, which do not divide into {pieces} parts"
            raise PlanError("DataLoader(drop_last=False)", fact, "drop_last=True")

    def _call(self, step: str, batch: Any, *others: Any) -> dict[str, Any]:
        """Return the arguments of the traced forward: without the number of a batch, with that of its loader."""
        follow(self._view, self.lightning_module)
        parts = self.lightning_module.trainer.accumulate_grad_batches if step == TRAINING else 1
        batch = dict(batch) if isinstance(batch, UserDict) else batch
        return {
            "batch": batch,
            "step": step,
            "others": tuple(None if not i else x for i, x in enumerate(others)),
            "parts": parts,
        }

    def training_step(self, *args: Any, **_: Any) -> torch.Tensor:
        """Run a batch forward and backward; return its loss, without a graph."""
        module, pm, call = self.lightning_module, self.ranks, self._call(TRAINING, *args)
        if module.trainer.fit_loop.epoch_loop.batch_idx % call["parts"] == 0:
            self._zero_grad()
        self._check_same(call["batch"])
        loss = pm.step(**pm.local_batch(**call)).to(self.root_device) * call["parts"]
        while not self._view.told.empty():
            self._logged = self._view.told.get()
        log_values(module, {how: loss for how in self._logged}, rows_of(call["batch"]))
        return loss

    def backward(self, closure_loss: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Return the loss: `training_step` has run backward."""
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **keywords: Any) -> Any:
        """Run the closure first: gradients of ranks are handed over before an optimizer would call it."""
        module, loss = self.lightning_module, closure()
        limit, how = module.trainer.gradient_clip_val, module.trainer.gradient_clip_algorithm
        module.clip_gradients(optimizer, limit, how)
        optimizer.step(**keywords)
        return loss

    def _check_same(self, batch: Any) -> None:
        """Raise RuntimeFault on all ranks where processes read different batches, from time to time."""
        step = self.ranks.clock.calls + 1
        if not self.is_process or not batch_is_due(step, self.options.ranks.check_every):
            return
        leaves = [x for x in tree_leaves(batch) if isinstance(x, torch.Tensor)]
        read: list[Any] = [None] * self.options.mesh.size
        dist.all_gather_object(read, fingerprint_of_values({str(i): x.cpu() for i, x in enumerate(leaves)}))
        if different := [rank for rank, other in enumerate(read) if other != read[0]]:
            fact = f"ranks {different} read another batch than rank 0"
            raise RuntimeFault(
                f"step {step}", fact, "the same dataset, seed and order on all: no DistributedSampler"
            )

    def validation_step(self, *args: Any, **_: Any) -> Any:
        return self._evaluate("validation_step", *args)

    def test_step(self, *args: Any, **_: Any) -> Any:
        return self._evaluate("test_step", *args)

    def _evaluate(self, step: str, *args: Any) -> Any:
        """Log what a step logs of a batch, and return what it returns."""
        call, module = self._call(step, *args), self.lightning_module
        # Ranks keep what they compute for evaluations, and train later.
        with torch.inference_mode(False), torch.no_grad():
            call = tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, call)
            if self.pm is None:
                self._start({**call, "step": TRAINING} if is_overridden(TRAINING, module) else call)
            form = (step, call["others"])
            with self._without_lists(form not in self._forms):
                local = self.ranks.local_batch(**call)
                found = self.ranks.eval_step(**local, outputs=found_of, everywhere=True)[1]
            self._forms.add(form)
        return log_values(
            module, {how: x.to(self.root_device) for how, x in found.items()}, rows_of(call["batch"])
        )

    # checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights of the ranks, in the first process; of the module when they are not running."""
        is_module = self.pm is None or self._is_fetched
        return super().lightning_module_state_dict() if is_module else self.ranks.state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return the settings of the optimizer; its state is in the folder of the ranks."""
        return {"param_groups": [{**group, "params": []} for group in optimizer.param_groups]}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if "optimizer_states" in checkpoint:
            self.ranks.save(folder_of(filepath), self._optimizer)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        folder = folder_of(filepath)
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(folder, ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self._read_from = checkpoint_path
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take the settings now, which callbacks may read; the ranks load their state when they start."""
        folder = folder_of(self._read_from)
        if not folder.is_dir():
            fact = f"there is no {folder}, with the optimizer's state for ranks"
            raise PlanError(f"ckpt_path={self._read_from}", fact, "load_from_checkpoint, for its weights")
        groups = checkpoint["optimizer_states"][0]["param_groups"]
        for group, saved in zip(self.optimizers[0].param_groups, groups, strict=True):
            group.update({key: x for key, x in saved.items() if key != "params"})
        self._resumes = True

    def fetch(self) -> None:
        """Write the trained weights into the module of every process. Collective."""
        if self.pm is not None:
            fetch_weights(self.pm, self.lightning_module, "the module", self.root_device)
            self._is_fetched = True

    def teardown(self) -> None:
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()


class FetchFirst(known.Callback):
    """Lets other callbacks, and the hook of the module, find the trained weights when training ends."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.strategy.fetch()


class RankPrecision(Precision):
    """The precision of the ranks in place of Lightning's, which would act on the module."""

    def __init__(self, strategy: Strategy, given: Precision) -> None:
        if given.precision not in PRECISION:
            fact = "is not a precision that ranks follow as Lightning computes it"
            remedy = f"{' or '.join(map(repr, PRECISION))}; Strategy(precision='fp16-mixed') has a loss scale of AutoPTD"
            raise PlanError(f"Trainer(precision={given.precision!r})", fact, remedy)
        wanted = PRECISION[given.precision]
        if wanted and strategy.settings.setdefault("precision", wanted) != wanted:
            fact = f"is not Strategy(precision={strategy.settings['precision']!r})"
            raise PlanError(f"Trainer(precision={given.precision!r})", fact, "one of the two")
        self.strategy, self.precision, self.convert_input = strategy, given.precision, given.convert_input

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        self.strategy.grad_norm = self.strategy.ranks.clip_grad_norm_(clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
        self.strategy.ranks.clip_grad_value_(clip_val)


def folder_of(checkpoint: Any) -> Path:
    """Return the folder with the exact state of the ranks that belongs to a checkpoint of Lightning."""
    # A link, such as last.ckpt, has that of its target.
    path = Path(checkpoint).resolve()
    return path.with_name(f"{path.name}.ranks")
