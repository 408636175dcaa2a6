"""Losses that compare the rows of a batch, or multiply means over it: in one microbatch they are those of one device on any
mesh, for replicas read the rows of one another in forward.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.compiler.batch import Batch
from autoptd.compiler.request import Request
from autoptd.runtime.step.stage import load_stage
from autoptd.runtime.step.standalone import check_stage
from autoptd.wings.reports.collectives import collectives_markdown
from benchmarks.lib.loss_cases import CASES
from benchmarks.losses import MACHINE
from tests.parity.checks import as_planned, check_is_found

ROWS, WIDTH, CLASSES = 8, 8, 5


class Net(nn.Module):
    """A small tower, and a loss of its rows."""

    def __init__(self, loss: Loss, drop: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head, self.scale = nn.Linear(WIDTH, CLASSES), nn.Parameter(torch.tensor(0.3))
        self.drop, self.loss = nn.Dropout(drop), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self, self.second(self.drop(F.gelu(self.first(x)))), y)


Loss = Callable[[Net, Tensor, Tensor], Tensor]


def clip(net: Net, h: Tensor, y: Tensor) -> Tensor:
    """Radford et al. 2021, figure 3: both directions, with a temperature that learns."""
    left, right = F.normalize(h, dim=-1), F.normalize(net.first(h[:, :6]), dim=-1)
    scores, rows = left @ right.T * net.scale.exp(), torch.arange(len(h))
    return (F.cross_entropy(scores, rows) + F.cross_entropy(scores.T, rows)) / 2


def sigmoid(net: Net, h: Tensor, y: Tensor) -> Tensor:
    """SigLIP's: pairs one by one; a number follows the batch."""
    pairs = 2 * torch.eye(len(h)) - 1
    return -F.logsigmoid(pairs * (h @ h.T * net.scale.exp())).sum() / len(h)


def supervised(net: Net, h: Tensor, y: Tensor) -> Tensor:
    """Labels are compared with those of all rows as well."""
    same = (y[:, None] == y).to(h.dtype)
    return (-(same * (h @ h.T).log_softmax(1)).sum(1) / same.sum(1)).mean()


def redundancy(net: Net, h: Tensor, y: Tensor) -> Tensor:
    """Barlow twins': a matrix of sums over the batch, of what was centred on its mean."""
    z = (h - h.mean(0)) / (h.std(0) + 1e-3)
    return (z.T @ z / len(h) - torch.eye(WIDTH)).square().sum()


def variance(net: Net, h: Tensor, y: Tensor) -> Tensor:
    """VICReg's, beside a plain loss."""
    plain = F.cross_entropy(net.head(h), y % CLASSES, ignore_index=0)
    return plain + F.relu(1 - (h.var(0) + 1e-4).sqrt()).mean() - 0.5


def two_views(net: Net, h: Tensor, y: Tensor) -> Tensor:
    """SimCLR's: each view of a row is to find the other among all. Labels of all rows, some of them ignored."""
    views = F.normalize(torch.cat([h, net.first(h[:, :6])]), dim=-1)
    count = len(views)
    scores = (views @ views.T / 0.5).masked_fill(torch.eye(count, dtype=torch.bool), -1e9)
    rows = torch.arange(count).roll(count // 2)
    return F.cross_entropy(scores, torch.where(rows % 5 == 0, -100, rows))


LOSSES: dict[str, Loss] = {
    "two views": two_views,
    "clip": clip,
    "variance": variance,
    "supervised": supervised,
    "sigmoid": sigmoid,
    "redundancy": redundancy,
    "ratio": lambda net, h, y: h.sum() / h.square().sum(),
    "root": lambda net, h, y: h.square().mean().sqrt(),
    "neighbours": lambda net, h, y: (h[1:] - h[:-1]).square().mean(),
    "sorted": lambda net, h, y: (h.sort(0).values * torch.arange(len(h))[:, None]).square().mean(),
    "farthest": lambda net, h, y: F.relu(torch.cdist(h, h).amax(1) + 1).mean(),
    "largest": lambda net, h, y: (h / h.abs().amax()).square().mean(),
    "a mean and its rows": lambda net, h, y: (h * h.mean()).square().mean(),
    "rows of the batch": lambda net, h, y: (h[y % len(h)] * h).mean(),
    "two towers end to end": lambda net, h, y: gram(torch.cat([h, net.first(h[:, :6])])),
    "pairs": lambda net, h, y: h.view(-1, 2, WIDTH).diff(dim=1).square().mean() + gram(h),
    "one sample": lambda net, h, y: (h[0] * h).square().mean(),
    "of inputs": lambda net, h, y: (h * (y / y.max())[:, None]).mean(),
    "whole sizes": lambda net, h, y: (h @ h.T).sum() / torch.full((), float(len(h))),
    "dropout behind": lambda net, h, y: net.drop(h @ h.T).square().mean(),
}


def gram(h: Tensor) -> Tensor:
    return (h @ h.T).square().mean()


def call() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 6, generator=generator), torch.randint(0, 9, (ROWS,), generator=generator)


