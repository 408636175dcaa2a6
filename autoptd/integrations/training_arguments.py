"""What every field of transformers' `TrainingArguments` means for a model on t*p*d ranks.

In: `TrainingArguments`, and the arguments of a Trainer. Out: nothing, or one PlanError for what the ranks would not obey.

Each field is in one table. `OBEYED`: training is as with one process of transformers. `IRRELEVANT`: it does not
concern the ranks, with the reason in a word. `REFUSED`: any value but the default is an error. A field of a later
version, or of a subclass, is in none of them, and refused likewise.

    check_arguments(args)
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from autoptd.errors import PlanError
from autoptd.integrations.around_loops import raise_all

try:
    from transformers import TrainingArguments
except ImportError as error:
    fact = f"transformers and accelerate cannot be imported ({error})"
    raise PlanError("autoptd.integrations.transformers", fact, 'pip install "autoptd[hf]"') from error

OBEYED = frozenset(
    "output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type lr_scheduler_kwargs"
    " warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon gradient_accumulation_steps max_grad_norm"
    " bf16 activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing gradient_checkpointing_kwargs"
    " logging_strategy logging_steps logging_first_step logging_nan_inf_filter include_num_input_tokens_seen eval_strategy"
    " eval_steps eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start save_only_model save_strategy"
    " save_steps save_total_limit load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip"
    " restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu dataloader_drop_last"
    " dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor"
    " dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names train_sampling_strategy"
    " ddp_backend skip_memory_metrics eval_do_concat_batches eval_accumulation_steps include_for_metrics"
    " batch_eval_metrics".split()
)
IRRELEVANT = {
    **dict.fromkeys("log_on_each_node log_level log_level_replica disable_tqdm".split(), "messages"),
    **dict.fromkeys("report_to run_name project".split(), "reports"),
    **dict.fromkeys("trackio_space_id trackio_bucket_id trackio_static_space_id".split(), "reports"),
    **dict.fromkeys("hub_token hub_private_repo hub_model_id hub_strategy".split(), "hub"),
    **dict.fromkeys("hub_always_push hub_revision".split(), "hub"),
    **dict.fromkeys("do_train do_eval do_predict resume_from_checkpoint".split(), "scripts"),
    "local_rank": "launcher",
    "tf32": "global",
    "eval_use_gather_object": "batches",
}
# Why, and what to use instead.
_HERE = "parallel= makes the ranks"
_COMPILED = ("stages are compiled by AutoPTD", "parallel={'fuse': 'inductor', ...}")
_DDP = ("there is no DistributedDataParallel: " + _HERE, "leave it out")
_FSDP = ("there is no FSDP: " + _HERE, "parallel={'zero': 1, ...}, or more tensor or pipeline ranks")
_EVALUATION = ("an evaluation has the precision of training", "leave it out, or bf16=True for both")
_INPUTS = ("the embeddings of the running ranks have no hooks", "add the noise in the model's own forward")
REFUSED = {
    "average_tokens_across_devices": ("the loss is that of the tokens of all replicas", "leave it True"),
    "label_smoothing_factor": (
        "it is computed from logits, outside the model",
        "a model whose forward smooths",
    ),
    "fp16": ("fp16 has a loss scale of AutoPTD", "parallel={'precision': 'fp16-mixed', ...}"),
    **dict.fromkeys(("bf16_full_eval", "fp16_full_eval"), _EVALUATION),
    **dict.fromkeys(("torch_compile", "torch_compile_backend", "torch_compile_mode"), _COMPILED),
    **dict.fromkeys(
        ("use_liger_kernel", "liger_kernel_config"),
        ("fused operators are chosen for the ranks", "parallel={'fuse': 'triton', ...}"),
    ),
    "use_cache": ("a step has no past keys and values", "leave it False"),
    "neftune_noise_alpha": _INPUTS,
    "torch_empty_cache_steps": ("the ranks hold on to their buffers", "leave it out"),
    "auto_find_batch_size": ("the ranks are compiled for one batch size", "parallel={'memory': '80GB', ...}"),
    "save_on_each_node": ("one rank writes the weights", "a folder that all nodes see"),
    "enable_jit_checkpoint": ("ranks would save at different steps", "save_steps"),
    "push_to_hub": (
        "uploads were not tried with several ranks",
        "trainer.save_model(), then upload the folder",
    ),
    "accelerator_config": ("the ranks read batches in their own way", "leave it out"),
    "parallelism_config": (_HERE, "parallel={'t': 2, 'p': 2, ...}"),
    **dict.fromkeys(("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"), _DDP),
    "ddp_static_graph": _DDP,
    "ddp_timeout": ("ranks have their own", "parallel={'ranks': autoptd.RankOptions(timeout=1800.0), ...}"),
    **dict.fromkeys(("fsdp", "fsdp_config", "deepspeed"), _FSDP),
    "debug": (
        "the modules of the running ranks have no hooks",
        "leave it out; a NaN names its step and rank",
    ),
    "optim_target_modules": ("the optimizers that read it are refused", "leave it out"),
    "length_column_name": (
        "train_sampling_strategy='group_by_length' is refused, which reads it",
        "leave it out",
    ),
}
OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "sgd", "adagrad", "rmsprop")
SAMPLING = ("random", "sequential")
PRECISION = {"no": None, "bf16": "bf16-mixed"}


def check_arguments(
    args: TrainingArguments,
    obeyed: Collection[str] = (),
    refused: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    values: Iterable[tuple[str, str, str]] = (),
) -> None:
    """Raise PlanError with all fields that have a value which the ranks would not obey.

    `obeyed` and `refused` are the tables of a subclass, for its own fields, and `values` what it has found already.
    """
    usual = TrainingArguments(output_dir=args.output_dir, use_cpu=args.use_cpu, ddp_backend=args.ddp_backend)
    found = [*values]
    for field in dataclasses.fields(args):
        name, value = field.name, getattr(args, field.name)
        if name in OBEYED or name in IRRELEVANT or name in obeyed:
            continue
        fact, remedy = {**REFUSED, **refused}.get(name, ("it is not known to AutoPTD", "leave it out"))
        if value != getattr(usual, name, _default(field)):
            found.append((f"{name}={value!r}", fact, remedy))
    for name, value, known in (
        ("optim", str(getattr(args.optim, "value", args.optim)), OPTIMIZERS),
        ("train_sampling_strategy", args.train_sampling_strategy, SAMPLING),
        ("mixed precision", args.mixed_precision, tuple(PRECISION)),
    ):
        if value not in known:
            found.append((f"{name}={value!r}", "the ranks cannot follow it", " or ".join(known)))
    if (args.activation_checkpointing_kwargs or {}).get("offload"):
        fact, remedy = "activations stay on their device", "more pipeline or tensor ranks"
        found.append(("activation_checkpointing_kwargs: offload", fact, remedy))
    raise_all("TrainingArguments", found)


def check_processes(args: TrainingArguments, backend: str | None) -> None:
    """Raise PlanError unless transformers knows the processes of torchrun: each would save as the first one."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if backend != "local" and args.world_size != started:
        fact = f"transformers sees {args.world_size} of the {started} processes that torchrun started"
        raise PlanError("TrainingArguments", fact, "use_cpu=True where there is no GPU")


def check_parts(parts: dict[str, Any]) -> None:
    """Raise PlanError for what a Trainer was given that computes another loss, or on the parameters of one device."""
    known = {
        "compute_loss_func": ("the ranks compute the model's own loss", "a model whose forward returns it"),
        "optimizers": (
            "an optimizer over model.parameters() would train nothing: ranks train copies",
            "optim=, or optimizer_cls_and_kwargs=(torch.optim.AdamW, {'lr': 1e-3})",
        ),
    }
    raise_all(
        "Trainer", [(name, *known[name]) for name in known if parts.get(name) not in (None, (None, None))]
    )


def _default(field: dataclasses.Field[Any]) -> Any:
    is_made = field.default_factory is not dataclasses.MISSING
    return field.default_factory() if is_made else field.default  # type: ignore[misc]
