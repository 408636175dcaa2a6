"""Supervised fine-tuning with TRL, over t*p*d ranks: the import and `parallel=` change, the rest of a script does not.

In: what `trl.SFTTrainer` takes, and the keywords of `autoptd.parallelize` in `parallel`. Out: the losses, norms, weights
and folders of one process of it. Datasets, chat templates, labels, packing and adapters are made by TRL; all that runs
the model is in `autoptd.integrations.transformers`.

    from autoptd.integrations.trl import SFTTrainer

    trainer = SFTTrainer(model, SFTConfig("out"), train_dataset=data, parallel={"t": 2, "p": 2, "d": 2})
    trainer.train()

TRL computes its losses from the weights of the head, in chunks; the ranks do so in the model's forward.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from autoptd.errors import PlanError, a_type
from autoptd.integrations.accumulated import IGNORED, rows_in
from autoptd.integrations.predictions import Predictions
from autoptd.integrations.token_scores import TokenScores, dft_loss
from autoptd.integrations.training_arguments import check_arguments, raise_all
from autoptd.integrations.transformers import Trainer, transformers

try:
    import trl
    from transformers.loss.loss_utils import ForCausalLMLoss
except ImportError as error:
    fact = f"trl cannot be imported ({error})"
    raise PlanError("autoptd.integrations.trl", fact, 'pip install "autoptd[trl]"') from error

# Fields of SFTConfig that are not those of TrainingArguments: see `training_arguments`.
OBEYED = frozenset(
    "model_init_kwargs trust_remote_code router_aux_loss_coef chat_template_path dataset_text_field dataset_kwargs"
    " dataset_num_proc eos_token max_length truncation_mode shuffle_dataset packing packing_strategy pad_to_multiple_of"
    " eval_packing completion_only_loss assistant_only_loss loss_type pad_token".split()
)
_FLAT = (
    "all rows become one, which replicas and microbatches cannot divide",
    "packing_strategy='wrapped', or none",
)
REFUSED = {
    "padding_free": _FLAT,
    "activation_offloading": ("activations stay on their device", "more pipeline or tensor ranks"),
}
LOSSES = {"nll": ForCausalLMLoss, "dft": dft_loss}


class SFTTrainer(Trainer, trl.SFTTrainer):
    """`trl.SFTTrainer`, whose model runs on the ranks of `parallelize(model, **parallel)`.

    Entropy and token accuracy are logged for evaluations only: during training they would take another forward.
    """

    args: Any
    # Of TRL's, only the value is needed.
    compute_loss = transformers.Trainer.compute_loss

    def __init__(self, *given: Any, parallel: Mapping[str, Any] | None = None, **keywords: Any) -> None:
        super().__init__(*given, parallel=parallel, **keywords)
        self._is_training = True
        # TRL sets it for streams, and the next trainer with these arguments would refuse it.
        self.args.accelerator_config.dispatch_batches = None
        model = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        # A head of TRL for its losses, which would go to a copy of the model with the weights of this one.
        vars(model).pop("forward", None)
        self._check_model(model)
        config = model.config.get_text_config()
        if hasattr(config, "output_router_logits"):
            config.output_router_logits = self.aux_loss_enabled
        if hasattr(model, "router_aux_loss_coef"):
            model.router_aux_loss_coef = self.router_aux_loss_coef
        model.loss_function = LOSSES[self.args.loss_type]

    def _check_model(self, model: Any) -> None:
        found = []
        if self._is_vision_dataset:
            found.append(("train_dataset", "has images", "trl.SFTTrainer, or columns of text"))
        calls = inspect.unwrap(type(model).forward).__code__.co_names
        if "loss_function" not in calls or model.loss_function not in LOSSES.values():
            fact = f"{a_type(model)} has another loss than that of causal models, which TRL puts in its place"
            found.append(("model", fact, "the Trainer of autoptd.integrations.transformers"))
        if getattr(getattr(self.model, "active_peft_config", None), "is_prompt_learning", False):
            fact = "virtual tokens before a row change which of its labels count"
            found.append(("peft_config", fact, "peft.LoraConfig(...)"))
        if self.aux_loss_enabled and self.args.gradient_accumulation_steps > 1:
            fact = "the balance of experts over all batches of an update is not the mean of theirs"
            remedy = "router_aux_loss_coef=0.0, or a larger per_device_train_batch_size"
            found.append(("gradient_accumulation_steps", fact, remedy))
        if self.aux_loss_enabled and not hasattr(model.config.get_text_config(), "router_aux_loss_coef"):
            fact = f"{a_type(model)} weights the balance of experts by another name"
            found.append(("router_aux_loss_coef", fact, "leave it out: the experts are then not balanced"))
        raise_all("SFTTrainer", found)

    def _checked(self, parts: Mapping[str, Any]) -> Any:
        model = parts["model"]
        args = parts.get("args") or trl.SFTConfig(f"{Path(getattr(model, 'name_or_path', model)).name}-SFT")
        if not isinstance(args, trl.SFTConfig):
            given = {x.name: getattr(args, x.name) for x in dataclasses.fields(args) if x.init}
            args = trl.SFTConfig(**given)
        found = []
        if args.packing and args.packing_strategy != "wrapped":
            found.append((f"packing_strategy={args.packing_strategy!r}", *_FLAT))
        if (args.activation_checkpointing_kwargs or {}).get("selective"):
            remedy = "parallel={'recompute': 'selective', ...}"
            found.append(
                ("gradient_checkpointing_kwargs: selective", "operators are chosen by AutoPTD", remedy)
            )
        check_arguments(args, OBEYED, REFUSED, found)
        return args

    def _get_num_items_in_batch(self, batches: Any, device: Any) -> Any:
        items = super()._get_num_items_in_batch(batches, device)
        # A batch without labels has a loss of 0 in TRL.
        return items.clamp(min=1) if isinstance(items, torch.Tensor) else items

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if "attention_mask" not in inputs:
            fact = "its batches have no attention_mask, by which TRL counts tokens"
            raise PlanError("SFTTrainer(data_collator=)", fact, "a collator that returns it")
        self._is_training = True
        self._total_train_tokens += int(inputs["attention_mask"].sum())
        self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return super().training_step(model, inputs, num_items_in_batch)

    def evaluation_loop(self, *given: Any, **keywords: Any) -> Any:
        self._is_training = False
        return super().evaluation_loop(*given, **keywords)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        """Return what the parent does, and keep what TRL logs of an evaluation."""
        counted = inputs["labels"].clone()
        # In training, transformers counts it for models whose class it does not know, such as GPT-2.
        counted[:, 0] = IGNORED
        items = self._get_num_items_in_batch([{"labels": counted}], self.args.device)
        self._is_loss, self._rows = True, rows_in(inputs)
        how = None if prediction_loss_only else Predictions((), ("labels",), self._preprocess)
        outputs = self._predictions.setdefault((prediction_loss_only, id(self._preprocess)), TokenScores(how))
        pm, batch = self.ranks, self._counted(inputs, items)
        loss, found = pm.eval_step(**pm.local_batch(**batch), outputs=outputs, everywhere=True)
        tokens, metrics = max(float(found.pop("tokens")), 1.0), self._metrics["eval"]
        metrics["entropy"].append(float(found.pop("entropy")) / tokens)
        metrics["mean_token_accuracy"].append(float(found.pop("right")) / tokens)
        metrics["num_tokens"] = [self._total_train_tokens]
        loss = loss.to(self.args.device)
        return (loss, None, None) if how is None else (loss, how.logits_of(found), inputs["labels"])

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # TRL asks `model` whether this is an evaluation; the ranks know without it.
        self.model.training, before = self._is_training, self.model.training
        try:
            super().log(logs, start_time)
        finally:
            self.model.training = before