def check(loss: Loss, drop: float = 0.0, **mesh: Any) -> None:
    autoptd.verify(Net(loss, drop), example_inputs=call(), steps=2, **mesh)


MIXED: dict[str, dict[str, Any]] = {
    "d2": {"d": 2},
    "t2 d2": {"t": 2, "d": 2, "machine": MACHINE},
    "d4 p2": {"d": 4, "p": 2, "num_microbatches": 1, "zero": 1, "recompute": "full"},
}


@pytest.mark.parametrize(
    "mesh", ["d2", *(pytest.param(m, marks=pytest.mark.thorough) for m in MIXED if m != "d2")]
)
@pytest.mark.parametrize("name", LOSSES)
def test_replicas_train_the_loss_of_all_rows(name: str, mesh: str) -> None:
    check(LOSSES[name], **MIXED[mesh])


@pytest.mark.parametrize("name", ["clip", "redundancy", "two views"])
def test_over_all_axes(name: str) -> None:
    check(LOSSES[name], drop=0.2, **{**MIXED["d4 p2"], "d": 2, "t": 2})


CELLS: dict[str, dict[str, Any]] = {
    "d=2": {"d": 2},
    "t=2": {"t": 2},
    "t=2 c=2 d=2": {"t": 2, "c": 2, "d": 2},
    "t=2 p=2 d=2": {"t": 2, "p": 2, "d": 2, "num_microbatches": 1, "sequence_parallel": True},
}


@pytest.mark.parametrize("mesh", CELLS)
@pytest.mark.parametrize("name", ["contrastive", "load_balancing"])
def test_cases_of_the_table(name: str, mesh: str) -> None:
    case = CASES[name]
    autoptd.verify(case.make(), example_inputs=case.call(), steps=2, **{"machine": MACHINE, **CELLS[mesh]})


def test_what_is_communicated_is_what_the_program_says() -> None:
    """Two gathers of [8, 8] for CLIP's scores, forward and back; sums of gradients wait for the end of backward."""
    program, _ = as_planned(Net(clip), call(), d=2)
    gathers = [one for one in program.collectives if one.scope == "microbatch"]
    assert [(one.axis, one.forward, one.backward, one.payload_bytes) for one in gathers] == [
        ("dp", "all-gather", "reduce-scatter", 4 * ROWS * WIDTH)
    ] * 2
    assert "matmul needs rows of all replicas" in gathers[0].why


def test_a_program_is_read_back_and_a_stage_runs_by_itself(tmp_path: Path) -> None:
    program = autoptd.compile(Net(clip), d=2, example_inputs=call())
    program.save(tmp_path)
    assert autoptd.Program.load(tmp_path).busy_axes == program.busy_axes == ("dp",)
    assert "`dp`: the data-parallel group" in " ".join(program.sources["stage_0.py"].split())
    stage = load_stage(program.sources["stage_0.py"], str(tmp_path / "stage_0.py"))
    assert not check_stage(stage, tmp_path).wrong


def test_one_microbatch_is_the_default_where_rows_are_mixed() -> None:
    program = autoptd.compile(Net(clip), d=2, example_inputs=call())
    assert (program.num_microbatches, program.rows) == (1, 4)
    with pytest.warns(UserWarning, match="one microbatch, in which the ranks of the pipeline wait"):
        program = autoptd.compile(Net(clip), p=2, example_inputs=call())
    assert (program.num_microbatches, program.rows, program.busy_axes) == (1, 8, ())


