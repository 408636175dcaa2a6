"""Losses of labels that the model shifts itself: every rank reads the logits of its tokens, and none is gathered."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd import passes
from autoptd.program.calls import expected_calls
from tests.parity.checks import as_planned, check_is_found
from tests.parity.models import VOCAB

# Tokens that 2, 3 and 4 ranks have two pieces each of.
LENGTH, WIDTH, HEADS, ROWS = 24, 16, 4, 4


class Shifting(nn.Module):
    """A block of causal attention, and a loss of its hidden states that is written in the model."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head, self.more = nn.Linear(WIDTH, VOCAB), nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("class_weight", torch.linspace(0.2, 1.4, VOCAB))
        self.name = name

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return (GONE | SMALL)[self.name](self, x, labels)


def flat(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and labels without the last token and the first, as one list of tokens."""
    return x[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1)


def of_transformers(m: Shifting, x: Tensor, labels: Tensor) -> Tensor:
    """As transformers wrote it before it padded labels."""
    logits = m.head(x).float() if x.dtype != torch.float64 else m.head(x)
    logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
    return F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1))


def by_transformers(m: Shifting, x: Tensor, labels: Tensor) -> Tensor:
    from transformers.loss.loss_utils import ForCausalLMLoss

    return ForCausalLMLoss(m.head(x), labels, VOCAB)


def several_tokens(m: Shifting, x: Tensor, labels: Tensor) -> Tensor:
    """The next three tokens, of a head each."""
    losses = []
    for k, y in enumerate(m.more(x).chunk(3, -1), 1):
        losses.append(F.cross_entropy(m.head(y)[:, :-k].flatten(0, 1), labels[:, k:].flatten()))
    return torch.stack(losses).mean()


def picked(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probabilities of the next token [b, s - 1], and of token 0 where it is ignored."""
    known = labels[:, 1:].clamp(min=0)
    return logits[:, :-1].log_softmax(-1).gather(-1, known.unsqueeze(-1)).squeeze(-1)


def averaged(values: Tensor, labels: Tensor) -> Tensor:
    counted = (labels[:, 1:] != -100).to(values.dtype)
    return (values * counted).sum() / (counted.sum() + 1)


def teacher(m: Shifting, x: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy with the probabilities of another head, token by token."""
    ours, theirs = m.head(x)[:, :-1].log_softmax(-1), m.head(x.tanh())[:, :-1].softmax(-1)
    return averaged(-(ours * theirs).sum(-1), labels)


def one_hot(m: Shifting, x: Tensor, labels: Tensor) -> Tensor:
    chosen = F.one_hot(labels[:, 1:].clamp(min=0), VOCAB).to(x.dtype)
    return averaged(-(m.head(x)[:, :-1].log_softmax(-1) * chosen).sum(-1), labels)


def each(m: Shifting, x: Tensor, labels: Tensor) -> Tensor:
    """A loss for every token [b * (s - 1)]."""
    return F.cross_entropy(*flat(m.head(x), labels), reduction="none")


Loss = Callable[[Shifting, Tensor, Tensor], Tensor]
# The cut goes where the loss ignores labels.
GONE: dict[str, Loss] = {
    "mean": lambda m, x, y: F.cross_entropy(*flat(m.head(x), y)),
    "sum": lambda m, x, y: F.cross_entropy(*flat(m.head(x), y), reduction="sum"),
    "as transformers did": of_transformers,
    "by transformers": by_transformers,
    "of hidden states": lambda m, x, y: F.cross_entropy(m.head(x[:, :-1]).flatten(0, 1), y[:, 1:].flatten()),
    "before the last norm": lambda m, x, y: F.cross_entropy(
        m.head(m.norm(x[:, :-1])).transpose(1, 2), y[:, 1:]
    ),
    "classes in dim 1": lambda m, x, y: F.cross_entropy(m.head(x).transpose(1, 2)[..., :-1], y[:, 1:]),
    "narrow": lambda m, x, y: F.cross_entropy(
        m.head(x).narrow(1, 0, LENGTH - 1).flatten(0, 1), y.narrow(1, 1, LENGTH - 1).flatten()
    ),
    "label 0 is ignored": lambda m, x, y: F.cross_entropy(
        *flat(m.head(x), y.clamp(min=0)), ignore_index=0, reduction="sum"
    ),
    "class weights": lambda m, x, y: F.cross_entropy(*flat(m.head(x), y), weight=m.class_weight),
    "smoothed": lambda m, x, y: F.cross_entropy(*flat(m.head(x), y), label_smoothing=0.1),
    "smoothed, class weights": lambda m, x, y: F.cross_entropy(
        *flat(m.head(x), y), weight=m.class_weight, label_smoothing=0.1, reduction="sum"
    ),
    "negative log-likelihood": lambda m, x, y: F.nll_loss(
        m.head(x)[:, :-1].log_softmax(-1).flatten(0, 1), y[:, 1:].flatten()
    ),
    "capped logits": lambda m, x, y: F.cross_entropy(*flat(5 * (m.head(x)[:, :] / 5).tanh(), y)),
    "a token earlier": lambda m, x, y: F.cross_entropy(m.head(x)[:, 1:].flatten(0, 1), y[:, :-1].flatten()),
    "in the middle": lambda m, x, y: F.cross_entropy(m.head(x)[:, 1:-2].flatten(0, 1), y[:, 3:].flatten()),
    "the next three tokens": several_tokens,
    "tokens first": lambda m, x, y: F.cross_entropy(
        m.head(x.transpose(0, 1))[:-1].flatten(0, 1), y.t()[1:].flatten()
    ),
}  # fmt: skip
# Before anything else reads it, a token's number is cut.
SMALL: dict[str, Loss] = {
    "a loss for each token": lambda m, x, y: each(m, x, y).mean(),
    "a loss for each token, by row": lambda m, x, y: averaged(each(m, x, y).view(len(y), -1), y),
    "later tokens count more": lambda m, x, y: (
        each(m, x, y).view(len(y), -1) * torch.linspace(0, 1, LENGTH - 1, dtype=x.dtype)
    ).sum(),
    "log-probabilities": lambda m, x, y: -picked(m.head(x), y).mean(),
    "log-probabilities of those that count": lambda m, x, y: -averaged(picked(m.head(x), y), y),
    "log-probabilities of a row": lambda m, x, y: -F.logsigmoid(picked(m.head(x), y).sum(-1)).mean(),
    "ratios": lambda m, x, y: averaged((picked(m.head(x), y) / 50).exp(), y),
    "focal": lambda m, x, y: (each(m, x, y) * (1 - (-each(m, x, y)).exp()) ** 2).mean(),
    "z": lambda m, x, y: m.head(x)[:, :-1].logsumexp(-1).square().mean(),
    "mean and z": lambda m, x, y: (
        F.cross_entropy(*flat(m.head(x), y)) + m.head(x)[:, :-1].logsumexp(-1).square().mean()
    ),
    "entropy": lambda m, x, y: -(
        m.head(x)[:, :-1].log_softmax(-1) * m.head(x)[:, :-1].softmax(-1)
    ).sum(-1).mean(),
    "a teacher": teacher,
    "one-hot labels": one_hot,
    "negative log-likelihood, cut behind": lambda m, x, y: F.nll_loss(*flat(m.head(x).log_softmax(-1), y)),
    "negative log-likelihood of anything": lambda m, x, y: F.nll_loss(*flat(m.head(x).tanh(), y)),
}  # fmt: skip
FORMS = GONE | SMALL
MESHES: list[dict[str, Any]] = [
    {"c": 2},
    {"c": 3},
    {"c": 4},
    {"c": 2, "t": 2},
    {"c": 2, "t": 2, "sequence_parallel": True},
    {"c": 2, "p": 2, "d": 2},
]
ORDERS = ["contiguous", "zigzag"]


def call(rows: int = ROWS, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """(ids, labels), of which some are ignored, and with them every one of a row."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(1, VOCAB, (rows, length), generator=generator) for _ in range(2))
    labels[0, : length // 2], labels[1], labels[2, ::3], labels[3, -1] = -100, -100, -100, 0
    return ids, labels


CASES = [(name, mesh, order) for name in FORMS for mesh in MESHES for order in ORDERS]


@pytest.mark.one_in(114)
@pytest.mark.parametrize(("name", "mesh", "order"), CASES, ids=map(str, CASES))
def test_loss(name: str, mesh: dict[str, Any], order: str) -> None:
    given: dict[str, Any] = {"context": "all_gather", "token_order": order, "example_inputs": call(4 * ROWS)}
    autoptd.verify(Shifting(name), **mesh, **given, steps=1)


def sent(name: str, order: str) -> dict[str, float]:
    """Bytes that a rank of two sends over cp in a step, by phase, as executed; the program says the same."""
    program, record = as_planned(Shifting(name), call(), c=2, context="all_gather", token_order=order)
    assert program.fallbacks == ()
    found = {"forward": 0.0, "backward": 0.0}
    for made in record.of(0):
        if made.axis == "cp" and made.phase in found:
            found[made.phase] += made.wire_bytes
    return found


# Half of all keys and values, in float32.
KEYS = 4 * ROWS * LENGTH * 2 * WIDTH / 2
# Of every token's number the other rank's half: what does not go on with parts of it needs all.
NUMBERS = 4 * ROWS * LENGTH / 2
TRAFFIC = {
    "mean": 0.0,
    "of hidden states": 0.0,
    "class weights": 0.0,
    "log-probabilities": 0.0,
    "ratios": NUMBERS,
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("name", "numbers"), TRAFFIC.items())
def test_keys_and_values_are_all_that_is_sent(name: str, numbers: float, order: str) -> None:
    assert sent(name, order) == {"forward": KEYS + numbers, "backward": KEYS}


@pytest.mark.parametrize("order", ORDERS)
def test_logits_were_sent_before(monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    """Each rank had those of all tokens, and a warning said so."""
    monkeypatch.setattr(passes, "PASSES", [each for each in passes.PASSES if each is not passes.keep_tokens])
    given = {"context": "all_gather", "token_order": order, "example_inputs": call()}
    program = autoptd.compile(Shifting("mean"), c=2, **given)
    calls = expected_calls(program, 0)
    forward = sum(n * made.wire_bytes for made, n in calls.items() if made.phase == "forward")
    assert forward == KEYS + 4 * ROWS * LENGTH * VOCAB / 2
    assert [fallback.op for fallback in program.fallbacks] == ["aten.slice"]


def first_label_only() -> tuple[Tensor, Tensor]:
    """Batches with as many labels of the first token, which is cut off, as of others; each row has one of these."""
    ids, labels = call(4 * ROWS)
    few = torch.full_like(labels, -100)
    few[:, 0] = 1
    few[torch.arange(len(few)), 1 + torch.arange(len(few)) % (LENGTH - 1)] = 2
    return ids, few


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("mesh", [{"c": 2}, {"c": 4, "d": 2}], ids=str)
def test_labels_that_are_cut_off_are_not_counted(mesh: dict[str, Any], order: str) -> None:
    given: dict[str, Any] = {"token_order": order, "example_inputs": first_label_only()}
    autoptd.verify(Shifting("mean"), **mesh, context="all_gather", **given, steps=1)


ZIGZAG: dict[str, Any] = {"context": "all_gather", "token_order": "zigzag"}


def text_of(name: str) -> str:
    given: dict[str, Any] = {"example_inputs": call(), **ZIGZAG}
    return "".join(autoptd.compile(Shifting(name), c=2, **given).sources.values())


WITHOUT_LABELS = ("z", "entropy")


@pytest.mark.thorough
@pytest.mark.one_in(36)
@pytest.mark.parametrize("name", [name for name in FORMS if name not in WITHOUT_LABELS])
def test_labels_in_chunks_are_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Between tokens in zigzag order; the name that the labels have by then depends on how the loss is fused."""
    slices = re.findall(r"= (rt\.i_to_s\(\w+, cp, dim=\d, blocks=rt\.Zigzag\((\d*)\))", text_of(name))
    # The first one is that of the ids.
    old, blocks = slices[-1]
    new = re.sub(r"rt\.Zigzag\(\d*\)", blocks or "1", old)
    assert len(slices) > 1
    check_is_found(monkeypatch, (old, new), Shifting(name), c=2, **ZIGZAG, example_inputs=call())
