"""Small models, data and runs of a Trainer, on one device or on ranks, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
from transformers import (  # noqa: E402
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
)

from autoptd.integrations.transformers import Trainer  # noqa: E402

VOCAB, LENGTH = 32, 8


def gpt2() -> nn.Module:
    """Two tied layers without dropout, as torch's masks are not those of the ranks."""
    config = GPT2Config(
        n_layer=2,
        n_embd=16,
        n_head=2,
        vocab_size=VOCAB,
        n_positions=LENGTH,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(1)
    return GPT2LMHeadModel(config)


def llama(**others: Any) -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **others}))


class Float64Loss:
    """The loss of causal models of transformers without its cast to float32, which hides errors under 1e-7."""

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        **_: Any,
    ) -> Tensor:
        shifted = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
        scores = logits.reshape(-1, vocab_size)
        if num_items_in_batch is None:
            return nn.functional.cross_entropy(scores, shifted)
        return nn.functional.cross_entropy(scores, shifted, reduction="sum") / num_items_in_batch


def in_float64(model: nn.Module) -> nn.Module:
    """With float64 parameters; rotary tables and norms of transformers still cast to float32 inside."""
    model = model.double()
    model.loss_function = Float64Loss()  # type: ignore[assignment]
    return model


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Rows of ids; some end in padding, so that batches have different numbers of labels."""

    def __init__(self, count: int, seed: int = 0, padded: bool = True, length: int = LENGTH) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(VOCAB, (count, length), generator=generator)
        self.lengths = torch.randint(2, length + 1, (count,), generator=generator)
        if not padded:
            self.lengths[:] = length

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        is_real = torch.arange(self.ids.shape[1]) < self.lengths[number]
        ids = self.ids[number]
        return {
            "input_ids": ids,
            "attention_mask": is_real.long(),
            "labels": torch.where(is_real, ids, -100),
        }


class PerSize:
    """A collator that cuts a batch to its longest row: lengths differ from batch to batch."""

    def __call__(self, rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        longest = int(batch["attention_mask"].sum(1).max())
        return {name: x[:, :longest] for name, x in batch.items()}


@dataclass
class Ended:
    """A run that has ended: its trainer, its logs without times, and the trained weights."""

    trainer: Any
    logs: list[dict[str, float]]
    weights: Mapping[str, Tensor]


TIMES = ("runtime", "per_second", "preparation_time")


def logs_of(trainer: Any) -> list[dict[str, float]]:
    return [
        {key: value for key, value in log.items() if not key.endswith(TIMES)}
        for log in trainer.state.log_history
    ]


def arguments(folder: Path | str, rows: int = 2, **others: Any) -> TrainingArguments:
    usual = {
        "output_dir": str(folder),
        "per_device_train_batch_size": rows,
        "per_device_eval_batch_size": rows,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
    }
    return TrainingArguments(**{**usual, **others})


def finished(trainer: Any, **keywords: Any) -> Ended:
    """Train, and return what came of it."""
    trainer.train(**keywords)
    weights = {name: x.detach().clone() for name, x in trainer.model.state_dict().items()}
    if getattr(trainer, "pm", None) is not None:
        trainer.pm.close()
    return Ended(trainer, logs_of(trainer), weights)


def one_device(
    make: Callable[[], nn.Module], folder: Path, d: int, rows: int = 2, data: Any = None, **others: Any
) -> Ended:
    """A run of transformers in one process, with the rows of all replicas."""
    args, parts = split(others)
    trainer = transformers.Trainer(
        make(), arguments(folder, rows * d, **args), train_dataset=data or Rows(22), **parts
    )
    return finished(trainer)


def on_ranks(
    make: Callable[[], nn.Module],
    folder: Path,
    mesh: Mapping[str, Any],
    rows: int = 2,
    data: Any = None,
    **others: Any,
) -> Ended:
    """The same on ranks as threads."""
    args, parts = split(others)
    parallel = {"backend": "local", **mesh}
    trainer = Trainer(
        make(), arguments(folder, rows, **args), train_dataset=data or Rows(22), parallel=parallel, **parts
    )
    return finished(trainer)


PARTS = ("eval_dataset", "compute_metrics", "data_collator", "callbacks", "optimizer_cls_and_kwargs")


def split(others: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the training arguments among keywords, and the others of a Trainer."""
    args = {name: value for name, value in others.items() if name not in PARTS}
    return args, {name: value for name, value in others.items() if name in PARTS}


def differences(found: Ended, expected: Ended) -> tuple[float, float]:
    """Return the largest difference of a logged number, relative to it, and of a weight."""
    assert [log.keys() for log in found.logs] == [log.keys() for log in expected.logs]
    logged = 0.0
    for own, other in zip(found.logs, expected.logs, strict=True):
        for key, value in other.items():
            if isinstance(value, (int, float)) and key != "total_flos":
                logged = max(logged, abs(own[key] - value) / max(abs(value), 1e-9))
    assert found.weights.keys() == expected.weights.keys()
    pairs = [(x, expected.weights[name]) for name, x in found.weights.items()]
    return logged, max(float((x - y).abs().max()) for x, y in pairs)
