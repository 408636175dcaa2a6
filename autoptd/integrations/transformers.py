"""The Trainer of transformers, over t*p*d ranks: the import and `parallel=` change, the rest of a script does not.

In: what `transformers.Trainer` takes, and the keywords of `autoptd.parallelize` in `parallel`. Out: the same losses,
norms, learning rates, weights and folders as one process of it with `per_device_train_batch_size * d` rows.

    from autoptd.integrations.transformers import Trainer

    trainer = Trainer(model, args, train_dataset=data, parallel={"t": 2, "p": 2, "d": 2})
    trainer.train()

Every process reads whole batches, as one process would, so that padding and random collators are the same; its ranks
compute their rows of them. The batches of one update are one `pm.step`. `trainer.pm` is the running model, and what
callbacks get as `model` in training; `trainer.model` has the weights from before training until it ends.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch

from autoptd.api import ParallelModel, parallelize
from autoptd.errors import PlanError, RuntimeFault, a_type
from autoptd.integrations.accumulated import merged, rows_in, widths_of, with_rows
from autoptd.integrations.around_loops import fetch_weights, kept_random_state, raise_all
from autoptd.integrations.predictions import Predictions, alone_or_all
from autoptd.integrations.training_arguments import (
    PRECISION,
    check_arguments,
    check_parts,
    check_processes,
)
from autoptd.options import flat, make_options
from autoptd.runtime.checks.inputs import batch_is_due
from autoptd.runtime.params.fingerprint import fingerprint_of_values
from autoptd.runtime.params.optimizer import NamedOptimizer

try:
    import accelerate
    import transformers
    from accelerate.data_loader import prepare_data_loader
    from transformers.trainer_utils import seed_worker
except ImportError as error:
    fact = f"transformers and accelerate cannot be imported ({error})"
    raise PlanError("autoptd.integrations.transformers", fact, 'pip install "autoptd[hf]"') from error

COUNT = "num_items_in_batch"
# Of a checkpoint of the Trainer: what `pm.save` writes.
FOLDER = "autoptd"
# What the loop of transformers calls, and the ranks do not.
UNUSED: tuple[str, ...] = ("compute_loss", "compute_loss_context_manager", "autocast_smart_context_manager")
UNUSED += ("_prepare_inputs", "_prepare_input", "_clip_grad_norm", "_get_grad_norm")
# Relative difference of a loss that is computed in two ways.
CLOSE, CLOSE_MIXED = 2e-6, 1e-4


class Trainer(transformers.Trainer):
    """`transformers.Trainer`, whose model runs on the ranks of `parallelize(model, **parallel)`.

    Takes what its parent takes. PlanError before training for what would not be as with one process: see
    `autoptd.integrations.training_arguments`. All processes make every call, as with the parent.
    """

    def __init__(self, *given: Any, parallel: Mapping[str, Any] | None = None, **keywords: Any) -> None:
        # Of the next class, which may be that of another library.
        parts = dict(inspect.signature(super().__init__).bind(*given, **keywords).arguments)
        check_parts(parts)
        args = parts["args"] = self._checked(parts)
        self._check_methods()
        if isinstance(parts.get("model"), ParallelModel):
            fact = "is a ParallelModel already"
            raise PlanError("Trainer(model=)", fact, "the model itself, with parallel={'t': 2, ...}")
        self.settings = settings_of(parallel, args)
        check_processes(args, self.settings.get("backend"))
        self.options = make_options(**flat({k: v for k, v in self.settings.items() if k != "weights"}))
        self.replicas = self.options.mesh.replicas
        self.pm: ParallelModel | None = None
        # The model that `pm` runs, batches of the update to come, and what has been proven of batches.
        self._running: Any = None
        self._waiting: list[Mapping[str, Any]] = []
        self._proven: set[tuple[bool, ...]] = set()
        # Of the evaluation that runs: the function of logits, and whether a loss is gathered next.
        self._preprocess: Callable[[Any, Any], Any] | None = None
        self._is_loss, self._rows = False, 0
        self._predictions: dict[Any, Predictions] = {}
        # Of `model`, when it was last equal to the ranks.
        self._synced = ""
        # A process has one device: without this, several visible GPUs would multiply the batch.
        args._n_gpu = 1
        super().__init__(**parts)
        if args.activation_checkpointing:
            how = dict(args.activation_checkpointing_kwargs or {})
            every = how.pop("every_n_layers", 1)
            self.model.activation_checkpointing_enable(
                activation_checkpointing_kwargs=how or None, every_n_layers=every
            )

    def _checked(self, parts: Mapping[str, Any]) -> Any:
        """Return the training arguments; PlanError for those that the ranks would not obey."""
        args = parts.get("args") or transformers.TrainingArguments(output_dir="tmp_trainer")
        check_arguments(args)
        return args

    def _check_methods(self) -> None:
        changed = [
            name
            for name in UNUSED
            if not getattr(getattr(type(self), name), "__module__", "").startswith(
                ("transformers.", "autoptd.")
            )
        ]
        fact = "is not called: the ranks run the model's own forward"
        remedy = "a model whose forward does it, or a collator"
        raise_all(type(self).__name__, [(name, fact, remedy) for name in changed])

    # the ranks

    def _start(self, loader: Any, count: int) -> ParallelModel:
        """Return the running model; start it for the first `count` batches of a loader. Collective."""
        if self.pm is not None and self._running is self.model:
            self._follow_edits(begins=True)
            return self.pm
        if self.pm is not None:
            self.pm.close()
            # Those of the model before.
            self.optimizer, self.lr_scheduler = None, None
        # As transformers does; models of from_pretrained are in eval mode.
        self.model.train()
        with kept_random_state():
            batches = first_batches(loader, count)
            self.pm = parallelize(self.model, **self.settings)
            items = self._get_num_items_in_batch(batches, torch.device("cpu"))
            self.pm.compile_now((), self._one_batch(batches, items))
        self._running, self._proven = self.model, set()
        self._synced = self._stamp()
        return self.pm

    @property
    def ranks(self) -> ParallelModel:
        """The running model; PlanError before there is one."""
        if self.pm is None:
            raise PlanError("trainer", "the ranks have not started", "trainer.train() or trainer.evaluate()")
        return self.pm

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        kind = self.accelerator.distributed_type.value
        if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
            raise PlanError(
                f"accelerate: {kind}", "parallel= makes the ranks", "torchrun, without its config"
            )
        self.accelerator.__class__ = RankAccelerator

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        """Leave the model where it is: each rank copies its part of it."""

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> InLoop:
        return InLoop(self)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, *others: Any, **more: Any) -> Any:
        self._waiting = []
        self._start(train_dataloader, self.args.gradient_accumulation_steps)
        prepared = super()._prepare_for_training(max_steps, train_dataloader, *others, **more)
        self.callback_handler.model = self.pm
        return prepared

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Return the optimizer of the ranks, with the parent's class, settings and groups. Collective."""
        if self.optimizer is None:
            known = self.optimizer_cls_and_kwargs
            cls, keywords = known or self.get_optimizer_cls_and_kwargs(self.args, self.model)
            decayed = set(self.get_decay_parameter_names(self.model))
            names = [name for name, x in self.model.named_parameters() if x.requires_grad]
            groups = [
                {"params": [n for n in names if n in decayed], "weight_decay": self.args.weight_decay},
                {"params": [n for n in names if n not in decayed], "weight_decay": 0.0},
            ]
            self.optimizer = self.ranks.optimizer(cls, groups, **keywords)
        return self.optimizer

    # batches

    def _get_dataloader(self, dataset: Any, description: str, batch_size: int, **others: Any) -> Any:
        return super()._get_dataloader(dataset, description, batch_size * self.replicas, **others)

    def get_tp_size(self) -> int:
        """Return how many processes see the same batches, by which the parent divides what it counts: all."""
        return self.args.world_size

    def get_total_train_batch_size(self, args: Any) -> int:
        return super().get_total_train_batch_size(args) * self.replicas

    def floating_point_ops(self, inputs: Any) -> float:
        # The parent adds up what the processes have.
        return super().floating_point_ops(inputs) / self.args.world_size

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        seen = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + seen // self.args.world_size

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if 0 < len(batches) < num_batches:
            fact = f"the data ended after {len(batches)} of them, which transformers adds to the next update"
            remedy = "a dataset with a length, or a number of batches that divides"
            raise PlanError(f"gradient_accumulation_steps={num_batches}", fact, remedy)
        return batches, items

    def _one_batch(self, batches: Sequence[Mapping[str, Any]], items: Any) -> dict[str, Any]:
        """Return all batches of an update as one that the ranks can divide, with the count of its labels."""
        if len(batches) > 1 and not self._is_scaled(items):
            fact = "the model does not divide its loss by num_items_in_batch, and a mean of means is another loss"
            remedy = "a larger per_device_train_batch_size with parallel={'num_microbatches': ..., ...}"
            raise PlanError(f"gradient_accumulation_steps={len(batches)}", fact, remedy)
        pad_token = getattr(getattr(self.model, "config", None), "pad_token_id", None) or 0
        parts = self.replicas * int(self.settings.get("num_microbatches") or 1)
        return self._counted(with_rows(merged(batches, pad_token), parts), items)

    def _is_scaled(self, items: Any) -> bool:
        return self.model_accepts_loss_kwargs and items is not None

    def _counted(self, batch: Mapping[str, Any], items: Any) -> dict[str, Any]:
        count = {COUNT: torch.as_tensor(items, device="cpu")} if self._is_scaled(items) else {}
        return {**batch, **count}

    # steps

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Keep a batch until the last one of its update, then run all of them; return the loss of the update
        there.
        """
        self._waiting.append(inputs)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._waiting = self._waiting, []
        batch = self._one_batch(batches, num_items_in_batch)
        pm = self.ranks
        self._check_same(batch)
        self._prove(batches, batch, num_items_in_batch)
        return pm.step(**pm.local_batch(**batch)).to(self.args.device)

    def _check_same(self, batch: Mapping[str, Any]) -> None:
        """Raise RuntimeFault on all ranks where processes read different batches: in the first steps, and
        then from time to time.
        """
        pm = self.ranks
        if self.args.world_size == 1 or not batch_is_due(pm.clock.calls + 1, self.options.ranks.check_every):
            return
        tensors = {name: x.cpu() for name, x in batch.items() if isinstance(x, torch.Tensor)}
        number = int(fingerprint_of_values(tensors), 16) >> 1
        read = self.accelerator.gather(torch.tensor([number], device=self.args.device)).tolist()
        if different := [rank for rank, other in enumerate(read) if other != read[0]]:
            fact = f"ranks {different} read another batch than rank 0"
            raise RuntimeFault(
                f"step {pm.clock.calls + 1}", fact, "the same dataset, seed and collator on all"
            )

    def _prove(self, batches: Sequence[Any], batch: Mapping[str, Any], items: Any) -> None:
        """Raise PlanError where one step of all rows is another loss than the sum over the batches.

        Once for accumulated batches, those of several lengths, and those with rows added: a loss may ignore the
        count of labels, or read padding and rows whose labels are ignored.
        """
        kind = (
            len(batches) > 1,
            rows_in(batch) > sum(map(rows_in, batches)),
            len({tuple(widths_of(other)) for other in batches}) > 1,
        )
        if not any(kind) or kind in self._proven:
            return
        apart = float(sum(self._loss_of(other, items) for other in batches))
        together = float(self._loss_of(batch, items))
        limit = CLOSE_MIXED if self.options.precision else CLOSE
        if not abs(apart - together) <= limit * abs(apart):
            what = "batches that are accumulated" if kind[0] else "added rows with ignored labels"
            what = "batches that are padded to the longest of an update" if kind[2] else what
            fact = f"{what}: the loss in one step is {together:.6g}, and transformers computes {apart:.6g}"
            remedy = "a loss that is a sum over labels / num_items_in_batch; or no accumulation, and dataloader_drop_last=True"
            raise PlanError("Trainer", fact, remedy)
        self._proven.add(kind)

    def _loss_of(self, batch: Mapping[str, Any], items: Any) -> torch.Tensor:
        pm = self.ranks
        return pm.eval_step(**pm.local_batch(**self._counted(batch, items)))

    def _clip_grad_norm(self, model: Any) -> torch.Tensor:
        return self.ranks.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self.ranks.clip_grad_norm_(torch.inf) if grad_norm is None else grad_norm

    # evaluation

    def evaluation_loop(self, dataloader: Any, *given: Any, **keywords: Any) -> Any:
        """Return what the parent returns: the mean loss over rows."""
        has_data = self.train_dataset is not None
        count = self.args.gradient_accumulation_steps if has_data else 1
        if self._running is not self.model:
            self._start(self.get_train_dataloader() if has_data else dataloader, count)
        self._follow_edits()
        self.gather_function = self._of_rows
        # A part of the evaluation that runs on the ranks.
        preprocess, self.preprocess_logits_for_metrics = self.preprocess_logits_for_metrics, None
        self._preprocess = preprocess
        try:
            return super().evaluation_loop(dataloader, *given, **keywords)
        finally:
            self.preprocess_logits_for_metrics = preprocess

    def _of_rows(self, found: Any) -> Any:
        """Return the loss of a batch once per row, as the parent averages over rows; all else is that of all
        rows already.
        """
        if not self._is_loss:
            return found
        self._is_loss = False
        return found[:1].repeat(self._rows)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        """Return loss, logits and labels of a batch with the rows of all replicas; PlanError without labels."""
        has_labels = all(inputs.get(name) is not None for name in self.label_names)
        if not has_labels or not (self.label_names or inputs.get("return_loss", self.can_return_loss)):
            if prediction_loss_only:
                return None, None, None
            fact = f"the batch has no {' or '.join(self.label_names) or 'labels'}, and the ranks run up to the loss"
            raise PlanError("trainer.predict", fact, "labels of -100 where there are none")
        items, self._is_loss = self._get_num_items_in_batch([inputs], self.args.device), True
        self._rows = rows_in(inputs)
        if prediction_loss_only:
            return self._loss_of(inputs, items), None, None
        if ignore_keys is None:
            config = getattr(self.model, "config", None)
            ignore_keys = [] if config is None else getattr(config, "keys_to_ignore_at_inference", ["cache"])
        how, preprocess = (tuple(ignore_keys), tuple(self.label_names)), self._preprocess
        # One function for all batches, which is compiled once.
        outputs = self._predictions.setdefault((*how, id(preprocess)), Predictions(*how, preprocess))
        pm, batch = self.ranks, self._counted(inputs, items)
        loss, found = pm.eval_step(**pm.local_batch(**batch), outputs=outputs, everywhere=True)
        labels = [inputs[name].to(self.args.device) for name in self.label_names]
        return loss.to(self.args.device), outputs.logits_of(found), alone_or_all(labels) if labels else None

    def hyperparameter_search(self, *given: Any, **keywords: Any) -> NoReturn:
        """Raise PlanError: its trials change arguments that were checked."""
        fact = "changes arguments after they were checked"
        raise PlanError("trainer.hyperparameter_search", fact, "a Trainer per trial")

    # checkpoints

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        # All processes are here, and one of them writes.
        if self.pm is not None and self._running is self.model:
            self._follow_edits()
            state_dict = self.pm.state_dict()
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.ranks.save(Path(output_dir) / FOLDER, self.optimizer, {"scheduler": self.lr_scheduler})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not (Path(resume_from_checkpoint) / FOLDER).is_dir():
            fact = f"{resume_from_checkpoint} has no folder {FOLDER!r}, with the optimizer's state for ranks"
            remedy = "a checkpoint of this Trainer without save_only_model; or from_pretrained(folder), for its weights"
            raise PlanError("resume_from_checkpoint", fact, remedy)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.ranks.load(Path(checkpoint) / FOLDER, self.optimizer, {"scheduler": self.lr_scheduler})

    def _load_best_model(self) -> None:
        # If there is no best one, the parent keeps what it has.
        self._fetch()
        super()._load_best_model()
        self.ranks.load_state_dict(self.model.state_dict())

    def _finalize_training(self, *given: Any, **keywords: Any) -> Any:
        self._fetch()
        self.callback_handler.model = self.model
        return super()._finalize_training(*given, **keywords)

    def _fetch(self) -> None:
        """Write the weights of the ranks into the model of every process. Collective."""
        fetch_weights(self.ranks, self.model, "trainer.model", self.args.device)
        self._synced = self._stamp()

    def _stamp(self) -> str:
        """Identify the values of `model`; "" on meta, which has none."""
        state = self.model.state_dict()
        return "" if any(x.is_meta for x in state.values()) else str(fingerprint_of_values(state))

    def _follow_edits(self, begins: bool = False) -> None:
        """Load `model` into the ranks if a script has set its weights since they were equal. Collective.

        Not in training, where `model` has the weights from before, unless that `begins`.
        """
        if self.is_in_train and not begins:
            return
        stamp = self._stamp()
        is_edited = torch.tensor([stamp != self._synced], dtype=torch.int, device=self.args.device)
        if self.args.world_size > 1:
            is_edited = self.accelerator.gather(is_edited)
        if is_edited.any():
            # An error on all ranks where their models differ.
            self.ranks.load_state_dict(self.model.state_dict())
            self._synced = stamp


class InLoop:
    """The model in the loop of transformers, which calls nothing else of it."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def zero_grad(self) -> None:
        """Forget the gradients of the ranks."""
        self._trainer.optimizer.zero_grad()

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yield the parameters of one device, which are counted."""
        yield from self._trainer.model.parameters()

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise PlanError: a method of a subclass runs a forward by itself."""
        fact = "model(...) in a method of a subclass: ranks run forward and backward at once"
        raise PlanError("Trainer", fact, "the parent's training_step and prediction_step")


