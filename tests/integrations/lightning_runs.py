"""A LightningModule, its data, and runs of a Trainer of Lightning: in one process as usual, or on ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pl = pytest.importorskip("lightning.pytorch")
from lightning.pytorch.callbacks import LearningRateMonitor  # noqa: E402

from autoptd.integrations.lightning import Strategy  # noqa: E402

VOCAB, LENGTH = 32, 6
Data = torch.utils.data.DataLoader


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Small(pl.LightningModule):
    """A model as a tutorial writes it: two groups, a schedule by steps, a validation with two numbers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.blocks = nn.Sequential(Block(width), Block(width))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(ids)))

    def loss_of(self, batch: Any) -> Tensor:
        ids, targets = batch
        return nn.functional.cross_entropy(self(ids).flatten(0, 1), targets.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss_of(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        ids, targets = batch
        logits = self(ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        right = (logits.argmax(-1) == targets).to(logits.dtype).mean()
        self.log_dict({"val_loss": loss, "right": right}, batch_size=len(ids))
        return {"loss": loss, "chosen": logits.argmax(-1)}

    def configure_optimizers(self) -> Any:
        wide = [x for x in self.parameters() if x.ndim > 1]
        others = {"params": [x for x in self.parameters() if x.ndim < 2], "weight_decay": 0.0}
        optimizer = torch.optim.AdamW([{"params": wide, "weight_decay": 0.1}, others], lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Rows(torch.utils.data.TensorDataset):
    """Random rows of ids and targets."""

    def __init__(self, count: int, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        super().__init__(*torch.randint(VOCAB, (2, count, LENGTH), generator=generator))


class Memory(pl.loggers.Logger):
    """A logger that keeps what it gets."""

    name, version = "memory", 0

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.logs.append((step or 0, dict(metrics)))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


@dataclass
class Ended:
    """A run that has ended."""

    trainer: Any
    module: Any
    logs: list[tuple[int, dict[str, float]]]

    @property
    def weights(self) -> dict[str, Tensor]:
        return self.module.state_dict()


def trainer_of(strategy: Any = None, callbacks: Sequence[Any] = (), **keywords: Any) -> Any:
    usual: dict[str, Any] = {"accelerator": "cpu", "enable_progress_bar": False, "log_every_n_steps": 1}
    usual |= {"enable_model_summary": False, "enable_checkpointing": False, "max_epochs": 2, "logger": False}
    usual |= {} if strategy is None else {"strategy": strategy}
    return pl.Trainer(callbacks=list(callbacks), **{**usual, **keywords})


def fitted(
    strategy: Any = None,
    make: Callable[[], Any] = Small,
    callbacks: Sequence[Any] = (),
    loaders: Callable[[], tuple[Any, Any]] | None = None,
    ckpt_path: Any = None,
    **keywords: Any,
) -> Ended:
    """Train a module in float64."""
    torch.manual_seed(0)
    module, logger = make().double(), Memory()
    trainer = trainer_of(
        strategy, [LearningRateMonitor("step"), *callbacks], **{"logger": logger, **keywords}
    )
    train, val = loaders() if loaders else (Data(Rows(24), 8, shuffle=True), Data(Rows(11, 2), 4))
    trainer.fit(module, train, val, ckpt_path=ckpt_path)
    return Ended(trainer, module, logger.logs)


def on_ranks(**mesh: Any) -> Strategy:
    return Strategy(backend="local", **mesh)


def differences(found: Ended, expected: Ended) -> tuple[float, float]:
    """Return the largest difference of a logged number and of a weight."""
    assert [(step, logs.keys()) for step, logs in found.logs] == [
        (step, logs.keys()) for step, logs in expected.logs
    ]
    pairs = zip(found.logs, expected.logs, strict=True)
    logged = max(abs(own[key] - other[key]) for (_, own), (_, other) in pairs for key in own)
    return logged, max(float((x - expected.weights[name]).abs().max()) for name, x in found.weights.items())
