"""What a Trainer of Lightning would do on the module itself, and ranks would not follow.

In: a Trainer whose run begins. Out: nothing, or one PlanError for all of it.

    check_trainer(trainer)
    check_last_batch(trainer, pieces=4)
"""

from __future__ import annotations

from collections.abc import Iterator

import lightning.pytorch as pl
import torch
from lightning.pytorch import callbacks as known
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torchmetrics import Metric

from autoptd.errors import PlanError, a_type
from autoptd.integrations.around_loops import raise_all
from autoptd.integrations.lightning_steps import TRAINING

# Hooks between forward, backward and update.
HOOKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
METHODS = (*HOOKS, "backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping")
_ON_MODULE = "works on the module, and the ranks train copies of its weights"
_TRAINS = "trains the module itself first"
_IN_ALL = "saves when one process has failed, and all of them have a part of the weights"
CALLBACKS = {
    known.WeightAveraging: _ON_MODULE,
    known.StochasticWeightAveraging: _ON_MODULE,
    known.ModelPruning: _ON_MODULE,
    known.BaseFinetuning: "unfreezes parameters while the ranks train",
    known.GradientAccumulationScheduler: "changes the number of accumulated batches, which is compiled",
    known.LearningRateFinder: _TRAINS,
    known.BatchSizeFinder: _TRAINS,
    known.OnExceptionCheckpoint: _IN_ALL,
}
INSTEAD = "on_train_batch_end, with trainer.strategy.grad_norm and trainer.strategy.ranks"


def check_trainer(trainer: pl.Trainer) -> None:
    """Raise PlanError for all that would not be as in one process."""
    raise_all("lightning.Trainer", [*_of_module(trainer.lightning_module), *_of_trainer(trainer)])


def _of_module(module: pl.LightningModule) -> Iterator[tuple[str, str, str]]:
    if not module.automatic_optimization:
        fact, remedy = "a step of ranks is forward and backward at once", "automatic optimization"
        yield "automatic_optimization=False", fact, remedy
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        yield f"{TRAINING}(dataloader_iter)", "ranks take batches", f"{TRAINING}(batch)"
    for name in METHODS:
        if is_overridden(name, module):
            yield name, _ON_MODULE, INSTEAD
    for name, each in module.named_modules():
        if isinstance(each, Metric):
            fact = f"{a_type(each)} keeps its state in the module"
            yield name, fact, "self.log of a tensor that validation_step computes"


def _of_trainer(trainer: pl.Trainer) -> Iterator[tuple[str, str, str]]:
    if trainer.state.fn == TrainerFn.PREDICTING:
        yield "trainer.predict", "ranks run up to a loss", "trainer.validate, whose step may return tensors"
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        yield "val_check_interval", "the clocks of processes differ", "a number of batches"
    for callback in trainer.callbacks:
        name = type(callback).__name__
        for cls, fact in CALLBACKS.items():
            if isinstance(callback, cls):
                yield name, fact, "leave it out"
        if getattr(callback, "save_on_exception", False):
            yield f"{name}(save_on_exception=True)", _IN_ALL, "every_n_train_steps="
        for hook in HOOKS:
            if is_overridden(hook, callback):
                yield f"{name}.{hook}", _ON_MODULE, INSTEAD


def check_last_batch(trainer: pl.Trainer, pieces: int) -> None:
    """Raise PlanError if an epoch ends with a batch whose rows cannot be divided into this number of pieces."""
    loader = trainer.train_dataloader
    sampler = getattr(loader, "batch_sampler", None)
    is_sized = not isinstance(getattr(loader, "dataset", None), torch.utils.data.IterableDataset)
    if (
        not is_sized
        or type(sampler) is not torch.utils.data.BatchSampler
        or trainer.num_training_batches < len(loader)
    ):
        return
    rows = 0 if sampler.drop_last else len(sampler.sampler) % sampler.batch_size  # type: ignore[arg-type]
    if rows % pieces:
        fact = f"the last batch of an epoch has {rows} rows, which do not divide into {pieces} parts"
        raise PlanError("DataLoader(drop_last=False)", fact, "drop_last=True")
