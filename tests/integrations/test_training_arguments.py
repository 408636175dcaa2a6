"""Every field of TrainingArguments is obeyed (and a test says so), irrelevant, or refused by name."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import autoptd
from autoptd.errors import PlanError
from autoptd.integrations.training_arguments import (
    IRRELEVANT,
    OBEYED,
    OPTIMIZERS,
    REFUSED,
    check_arguments,
    check_processes,
)
from tests.integrations.runs import Rows, Trainer, arguments, gpt2, transformers

HERE = Path(__file__).parent
MESH = {"backend": "local", "t": 2}
# The tests of each field that is obeyed. "same": of `runs.arguments`, so in every comparison with one process.
TESTED = {
    "test_a_run_is_that_of_one_process": "output_dir per_device_train_batch_size num_train_epochs learning_rate weight_decay"
    " max_grad_norm warmup_steps logging_strategy logging_steps gradient_accumulation_steps eval_strategy use_cpu"
    " per_device_eval_batch_size",
    "test_data_are_those_of_one_process": "dataloader_drop_last train_sampling_strategy data_seed seed logging_first_step"
    " include_num_input_tokens_seen dataloader_num_workers",
    "test_updates_are_those_of_one_process": "max_steps optim optim_args adam_beta1 adam_beta2 adam_epsilon lr_scheduler_type"
    " lr_scheduler_kwargs eval_on_start eval_steps eval_delay",
    "test_bf16_is_autocast": "bf16",
    "test_layers_are_computed_again": "activation_checkpointing activation_checkpointing_kwargs gradient_checkpointing"
    " gradient_checkpointing_kwargs",
    "test_a_resumed_run_is_one_that_did_not_end": "save_strategy save_steps ignore_data_skip",
    "test_the_best_model_is_loaded": "load_best_model_at_end metric_for_best_model greater_is_better save_total_limit",
    "test_a_checkpoint_without_the_ranks_is_refused": "save_only_model",
    "test_processes_train_save_and_resume": "ddp_backend",
    "test_loaders_have_their_settings": "dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor"
    " dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names",
    "test_other_settings_do_what_they_do_in_transformers": "full_determinism skip_memory_metrics prediction_loss_only"
    " logging_nan_inf_filter restore_callback_states_from_checkpoint",
    "test_settings_of_metrics": "batch_eval_metrics include_for_metrics eval_accumulation_steps",
    "test_batches_of_predictions_may_stay_apart": "eval_do_concat_batches",
}
# Fields -> a value that is not the default.
OTHERS: dict[str, Any] = {
    "average_tokens_across_devices": False,
    "label_smoothing_factor": 0.1,
    "fp16": True,
    "torch_compile_backend": "inductor",
    "torch_compile_mode": "default",
    "liger_kernel_config": {"rope": True},
    "neftune_noise_alpha": 5.0,
    "torch_empty_cache_steps": 5,
    "accelerator_config": {"split_batches": True},
    "parallelism_config": object(),
    "ddp_bucket_cap_mb": 25,
    "ddp_timeout": 60,
    "fsdp": "full_shard",
    "fsdp_config": {"min_num_params": 5},
    "deepspeed": {"zero_optimization": {"stage": 2}},
    "debug": "underflow_overflow",
    "optim_target_modules": "all-linear",
    "length_column_name": "size",
}


def test_every_field_is_in_one_table() -> None:
    fields = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert fields == OBEYED | set(IRRELEVANT) | set(REFUSED)
    assert len(fields) == len(OBEYED) + len(IRRELEVANT) + len(REFUSED)
    assert all(len(why.split()) == 1 for why in IRRELEVANT.values())


def test_every_obeyed_field_has_a_test() -> None:
    assert sorted(name for names in TESTED.values() for name in names.split()) == sorted(OBEYED)
    texts = {path: path.read_text() for path in HERE.glob("*.py")}
    functions = {
        node.name: ast.get_source_segment(text, node) or ""
        for text in texts.values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
    }
    assert not set(TESTED) - set(functions)
    # Each is set to something in the files of this folder.
    words = "".join(text for path, text in texts.items() if path.name != Path(__file__).name)
    words += functions["test_loaders_have_their_settings"]
    words += functions["test_other_settings_do_what_they_do_in_transformers"]
    assert {name for name in OBEYED if f'"{name}"' not in words and f"{name}=" not in words} == {
        "logging_strategy"
    }


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_others_are_refused_by_name(name: str, tmp_path: Path) -> None:
    args = arguments(tmp_path)
    usual = getattr(args, name)
    # Set afterwards: not every value can be asked for without a GPU, or another package.
    value = OTHERS.get(name, not usual if isinstance(usual, bool) else True)
    setattr(args, name, value)
    with pytest.raises(PlanError, match=rf"^TrainingArguments: {name}=.*Remedy: .*{name}="):
        Trainer(gpt2(), args, train_dataset=Rows(4), parallel=MESH)


@pytest.mark.parametrize(
    ("how", "fact"),
    [
        ({"optim": "adafactor"}, "optim='adafactor': the ranks cannot follow it"),
        ({"optim": "adamw_bnb_8bit"}, "optim='adamw_bnb_8bit'"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy='group_by_length'"),
        (
            {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"offload": True}},
            "activation_checkpointing_kwargs: offload",
        ),
    ],
)
def test_some_values_are_refused(how: dict[str, Any], fact: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=fact):
        Trainer(gpt2(), arguments(tmp_path, **how), train_dataset=Rows(4), parallel=MESH)


def test_all_is_refused_at_once(tmp_path: Path) -> None:
    args = arguments(tmp_path, optim="adafactor", label_smoothing_factor=0.1, push_to_hub=True)
    with pytest.raises(PlanError, match=r"label_smoothing_factor=0.1.*push_to_hub=True.*optim='adafactor'"):
        Trainer(gpt2(), args, train_dataset=Rows(4), parallel=MESH)
    assert "adafactor" not in OPTIMIZERS


def test_processes_that_transformers_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU and without use_cpu, it takes no notice of torchrun, and each process would save as the first one."""
    args = arguments(tmp_path)
    assert args.world_size == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    # Not a whole Trainer: accelerate keeps, for the tests that follow, what it finds in the environment.
    check_processes(args, "local")
    with pytest.raises(PlanError, match=r"sees 1 of the 2 processes.*use_cpu=True"):
        check_processes(args, None)


