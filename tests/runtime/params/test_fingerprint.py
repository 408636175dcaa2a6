"""Fingerprints add up over shards of every kind, and see what changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autoptd.runtime.params.fingerprint import fingerprint, fingerprint_of, hash_words
from tests.model.test_parallel_model import parallel
from tests.runtime.tied_model import Case, make_model, make_program

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shards_add_up(dtype: torch.dtype) -> None:
    x = torch.randn(7, 3, 5).mul(9).to(dtype)
    kept, whole = x.clone(), fingerprint(x, "w")
    rows = torch.tensor([4, 0, 6]), torch.tensor([1, 2, 3, 5])
    assert sum(fingerprint(x[some], "w", rows=some) for some in rows) == whole
    columns = torch.arange(15).view(3, 5)
    parts = [fingerprint(x[:, :, i], "w", columns=columns[:, i].flatten()) for i in range(5)]
    assert sum(parts) == whole
    padded = torch.cat([x, x[:2]])
    assert fingerprint(padded, "w", rows=torch.tensor([*range(7), -1, -1])) == whole
    assert torch.equal(x, kept)


def test_what_changes_is_seen() -> None:
    x = torch.randn(40, 50)
    whole = fingerprint(x, "w")
    assert fingerprint(x.clone(), "w") == whole != fingerprint(x, "v")
    flipped = x.clone()
    flipped.view(torch.int32)[3, 4] ^= 1
    swapped = x[[1, 0, *range(2, 40)]]
    for other in (flipped, swapped, x.flip(1), x.t().reshape(40, 50), -x, torch.zeros_like(x)):
        assert fingerprint(other, "w") != whole
    assert fingerprint(torch.zeros(2), "w") != fingerprint(-torch.zeros(2), "w")
    assert fingerprint(torch.tensor(1.5), "w") != fingerprint(torch.tensor(2.5), "w")
    assert fingerprint(torch.ones(0, 3), "w") == 0


def test_many_different_values_have_different_fingerprints() -> None:
    ids = {int(hash_words(torch.randint(0, 100, (4, 16)))) for _ in range(2000)}
    near = {int(fingerprint(torch.tensor([i, j]), "")) for i in range(50) for j in range(50)}
    assert len(ids) == 2000 and len(near) == 2500
    big = torch.zeros(1 << 20, dtype=torch.uint8)
    assert hash_words(big) != hash_words(big + 1)


@pytest.mark.parametrize("case", [Case(t=2), Case(t=2, p=2, d=2, v=2, m=2, schedule="interleaved")], ids=str)
def test_parts_of_ranks_add_up_to_the_models(case: Any) -> None:
    model = make_model(case.layers)
    with parallel(case, model) as pm:
        program, state = make_program(case, model), pm.state_dict()
        for spec in program.params:
            owners = [
                rank
                for rank in pm.run.ranks.here
                if spec.name in rank.params.local and rank.world.coordinate.dp == 0
            ]
            owners = [rank for rank in owners if rank.params.is_first_owner(spec)]
            parts = [
                fingerprint_of(rank.params, spec)
                for rank in owners[:: 1 if spec.storage.layout["tp"].kind == "S" else len(owners)]
            ]
            assert sum(parts) == fingerprint(state[spec.name], spec.name), spec.name
