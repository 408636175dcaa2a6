"""Losses as people write them, over one small decoder: what `benchmarks/losses.py` and `tests/parity/test_losses.py` run.

In: a name. Out: a `Case`, which makes the module (a decoder with its heads, `forward` returns the loss) and the call, a global
batch. Nothing here knows that it will be partitioned.

    case = CASES["masked_mean"]
    autoptd.verify(case.make(), t=2, example_inputs=case.call())
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.gpt import GPTConfig, Transformer

ROWS, LENGTH, VOCAB, WIDTH, LAYERS = 8, 8, 64, 16, 2
# (model, ids, the other arguments of the call by name) -> the loss.
Loss = Callable[..., Any]


class Model(nn.Module):
    """A decoder with the heads that the losses read, and one of the losses."""

    def __init__(self, loss: Loss, heads: tuple[str, ...], vocab: int, width: int) -> None:
        super().__init__()
        config = GPTConfig(vocab, LENGTH, LAYERS, n_head=2, n_embd=width)
        self.decoder = Transformer(config)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.heads = nn.ModuleDict({name: nn.Linear(width, HEADS.get(name, vocab)) for name in heads})
        self.loss = loss

    def logits(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.decoder(ids))

    def forward(self, ids: Tensor, **given: Any) -> Any:
        return self.loss(self, ids, **given)


# Outputs of the heads that are none of a vocabulary.
HEADS = {"value": 1, "embed": 16, "router": 4}


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)


def log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """The log-probability of every label: [b, s]."""
    return logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)


def masked_mean(model: Model, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return (token_losses(model.logits(ids), labels) * mask).sum() / mask.sum()


def masked_mean_clamped(model: Model, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return (token_losses(model.logits(ids), labels) * mask).sum() / mask.sum().clamp(min=1)


def valid_tokens(model: Model, ids: Tensor, labels: Tensor) -> Tensor:
    total = F.cross_entropy(model.logits(ids).flatten(0, 1), labels.flatten(), reduction="sum")
    return total / (labels != -100).sum()


def num_items(model: Model, ids: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    total = F.cross_entropy(model.logits(ids).flatten(0, 1), labels.flatten(), reduction="sum")
    return total / num_items_in_batch


def div_rows(model: Model, ids: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model.logits(ids).flatten(0, 1), labels.flatten(), reduction="sum") / ids.shape[0]


def div_numel(model: Model, ids: Tensor, labels: Tensor) -> Tensor:
    return token_losses(model.logits(ids), labels).sum() / labels.numel()


def per_sample_mean(model: Model, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    losses = token_losses(model.logits(ids), labels) * mask
    return (losses.sum(1) / mask.sum(1).clamp(min=1)).mean()


def zloss(model: Model, ids: Tensor, labels: Tensor) -> Tensor:
    logits = model.logits(ids)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    return loss + 1e-2 * logits.logsumexp(-1).square().mean()


def soft_labels(model: Model, ids: Tensor, probabilities: Tensor) -> Tensor:
    return F.cross_entropy(model.logits(ids).flatten(0, 1), probabilities.flatten(0, 1))


def distillation(model: Model, ids: Tensor, teacher: Tensor) -> Tensor:
    student = F.log_softmax(model.logits(ids) / 2, dim=-1)
    return F.kl_div(student, F.softmax(teacher / 2, dim=-1), reduction="batchmean") * 4


def nll(model: Model, ids: Tensor, labels: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(model.logits(ids), dim=-1).flatten(0, 1), labels.flatten())


def entropy_bonus(model: Model, ids: Tensor, labels: Tensor) -> Tensor:
    log_p = model.logits(ids).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return -log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).mean() - 0.01 * entropy.mean()


def policy_clip(model: Model, ids: Tensor, labels: Tensor, old: Tensor, advantage: Tensor) -> Tensor:
    ratio = (log_probs(model.logits(ids), labels) - old).exp()
    clipped = ratio.clamp(0.8, 1.2) * advantage
    return -torch.min(ratio * advantage, clipped).mean()


def grpo_masked(
    model: Model, ids: Tensor, labels: Tensor, old: Tensor, reference: Tensor, reward: Tensor, mask: Tensor
) -> Tensor:
    log_p = log_probs(model.logits(ids), labels)
    ratio = (log_p - old).exp()
    gain = torch.min(ratio * reward[:, None], ratio.clamp(0.8, 1.2) * reward[:, None])
    kl = (reference - log_p).exp() - (reference - log_p) - 1
    return ((0.04 * kl - gain) * mask).sum() / mask.sum()


def _preference(chosen: Tensor, rejected: Tensor) -> Tensor:
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


def dpo_halves(model: Model, ids: Tensor, labels: Tensor, mask: Tensor, base: Tensor) -> Tensor:
    gained = (log_probs(model.logits(ids), labels) * mask).sum(-1) - base
    chosen, rejected = gained.chunk(2, 0)
    return _preference(chosen, rejected)


def dpo_pairs(model: Model, ids: Tensor, labels: Tensor, mask: Tensor, base: Tensor) -> Tensor:
    gained = (log_probs(model.logits(ids), labels) * mask).sum(-1) - base
    pairs = gained.view(-1, 2)
    return _preference(pairs[:, 0], pairs[:, 1])


def reward_head(model: Model, ids: Tensor, lengths: Tensor, reward: Tensor) -> Tensor:
    scores = model.heads["value"](model.decoder(ids)).squeeze(-1)
    last = scores.gather(1, (lengths - 1)[:, None]).squeeze(1)
    return F.mse_loss(last, reward)


def value_clipped(model: Model, ids: Tensor, old: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    value = model.heads["value"](model.decoder(ids)).squeeze(-1)
    clipped = old + (value - old).clamp(-0.2, 0.2)
    worst = torch.max((value - returns).square(), (clipped - returns).square())
    return 0.5 * (worst * mask).sum() / mask.sum()


def multi_token(model: Model, ids: Tensor, labels: Tensor) -> Tensor:
    hidden = model.decoder(ids)
    first = F.cross_entropy(model.lm_head(hidden).flatten(0, 1), labels.flatten())
    second = model.heads["second"](hidden)[:, :-1]
    return first + 0.3 * F.cross_entropy(second.flatten(0, 1), labels[:, 1:].flatten())


def hf_shift(model: Model, ids: Tensor, labels: Tensor) -> Tensor:
    logits = model.logits(ids).float()
    shifted = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(
        logits.view(-1, logits.size(-1)), shifted.view(-1), ignore_index=-100, reduction="mean"
    )


def focal(model: Model, ids: Tensor, labels: Tensor) -> Tensor:
    log_p = log_probs(model.logits(ids), labels)
    return -((1 - log_p.exp()) ** 2 * log_p).mean()


def contrastive(model: Model, ids: Tensor) -> Tensor:
    hidden = model.heads["embed"](model.decoder(ids))
    one, other = F.normalize(hidden[:, 0], dim=-1), F.normalize(hidden[:, -1], dim=-1)
    return F.cross_entropy(one @ other.T / 0.1, torch.arange(ids.shape[0], device=ids.device))


def load_balancing(model: Model, ids: Tensor, labels: Tensor) -> Tensor:
    hidden = model.decoder(ids)
    probs = model.heads["router"](hidden).flatten(0, 1).softmax(-1)
    chosen = F.one_hot(probs.argmax(-1), 4).to(probs.dtype)
    balance = 4 * (chosen.mean(0) * probs.mean(0)).sum()
    return F.cross_entropy(model.lm_head(hidden).flatten(0, 1), labels.flatten()) + 0.01 * balance


def with_accuracy(model: Model, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    logits = model.logits(ids)
    hits = ((logits.argmax(-1) == labels) & (labels != -100)).sum() / (labels != -100).sum()
    return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "accuracy": hits}


Maker = Callable[[int, int, torch.Generator], Tensor]


def _labels(rows: int, vocab: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, vocab, (rows, LENGTH), generator=generator)


def _some_labels(rows: int, vocab: int, generator: torch.Generator) -> Tensor:
    """Labels of which every row ignores another number."""
    return _labels(rows, vocab, generator).masked_fill(_mask(rows, vocab, generator) == 0, -100)


def _mask(rows: int, vocab: int, generator: torch.Generator) -> Tensor:
    """Tokens that count: another number in every row."""
    return (torch.arange(LENGTH) < LENGTH - torch.arange(rows)[:, None] % 5).float()


def _numbers(*tail: int, low: float = -1.0, high: float = 1.0) -> Maker:
    def make(rows: int, vocab: int, generator: torch.Generator) -> Tensor:
        return torch.rand(rows, *tail, generator=generator) * (high - low) + low

    return make


def _scores(rows: int, vocab: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, LENGTH, vocab, generator=generator)


def _probabilities(rows: int, vocab: int, generator: torch.Generator) -> Tensor:
    return _scores(rows, vocab, generator).softmax(-1)


def _lengths(rows: int, vocab: int, generator: torch.Generator) -> Tensor:
    return torch.randint(1, LENGTH + 1, (rows,), generator=generator)


def _num_items(rows: int, vocab: int, generator: torch.Generator) -> Tensor:
    return torch.tensor(53)


WHOLE: dict[str, Maker] = {"labels": _labels}
SOME: dict[str, Maker] = {"labels": _some_labels}
MASKED: dict[str, Maker] = {"labels": _labels, "mask": _mask}
# Log-probabilities of an earlier policy: near those of one that has learned nothing yet.
OLD = _numbers(LENGTH, low=-4.6, high=-3.8)
POLICY: dict[str, Maker] = {"labels": _labels, "old": OLD}


@dataclass(frozen=True)
class Case:
    """A loss: what it is in a table, and what its call has beside ids."""

    loss: Loss
    about: str
    inputs: Mapping[str, Maker]
    heads: tuple[str, ...] = ()

    def make(self, vocab: int = VOCAB, width: int = WIDTH) -> nn.Module:
        torch.manual_seed(0)
        return Model(self.loss, self.heads, vocab, width)

    def call(self, rows: int = ROWS, vocab: int = VOCAB) -> dict[str, Tensor]:
        """The global batch, the same on every call."""
        generator = torch.Generator().manual_seed(1)
        call = {"ids": _labels(rows, vocab, generator)}
        return call | {name: make(rows, vocab, generator) for name, make in self.inputs.items()}


CASES = {
    "masked_mean": Case(masked_mean, "`(loss * mask).sum() / mask.sum()`", MASKED),
    "masked_mean_clamped": Case(masked_mean_clamped, "the same, over `mask.sum().clamp(min=1)`", MASKED),
    "valid_tokens": Case(valid_tokens, "a sum over `(labels != -100).sum()`", SOME),
    "num_items": Case(
        num_items, "a sum over `num_items_in_batch`, an input", SOME | {"num_items_in_batch": _num_items}
    ),
    "div_rows": Case(div_rows, "a sum over `ids.shape[0]`", SOME),
    "div_numel": Case(div_numel, "a sum over `labels.numel()`", WHOLE),
    "per_sample_mean": Case(per_sample_mean, "a masked mean of each row, then their mean", MASKED),
    "zloss": Case(zloss, "cross-entropy and the square of `logsumexp`", SOME),
    "soft_labels": Case(
        soft_labels, "cross-entropy of class probabilities", {"probabilities": _probabilities}
    ),
    "distillation": Case(
        distillation, '`F.kl_div(..., reduction="batchmean")` to a teacher', {"teacher": _scores}
    ),
    "nll": Case(nll, "`F.nll_loss` of `log_softmax`", SOME),
    "entropy_bonus": Case(entropy_bonus, "log-probabilities less their entropy", WHOLE),
    "policy_clip": Case(
        policy_clip, "PPO's clipped ratio of policies", POLICY | {"advantage": _numbers(LENGTH)}
    ),
    "grpo_masked": Case(
        grpo_masked,
        "GRPO: clipped ratio and KL to a reference, masked",
        POLICY | {"reference": OLD, "reward": _numbers(), "mask": _mask},
    ),
    "dpo_halves": Case(
        dpo_halves, "DPO, `chunk(2, 0)` of chosen and rejected", MASKED | {"base": _numbers()}
    ),
    "dpo_pairs": Case(dpo_pairs, "DPO, chosen and rejected row by row", MASKED | {"base": _numbers()}),
    "reward_head": Case(
        reward_head, "the score of the last token", {"lengths": _lengths, "reward": _numbers()}, ("value",)
    ),
    "value_clipped": Case(
        value_clipped,
        "PPO's clipped value loss, masked",
        {"old": _numbers(LENGTH), "returns": _numbers(LENGTH), "mask": _mask},
        ("value",),
    ),
    "multi_token": Case(multi_token, "two heads, the next token and that after it", SOME, ("second",)),
    "hf_shift": Case(hf_shift, "labels shifted as transformers does", SOME),
    "focal": Case(focal, "`(1 - p)**2 * log p`", WHOLE),
    "contrastive": Case(contrastive, "every row against all others", {}, ("embed",)),
    "load_balancing": Case(load_balancing, "a product of two means over the batch", SOME, ("router",)),
    "with_accuracy": Case(with_accuracy, "the loss beside an accuracy", SOME),
}
