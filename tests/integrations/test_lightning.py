"""A Trainer of Lightning on ranks as threads, against the same Trainer in one process: numbers in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("lightning")
import lightning.pytorch as pl
import torchmetrics
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from autoptd.errors import AutoptdError
from autoptd.integrations.lightning_checks import METHODS
from examples.gpt import GPT, GPTConfig
from tests.integrations.lightning_runs import (
    LENGTH,
    VOCAB,
    Data,
    Ended,
    Rows,
    Small,
    differences,
    fitted,
    on_ranks,
    trainer_of,
)

CLOSE = 1e-9
SLOW = pytest.mark.thorough


class Norms(Callback):
    """Logs the norm of gradients before they are clipped."""

    def __init__(self) -> None:
        self.norms: list[Any] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        norm = trainer.strategy.grad_norm
        if norm is not None and not any(norm is other for other in self.norms):
            self.norms.append(norm)


class PlainNorms(Callback):
    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.norms.append(float(torch.nn.utils.get_total_norm([x.grad for x in module.parameters()])))


@pytest.fixture(scope="module")
def usual() -> Ended:
    return fitted()


@pytest.mark.parametrize(
    "mesh",
    [
        {"t": 2},
        {"t": 2, "p": 2, "d": 2},
        {"d": 2, "zero": 1},
        pytest.param({"p": 2}, marks=SLOW),
        pytest.param({"t": 2, "p": 2, "num_microbatches": 4}, marks=SLOW),
        pytest.param({"t": 2, "sequence_parallel": True}, marks=SLOW),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("error:.*optimizer.step:UserWarning")
def test_it_trains_as_in_one_process(mesh: dict[str, Any], usual: Ended) -> None:
    found = fitted(on_ranks(**mesh))
    assert max(differences(found, usual)) < CLOSE
    assert found.trainer.strategy.ranks.options.mesh.size > 1
    assert len(usual.logs) > 10 and {"val_loss", "right", "train_loss_step"} <= set().union(
        *(x for _, x in usual.logs)
    )


@pytest.mark.parametrize("mesh", [{"t": 2, "d": 2}, pytest.param({"p": 2}, marks=SLOW)], ids=str)
def test_accumulated_and_clipped(mesh: dict[str, Any]) -> None:
    # The last window of an epoch has one batch.
    how = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    plain, own = PlainNorms(), Norms()
    expected, found = fitted(callbacks=[plain], **how), fitted(on_ranks(**mesh), callbacks=[own], **how)
    assert max(differences(found, expected)) < CLOSE
    assert [float(x) for x in own.norms] == pytest.approx(plain.norms, rel=1e-12) and min(plain.norms) > 0.1


def test_clipped_by_value(usual: Ended) -> None:
    how = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
    expected = fitted(**how)
    assert max(differences(fitted(on_ranks(t=2, d=2), **how), expected)) < CLOSE
    assert max(differences(expected, usual)) > 1e-3


class Plateau(Small):
    """With a schedule that follows what the validation logs, by an object that it keeps."""

    def configure_optimizers(self) -> Any:
        self.held = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(
            self.held, factor=0.1, patience=0, threshold=1.0
        )
        return {"optimizer": self.held, "lr_scheduler": schedule, "monitor": "val_loss"}


def test_a_schedule_by_what_is_logged() -> None:
    expected, found = fitted(make=Plateau, max_epochs=4), fitted(on_ranks(t=2), make=Plateau, max_epochs=4)
    assert max(differences(found, expected)) < CLOSE
    assert found.module.held is found.trainer.optimizers[0]
    assert found.module.held.param_groups[0]["lr"] == expected.module.held.param_groups[0]["lr"] < 0.01


def test_bf16_mixed() -> None:
    def run(strategy: Any = None) -> list[float]:
        torch.manual_seed(0)
        module, trainer = Small(16), trainer_of(strategy, precision="bf16-mixed")
        trainer.fit(module, Data(Rows(24), 8))
        return [
            float(x)
            for x in (trainer.callback_metrics["train_loss_epoch"], module.head.weight.detach().norm())
        ]

    found, expected = run(on_ranks(t=2, d=2)), run()
    assert found == pytest.approx(expected, rel=2e-3) and found != expected


# checkpoints


def saving(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1, save_last="link")


def test_a_checkpoint_resumes_on_any_mesh(tmp_path: Path, usual: Ended) -> None:
    one, own = tmp_path / "one", tmp_path / "own"
    on = {"enable_checkpointing": True, "max_epochs": 3}
    fitted(callbacks=[saving(one)], **{**on, "max_epochs": 2})
    expected = fitted(callbacks=[saving(tmp_path / "rest")], ckpt_path=one / "step=6.ckpt", **on)
    mesh = {"t": 2, "d": 2}
    first = fitted(on_ranks(**mesh), callbacks=[saving(own)], **{**on, "max_epochs": 2})
    assert sorted(path.name for path in own.iterdir()) == sorted(
        ["last.ckpt", "step=3.ckpt", "step=3.ckpt.ranks", "step=6.ckpt", "step=6.ckpt.ranks"]
    )
    for other in (mesh, {"p": 2}):
        again = fitted(
            on_ranks(**other), callbacks=[saving(tmp_path / str(other))], ckpt_path=own / "last.ckpt", **on
        )
        assert max(differences(again, expected)) < CLOSE
    # What Lightning's own loading sees.
    loaded = Small.load_from_checkpoint(own / "last.ckpt")
    assert all(torch.equal(x, first.weights[name].float()) for name, x in loaded.state_dict().items())
    first.trainer.save_checkpoint(own / "after.ckpt")
    assert (own / "after.ckpt.ranks").is_dir()
    with pytest.raises(AutoptdError, match=r"no step=6\.ckpt\.ranks"):
        fitted(on_ranks(t=2), ckpt_path=one / "step=6.ckpt", **on)


@pytest.mark.thorough
def test_a_resumed_run_continues_with_the_same_bits(tmp_path: Path) -> None:
    def loaders() -> tuple[Any, Any]:
        return Data(Rows(24), 8), Data(Rows(11, 2), 4)

    class Dropped(Small):
        def forward(self, ids: Any) -> Any:
            return self.head(nn.functional.dropout(self.blocks(self.embed(ids)), 0.2, self.training))

    on = {"enable_checkpointing": True, "make": Dropped, "loaders": loaders}
    whole = fitted(on_ranks(t=2), callbacks=[saving(tmp_path / "a")], max_epochs=4, **on)
    fitted(on_ranks(t=2), callbacks=[saving(tmp_path / "b")], max_epochs=2, **on)
    rest = fitted(
        on_ranks(t=2),
        callbacks=[saving(tmp_path / "c")],
        max_epochs=4,
        ckpt_path=tmp_path / "b/last.ckpt",
        **on,
    )
    assert all(torch.equal(x, whole.weights[name]) for name, x in rest.weights.items())


def test_the_best_are_kept(tmp_path: Path) -> None:
    best = ModelCheckpoint(tmp_path, filename="{epoch}", monitor="val_loss", save_top_k=1)
    only = ModelCheckpoint(tmp_path / "only", save_weights_only=True)
    fitted(on_ranks(t=2), callbacks=[best, only], enable_checkpointing=True)
    kept = {path.name for path in tmp_path.iterdir()} - {"only"}
    assert kept == {Path(best.best_model_path).name, Path(best.best_model_path).name + ".ranks"}
    assert [path.suffix for path in (tmp_path / "only").iterdir()] == [".ckpt"]


# evaluation


class Several(Small):
    """Several loaders, and sums."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log(f"of_{dataloader_idx}", self.loss_of(batch))

    def test_step(self, batch: Any) -> Any:
        logits, targets = self(batch[0]), batch[1]
        self.log("right", (logits.argmax(-1) == targets).sum(), reduce_fx="sum")
        self.log("loss", nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))


