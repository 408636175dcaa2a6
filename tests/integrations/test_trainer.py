"""A Trainer on ranks: losses, norms, learning rates and weights are those of transformers in one process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoptd.errors import PlanError
from tests.integrations.runs import (
    Ended,
    PerSize,
    Rows,
    Trainer,
    arguments,
    differences,
    finished,
    gpt2,
    in_float64,
    llama,
    logs_of,
    on_ranks,
    one_device,
    transformers,
)

# Transformers adds up losses in float32 to log them; norms of a Llama are float32 in a float64 model.
LOGGED, WEIGHTS, WEIGHTS_LLAMA = 1e-6, 1e-9, 1e-6
EVALUATED: dict[str, Any] = {"eval_strategy": "epoch", "eval_dataset": Rows(7, seed=3)}


def gpt2_64() -> nn.Module:
    return in_float64(gpt2())


def llama_64() -> nn.Module:
    return in_float64(llama())


def check(mesh: dict[str, Any], folder: Path, make: Callable[[], nn.Module] = gpt2_64, **how: Any) -> Ended:
    """Compare a run on ranks with one of transformers; return the former."""
    replicas = mesh.get("d", 1)
    expected = one_device(make, folder / "one", replicas, **how)
    found = on_ranks(make, folder / "ranks", mesh, **how)
    logged, weights = differences(found, expected)
    assert logged <= LOGGED and weights <= (WEIGHTS_LLAMA if make is llama_64 else WEIGHTS), (logged, weights)
    return found


MESHES: list[dict[str, Any]] = [{"t": 2}, {"p": 2}, {"d": 2}, {"t": 2, "p": 2}]


@pytest.mark.parametrize(
    ("make", "mesh"),
    [
        *((gpt2_64, mesh) for mesh in MESHES),
        (llama_64, MESHES[-1]),
        *(pytest.param(llama_64, mesh, marks=pytest.mark.thorough) for mesh in MESHES[:-1]),
    ],
)
def test_a_run_is_that_of_one_process(
    make: Callable[[], nn.Module], mesh: dict[str, Any], tmp_path: Path
) -> None:
    """Clipped, with uneven padding, an odd last batch, 3 batches an update; evaluated with another odd one."""
    check(mesh, tmp_path, make, gradient_accumulation_steps=3, num_train_epochs=1, **EVALUATED)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "how",
    [
        {"data_collator": PerSize(), "gradient_accumulation_steps": 3},
        {"data": Rows(19), "gradient_accumulation_steps": 2},
        {"data": Rows(21), "dataloader_drop_last": True},
        {"max_grad_norm": 0.0, "train_sampling_strategy": "sequential"},
        {"data_seed": 5, "seed": 7, "logging_first_step": True, "logging_steps": 3},
        {"include_num_input_tokens_seen": "non_padding", "dataloader_num_workers": 1},
    ],
    ids=lambda how: " ".join(how),
)
def test_data_are_those_of_one_process(how: dict[str, Any], tmp_path: Path) -> None:
    """Over d=2: batches of several lengths, rows that do not divide, orders and seeds."""
    check({"d": 2}, tmp_path, num_train_epochs=1, **how)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "how",
    [
        {"optim": "adamw_torch", "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6},
        {"optim": "sgd", "optim_args": "momentum=0.9"},
        {"optim": "adagrad"},
        {"optim": "rmsprop"},
        {"optimizer_cls_and_kwargs": (torch.optim.Adam, {"lr": 1e-3})},
        {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_on_start": True}
        | {"eval_strategy": "steps", "eval_steps": 1, "eval_delay": 2, "eval_dataset": Rows(5)},
    ],
    ids=lambda how: " ".join(map(str, how.values()))[:30],
)
def test_updates_are_those_of_one_process(how: dict[str, Any], tmp_path: Path) -> None:
    check({"t": 2}, tmp_path, max_steps=4, **how)


def test_bf16_is_autocast(tmp_path: Path) -> None:
    found = on_ranks(gpt2, tmp_path, {"t": 2}, max_steps=2, bf16=True)
    assert found.trainer.options.precision == "bf16-mixed"
    expected = one_device(gpt2, tmp_path, 1, max_steps=2, bf16=True)
    assert differences(found, expected)[0] < 1e-2
    with pytest.raises(PlanError, match="bf16=True: is not parallel's precision='bf16'"):
        on_ranks(gpt2, tmp_path, {"precision": "bf16"}, bf16=True)


def test_layers_are_computed_again(tmp_path: Path) -> None:
    how = {"activation_checkpointing_kwargs": {"every_n_layers": 2}, "max_steps": 2}
    found = check({"p": 2}, tmp_path, activation_checkpointing=True, **how)
    assert found.trainer.model.is_activation_checkpointing
    check({"p": 2}, tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs={}, max_steps=2)


# checkpoints

# 3 updates an epoch of 22 rows, so in the middle of one.
SAVED: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 7}
SAVED |= {"gradient_accumulation_steps": 2}


def test_a_resumed_run_is_one_that_did_not_end(tmp_path: Path) -> None:
    """In the middle of an epoch, on the same mesh with the same bits, on another, and with other data."""
    full = on_ranks(gpt2_64, tmp_path / "run", {"d": 2}, **SAVED)
    saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "run" / "checkpoint-7")
    assert all(torch.equal(x, full.weights[name]) for name, x in saved.state_dict().items())
    assert saved.lm_head.weight is saved.transformer.wte.weight
    for number in (4, 6, 7):
        shutil.rmtree(tmp_path / "run" / f"checkpoint-{number}")
    for name, mesh, limit in (("same", {"d": 2}, 0.0), ("other", {"t": 2, "d": 2}, WEIGHTS)):
        shutil.copytree(tmp_path / "run", tmp_path / name)
        found = resumed(tmp_path / name, mesh)
        # The last line has the mean of the steps of a session.
        pairs = zip(found.logs[:-1], full.logs[:-1], strict=True)
        logged = max(abs(own[key] - log[key]) for own, log in pairs for key in log)
        assert logged <= (LOGGED if limit else 0.0)
        assert all(float((x - full.weights[name]).abs().max()) <= limit for name, x in found.weights.items())
    skipped = resumed(tmp_path / "run", {"d": 2}, ignore_data_skip=True)
    assert abs(skipped.logs[3]["loss"] - full.logs[3]["loss"]) > 1e-6


def resumed(folder: Path, mesh: dict[str, Any], **others: Any) -> Ended:
    args = arguments(folder, **SAVED, **others)
    parallel = {"backend": "local", **mesh}
    trainer = Trainer(gpt2_64(), args, train_dataset=Rows(22), parallel=parallel)
    return finished(trainer, resume_from_checkpoint=True)


def test_the_best_model_is_loaded(tmp_path: Path) -> None:
    """An earlier one, as the loss of random ids grows; folders beyond the limit are removed."""
    how = {**SAVED, "load_best_model_at_end": True, "save_total_limit": 2, "eval_strategy": "steps"}
    how |= {"eval_steps": 2, "eval_dataset": Rows(7, seed=3)}
    how |= {"greater_is_better": False, "metric_for_best_model": "loss"}
    found = check({"d": 2}, tmp_path, **how)
    assert found.trainer.state.best_global_step == 2
    names = [sorted(path.name for path in (tmp_path / run).iterdir()) for run in ("one", "ranks")]
    assert names[0] == names[1] and len(names[0]) == 2
    best = transformers.GPT2LMHeadModel.from_pretrained(found.trainer.state.best_model_checkpoint)
    assert all(torch.equal(x, found.weights[name]) for name, x in best.state_dict().items())


def test_a_checkpoint_without_the_ranks_is_refused(tmp_path: Path) -> None:
    on_ranks(gpt2_64, tmp_path, {"t": 2}, **{**SAVED, "save_only_model": True})
    assert not (tmp_path / "checkpoint-7" / "autoptd").exists()
    with pytest.raises(PlanError, match=r"has no folder 'autoptd'.*without save_only_model"):
        resumed(tmp_path, {"t": 2})


def test_adapters_are_trained_and_saved(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> nn.Module:
        config = peft.LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True)
        model: nn.Module = peft.get_peft_model(gpt2(), config)
        return model.double()

    def seeded() -> nn.Module:
        torch.manual_seed(3)
        return adapted()

    found = on_ranks(seeded, tmp_path / "ranks", {"t": 2}, **SAVED)
    expected = one_device(seeded, tmp_path / "one", 1, **SAVED)
    assert max(differences(found, expected)) < 1e-5
    loaded = peft.PeftModel.from_pretrained(gpt2().double(), tmp_path / "ranks" / "checkpoint-7")
    for name, x in loaded.named_parameters():
        assert torch.equal(x, found.weights[name]), name


# calls in other orders


def test_calls_in_any_order(tmp_path: Path) -> None:
    """An evaluation before the first step, two trainings, another dataset; and `trainer.model` afterwards."""
    data = {"train_dataset": Rows(22), "eval_dataset": Rows(5)}
    ours = Trainer(gpt2_64(), arguments(tmp_path, max_steps=2), **data, parallel={"backend": "local", "p": 2})
    theirs = transformers.Trainer(gpt2_64(), arguments(tmp_path, max_steps=2), **data)
    for trainer in (ours, theirs):
        trainer.evaluate()
        trainer.train()
        trainer.evaluate(Rows(3, seed=9))
        trainer.train()
    found, expected = (Ended(x, logs_of(x), x.model.state_dict()) for x in (ours, theirs))
    assert max(differences(found, expected)) < WEIGHTS or differences(found, expected)[0] < LOGGED
    ours.save_model(str(tmp_path / "final"))
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "final")
    assert all(torch.equal(x, found.weights[name]) for name, x in loaded.state_dict().items())


def test_a_model_per_training(tmp_path: Path) -> None:
    pair = []
    for cls, others in ((Trainer, {"parallel": {"backend": "local", "t": 2}}), (transformers.Trainer, {})):
        args = arguments(tmp_path, max_steps=2)
        trainer = cls(args=args, model_init=gpt2_64, train_dataset=Rows(22), **others)
        trainer.train()
        trainer.train()
        pair.append(Ended(trainer, logs_of(trainer), trainer.model.state_dict()))
    logged, weights = differences(*pair)
    assert logged < LOGGED and weights < WEIGHTS
    # Another model: with an optimizer for its ranks.
    ours = pair[0].trainer
    ours.model_init, ours.model, before = None, gpt2_64(), ours.optimizer
    ours.train()
    assert ours.optimizer is not before and not ours.model.lm_head.weight.equal(gpt2_64().lm_head.weight)


class Seen(transformers.TrainerCallback):
    """Keeps what it is given: a step before the update, and the model after training."""

    def __init__(self) -> None:
        self.gradients, self.types, self.substeps = 0, list[str](), 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.gradients += all(x.grad is not None for x in model.parameters())
        self.types.append(type(model).__name__)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.substeps += 1

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.types.append(type(model).__name__)
        self.norm = float(model.transformer.wte.weight.norm())


def test_callbacks_see_the_ranks_and_then_the_trained_model(tmp_path: Path) -> None:
    seen = Seen()
    how = {"callbacks": [seen], "max_steps": 2, "gradient_accumulation_steps": 2}
    found = on_ranks(gpt2_64, tmp_path, {"t": 2}, **how)
    assert seen.types == ["ParallelModel", "ParallelModel", "GPT2LMHeadModel"]
    assert (seen.gradients, seen.substeps) == (2, 2)
    assert seen.norm == float(found.weights["transformer.wte.weight"].norm())


# what would be another number


class Mean(nn.Module):
    """A loss that takes num_items_in_batch and ignores it: transformers adds up means."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 32)

    def forward(self, input_ids: Any, labels: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return {"loss": nn.functional.cross_entropy(self.table(input_ids).flatten(0, 1), labels.flatten())}


class Own(Mean):
    """A loss that does not take it."""

    def forward(self, input_ids: Any, labels: Any) -> Any:  # type: ignore[override]
        return super().forward(input_ids, labels)


@pytest.mark.parametrize(
    ("make", "how", "fact"),
    [
        (Mean, {"gradient_accumulation_steps": 2}, "batches that are accumulated: the loss in one step is"),
        (Own, {"gradient_accumulation_steps": 2}, "does not divide its loss by num_items_in_batch"),
    ],
)
def test_another_loss_is_refused(
    make: Callable[[], nn.Module], how: dict[str, Any], fact: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=fact):
        on_ranks(make, tmp_path, {"d": 2}, **how)


@pytest.mark.parametrize("make", [Mean, Own])
def test_a_mean_is_right_without_accumulation(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = make()
    state = {name: x.clone() for name, x in model.state_dict().items()}

    def again() -> nn.Module:
        other = make()
        other.load_state_dict(state)
        return other.double()

    check({"d": 2}, tmp_path, again, max_steps=3, data=Rows(21))


def test_data_that_end_within_an_update_are_refused(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return (Rows(10)[number] for number in range(10))

    check({"d": 2}, tmp_path, data=Stream(), max_steps=2)
    with pytest.raises(PlanError, match="the data ended after 1 of them"):
        on_ranks(gpt2_64, tmp_path, {"d": 2}, data=Stream(), max_steps=3, gradient_accumulation_steps=2)
    once = iter(Rows(10)[number] for number in range(10))
    Stream.__iter__ = lambda self: self  # type: ignore[method-assign,assignment,misc]
    Stream.__next__ = lambda self: next(once)  # type: ignore[attr-defined]
    with pytest.raises(PlanError, match="can be iterated once"):
        on_ranks(gpt2_64, tmp_path, {"d": 2}, data=Stream(), max_steps=2)
