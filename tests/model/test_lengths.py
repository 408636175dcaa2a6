"""What `shapes` refuses, each by one error that says what helps; and what lies around a step of another size."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd import Buckets, ParallelModel, PlanError
from autoptd.options.buckets import bucket_lengths
from tests.parity.kinds import KINDS
from tests.parity.models import VOCAB, batch, gpt


def cut(rows: int, length: int) -> tuple[Tensor, ...]:
    return tuple(x[:, :length].contiguous() for x in batch(rows))


@contextmanager
def running(model: nn.Module | None = None, **keywords: Any) -> Iterator[ParallelModel]:
    about = {"backend": "local", "timeout": 60, "example_inputs": cut(8, 8), "t": 2}
    pm = autoptd.parallelize(model or gpt(1), **{**about, **keywords})
    try:
        yield pm
    finally:
        pm.close()


def refused(match: str, model: nn.Module | None = None, **keywords: Any) -> None:
    with pytest.raises(PlanError, match=match), running(model, **keywords):
        pass


class Scores(nn.Module):
    """Attention in both directions or one, a loss of all tokens or of those with labels."""

    def __init__(self, is_causal: bool = True, counts_all: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_causal, self.counts_all = is_causal, counts_all
        self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        q = self.embed(ids)[:, None]
        sees = None if mask is None else mask.bool()[:, None, None]
        x = F.scaled_dot_product_attention(q, q, q, sees, is_causal=self.is_causal and mask is None)[:, 0]
        logits, targets = self.head(x).flatten(0, 1), labels.flatten()
        if self.counts_all:
            return F.cross_entropy(logits, targets, reduction="none").mean()
        return F.cross_entropy(logits, targets)


def test_without_shapes_the_error_tells_of_them() -> None:
    with (
        running() as pm,
        pytest.raises(PlanError, match=r"or parallelize\(\.\.\., shapes='exact' or 'bucket'"),
    ):
        pm.step(*cut(8, 4))


@pytest.mark.parametrize(
    ("keywords", "fact"),
    [
        ({"shapes": "padded"}, "no such choice"),
        ({"shapes": True}, "no such choice"),
        ({"max_programs": 4}, "has no effect without shapes="),
        ({"shapes": "exact", "max_programs": 0}, "must be a positive integer"),
        ({"shapes": "bucket", "example_inputs": None}, "there are none"),
        ({"shapes": Buckets((4, 6))}, r"has 8 tokens, which is not one of the buckets \(4, 6\)"),
        ({"shapes": Buckets((4, 8), pad={"mask": 0})}, "the model has no mask"),
    ],
    ids=str,
)
def test_a_wrong_request_is_refused(keywords: dict[str, Any], fact: str) -> None:
    refused(fact, **keywords)


@pytest.mark.parametrize("lengths", [(), (0, 4), (4.0,), "512", 512, (True,)], ids=str)
def test_buckets_are_lengths(lengths: Any) -> None:
    with pytest.raises(PlanError, match="must be positive integers"):
        Buckets(lengths)


def test_buckets_are_halves_that_divide() -> None:
    assert bucket_lengths("bucket", 1024, unit=1) == (64, 128, 256, 512, 1024)
    assert bucket_lengths("bucket", 1000, unit=4) == (500, 1000)
    assert bucket_lengths("bucket", 7, unit=1) == (7,)
    assert bucket_lengths(Buckets((6, 2, 6)), 6, unit=1) == (2, 6)


def test_programs_are_counted() -> None:
    with running(shapes="exact", max_programs=2) as pm:
        for length in (8, 4, 8):
            pm.step(*cut(8, length))
            pm.eval_step(*cut(8, length))
        fact = r"idx \[8, 6\], targets \[8, 6\] would be program 3, and there are 2 already \(idx \[8, 8\].*"
        with pytest.raises(PlanError, match=rf"pm\.step: {fact}Remedy: .*'bucket'.*Shapes\(max_programs=4"):
            pm.step(*cut(8, 6))
        with pytest.raises(PlanError, match=r"pm\.eval_step: .* would be program 3"):
            pm.eval_step(*cut(8, 6))
        assert len(pm.programs) == 2 and pm.steps == 3
        pm.step(*cut(8, 4))


@pytest.mark.parametrize("shapes", ["exact", "bucket"])
def test_what_is_no_other_size_is_refused(shapes: str) -> None:
    ids, targets = cut(8, 4)
    with running(shapes=shapes) as pm:
        for call, fact in (
            ((ids.int(), targets), r"idx is \[8, 4\] int32, but was compiled as a tensor"),
            ((ids[0], targets), r"idx is \[4\] int64, but was compiled as a tensor"),
            ((ids,), "was called with 1 argument by position"),
            ((ids[:, :3], targets), ""),
        ):
            with pytest.raises(PlanError, match=fact):
                pm.step(*call)
        pm.step(ids, targets)


def test_a_size_that_no_program_is_for() -> None:
    with running(shapes="exact") as pm:
        with pytest.raises(PlanError, match=r"pm\.step with idx \[8, 16\], .*more than block_size=8"):
            pm.step(*(torch.cat([x, x], 1) for x in cut(8, 8)))
        pm.step(*cut(8, 8))
    with (
        running(shapes="exact", sequence_parallel=True) as pm,
        pytest.raises(PlanError, match=r"5 tokens do not divide over t=2\. Remedy: a multiple of 2 tokens"),
    ):
        pm.step(*cut(8, 5))
    with (
        running(shapes="exact", d=2, t=1) as pm,
        pytest.raises(PlanError, match=r"7 rows do not divide over d=2"),
    ):
        pm.step(*cut(7, 8))


def test_sizes_beyond_the_largest_bucket() -> None:
    with running(shapes="bucket") as pm:
        with pytest.raises(PlanError, match="idx has 16 tokens, but the largest bucket has 8"):
            pm.step(*(torch.cat([x, x], 1) for x in cut(8, 8)))
        with pytest.raises(PlanError, match="idx has 9 rows, but the batch of example_inputs has 8"):
            pm.step(*cut(9, 8))
        with pytest.raises(
            PlanError, match=r"targets is \[8, 5\], but should be \[8, 4\] where idx is \[8, 4\]"
        ):
            pm.step(cut(8, 4)[0], cut(8, 5)[1])


@pytest.mark.parametrize(
    "model", [Scores(is_causal=False), Scores(counts_all=True)], ids=["both ways", "mean"]
)
def test_a_model_that_reads_padding_is_refused(model: nn.Module) -> None:
    refused("padding: the loss or its gradients change with padded tokens", model, shapes="bucket")


def test_a_model_that_hardly_reads_padding_is_refused() -> None:
    """By what sums over other numbers of tokens would explain; but other tokens in the padding change it, too."""

    class Leaks(Scores):
        def forward(self, ids: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(ids, labels) + 5e-5 * self.embed(ids).mean()

    refused("padding: the model reads padded tokens", Leaks(), shapes="bucket")


def test_a_mask_makes_both_ways_pass_over_padding() -> None:
    model = Scores(is_causal=False)
    call = (*cut(8, 8), torch.ones(8, 8, dtype=torch.long))
    with running(model, shapes="bucket", example_inputs=call) as pm:
        short = (*cut(8, 3), torch.ones(8, 3, dtype=torch.long))
        torch.testing.assert_close(pm.step(*short), model(*short).detach())


def test_an_input_that_says_which_labels_count_is_no_label() -> None:
    """It is padded with zeros: with `ignore_index` a model that looks it up could not run."""

    class Documents(Scores):
        def forward(self, ids: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
            assert mask is not None
            is_first = F.one_hot(mask, 2)[..., 1] == 1
            return super().forward(ids, labels.masked_fill(is_first, -100))

    model = Documents()
    marks = (torch.arange(8) % 3 == 2).long().repeat(8, 1)
    with running(model, shapes="bucket", example_inputs=(*cut(8, 8), marks)) as pm:
        short = (*cut(8, 3), marks[:, :3])
        torch.testing.assert_close(pm.step(*short), model(*short).detach())


def test_a_model_that_cannot_run_with_padding_is_one_error() -> None:
    """Labels that are made of the ids themselves: one number cannot pad both."""

    class OfIds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)

        def forward(self, ids: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), ids.roll(-1, 1).flatten())

    refused(
        r"padding: the model cannot run with padded tokens: IndexError",
        OfIds(),
        shapes="bucket",
        example_inputs=cut(8, 8)[:1],
    )


def test_numbers_of_padding_are_the_users() -> None:
    """Where the argument is no label for a cross-entropy: a weight per token, of which 0 leaves a token out."""

    class Weighted(Scores):
        def forward(self, ids: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
            assert mask is not None
            losses = F.cross_entropy(
                self.head(self.embed(ids)).flatten(0, 1), labels.flatten(), reduction="none"
            )
            return (losses * mask.flatten()).sum() / 100

    call, short = (*cut(8, 8), torch.ones(8, 8)), (*cut(8, 3), torch.ones(8, 3))
    model = Weighted()
    with running(model, shapes="bucket", example_inputs=call) as pm:
        torch.testing.assert_close(pm.step(*short), model(*short).detach())
    shapes = Buckets((4, 8), pad={"mask": 1.0, "labels": 3})
    refused("change with padded tokens", model, shapes=shapes, example_inputs=call)


def test_rows_are_added_where_the_loss_can_pass_over_them() -> None:
    class Unlabelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCAB, 8)

        def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
            return (self.embed(ids).square().mean(-1) * weights).sum()

    ids = cut(8, 8)[0]
    model = Unlabelled()
    with running(model, shapes="bucket", example_inputs=(ids, torch.ones(8, 8))) as pm:
        for call in ((ids[:, :3], torch.ones(8, 3)), (ids[:5], torch.rand(5, 8))):
            torch.testing.assert_close(pm.step(*call), model(*call).detach())
            pm.optimizer(torch.optim.SGD, lr=0.0).zero_grad()
    # Which argument that is, only trying shows.
    with running(model, shapes=Buckets((4, 8), check=False), example_inputs=(ids, torch.ones(8, 8))) as pm:
        pm.step(ids[:, :3], torch.ones(8, 3))
        with pytest.raises(PlanError, match=r"no argument by which the loss could pass over rows"):
            pm.step(ids[:5], torch.ones(5, 8))


class Losses(nn.Module):
    """A function of the losses of tokens, and of arguments that say which of them count, or how much."""

    def __init__(self, of_losses: Callable[..., Tensor], *, sees: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.of_losses, self.sees = of_losses, sees

    def forward(self, ids: Tensor, labels: Tensor, *given: Tensor) -> Tensor:
        q = self.embed(ids)[:, None]
        sees = given[0].bool()[:, None, None] if self.sees else None
        logits = self.head(F.scaled_dot_product_attention(q, q, q, sees, is_causal=sees is None)[:, 0])
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        return self.of_losses(losses, *given)


MASKED: dict[str, tuple[nn.Module, Callable[[int, int], list[Tensor]]]] = {
    "a mask": (Losses(lambda x, mask: (x * mask).sum() / mask.sum()), lambda b, s: [torch.ones(b, s)]),
    "bools": (
        Losses(lambda x, mask: torch.where(mask, x, 0).sum() / mask.sum().clamp(min=1)),
        lambda b, s: [torch.rand(b, s) > 0.4],
    ),
    # Rows that attend to nothing would be NaN: only the second one is 0 in rows that are added.
    "two masks": (
        Losses(lambda x, sees, mask: (x * mask).sum() / mask.sum(), sees=True),
        lambda b, s: [torch.ones(b, s, dtype=torch.long), torch.ones(b, s)],
    ),
    "weights of rows": (
        Losses(lambda x, weights: (x.sum(1) * weights).sum() / weights.sum()),
        lambda b, s: [torch.rand(b)],
    ),
}


# All on one mesh, by default; of the other, whose replicas have rows of their own, the one with most inputs.
ADDED = [
    pytest.param(
        mesh,
        name,
        id=f"{mesh}-{name}",
        marks=[] if "t" in mesh or name == "two masks" else pytest.mark.thorough,
    )
    for mesh in ({"t": 2}, {"d": 2, "num_microbatches": 2})
    for name in MASKED
]


@pytest.mark.parametrize(("mesh", "name"), ADDED)
def test_rows_are_added_with_a_mask_of_ones_own(name: str, mesh: dict[str, Any]) -> None:
    model, arguments = MASKED[name]
    model = copy.deepcopy(model).double()

    def call(rows: int, length: int) -> tuple[Tensor, ...]:
        given = [x.double() if x.is_floating_point() else x for x in arguments(rows, length)]
        return (*cut(rows, length), *given)

    with running(model, shapes="bucket", example_inputs=call(8, 8), **{"t": 1, **mesh}) as pm:
        for rows, length in ((6, 8), (4, 3), (2, 5)):
            batch = call(rows, length)
            found, wanted = pm.step(*batch), model(*batch)
            torch.testing.assert_close(found, wanted.detach(), rtol=1e-9, atol=0)
            torch.testing.assert_close(pm.eval_step(*batch), found, rtol=1e-9, atol=0)
            gradients = torch.autograd.grad(wanted, list(model.parameters()))
            for own, gradient in zip(pm.gradients().values(), gradients, strict=True):
                torch.testing.assert_close(own, gradient, rtol=1e-9, atol=1e-12)
            pm.optimizer(torch.optim.SGD, lr=0.0).zero_grad()


HIDING: dict[str, tuple[nn.Module, Tensor, tuple[int, int], str]] = {
    "weights of 1": (
        Losses(lambda x, w: x.sum() / 30 * w.mean()),
        torch.ones(8),
        (5, 8),
        "with added rows",
    ),
    "largest": (Losses(lambda x, r: (x * r.max()).sum() / 30), torch.ones(8, 8) + 1, (8, 4), "padded tokens"),
    "of a row": (
        Losses(lambda x, r: (x * r.amax(1, keepdim=True)).sum() / 30),
        torch.ones(8, 8) + 1,
        (8, 4),
        "padded tokens",
    ),
    "smallest": (
        Losses(lambda x, r: (x * r.amin()).sum() / 30),
        -torch.ones(8, 8),
        (8, 4),
        "padded tokens",
    ),
    "zeros": (Losses(lambda x, r: x.sum() / 30 * (1 + r.mean())), torch.zeros(8), (5, 8), "added rows"),
    "flags": (
        Losses(lambda x, r: x.sum() / 30 * (1 + r.float().mean())),
        torch.zeros(8) > 0,
        (5, 8),
        "added rows",
    ),
    "smallest number": (
        Losses(lambda x, r: (x * r.min()).sum() / 30),
        torch.arange(64).view(8, 8) * 2,
        (8, 4),
        "padded tokens",
    ),
}


@pytest.mark.parametrize("name", HIDING)
def test_numbers_that_hide_that_padding_is_read(name: str) -> None:
    """Of the first batch; others would be trained with another loss than that of one device."""
    model, numbers, (rows, length), what = HIDING[name]
    call = (*cut(8, 8), numbers)
    short = tuple(x[:rows, :length] if x.dim() > 1 else x[:rows] for x in call)
    with (
        pytest.raises(PlanError, match=what),
        running(model, shapes="bucket", num_microbatches=1, example_inputs=call) as pm,
    ):
        pm.step(*short)


def test_rows_that_are_read_are_not_added() -> None:
    class Balanced(Scores):
        """An auxiliary loss of all rows."""

        def forward(self, ids: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(ids, labels) + self.embed(ids[:, :1]).square().mean()

    with running(Balanced(), shapes="bucket") as pm:
        pm.step(*cut(8, 3))
        with pytest.raises(PlanError, match="change with added rows"):
            pm.step(*cut(7, 8))


def test_a_deferred_model_cannot_be_run() -> None:
    with autoptd.deferred():
        model = gpt(1)
    refused(r"the model has no values yet.*check=False", model, shapes="bucket")
    shapes = Buckets((4, 8), check=False)
    with running(model, shapes=shapes) as pm:
        full = autoptd.materialize(model)
        torch.testing.assert_close(pm.step(*cut(8, 3)), full(*cut(8, 3))[1].detach())


def test_parameters_that_only_some_sizes_read() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head, self.more = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB), nn.Linear(8, 8)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            x = self.embed(ids)
            if ids.shape[1] > 4:
                x = self.more(x)
            return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

    with running(Deep(), shapes="exact") as pm:
        with pytest.raises(PlanError, match=r"more\.(weight|bias).* in the first program"):
            pm.step(*cut(8, 4))
        pm.step(*cut(8, 6))


def test_parameters_that_were_frozen_meanwhile() -> None:
    model = gpt(1)
    with running(model, shapes="exact") as pm:
        model.transformer.wte.weight.requires_grad_(False)
        with pytest.raises(PlanError, match=r"wte\.weight: is trained or frozen otherwise"):
            pm.step(*cut(8, 4))


@pytest.mark.thorough
def test_gradients_that_other_ranks_sum_do_not_fit_shared_storage() -> None:
    """Tokens that do not divide leave norms whole, whose gradients are no sums then."""
    kind = KINDS["grouped"]
    whole = kind.batch(4, 0)
    short, even = ({name: x[:, :length] for name, x in whole.items()} for length in (5, 6))
    keywords: dict[str, Any] = {"sequence_parallel": "auto", "d": 2, "zero": 1, "shapes": "exact"}
    with running(kind.make(0.2), example_inputs=whole, num_microbatches=1, **keywords) as pm:
        with pytest.raises(PlanError, match="zero=1: gradients are summed over other ranks"):
            pm.step(**short)
        pm.step(**even)


def test_what_is_seen_of_steps_of_other_sizes() -> None:
    """Records, times and the check of ranks are those of the program that runs."""
    with running(shapes="exact", d=2) as pm:
        pm.step(*cut(8, 8))
        with pm.record() as whole:
            pm.step(*cut(8, 8))
        with pm.record() as half:
            pm.step(*cut(8, 4))
        per_step = [sum(work.flops for work in record.flops) for record in (whole, half)]
        assert len(half.collectives) == len(whole.collectives) and all(call.why for call in half.collectives)
        assert 0 < per_step[1] < per_step[0]
        assert half.spans and len(half.spans) == len(whole.spans)
        loss, times = pm.measured_step(*cut(8, 6))
        assert all(one.compute > 0 for one in times) and bool(loss.isfinite())
        assert all(executor.watch is None for rank in pm.run.ranks.here for executor in rank.executors)  # type: ignore[union-attr]
        pm.check_ranks(*cut(8, 4))
        pm.check_ranks(*cut(8, 2))
        assert pm.steps == 4 and len(pm.programs) == 4


def test_a_model_that_compiles_at_the_first_step() -> None:
    model = gpt(1)
    with running(model, shapes="exact", example_inputs=None) as pm:
        for size in ((8, 6), (4, 8)):
            torch.testing.assert_close(pm.step(*cut(*size)), model(*cut(*size))[1].detach())
        assert len(pm.programs) == 2
