"""What a script does around `train` and `evaluate` counts as it does in transformers: modes, edits, short batches, padding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoptd.errors import PlanError
from autoptd.integrations.transformers import Trainer
from tests.integrations.runs import Rows, arguments, gpt2, in_float64, transformers

MESH = {"t": 2, "backend": "local"}


def pair(folder: Path, make: Any = lambda: in_float64(gpt2()), **given: Any) -> tuple[Any, Any]:
    args = given.pop("args", {})
    one = transformers.Trainer(make(), arguments(folder / "one", 4, **args), **given)
    return one, Trainer(make(), arguments(folder / "ours", 4, **args), **given, parallel=MESH)


def test_a_model_in_eval_mode_is_trained_with_dropout(tmp_path: Path) -> None:
    """`from_pretrained` returns models in eval mode."""
    losses = []
    for is_training in (True, False):
        model = gpt2()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.5
        model.train(is_training)
        trainer = Trainer(model, arguments(tmp_path, 4, max_steps=2), train_dataset=Rows(8), parallel=MESH)
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
        assert trainer.model.training
        trainer.pm.close()
    assert losses[0] == losses[1]
    plain = Trainer(gpt2(), arguments(tmp_path, 4, max_steps=2), train_dataset=Rows(8), parallel=MESH)
    plain.train()
    assert losses[0] != [log["loss"] for log in plain.state.log_history if "loss" in log]
    plain.pm.close()


def halve(model: Any) -> None:
    with torch.no_grad():
        model.transformer.ln_f.weight.mul_(0.5)


def load(model: Any) -> None:
    torch.manual_seed(7)
    model.load_state_dict({name: x + 0.1 * torch.randn_like(x) for name, x in model.state_dict().items()})


def through_data(model: Any) -> None:
    model.transformer.ln_f.weight.data *= 0.5


@pytest.mark.parametrize("edit", [halve, load, through_data])
def test_weights_that_a_script_sets_are_those_of_the_ranks(edit: Any, tmp_path: Path) -> None:
    one, ours = pair(tmp_path, train_dataset=Rows(8), eval_dataset=Rows(6, seed=2), args={"max_steps": 2})
    found: list[list[float]] = [[], []]
    for trainer, numbers in zip((one, ours), found, strict=True):
        numbers.append(trainer.evaluate()["eval_loss"])
        edit(trainer.model)
        trainer.train()
        numbers += [log["loss"] for log in trainer.state.log_history if "loss" in log]
        numbers.append(trainer.evaluate()["eval_loss"])
        edit(trainer.model)
        trainer.save_model(str(tmp_path / "saved"))
        saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved", dtype=torch.float64)
        assert torch.equal(saved.transformer.ln_f.weight, trainer.model.transformer.ln_f.weight)
        numbers.append(trainer.evaluate()["eval_loss"])
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert len(set(found[1])) == len(found[1])
    ours.pm.close()


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Has no length; the last batch is short."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (Rows(5)[number] for number in range(5))


def test_a_short_last_batch_of_a_stream_counts_by_its_rows(tmp_path: Path) -> None:
    one, ours = pair(tmp_path, eval_dataset=Stream(), args={"max_steps": 2})
    assert ours.evaluate()["eval_loss"] == pytest.approx(one.evaluate()["eval_loss"], rel=1e-6)
    ours.pm.close()


class Pooled(nn.Module):
    """Reads padding: every token sees the mean over all tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(32, 8), nn.Linear(8, 32)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        attention_mask: Any = None,
        num_items_in_batch: Any = None,
        **_: Any,
    ) -> Any:
        x = self.embed(input_ids)
        logits = self.head(torch.tanh(x + x.mean(1, keepdim=True)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": loss / num_items_in_batch, "logits": logits}


def test_padding_of_a_later_update_is_proven_as_well(tmp_path: Path) -> None:
    lengths = [8] * 8 + [8] * 4 + [2] * 4
    data = [{"input_ids": torch.arange(n) + k, "labels": torch.arange(n) + k} for k, n in enumerate(lengths)]
    data = [{**row, "attention_mask": torch.ones_like(row["labels"])} for row in data]
    how = {"gradient_accumulation_steps": 2, "train_sampling_strategy": "sequential", "max_steps": 2}
    trainer = Trainer(
        Pooled(),
        arguments(tmp_path, 4, **how),
        train_dataset=data,
        data_collator=lambda rows: {name: torch.stack([row[name] for row in rows]) for name in rows[0]},
        parallel=MESH,
    )
    with pytest.raises(PlanError, match="batches that are padded to the longest of an update"):
        trainer.train()
    assert trainer.state.global_step == 1
    trainer.pm.close()