@pytest.mark.parametrize("mesh", [{"t": 2, "d": 2}, pytest.param({"p": 2}, marks=SLOW)], ids=str)
def test_evaluation_without_training(mesh: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = Several().double()
    loaders = [Data(Rows(11, 2), 4), Data(Rows(9, 3), 4)]

    def run(strategy: Any) -> Any:
        trainer = trainer_of(strategy)
        return [
            *trainer.validate(module, loaders, verbose=False),
            *trainer.test(module, loaders[0], verbose=False),
        ]

    found, expected = run(on_ranks(**mesh)), run(None)
    assert [one.keys() for one in found] == [one.keys() for one in expected] and len(expected) == 3
    for own, other in zip(found, expected, strict=True):
        assert own == pytest.approx(other, rel=1e-12)


class Outputs(Callback):
    def __init__(self) -> None:
        self.rows: list[Any] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.rows.append(outputs["chosen"])

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.weights = {name: x.clone() for name, x in module.state_dict().items()}


def test_callbacks_find_outputs_and_trained_weights() -> None:
    own, other = Outputs(), Outputs()
    found = fitted(on_ranks(t=2, p=2), callbacks=[own])
    fitted(callbacks=[other], num_sanity_val_steps=0)
    assert len(own.rows) == 6 and all(torch.equal(x, y) for x, y in zip(own.rows, other.rows, strict=True))
    assert all(torch.equal(x, found.weights[name]) for name, x in own.weights.items())


def test_a_module_is_trained_twice() -> None:
    def twice(strategy: Any = None) -> Ended:
        ended = fitted(strategy)
        ended.trainer.fit_loop.max_epochs = 4
        ended.trainer.fit(ended.module, Data(Rows(24, 4), 8, shuffle=True))
        return ended

    assert max(differences(twice(on_ranks(t=2)), twice())) < CLOSE


# models


class Tiny(pl.LightningModule):
    """A model of transformers, with batches as its collators make them."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": VOCAB, "n_positions": LENGTH}
        drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        self.model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = self.model(**batch)
        self.log("loss", output.loss)
        return {"loss": output.loss}

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Nano(pl.LightningModule):
    """The GPT of the examples, with a loss that the step computes."""

    def __init__(self) -> None:
        super().__init__()
        config = GPTConfig(vocab_size=VOCAB, block_size=LENGTH, n_layer=2, n_head=2, n_embd=16)
        self.gpt = GPT(config)

    def training_step(self, batch: Any) -> Any:
        logits, _ = self.gpt(batch["ids"])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True)
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20)]


def encoded(rows: Any) -> Any:
    ids = torch.stack([row[0] for row in rows])
    return pytest.importorskip("transformers").BatchEncoding({"input_ids": ids, "labels": ids})


def in_dict(rows: Any) -> Any:
    return dict(zip(("ids", "targets"), map(torch.stack, zip(*rows, strict=True)), strict=True))


@pytest.mark.parametrize("mesh", [{"t": 2, "p": 2}, pytest.param({"d": 2}, marks=SLOW)], ids=str)
@pytest.mark.parametrize(("make", "collate", "close"), [(Tiny, encoded, 1e-5), (Nano, in_dict, CLOSE)])
def test_models(make: Any, collate: Any, close: float, mesh: dict[str, Any]) -> None:
    def loaders() -> Any:
        return Data(Rows(12), 4, collate_fn=collate), None

    found, expected = (fitted(strategy, make=make, loaders=loaders) for strategy in (on_ranks(**mesh), None))
    assert max(differences(found, expected)) < close


class Noisy(Small):
    """Draws numbers for all batches, keeps statistics, and logs in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, ids: Any) -> Any:
        x = self.blocks(self.embed(ids))
        return self.head(self.norm(x.flatten(0, 1)).view_as(x))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        ids, targets = batch
        return torch.where(torch.rand(ids.shape) < 0.1, 0, ids), targets

    def on_train_batch_end(self, *_: Any) -> None:
        self.log("last", self.lr_schedulers().get_last_lr()[0])


