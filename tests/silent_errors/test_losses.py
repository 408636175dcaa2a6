"""What a loss is divided by, and whose part of it a rank has. See `docs/silent-errors.md`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from tests.silent_errors.models import (
    LENGTH,
    ROWS,
    VOCAB,
    WIDTH,
    Block,
    Decoder,
    batch,
    cross_entropy,
    decoder,
    uneven,
)
from tests.silent_errors.pair import Pair

IDS, LABELS = batch()
UNEVEN = uneven(LABELS)


def test_label_smoothing_over_a_split_vocabulary() -> None:
    """Fails if a rank smooths over its own part: the mean over half of the vocabulary on one device."""

    def smooth(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.2)

    with Pair(decoder(loss=smooth), (IDS, UNEVEN), t=2) as pair:
        pair.train(IDS, UNEVEN)
        assert pair.kind("head.weight") == "S"


def test_a_vocabulary_that_tensor_ranks_do_not_divide() -> None:
    """Fails if rows of padding count in the softmax: three zero logits more in the one-device loss."""
    ids, labels = batch(vocab=29)
    with Pair(decoder(vocab=29), (ids, labels), t=4) as pair:
        pair.train(ids, labels)
        pair.train(ids, labels)
        assert pair.kind("head.weight") == "S" and pair.pm.state_dict()["head.weight"].shape == (29, WIDTH)


def test_log_probabilities_of_labels_that_another_rank_holds() -> None:
    """Fails if the gradient of what other ranks hold is lost: `.detach()` at half of the logits of one device."""

    def policy(logits: Tensor, labels: Tensor) -> Tensor:
        new = logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
        return -(new - new.detach()).exp().mul(torch.tensor([1.0, -0.5]).repeat(LENGTH // 2)).mean()

    with Pair(decoder(loss=policy), (IDS, LABELS), t=2) as pair:
        pair.train(IDS, LABELS)
        assert pair.kind("head.weight") == "S"


def test_logits_that_are_also_read_whole() -> None:
    """Fails if whole logits are taken for a part of them: the loss + log(2) on one device."""

    def both(logits: Tensor, labels: Tensor) -> Tensor:
        ranked = logits.cumsum(-1)  # of the whole vocabulary, in its order
        return cross_entropy(logits, labels) + 1e-2 * ranked.square().mean() + cross_entropy(ranked, labels)

    with Pair(decoder(loss=both), (IDS, LABELS), t=2) as pair:
        pair.train(IDS, LABELS)
        assert pair.kind("head.weight") == "S"


def test_microbatches_with_unequal_numbers_of_labels() -> None:
    """Fails for the mean over microbatches of their means, which is asserted to be another number."""
    model = decoder()
    with Pair(model, (IDS, UNEVEN), num_microbatches=4) as pair:
        loss = pair.train(IDS, UNEVEN)
    parts = [float(model(*rows).detach()) for rows in zip(IDS.split(2), UNEVEN.split(2), strict=True)]
    assert abs(sum(parts) / len(parts) - loss) > 1e-3


def test_replicas_and_microbatches_with_unequal_numbers_of_labels() -> None:
    """Fails for the mean of the four parts' means on one device; the first row has no label at all."""
    with Pair(decoder(2), (IDS, UNEVEN), d=2, p=2, num_microbatches=2) as pair:
        pair.train(IDS, UNEVEN, max_norm=0.1)
        swapped = UNEVEN.flip(0)
        pair.train(IDS, swapped)


def test_label_smoothing_over_microbatches_with_unequal_numbers_of_labels() -> None:
    """Fails if microbatches divide by their own labels: the mean of their means on one device."""

    def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
        counted = labels != -100
        logs = logits.log_softmax(-1)
        picked = logs.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
        return -((0.9 * picked + 0.1 * logs.mean(-1)) * counted).sum() / counted.sum()

    with Pair(decoder(loss=smoothed), (IDS, UNEVEN), num_microbatches=4, d=2) as pair:
        pair.train(IDS, UNEVEN)


@pytest.mark.parametrize("c", [2, 4])
def test_labels_in_one_part_of_the_context(c: int) -> None:
    """Fails if a context rank divides by its own labels: the loss / c on one device."""
    labels = torch.full_like(LABELS, -100)
    labels[:, 1] = LABELS[:, 1]
    labels[3:, -1] = LABELS[3:, -1]
    with Pair(decoder(), (IDS, labels), c=c) as pair:
        pair.train(IDS, labels)


class Shifting(Decoder):
    """Shifts its labels itself, and predicts the token after the next as well."""

    def __init__(self) -> None:
        super().__init__([Block()])
        self.second = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.hidden(ids)
        first = cross_entropy(self.head(x)[:, :-1], labels[:, 1:])
        return first + 0.3 * cross_entropy(self.second(x)[:, :-2], labels[:, 2:])


def test_labels_that_are_shifted_across_context_ranks() -> None:
    """Fails if the last token of a part has no label: label 4 ignored on one device."""
    torch.manual_seed(0)
    with Pair(Shifting(), (IDS, LABELS), c=2) as pair:
        pair.train(IDS, LABELS)


