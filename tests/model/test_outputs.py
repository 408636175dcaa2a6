"""`eval_step(outputs=...)`: what it returns besides the loss is that of one device, on every mesh, for any number of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.errors import PlanError, RuntimeFault

VOCAB = 13  # divides over nothing


class Model(nn.Module):
    """Returns what models of transformers do; eval mode has no dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.dropout = nn.Embedding(VOCAB, 8), nn.Dropout(0.3)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(4)
        )
        self.head = nn.Linear(8, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Any]:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + self.dropout(layer(x))
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits, "hidden": x, "cache": None}


def batch(rows: int = 8, length: int = 4) -> dict[str, Tensor]:
    ids = (torch.arange(rows * length).view(rows, length) * 7 + rows) % VOCAB
    # Another number of labels counts in each row.
    return {
        "ids": ids,
        "labels": torch.where(torch.arange(length) < 1 + ids[:, :1] % length, ids.roll(1, 1), -100),
    }


def everything(output: dict[str, Any], ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Rows, sums and means over the batch, and what no row changes."""
    chosen, counts = output["logits"].argmax(-1), labels != -100
    return {
        "chosen": chosen,
        "is right": chosen == labels,
        "flat": output["logits"].flatten(0, 1),
        "per token": F.cross_entropy(
            output["logits"].flatten(0, 1), labels.flatten(), reduction="none"
        ).view_as(ids),
        "right": ((chosen == labels) & counts).sum(),
        "of all": ((chosen == labels) & counts).double().sum() / counts.sum(),
        "of each class": F.one_hot(chosen, VOCAB).sum((0, 1)),
        "mean": output["hidden"].mean((0, 1)),
        "scale": torch.full((2,), 3.0),
        # The name of nothing else.
        "output": output["hidden"].mean(-1),
        "at least 7": torch.stack([counts.sum(), torch.tensor(7)]).amax(),
    }


@pytest.mark.one_in(4)
@pytest.mark.parametrize("rows", [8, 5, 1])
@pytest.mark.parametrize(
    "mesh",
    [
        {"t": 2},
        {"p": 2},
        {"d": 2},
        {"c": 2},
        {"t": 2, "p": 2, "v": 2, "num_microbatches": 2, "sequence_parallel": True},
        {"t": 2, "p": 2, "d": 2, "num_microbatches": 2},
        {"p": 2, "d": 2, "schedule": "zbv", "v": 2, "num_microbatches": 4},
        {"d": 2, "p": 2, "recompute": "full", "zero": 1},
    ],
    ids=str,
)
def test_outputs_of_one_device(mesh: dict[str, Any], rows: int) -> None:
    pm = autoptd.parallelize(Model().double(), backend="local", example_inputs=batch(), **mesh)
    optimizer, plain = pm.optimizer(torch.optim.SGD, lr=0.5), Model().double()
    for _ in range(2):
        pm.step(**batch())
        optimizer.step()
        optimizer.zero_grad()
        plain.load_state_dict(pm.state_dict())
        call = batch(rows)
        with torch.no_grad():
            wanted = plain.eval()(**call)
        loss, logits = pm.eval_step(**call, outputs="logits")
        torch.testing.assert_close(loss, wanted["loss"], rtol=1e-12, atol=0)
        torch.testing.assert_close(logits, wanted["logits"], rtol=0, atol=1e-12)
        _, found = pm.eval_step(**call, outputs=["hidden", "logits"])
        assert list(found) == ["hidden", "logits"]
        torch.testing.assert_close(found["hidden"], wanted["hidden"], rtol=0, atol=1e-12)
        _, found = pm.eval_step(**call, outputs=everything)
        for name, x in everything(wanted, **call).items():
            torch.testing.assert_close(
                found[name], x, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
            )
        assert not any(x.requires_grad for x in found.values())
        # The same programs all the time, and the loss alone as before.
        assert pm.eval_step(**call) == pytest.approx(float(wanted["loss"]), rel=1e-12)
        assert len(pm.sizes.evaluating) == 4
    pm.close()


class Logits(Model):
    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids, ids)["logits"]  # type: ignore[no-any-return]


def test_with_a_loss_function_the_targets_are_handed_over() -> None:
    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    call = {"ids": batch()["ids"], "targets": batch()["ids"].roll(1, 1)}
    pm = autoptd.parallelize(
        Logits().double(), t=2, p=2, backend="local", loss_fn=loss_fn, example_inputs=call
    )
    _, right = pm.eval_step(**call, outputs=lambda logits, ids, targets: logits.argmax(-1) == targets)
    with torch.no_grad():
        logits = Logits().double().eval()(call["ids"])
    assert torch.equal(right, logits.argmax(-1) == call["targets"])
    pm.close()


def of_dim_1(output: dict[str, Any], ids: Tensor, labels: Tensor) -> Tensor:
    return output["logits"].transpose(0, 1)  # type: ignore[no-any-return]


def interleaved(output: dict[str, Any], ids: Tensor, labels: Tensor) -> Tensor:
    return output["logits"].transpose(0, 1).flatten(0, 1)  # type: ignore[no-any-return]


def largest(output: dict[str, Any], ids: Tensor, labels: Tensor) -> Tensor:
    return output["hidden"].amax()  # type: ignore[no-any-return]


def quotient_of_sums(output: dict[str, Any], ids: Tensor, labels: Tensor) -> Tensor:
    chosen = output["logits"].argmax(-1)
    return (chosen == labels).sum() / (chosen > 3).sum()


def draws(output: dict[str, Any], ids: Tensor, labels: Tensor) -> Tensor:
    return F.dropout(output["hidden"], 0.5)


def a_number(output: dict[str, Any], ids: Tensor, labels: Tensor) -> float:
    return 1.0


def integers_joined(output: dict[str, Any], ids: Tensor, labels: Tensor) -> Tensor:
    """A part of an integer is none: each microbatch would add a third of the 5."""
    return torch.stack([(output["logits"].argmax(-1) == labels).sum(), torch.tensor(5)])


def a_branch(output: dict[str, Any], ids: Tensor, labels: Tensor) -> Tensor:
    """Of the number of rows, by which it picks one of two tensors."""
    picked = output["hidden"] if len(ids) > 4 else output["hidden"].sin()
    return torch.stack([output["hidden"].sin(), picked], 1)


def a_choice(output: dict[str, Any], ids: Tensor, labels: Tensor) -> Tensor:
    sine, cosine = output["hidden"].sin(), output["hidden"].cos()
    return (sine if len(ids) > 4 else cosine) + sine + cosine


REFUSED: list[tuple[Any, str]] = [
    (3, r"outputs=\): is 3. Remedy: a name, a list of names, or a function"),
    (integers_joined, "of a sum over samples is not a sum over samples"),
    (a_branch, "its operators depend on the number of rows in the batch"),
    (a_choice, "its operators depend on the number of rows in the batch"),
    (
        "probabilities",
        r"the model returns a dict, which has no 'probabilities'. Remedy: one of loss, logits, hidden",
    ),
    ("cache", r"gives a NoneType as 'cache'. Remedy: a tensor"),
    (a_number, r"gives a float. Remedy: a tensor, or a dict of tensors by name"),
    (
        of_dim_1,
        r"of shape \(4, \d, 13\), whose outermost dim is not the batch. Remedy: a value with the batch in dim 0",
    ),
    (interleaved, r"of shape \(\d+, 13\), whose outermost dim is not the batch"),
    (largest, "mixes the samples of the batch"),
    (quotient_of_sums, "of a sum over samples is not a sum over samples"),
    (draws, "dropout of 0.5 is drawn in eval mode"),
]


@pytest.mark.parametrize(
    ("outputs", "text"), REFUSED, ids=[str(getattr(x, "__name__", x)) for x, _ in REFUSED]
)
def test_what_no_evaluation_returns_is_refused(outputs: Any, text: str) -> None:
    pm = autoptd.parallelize(
        Model().double(), d=2, backend="local", num_microbatches=2, example_inputs=batch()
    )
    with pytest.raises(PlanError, match=text):
        pm.eval_step(**batch(), outputs=outputs)
    assert pm.eval_step(**batch(), outputs="logits")[1].shape == (8, 4, VOCAB)
    pm.close()


def test_padded_batches_have_no_outputs() -> None:
    pm = autoptd.parallelize(
        Model().double(), backend="local", shapes=autoptd.Buckets((4, 8)), example_inputs=batch()
    )
    with pytest.raises(PlanError, match="shapes='bucket' pads the batch, and with it the outputs"):
        pm.eval_step(**batch(), outputs="logits")
    pm.close()


def test_another_function_in_every_call_is_refused_at_last() -> None:
    pm = autoptd.parallelize(Model().double(), backend="local", example_inputs=batch())
    made: list[Callable[..., Any]] = [lambda output, ids, labels, k=k: output["logits"] * k for k in range(9)]
    for k, function in enumerate(made[:8]):
        found = pm.eval_step(**batch(), outputs=function)[1]
        assert torch.equal(found, k * pm.eval_step(**batch(), outputs=made[1 if k else 0])[1])
    with pytest.raises(PlanError, match=r"another function than the 8 before.*a lambda within a loop"):
        pm.eval_step(**batch(), outputs=made[8])
    pm.close()


class Best:
    """A function with state; as a bound method it is another object in each call."""

    def __init__(self) -> None:
        self.count, self.mode, self.scale = 2, "best", torch.tensor(1.0)

    def of(self, output: dict[str, Any], ids: Tensor, labels: Tensor) -> Tensor:
        indices = output["logits"].topk(self.count, -1, largest=self.mode == "best").indices
        return indices * self.scale


@pytest.mark.parametrize(("name", "value"), [("count", 3), ("mode", "worst"), ("scale", torch.tensor(2.0))])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_function_that_has_changed_is_noticed(name: str, value: Any, dropout: float) -> None:
    best, model = Best(), Model().double()
    model.dropout.p = dropout
    often = autoptd.RankOptions(check_every=1)
    pm = autoptd.parallelize(model, p=2, backend="local", ranks=often, example_inputs=batch())
    for _ in range(2):
        assert pm.eval_step(**batch(), outputs=best.of)[1].shape == (8, 4, 2)
    assert len(pm.sizes.evaluating) == 1
    setattr(best, name, value)
    with pytest.raises(RuntimeFault, match=rf"changed since the model was compiled: outputs.*{name} \("):
        pm.eval_step(**batch(), outputs=best.of)
    pm.close()


def test_a_function_that_collects_what_it_sees_is_warned_of() -> None:
    seen: list[Tensor] = []

    def collects(output: dict[str, Any], ids: Tensor, labels: Tensor) -> Tensor:
        seen.append(output["loss"])
        return output["loss"]  # type: ignore[no-any-return]

    pm = autoptd.parallelize(Model().double(), p=2, backend="local", example_inputs=batch())
    with pytest.warns(UserWarning, match=r"seen.* is added to"):
        loss, same = pm.eval_step(**batch(), outputs=collects)
    torch.testing.assert_close(loss, same, rtol=1e-12, atol=0)
    pm.close()


def test_results_are_copies_and_leave_the_loss_alone() -> None:
    def weights(output: dict[str, Any], ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        output["loss"].add_(1)
        return {"head": model.head.weight, "ids": ids}

    for mesh in ({"d": 1}, {"t": 2}, {"p": 2}, {"d": 2}):
        model = Model().double()
        pm = autoptd.parallelize(model, backend="local", example_inputs=batch(), **mesh)
        before = pm.eval_step(**batch())
        loss, found = pm.eval_step(**batch(), outputs=weights)
        torch.testing.assert_close(loss, before, rtol=1e-12, atol=0)
        found["head"].zero_(), found["ids"].zero_()
        torch.testing.assert_close(pm.eval_step(**batch()), before, rtol=1e-12, atol=0)
        pm.close()


@dataclass(frozen=True)
class Scaled:
    """Equal to any other, whatever its number."""

    scale: float = field(compare=False)

    def __call__(self, output: dict[str, Any], ids: Tensor, labels: Tensor) -> Tensor:
        return output["logits"] * self.scale  # type: ignore[no-any-return]


def test_equal_functions_are_not_the_same() -> None:
    pm = autoptd.parallelize(Model().double(), d=2, backend="local", example_inputs=batch())
    once, twice = Scaled(1.0), Scaled(2.0)
    assert once == twice
    first, second = (pm.eval_step(**batch(), outputs=scaled)[1] for scaled in (once, twice))
    torch.testing.assert_close(second, 2 * first, rtol=0, atol=0)
    pm.close()