class RankAccelerator(accelerate.Accelerator):
    """An accelerator whose processes read the same batches, and whose optimizers belong to a ParallelModel."""

    def prepare_data_loader(self, data_loader: Any, *_: Any, **others: Any) -> Any:
        """Return a loader that reads as one process does."""
        how = data_loader.worker_init_fn
        if isinstance(how, partial) and how.func is seed_worker:
            # Each process would draw other numbers in its workers.
            data_loader.worker_init_fn = partial(how.func, **{**how.keywords, "rank": 0})
        loader = prepare_data_loader(
            data_loader,
            self.device,
            num_processes=1,
            process_index=0,
            put_on_device=False,
            dispatch_batches=False,
            use_seedable_sampler=self.use_seedable_sampler,
            data_seed=self.dataloader_config.data_seed,
        )
        self._dataloaders.append(loader)
        return loader

    def prepare_optimizer(self, optimizer: Any, *_: Any, **others: Any) -> Any:
        """Return an optimizer of the ranks unchanged; PlanError for any other one."""
        if not isinstance(optimizer, NamedOptimizer):
            fact = f"create_optimizer returned {a_type(optimizer)} over other tensors than those of the ranks"
            raise PlanError("Trainer", fact, "trainer.ranks.optimizer(cls, groups, ...) in create_optimizer")
        if not any(known is optimizer for known in self._optimizers):
            self._optimizers.append(optimizer)
        return optimizer