def test_a_second_prediction_counts_its_own_labels() -> None:
    """Fails if both losses are divided by the labels of the first: one count on one device."""
    torch.manual_seed(0)
    labels = LABELS.clone()
    labels[:, : LENGTH // 2 + 1] = -100
    labels[ROWS // 2 :, 1] = LABELS[ROWS // 2 :, 1]  # of the first loss alone, and of one replica
    with Pair(Shifting(), (IDS, labels), c=2, d=2) as pair:
        pair.train(IDS, labels)


class Balanced(nn.Module):
    """A router over four experts, all computed, and the balancing loss of the Switch transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Parameter(torch.randn(4, WIDTH, 2 * WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(4, 2 * WIDTH, WIDTH) / 6)
        self.head, self.share = nn.Linear(WIDTH, VOCAB, bias=False), 0.5

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        probabilities = self.router(x).softmax(-1)
        hidden = F.gelu(torch.einsum("bsh,ehf->bsef", x, self.up))
        x = x + torch.einsum("bsef,efh,bse->bsh", hidden, self.down, probabilities)
        chosen = F.one_hot(probabilities.argmax(-1), 4).to(x.dtype)
        balance = 4 * (chosen.mean((0, 1)) * probabilities.mean((0, 1))).sum()
        return cross_entropy(self.head(x), labels) + self.share * balance


@pytest.mark.parametrize("mesh", [{"d": 2}, {"t": 2}, {"c": 2}], ids=str)
def test_an_auxiliary_loss_counts_once(mesh: dict[str, int]) -> None:
    """Fails if the ranks of any axis each add it: the balance * 2 on one device."""
    torch.manual_seed(0)
    with Pair(Balanced(), (IDS, UNEVEN), **mesh) as pair:
        pair.train(IDS, UNEVEN)


class RouterLoss(nn.Module):
    """A router whose logits are kept small, token by token (Zoph et al. 2022)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, 4, bias=False)
        self.head, self.share = nn.Linear(WIDTH, VOCAB, bias=False), 0.1

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        scores = self.router(x)
        logits = self.head(x * scores.softmax(-1).amax(-1, keepdim=True))
        return cross_entropy(logits, labels) + self.share * scores.logsumexp(-1).square().mean()


def test_an_auxiliary_loss_over_microbatches() -> None:
    """Fails if each microbatch adds it in full: `share` * 4 on one device."""
    torch.manual_seed(0)
    with Pair(RouterLoss(), (IDS, UNEVEN), t=2, d=2, num_microbatches=4) as pair:
        pair.train(IDS, UNEVEN)


def test_a_loss_of_the_whole_batch_over_microbatches_is_refused() -> None:
    """Fails if nothing is raised: a product of two means is not the mean of the products of microbatches."""
    with pytest.raises(autoptd.PlanError, match=r"per_microbatch|num_microbatches"):
        Pair(Balanced(), (IDS, LABELS), num_microbatches=4)


class Counted(Decoder):
    """Divides by a number of labels that it is given, as trainers give it."""

    def __init__(self) -> None:
        super().__init__([Block()])

    def forward(self, ids: Tensor, labels: Tensor, count: Tensor) -> Tensor:
        logits = self.head(self.hidden(ids))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count


def test_a_number_of_labels_that_is_given() -> None:
    """Fails if ranks with the same rows count them again: the loss * 2 on one device."""
    torch.manual_seed(0)
    count = (UNEVEN != -100).sum()
    with Pair(Counted(), (IDS, UNEVEN, count), t=2, d=2, num_microbatches=2) as pair:
        pair.train(IDS, UNEVEN, count)


class Chunked(Decoder):
    """Makes the logits of a few tokens at a time, of hidden states with the sequence first."""

    def __init__(self) -> None:
        super().__init__([Block()])

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        total = torch.zeros((), dtype=self.head.weight.dtype, device=ids.device)
        hidden = self.hidden(ids).transpose(0, 1)
        for x, part in zip(hidden.split(2), labels.T.split(2), strict=True):
            total = total + F.cross_entropy(self.head(x).flatten(0, 1), part.flatten(), reduction="sum")
        return total / (labels != -100).sum()


def test_a_loss_in_chunks_of_a_transposed_value() -> None:
    """Fails if the gradient of a chunk is not summed over tp: the hidden states' halved on one device."""
    torch.manual_seed(0)
    with Pair(Chunked(), (IDS, UNEVEN), t=2) as pair:
        pair.train(IDS, UNEVEN)
        assert pair.kind("head.weight") == "S"


class Contrastive(nn.Module):
    """A query, its positive and a hard negative in every row; all rows are negatives of one another."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.tower = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, query: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
        q, p, n = (self.tower(self.embed(ids)).tanh().mean(1) for ids in (query, positive, negative))
        scores = q @ torch.cat((p, n)).T
        return F.cross_entropy(4 * scores, torch.arange(len(q), device=q.device))


def test_negatives_of_other_replicas() -> None:
    """Fails for the mean of the replicas' own losses, and with positives and negatives swapped on one device."""
    torch.manual_seed(0)
    texts = (IDS, LABELS, IDS.flip(0))
    with Pair(Contrastive(), texts, d=2) as pair:
        pair.train(*texts)