class Endless(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(Rows(24))


def test_random_hooks_and_data_without_a_length() -> None:
    def loaders() -> Any:
        return Data(Endless(), 8), Data(Rows(11, 2), 4)

    found, expected = (
        fitted(strategy, make=Noisy, loaders=loaders) for strategy in (on_ranks(t=2, d=2), None)
    )
    assert max(differences(found, expected)) < CLOSE


# what is refused


def given(**attributes: Any) -> type[Small]:
    """A class of the module with other methods."""

    class Given(Small):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[Any] = []

    for name, attribute in attributes.items():
        setattr(Given, name, attribute)
    return Given


def no_hook(*_: Any, **__: Any) -> None:
    pass


def refused(make: Any, message: str, callbacks: Any = (), **keywords: Any) -> None:
    made: list[Any] = []
    with pytest.raises(AutoptdError, match=message):
        made.append(trainer_of(on_ranks(**keywords.pop("mesh", {"t": 2})), callbacks, **keywords))
        made[0].fit(make(), Data(Rows(24), 8), Data(Rows(11, 2), 4))
    assert not made or made[0].global_step == 0


class Manual(Small):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Counts(Small):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=VOCAB)


class Thaws(pl.callbacks.BaseFinetuning):
    freeze_before_training = finetune_function = no_hook


class SeesGradients(Callback):
    on_after_backward = no_hook


@pytest.mark.parametrize("name", [*METHODS, "manual", "metric"])
def test_what_works_on_the_module(name: str) -> None:
    others = {
        "manual": (Manual, "automatic_optimization"),
        "metric": (Counts, "accuracy: a MulticlassAccuracy"),
    }
    refused(*others.get(name, (given(**{name: no_hook}), f"lightning.Trainer: {name}: works on the module")))


@pytest.mark.parametrize(
    "callback",
    [
        pl.callbacks.StochasticWeightAveraging(1e-2),
        pl.callbacks.EMAWeightAveraging(),
        pl.callbacks.GradientAccumulationScheduler({1: 2}),
        Thaws(),
        pl.callbacks.OnExceptionCheckpoint("."),
        ModelCheckpoint(save_on_exception=True),
        SeesGradients(),
        pl.callbacks.LambdaCallback(on_before_zero_grad=no_hook),
    ],
    ids=lambda callback: type(callback).__name__,
)
def test_callbacks_that_ranks_do_not_follow(callback: Any) -> None:
    refused(Small, type(callback).__name__, [callback], enable_checkpointing=True)


