"""One number for the weights: the same on every mesh, on one device, and of what a checkpoint has."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from autoptd.errors import AutoptdError, RuntimeFault
from autoptd.runtime.checkpoint import read
from autoptd.runtime.checkpoint.read import open_checkpoint
from autoptd.runtime.params.fingerprint import fingerprint_of_values
from tests.runtime.checkpoint.models import running, tied_gpt, train

MESHES: list[dict[str, Any]] = [
    {},
    {"t": 2, "p": 2},
    {"t": 4},
    {"d": 4, "zero": 1, "dp_shard": 2},
    {"c": 2, "d": 2, "zero": 1},
    {"p": 2, "d": 2},
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_mesh_has_that_of_one_device(mesh: dict[str, Any], tmp_path: Path) -> None:
    """61 rows that no t divides, tied; behind a step, that of the state dict, and of the file."""
    model = tied_gpt()
    pm, opt = running(model, **mesh)
    assert pm.fingerprint() == fingerprint_of_values(dict(model.named_parameters()))
    train(pm, opt, 1)
    names = dict(model.named_parameters())
    after = {name: x for name, x in pm.state_dict().items() if name in names}
    assert pm.fingerprint() == fingerprint_of_values(after) != fingerprint_of_values(names)
    pm.save(tmp_path / "saved", optimizer=opt)
    reader = open_checkpoint(tmp_path / "saved").reader()
    assert fingerprint_of_values({name: reader.whole(name) for name in names}) == pm.fingerprint()
    pm.close()


def test_one_bit_or_two_rows_change_it() -> None:
    pm, _ = running(d=2)
    before = pm.fingerprint()
    for rank in (0, 1):
        own = pm.rank_parameters(rank)["transformer.wte.weight"].data
        own[[3, 4]] = own[[4, 3]]
    assert pm.fingerprint() != before
    for rank in (0, 1):
        own = pm.rank_parameters(rank)["transformer.wte.weight"].data
        own[[3, 4]] = own[[4, 3]]
    assert pm.fingerprint() == before
    for rank in (0, 1):
        pm.rank_parameters(rank)["transformer.wte.weight"].data.view(torch.int64)[5, 5] ^= 1
    assert pm.fingerprint() != before
    pm.close()


def test_masters_count_where_they_are_what_is_stored() -> None:
    """In bfloat16 stages would not see the bit."""
    pm, _ = running(precision="bf16", t=2, zero=1, d=2)
    model = tied_gpt(torch.float32)
    assert pm.fingerprint() == fingerprint_of_values(dict(model.named_parameters()))
    pm.close()


def test_a_checkpoint_has_it_and_a_load_is_held_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pm, opt = running(t=2, p=2)
    train(pm, opt, 1)
    pm.save(tmp_path / "saved", optimizer=opt)
    saved = open_checkpoint(tmp_path / "saved").manifest.about["fingerprint"]
    assert saved == pm.fingerprint()
    other, fresh = running(d=2, zero=1)
    other.load(tmp_path / "saved", optimizer=fresh)
    assert other.fingerprint() == saved
    fill = read.Reader.fill

    def swapped(reader: read.Reader, wants: Iterable[read.Want]) -> None:
        """The right bytes, which their CRC confirms, in the wrong places."""
        fill(reader, wants := list(wants))
        for want in wants:
            if want.into.dim() == 2:
                want.into.copy_(want.into.flip(0))

    monkeypatch.setattr(read.Reader, "fill", swapped)
    with pytest.raises(RuntimeFault, match="fingerprint"):
        other.load(tmp_path / "saved", optimizer=fresh)
    monkeypatch.undo()
    with pytest.raises(AutoptdError, match="did not end"):
        other.fingerprint()
    other.load(tmp_path / "saved", optimizer=fresh)
    assert other.fingerprint() == saved
    for each in (pm, other):
        each.close()