def test_fields_of_a_subclass_are_refused(tmp_path: Path) -> None:
    how = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none"}
    Trainer(gpt2(), transformers.Seq2SeqTrainingArguments(**how), train_dataset=Rows(4), parallel=MESH)
    args = transformers.Seq2SeqTrainingArguments(**how, predict_with_generate=True)
    with pytest.raises(PlanError, match="predict_with_generate=True: it is not known to AutoPTD"):
        Trainer(gpt2(), args, train_dataset=Rows(4), parallel=MESH)
    # With the tables of a subclass.
    check_arguments(args, obeyed=("predict_with_generate",))
    refused = {"predict_with_generate": ("there is no cache", "outputs=")}
    with pytest.raises(
        PlanError, match=r"a: b; predict_with_generate=True: there is no cache\. Remedy: a: c; "
    ):
        check_arguments(args, refused=refused, values=[("a", "b", "c")])


def test_a_missing_trl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    monkeypatch.delitem(sys.modules, "autoptd.integrations.trl", raising=False)
    with pytest.raises(PlanError, match=r'pip install "autoptd\[trl\]"'):
        importlib.import_module("autoptd.integrations.trl")


def test_loaders_have_their_settings(tmp_path: Path) -> None:
    loader = {"dataloader_num_workers": 1, "dataloader_pin_memory": False, "dataloader_prefetch_factor": 3}
    others = {"dataloader_persistent_workers": True, "dataloader_multiprocessing_context": "fork"}
    others |= {"dataloader_in_order": False, "label_names": ["labels"], "remove_unused_columns": True}
    args = arguments(tmp_path, 2, **loader, **others)
    parallel = {"backend": "local", "d": 2}
    trainer = Trainer(gpt2(), args, train_dataset=Rows(9), eval_dataset=Rows(9), parallel=parallel)
    for made in (trainer.get_train_dataloader(), trainer.get_eval_dataloader()):
        assert (made.num_workers, made.pin_memory, made.prefetch_factor) == (1, False, 3)
        assert made.persistent_workers and not made.in_order
        assert made.multiprocessing_context.get_start_method() == "fork"
        # Rows of all replicas.
        assert made.batch_sampler.batch_size == 4
        # Columns that the forward does not take are left out.
        row = {**Rows(9)[0], "other": 1}
        assert set(made.collate_fn([row])) == {"input_ids", "attention_mask", "labels"}