REFUSED: dict[str, tuple[Loss, dict[str, Any], str]] = {
    "several microbatches": (clip, {"num_microbatches": 2}, "or run with num_microbatches=1"),
    "means in several": (variance, {"num_microbatches": 4, "d": 2}, "or run with num_microbatches=1"),
    "a layer behind": (
        lambda net, h, y: F.cross_entropy(net.head(h.flip(0)), y % CLASSES),
        {"d": 2},
        "every replica would compute .* for all rows.*d=1 and num_microbatches=1",
    ),
    "statistics of a batch": (
        lambda net, h, y: F.batch_norm(h, None, None, training=True).square().mean(),
        {"num_microbatches": 2},
        "batch norm in training.*LayerNorm",
    ),
    "what nobody knows": (
        lambda net, h, y: (h.sum(1).argsort() * h.sum(1)).mean(),
        {"d": 2},
        "aten.argsort has no rule.*d=1 and num_microbatches=1",
    ),
    "of every microbatch": (
        lambda net, h, y: F.cross_entropy(net.head(h), y % CLASSES) + autoptd.per_microbatch(gram(h)),
        {"d": 2},
        "mixes the samples.*d=1 and num_microbatches=1",
    ),
    "rows told apart": (
        lambda net, h, y: (h * torch.arange(len(h))[:, None]).mean() + gram(h),
        {"d": 2},
        "pass it to the model as an input",
    ),
    "pairs over replicas": (LOSSES["pairs"], {"d": 8}, "folds the batch.*d=1 and num_microbatches=1"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    loss, mesh, text = REFUSED[what]
    with pytest.raises(autoptd.PlanError, match=text):
        autoptd.compile(Net(loss), example_inputs=call(), **mesh)


class NextRow(nn.Module):
    """Every row is to say what the next one has: logits and labels are cut along the batch."""

    def __init__(self, weighed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, 9)
        self.register_buffer("rates", torch.rand(9) if weighed else None)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        logits, weight = self.head(x)[:-1], self.get_buffer("rates")
        return F.cross_entropy(logits.flatten(0, 1), labels[1:].flatten(), weight, ignore_index=0)

    def batch(self, step: int = 0) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(step)
        ids, labels = torch.randint(0, 9, (2, 4, 8), generator=generator)
        labels[2, :5] = 0
        return {"ids": ids, "labels": labels}


@pytest.mark.parametrize("weighed", [False, True])
def test_labels_of_all_rows_are_gathered_to_be_counted(
    weighed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where tokens are divided, the mean divides by a count, which replicas make before the first forward."""
    model = NextRow(weighed)
    mesh: dict[str, Any] = {"c": 2, "d": 2, "num_microbatches": 1, "machine": MACHINE}
    autoptd.verify(model, example_inputs=model.batch(), steps=2, **mesh)
    autoptd.verify(model, example_inputs=model.batch(), steps=2, t=2, p=2, **mesh)
    as_planned(model, model.batch(), **mesh)
    edit = 'rt.s_to_r(labels, dp, dim=0, site="count of labels")', "labels"
    check_is_found(monkeypatch, edit, model, example_inputs=model.batch(), **mesh)


@pytest.mark.parametrize("loss", [clip, LOSSES["dropout behind"]])
def test_masks_do_not_depend_on_replicas(loss: Loss) -> None:
    losses = []
    for d in (1, 2):
        with closing(autoptd.parallelize(Net(loss, 0.5), d=d, backend="local", example_inputs=call())) as pm:
            losses.append(pm.step(*call()))
    torch.testing.assert_close(*losses)


def test_padded_rows_are_refused() -> None:
    """A row more is one more to be compared with: buckets of lengths are right, and missing rows an error."""

    class Compared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(9, WIDTH)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            h = self.embed(ids)
            return F.cross_entropy((h @ self.embed.weight.T).flatten(0, 1), labels.flatten()) + gram(h[:, 0])

    def batch(rows: int, length: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(rows)
        ids, labels = torch.randint(0, 9, (2, rows, length), generator=generator)
        return {"ids": ids, "labels": labels}

    reference = Compared()
    first = batch(ROWS, 12)
    pm = autoptd.parallelize(Compared(), d=2, backend="local", shapes="bucket", example_inputs=first)
    with closing(pm):
        torch.testing.assert_close(pm.step(**batch(ROWS, 5)), reference(**batch(ROWS, 5)).detach())
        with pytest.raises(autoptd.PlanError, match="change with added rows"):
            pm.step(**batch(6, 5))


def test_what_replicas_read_of_one_another_is_listed() -> None:
    program = autoptd.compile(Net(clip), d=2, example_inputs=call())
    text = collectives_markdown(program)
    assert "## Over dp, in every microbatch" in text and "matmul needs rows of all replicas" in text
    # Every replica makes all scores: as FLOPs of the model they count once.
    (scores,) = (row for row in program.costs.gemms if row.operator == "aten.matmul")
    assert scores.total == ROWS * ROWS * WIDTH and scores.forward == 2 * scores.total


def test_what_is_mixed_is_traced_once_for_pairs_and_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    traced, capture = [], Request.capture

    def counted(request: Request, batch: Batch) -> Any:
        traced.append(batch.traced_rows)
        return capture(request, batch)

    monkeypatch.setattr(Request, "capture", counted)
    autoptd.compile(Net(clip), d=2, num_microbatches=1, example_inputs=call())
    assert traced == [ROWS // 2, ROWS]
