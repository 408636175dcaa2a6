"""What a user may do between steps, in an order drawn at random: `zero=1` gives the numbers of `zero=0`, each time.

Gathers are done when they are waited for, in buffers of NaN: what is read too early, or written over, shows.
"""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import autoptd
from autoptd.program import buckets
from autoptd.runtime.params import storage
from tests.parity.late import Late, usual_gather
from tests.parity.models import batch, gpt, separate, skipping

LENGTH, ROWS = 14, 8
MODELS = [gpt, separate, skipping]
MESHES: list[dict[str, Any]] = [
    {"d": 2},
    {"p": 2, "d": 2, "schedule": "zb_h1"},
    {"p": 2, "d": 2, "v": 2, "num_microbatches": 2},
    {"t": 2, "d": 2},
    {"t": 2, "p": 2, "d": 2, "sequence_parallel": True},
]
OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 1e-2}),
    (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    (torch.optim.Adam, {"lr": 1e-2, "foreach": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.RMSprop, {"lr": 1e-3}),
    (torch.optim.Adagrad, {"lr": 1e-2}),
]
MORE: list[dict[str, Any]] = [
    {},
    {"precision": "bf16"},
    {"precision": "bf16-mixed"},
    {"precision": "fp16"},
    {"accumulate_allreduce_grads_in_fp32": True},
]


class User:
    """A model in training, and what its user does with it; every action returns numbers."""

    def __init__(self, seed: int, zero: int) -> None:
        drawn = random.Random(seed)
        make, mesh, more = drawn.choice(MODELS), drawn.choice(MESHES), drawn.choice(MORE)
        kind, settings = drawn.choice(OPTIMIZERS)
        about = {"backend": "local", "timeout": 30, "example_inputs": batch(ROWS)}
        torch.manual_seed(0)
        self.pm = autoptd.parallelize(make(), **mesh, **more, zero=zero, **about)
        self.optimizer = self.pm.optimizer(kind, **settings)
        # Taken before training: the tensors that the loop below goes on to read and to write.
        self.held = list(self.pm.named_parameters())
        self.number = 0

    def losses(self, count: int = 1) -> list[Tensor]:
        self.number += 1
        return [self.pm.step(*(x.roll(self.number, 0) for x in batch(ROWS))).clone() for _ in range(count)]

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def named(self) -> list[Tensor]:
        """The copies of one parameter, on all ranks of this process."""
        name = self.held[self.number % len(self.held)][0]
        return [x for one, x in self.held if one == name]

    def step(self) -> Any:
        found = [*self.losses(), self.pm.clip_grad_norm_(0.5)]
        self.update()
        return found

    def add_up(self) -> Any:
        found = self.losses(2)
        self.update()
        return found

    def keep_gradients(self) -> Any:
        found = self.losses()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        return found

    def change_gradients(self) -> Any:
        self.losses()
        found = self.pm.gradients()
        for group in self.optimizer.param_groups:
            for x in group["params"]:
                if x.grad is not None:
                    x.grad.mul_(0.5)
        self.update()
        return found

    def record(self) -> Any:
        with self.pm.record():
            found = self.losses()
        self.update()
        return found

    def evaluate(self) -> Any:
        return self.pm.eval_step(*batch(ROWS)).clone()

    def fail(self) -> Any:
        ids, targets = batch(ROWS)
        with pytest.raises(autoptd.AutoptdError):
            self.pm.step(ids[:, :3], targets)

    def read(self) -> Any:
        return [x.detach().clone() for _, x in self.held]

    def read_data(self) -> Any:
        return [x.data.clone() for x in self.named()]

    def as_numpy(self) -> Any:
        return [torch.from_numpy(x.detach().float().numpy().copy()) for x in self.named()]

    def copy(self) -> Any:
        return [x.detach() for x in copy.deepcopy(list(self.pm.parameters()))]

    def save(self) -> Any:
        file = io.BytesIO()
        torch.save(dict(self.pm.state_dict()), file)
        file.seek(0)
        return torch.load(file)

    def edit(self) -> Any:
        with torch.no_grad():
            for x in self.named():
                x.mul_(0.75)

    def edit_data(self) -> Any:
        for x in self.named():
            x.data.mul_(0.5)

    def edit_all(self) -> Any:
        with torch.no_grad():
            torch._foreach_mul_([x for _, x in self.held], 0.9)

    def edit_a_view(self) -> Any:
        with torch.no_grad():
            for x in self.named():
                x.view(-1).mul_(1.5)

    def load_its_own(self) -> Any:
        self.pm.load_state_dict(self.pm.state_dict())
        self.optimizer.load_state_dict(self.optimizer.state_dict())

    def load(self) -> Any:
        halved = {name: x / 2 if x.is_floating_point() else x for name, x in self.pm.state_dict().items()}
        self.pm.load_state_dict(halved)

    def slow_down(self) -> Any:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5


ACTIONS: list[Callable[[User], Any]] = [
    *[User.step] * 4,
    *(
        value
        for name, value in vars(User).items()
        if name[0] != "_" and name not in ("losses", "update", "named")
    ),
]


def script(seed: int) -> list[Callable[[User], Any]]:
    return [User.step, *random.Random(seed).choices(ACTIONS, k=LENGTH), User.save]


def assert_equal(found: Any, wanted: Any, what: str) -> None:
    """To the bit; the norm, whose sum is cut elsewhere, but for rounding. What overflowed may be no number on both."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), what
        found, wanted = list(found.values()), list(wanted.values())
    if isinstance(wanted, list):
        for one, other in zip(found, wanted, strict=True):
            assert_equal(one, other, what)
    elif isinstance(wanted, Tensor):
        rtol = 1e-14 if wanted.dtype == torch.float64 else 0
        torch.testing.assert_close(found, wanted, rtol=rtol, atol=0, equal_nan=True, msg=what)


@pytest.mark.one_in(120)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(40))
def test_what_is_done_between_steps_gives_the_same_numbers(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "usual_bytes", lambda *_: 3000)
    users = [User(seed, zero) for zero in (0, 1)]
    done: list[str] = []
    for action in script(seed):
        done.append(action.__name__)
        results = []
        for zero, user in enumerate(users):
            monkeypatch.setattr(storage, "start_gather", (usual_gather, Late)[zero])
            results.append(action(user))
        assert_equal(results[1], results[0], " ".join(done))
    for user in users:
        user.pm.close()
