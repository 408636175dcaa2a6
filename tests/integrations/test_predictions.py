"""Metrics and predictions of the Trainer are those of one process, for odd last batches and rows of several lengths too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from autoptd.errors import PlanError
from autoptd.integrations.transformers import Trainer
from tests.integrations.runs import PerSize, Rows, arguments, gpt2, in_float64, transformers

MESHES: list[dict[str, Any]] = [{"t": 2, "p": 2}, {"d": 2}, {"c": 2}]


def accuracy(found: Any) -> dict[str, float]:
    """As scripts do: logits are shifted, and labels of -100 do not count."""
    chosen = found.predictions if found.predictions.ndim == 2 else found.predictions.argmax(-1)
    labels = found.label_ids[:, 1:]
    counts = labels != -100
    result = {"accuracy": float(((chosen[:, :-1] == labels) & counts).sum() / counts.sum())}
    if found.inputs is not None:
        result["first"] = float(found.inputs[:, 0].mean())
    if found.losses is not None:
        result["worst"] = float(found.losses.max())
    return result


def choose(logits: Any, labels: Tensor) -> Tensor:
    assert labels.shape == logits.shape[:-1]
    return logits.argmax(-1)  # type: ignore[no-any-return]


def pair(folder: Path, mesh: dict[str, Any], rows: int = 2, **others: Any) -> tuple[Any, Any]:
    """A Trainer of one process, and one over ranks, with the same model."""
    parts = ("compute_metrics", "data_collator", "train_dataset", "eval_dataset")
    given = {name: others.pop(name) for name in list(others) if name in parts}
    given |= {name: others.pop(name) for name in list(others) if name.startswith("preprocess")}
    replicas = mesh.get("d", 1)
    one = transformers.Trainer(
        in_float64(gpt2()), arguments(folder / "one", rows * replicas, **others), **given
    )
    parallel = {"backend": "local", **mesh}
    ours = Trainer(in_float64(gpt2()), arguments(folder / "ours", rows, **others), parallel=parallel, **given)
    return one, ours


def same(found: Any, expected: Any) -> None:
    """Nested arrays."""
    if isinstance(expected, (tuple, list)):
        assert type(found) is type(expected) and len(found) == len(expected)
        for own, other in zip(found, expected, strict=True):
            same(own, other)
    else:
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("mesh", "collator"),
    [*((mesh, None) for mesh in MESHES), *((mesh, PerSize()) for mesh in MESHES[:2])],
    ids=lambda value: str(value) if isinstance(value, dict) else "lengths" if value else "one length",
)
def test_metrics_and_predictions_are_those_of_one_process(
    mesh: dict[str, Any], collator: Any, tmp_path: Path
) -> None:
    one, ours = pair(tmp_path, mesh, compute_metrics=accuracy, data_collator=collator)
    data = Rows(7, seed=3)
    expected = one.evaluate(data)
    found = ours.evaluate(data)
    for name in ("eval_accuracy", "eval_loss"):
        assert abs(found[name] - expected[name]) <= 1e-7 * abs(expected[name]), name
    wanted, given = one.predict(data), ours.predict(data)
    same(given.predictions, wanted.predictions)
    same(given.label_ids, wanted.label_ids)
    assert given.metrics["test_accuracy"] == wanted.metrics["test_accuracy"]
    ours.pm.close()


@pytest.mark.parametrize(
    "how",
    [
        {"preprocess_logits_for_metrics": choose},
        {"batch_eval_metrics": True},
        {"include_for_metrics": ["inputs", "loss"]},
        {"eval_accumulation_steps": 1},
    ],
    ids=lambda how: next(iter(how)),
)
def test_settings_of_metrics(how: dict[str, Any], tmp_path: Path) -> None:
    counted: list[float] = []

    def metrics(found: Any, compute_result: bool = True) -> dict[str, float]:
        if isinstance(found.predictions, Tensor):
            found.predictions, found.label_ids = (
                found.predictions.cpu().numpy(),
                found.label_ids.cpu().numpy(),
            )
        result = accuracy(found)
        counted.append(result["accuracy"] + found.predictions.ndim)
        return result if compute_result else {}

    one, ours = pair(tmp_path, {"t": 2, "d": 2}, compute_metrics=metrics, **how)
    expected = one.evaluate(Rows(7))
    first = counted[:]
    found = ours.evaluate(Rows(7))
    assert counted == first + first
    names = [name for name in expected if name in ("eval_accuracy", "eval_first", "eval_worst", "eval_loss")]
    assert len(names) >= 2
    for name in names:
        assert abs(found[name] - expected[name]) <= 1e-7 * abs(expected[name]), name
    # The function is the user's again.
    assert ours.preprocess_logits_for_metrics is how.get("preprocess_logits_for_metrics")
    ours.pm.close()


def test_batches_of_predictions_may_stay_apart(tmp_path: Path) -> None:
    one, ours = pair(tmp_path, {"p": 2}, eval_do_concat_batches=False)
    wanted, given = one.predict(Rows(5)), ours.predict(Rows(5))
    same(given.predictions, wanted.predictions)
    ours.pm.close()


def test_metrics_in_training_are_those_of_the_weights_then(tmp_path: Path) -> None:
    how = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4, "gradient_accumulation_steps": 2}
    data = {"train_dataset": Rows(22), "eval_dataset": Rows(5, seed=2)}
    one, ours = pair(tmp_path, {"t": 2, "p": 2}, compute_metrics=accuracy, **how, **data)
    one.train(), ours.train()
    logs = [[log for log in trainer.state.log_history if "eval_accuracy" in log] for trainer in (ours, one)]
    assert len(logs[0]) == 2
    for found, expected in zip(*logs, strict=True):
        assert abs(found["eval_loss"] - expected["eval_loss"]) <= 1e-7 * expected["eval_loss"]
        assert found["eval_accuracy"] == expected["eval_accuracy"]
    ours.pm.close()


def test_several_predictions_and_names_to_ignore(tmp_path: Path) -> None:
    one, ours = pair(tmp_path, {"t": 2})
    for trainer in (one, ours):
        trainer.model.config.output_hidden_states = True
    keys = ["past_key_values", "hidden_states"]
    same(
        ours.predict(Rows(3), ignore_keys=keys).predictions,
        one.predict(Rows(3), ignore_keys=keys).predictions,
    )
    with pytest.raises(PlanError, match="the predictions have a tuple among them"):
        ours.predict(Rows(3))
    ours.pm.close()


def test_predictions_without_labels_are_refused(tmp_path: Path) -> None:
    class Unlabelled(Rows):
        def __getitem__(self, number: int) -> dict[str, Tensor]:
            row = super().__getitem__(number)
            del row["labels"]
            return row

    _, ours = pair(tmp_path, {"t": 2})
    ours.train_dataset = Rows(8)
    with pytest.raises(PlanError, match=r"trainer\.predict: the batch has no labels.*labels of -100"):
        ours.predict(Unlabelled(3))


def test_a_model_with_a_head_for_classes(tmp_path: Path) -> None:
    """Labels are one number for each row, and the loss is no sum over labels that are counted."""

    def make() -> Any:
        torch.manual_seed(1)
        config = transformers.LlamaConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=32,
            num_labels=3,
            pad_token_id=0,
        )
        return transformers.LlamaForSequenceClassification(config)

    class Classes(Rows):
        def __getitem__(self, number: int) -> dict[str, Tensor]:
            row = super().__getitem__(number)
            return {**row, "input_ids": row["input_ids"].clamp(min=1), "labels": torch.tensor(number % 3)}

    def right(found: Any) -> dict[str, float]:
        return {"right": float((found.predictions.argmax(-1) == found.label_ids).mean())}

    one = transformers.Trainer(make(), arguments(tmp_path, 4), compute_metrics=right)
    ours = Trainer(
        make(), arguments(tmp_path, 2), compute_metrics=right, parallel={"d": 2, "t": 2, "backend": "local"}
    )
    data = Classes(8, padded=False)
    expected, found = one.evaluate(data), ours.evaluate(data)
    assert found["eval_right"] == expected["eval_right"]
    assert abs(found["eval_loss"] - expected["eval_loss"]) <= 1e-5 * expected["eval_loss"]
    np.testing.assert_allclose(
        ours.predict(data).predictions, one.predict(data).predictions, rtol=0, atol=1e-5
    )
    ours.pm.close()