def logs(value: Callable[[Any, Any], Any], **how: Any) -> Callable[..., Any]:
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = self.loss_of(batch)
        self.log("it", value(loss, self), **how)
        return loss

    return step


def collects(self: Any, batch: Any, batch_idx: int) -> Any:
    loss = self.loss_of(batch)
    self.losses.append(loss)
    return loss


STEPS = {
    "is not the loss": logs(lambda loss, module: loss * 2),
    "gets a float": logs(lambda loss, module: 1.0),
    "batch_size=3 is not": logs(lambda loss, module: loss, batch_size=3),
    "not a plain value": logs(lambda loss, module: loss, reduce_fx=torch.max),
    "batch_idx: is used": lambda self, batch, batch_idx: self.loss_of(batch) * (batch_idx + 1),
    "self.current_epoch": lambda self, batch, batch_idx: self.loss_of(batch) * (self.current_epoch + 1),
    "self.global_step": lambda self, batch, batch_idx: self.loss_of(batch) / (self.global_step + 1),
    "self.trainer": lambda self, batch, batch_idx: self.loss_of(batch) * self.trainer.max_epochs,
    "returns a NoneType": lambda self, batch, batch_idx: None,
    "returns more as well": lambda self, batch, batch_idx: {"loss": self.loss_of(batch), "more": batch[0]},
    "losses": collects,
}


@pytest.mark.parametrize("message", STEPS)
def test_training_steps(message: str) -> None:
    refused(given(training_step=STEPS[message]), message)


@pytest.mark.parametrize(
    ("message", "step"),
    [
        ("neither logs nor returns", lambda self, batch, batch_idx: None),
        ("returns a float", lambda self, batch, batch_idx: {"loss": self.loss_of(batch), "it": 1.0}),
        ("losses", collects),
    ],
    ids=["nothing", "a float", "a list"],
)
def test_validation_steps_are_tried_before_training(message: str, step: Any) -> None:
    refused(given(validation_step=step), message)


@pytest.mark.parametrize(
    ("message", "how"),
    [
        ("64-true.*module.double", {"precision": "64-true"}),
        ("16-true.*fp16-mixed", {"precision": "16-true"}),
        ("one of them", {"precision": "bf16-mixed", "mesh": {"t": 2, "precision": "bf16"}}),
        ("number of batches", {"val_check_interval": "00:00:00:01"}),
        ("there is no batch yet", {"mesh": {"t": "auto"}}),
        ("loss_fn", {"mesh": {"t": 2, "loss_fn": no_hook}}),
        ("8 rows do not", {"mesh": {"d": 3}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings(message: str, how: dict[str, Any]) -> None:
    refused(Small, message, **how)


def test_a_last_batch_that_does_not_divide() -> None:
    with pytest.raises(AutoptdError, match="the last batch of an epoch has 5 rows"):
        trainer_of(on_ranks(d=2)).fit(Small(), Data(Rows(21), 8))


@pytest.mark.parametrize(
    ("message", "configure"),
    [
        (
            "embed.weight and 2 more: trained, and in no group",
            lambda self: torch.optim.SGD(self.blocks.parameters()),
        ),
        ("elementwise", lambda self: torch.optim.LBFGS(self.parameters())),
        ("not the module's", lambda self: torch.optim.SGD([*self.parameters(), nn.Parameter(torch.ones(1))])),
    ],
    ids=["some", "LBFGS", "others"],
)
def test_optimizers(message: str, configure: Any) -> None:
    refused(given(configure_optimizers=configure), message)


def test_two_optimizers_are_refused_by_lightning() -> None:
    def configure(self: Any) -> Any:
        return [torch.optim.SGD(self.head.parameters()), torch.optim.SGD(self.blocks.parameters())]

    with pytest.raises(RuntimeError, match="manual optimization"):
        trainer_of(on_ranks(t=2)).fit(given(configure_optimizers=configure)(), Data(Rows(24), 8))


def test_a_prediction_is_refused() -> None:
    with pytest.raises(AutoptdError, match=r"trainer\.predict"):
        trainer_of(on_ranks(t=2)).predict(Small(), Data(Rows(8), 8))


def test_what_a_hook_sets_is_noticed_in_the_next_epoch() -> None:
    class Warms(Small):
        weight = 1.0

        def on_train_epoch_start(self) -> None:
            self.weight = self.current_epoch + 1.0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss_of(batch) * self.weight

    with pytest.raises(AutoptdError, match=r"epoch 1: .*weight"):
        trainer_of(on_ranks(t=2)).fit(Warms(), Data(Rows(24), 8))