class Counting(transformers.TrainerCallback, transformers.trainer_callback.ExportableState):  # type: ignore[misc]
    """Counts steps, and is saved with the trainer."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"count": self.count}}


@pytest.mark.thorough  # what memory metrics need takes ten seconds
def test_other_settings_do_what_they_do_in_transformers(tmp_path: Path) -> None:
    how: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    how |= {"skip_memory_metrics": False, "prediction_loss_only": True, "logging_nan_inf_filter": False}
    how |= {"restore_callback_states_from_checkpoint": True, "full_determinism": True}
    try:
        args = arguments(tmp_path, **how)
        first = Trainer(gpt2(), args, train_dataset=Rows(22), callbacks=[Counting()], parallel=MESH)
        found = first.train()
        assert torch.are_deterministic_algorithms_enabled() and "train_mem_cpu_alloc_delta" in found.metrics
        args = arguments(tmp_path, **{**how, "max_steps": 3})
        second = Trainer(gpt2(), args, train_dataset=Rows(22), callbacks=[Counting()], parallel=MESH)
        second.train(resume_from_checkpoint=True)
    finally:
        torch.use_deterministic_algorithms(False)
    (counting,) = (x for x in second.callback_handler.callbacks if isinstance(x, Counting))
    assert counting.count == 3
    # The trained weights, on one device.
    one = transformers.Trainer(second.model, arguments(tmp_path / "one", prediction_loss_only=True))
    expected = one.predict(Rows(5)).metrics["test_loss"]
    assert abs(second.predict(Rows(5)).metrics["test_loss"] - expected) < 1e-5 * expected


# what a Trainer is given


@pytest.mark.parametrize(
    "given",
    [
        {"compute_loss_func": len},
        {"optimizers": (torch.optim.SGD([torch.ones(1, requires_grad=True)]), None)},
    ],
    ids=lambda given: next(iter(given)),
)
def test_parts_of_another_loss_or_one_device_are_refused(given: dict[str, Any], tmp_path: Path) -> None:
    (name,) = given
    with pytest.raises(PlanError, match=rf"^Trainer: {name}: .*Remedy: {name}: "):
        Trainer(gpt2(), arguments(tmp_path), train_dataset=Rows(4), parallel=MESH, **given)


def test_methods_that_would_not_be_called_are_refused(tmp_path: Path) -> None:
    class Own(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

    with pytest.raises(PlanError, match=r"^Own: compute_loss: is not called"):
        Own(gpt2(), arguments(tmp_path), train_dataset=Rows(4), parallel=MESH)

    class OwnStep(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            return model(**inputs).loss

    with pytest.raises(PlanError, match=r"model\(\.\.\.\) in a method of a subclass"):
        OwnStep(gpt2(), arguments(tmp_path), train_dataset=Rows(4), parallel=MESH).train()

    class OwnOptimizer(Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters())
            return self.optimizer

    with pytest.raises(PlanError, match="create_optimizer returned an SGD over other tensors"):
        OwnOptimizer(gpt2(), arguments(tmp_path), train_dataset=Rows(4), parallel=MESH).train()


@pytest.mark.parametrize(
    ("parallel", "fact"),
    [
        (None, r"parallel=\)"),
        ({"t": 2, "loss_fn": len}, "parallel: loss_fn"),
        ({"t": "auto"}, "the batch depends on d"),
        ({"tp": 2}, "tp"),
    ],
)
def test_a_mesh_is_asked_for(parallel: Any, fact: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=fact):
        Trainer(gpt2(), arguments(tmp_path), train_dataset=Rows(4), parallel=parallel)


def test_a_parallel_model_is_refused_by_transformers_and_accelerate(tmp_path: Path) -> None:
    import accelerate

    pm = autoptd.parallelize(gpt2(), **MESH)
    ids = torch.zeros(2, 8, dtype=torch.long)
    pm.compile_now((), {"input_ids": ids, "labels": ids})
    name = r"autoptd\.integrations\.transformers\.Trainer"
    with pytest.raises(PlanError, match=name):
        transformers.Trainer(pm, arguments(tmp_path), train_dataset=Rows(4))
    with pytest.raises(PlanError, match="is a ParallelModel already"):
        Trainer(pm, arguments(tmp_path), train_dataset=Rows(4), parallel=MESH)
    accelerator = accelerate.Accelerator(cpu=True)
    with pytest.raises(PlanError, match="save_state would save no weights"):
        accelerator.prepare(pm, pm.optimizer(torch.optim.SGD, lr=0.1))
    with pytest.raises(PlanError, match="leave pm out of accelerate"):
        accelerator.unwrap_model(pm)
    pm.close()
