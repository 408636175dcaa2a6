"""A save that only some of the ranks make: a fault within the timeout, which names those that do not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from autoptd.errors import RuntimeFault
from autoptd.runtime.checkpoint.extra import own_state
from autoptd.runtime.checkpoint.manifest import Staged
from autoptd.runtime.checkpoint.save import Contents, Job, Writer, save_rank
from autoptd.runtime.step.launch import Rank
from autoptd.runtime.world.world import Mailbox
from tests.runtime.checkpoint.models import running, train
from tests.waits import LONG, wait_until


def test_a_rank_that_does_not_save(tmp_path: Path) -> None:
    pm, opt = running(t=2, d=2, timeout=2)

    def run(rank: Rank) -> None:
        if rank.world.rank != 3:
            save_rank(rank.params, tmp_path / "saved", lambda: (Contents({}), None))

    assert pm.run.ranks is not None
    # Objects are gathered axis by axis: rank 2 waits for rank 3, and rank 0 for rank 2. Either may tell first.
    told = r"waited 2 s for gather_objects 'pm.save'; not arrived: rank [23] at pm.save"
    with pytest.raises(RuntimeFault, match=told):
        pm.run.ranks.run("pm.save", run)
    assert list(tmp_path.iterdir()) == []
    # Ranks as threads go on.
    train(pm, opt, 1)
    pm.save(tmp_path / "saved", optimizer=opt)
    pm.close()


@pytest.mark.parametrize("callers", [(0, 2), (1, 2)], ids=str)
def test_a_process_that_does_not_save_beside_training(tmp_path: Path, callers: tuple[int, ...]) -> None:
    """Each process has a thread, and they share a mailbox."""
    box = Mailbox(HashStore())
    writers = [Writer(box, rank, size=3, processes=3) for rank in range(3)]
    state = own_state({}, torch.device("cpu"))
    for rank in callers:
        replicas = dict.fromkeys(range(3), 0)
        job = Job(tmp_path / "saved", "0123abcd-1", [Staged(rank)], [], Contents({}), lambda: state, replicas)
        writers[rank].start(job)
    (other,) = {0, 1, 2} - {*callers}
    # Without rank 0 there is no folder, and nobody ends a share.
    if 0 in callers:
        wait_until(lambda: box.count("saved.part-0123abcd-1 ended") == 2)
    told = f"a save made no progress for 0.5 s: rank {other} has not written its part: all ranks have to"
    with pytest.raises(RuntimeFault, match=told):
        writers[callers[0]].wait(0.5)
    for writer in writers:
        writer.close()
    assert not (tmp_path / "saved").exists()


class OfRank0(Mailbox):
    """A mailbox that ends with rank 0, as a store that its process hosts, and answers others late."""

    is_gone = False

    def get(self, key: str) -> str | None:
        time.sleep(0.2)
        if self.is_gone:
            raise RuntimeError("connection reset by peer")
        return super().get(key)


def test_rank_0_stays_until_all_know_that_the_save_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoptd.runtime.checkpoint.save.LATE_READERS", LONG)
    box, state = OfRank0(HashStore()), own_state({}, torch.device("cpu"))
    writers = [Writer(box, rank, size=3, processes=3) for rank in range(3)]
    for rank, writer in enumerate(writers):
        replicas = dict.fromkeys(range(3), 0)
        writer.start(
            Job(tmp_path / "saved", "0123abcd-1", [Staged(rank)], [], Contents({}), lambda: state, replicas)
        )
    writers[0].wait(30.0)
    box.is_gone = True
    for writer in writers:
        writer.wait(30.0)
        assert writer.take_error() == ""
        writer.close()
    assert (tmp_path / "saved").exists()