def settings_of(parallel: Mapping[str, Any] | None, args: Any) -> dict[str, Any]:
    """Return the keywords of `parallelize`, with those that follow from the arguments."""
    if parallel is None:
        raise PlanError("Trainer(parallel=)", "there is none", "parallel={'t': 2, 'p': 2, 'd': 2}")
    for name in ("example_inputs", "loss_fn"):
        if name in parallel:
            raise PlanError(
                f"parallel: {name}", "batches and losses are those of the Trainer", "leave it out"
            )
    found = {"seed": args.seed, "shapes": "exact", **parallel}
    if "auto" in (found.get("t"), found.get("p"), found.get("d")):
        raise PlanError('parallel: "auto"', "the batch depends on d", "autoptd.plan(...), and its degrees")
    if args.gradient_accumulation_steps > 1:
        found.setdefault("num_microbatches", args.gradient_accumulation_steps)
    precision = PRECISION[args.mixed_precision]
    if precision and found.setdefault("precision", precision) != precision:
        fact = f"is not parallel's precision={found['precision']!r}"
        raise PlanError("bf16=True", fact, "one of the two: bf16=True is 'bf16-mixed'")
    if args.use_cpu and args.world_size > 1:
        found.setdefault("backend", "gloo")
    if found.get("backend") == "local" and args.device.type != "cpu":
        found.setdefault("device", str(args.device))
    return found


def first_batches(loader: Any, count: int) -> list[Mapping[str, Any]]:
    """Return the first batches of a prepared loader, without its workers and its state; PlanError for a
    dataset that can be read only once.
    """
    dataset, groups = loader.dataset, []
    if isinstance(dataset, torch.utils.data.IterableDataset):
        rows = iter(dataset)
        if rows is dataset:
            fact = "can be iterated once, and its first batch is needed to compile"
            remedy = "an __iter__ that starts again each time"
            raise PlanError(f"train_dataset: {a_type(dataset)}", fact, remedy)
        groups = [list(islice(rows, loader.batch_size)) for _ in range(count)]
    else:
        for numbers in islice(loader.batch_sampler, count):
            groups.append([dataset[number] for number in numbers])
    return [loader.collate_fn(group) for group in groups if group]
