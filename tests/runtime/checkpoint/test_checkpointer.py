"""Checkpoints beside training: consistent whatever happens meanwhile, found again, and never in the way of each other."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import autoptd
from autoptd.errors import PlanError, RuntimeFault
from autoptd.model import checkpointer as module
from autoptd.runtime.checkpoint import commit, save
from autoptd.runtime.checkpoint.read import open_checkpoint
from autoptd.runtime.checkpoint.stage import Staging
from tests.runtime.checkpoint.models import assert_same, data, running, state_of, train
from tests.waits import LONG

MESH = {"t": 2, "p": 2, "d": 2}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != commit.LOCK)


def one_step(pm: autoptd.ParallelModel, opt: torch.optim.Optimizer) -> Tensor:
    loss = pm.step(*data(pm.steps))
    opt.step()
    opt.zero_grad()
    return loss


class Held:
    """The thread stops before it writes, when `is_there`, until `go` is called."""

    def __init__(self) -> None:
        self.is_there, self._gate, self._right = threading.Event(), threading.Event(), save.write_share
        self.go = self._gate.set

    def write_share(self, *args: Any) -> None:
        self.is_there.set()
        assert self._gate.wait(LONG)
        self._right(*args)


@pytest.fixture
def held() -> Iterator[Held]:
    made = Held()
    with mock.patch.object(save, "write_share", made.write_share):
        yield made
    made.go()


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a niceness of each thread")
def test_the_thread_lets_training_have_the_cores(tmp_path: Path) -> None:
    pm, opt = running()
    own = os.getpriority(os.PRIO_PROCESS, 0)
    found = []

    def wait(*args: Any) -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    with mock.patch.object(save, "write_share", wait), pm.checkpointer(tmp_path, opt, every=1) as ckpt:
        one_step(pm, opt)
        with pytest.raises(RuntimeFault):
            ckpt.save()
    assert found == [max(own, save.NICENESS)] and os.getpriority(os.PRIO_PROCESS, 0) == own
    pm.close()


@pytest.mark.parametrize("mesh", [MESH, {"d": 2, "zero": 1}], ids=str)
def test_seven_steps_and_five_are_twelve(tmp_path: Path, mesh: dict[str, Any]) -> None:
    """To the bit, with a scheduler whose state travels along."""

    def start() -> tuple[Any, Any, Any]:
        pm, opt = running(**mesh)
        return pm, opt, torch.optim.lr_scheduler.StepLR(opt, 3, 0.5)

    def go_on(pm: Any, opt: Any, scheduler: Any, ckpt: Any, until: int) -> list[float]:
        losses = []
        while pm.steps < until:
            loss = one_step(pm, opt)
            scheduler.step()
            losses.append(float(loss))
            assert ckpt is None or ckpt.step(loss)
        return losses

    pm, opt, scheduler = start()
    wanted = go_on(pm, opt, scheduler, None, 12)
    expected = state_of(pm, opt)
    pm, opt, scheduler = start()
    with pm.checkpointer(tmp_path, opt, every=7, extra={"scheduler": scheduler}) as ckpt:
        assert ckpt.resume() is None
        found = go_on(pm, opt, scheduler, ckpt, 7)
    pm, opt, scheduler = start()
    with pm.checkpointer(tmp_path, opt, every=7, extra={"scheduler": scheduler}) as ckpt:
        assert ckpt.resume() == tmp_path / "step-00000007" and pm.steps == 7
        found += go_on(pm, opt, scheduler, ckpt, 12)
    assert found == wanted
    assert_same(state_of(pm, opt), expected)
    pm.close()


def test_what_changes_while_it_is_written_is_not_in_it(tmp_path: Path, held: Held) -> None:
    pm, opt = running(**MESH)
    train(pm, opt, 1)
    with pm.checkpointer(tmp_path, opt, every=2) as ckpt:
        one_step(pm, opt)
        expected = state_of(pm, opt)
        ckpt.step()
        # Parameters, moments, step counts, groups, and the number of steps.
        train(pm, opt, 1)
        opt.param_groups[0]["lr"] = 0.5
        for state in opt.state.values():
            for value in state.values():
                value.fill_(7.0)
        pm.load_state_dict({name: x * 0 for name, x in pm.state_dict().items()})
        assert held.is_there.wait(LONG) and names(tmp_path)[0].startswith("step-00000002.part-")
        held.go()
    assert names(tmp_path) == ["step-00000002"]
    other, others = running(d=2)
    with other.checkpointer(tmp_path, others, every=2) as ckpt:
        ckpt.resume()
    assert_same(state_of(other, others), expected)
    pm.close()
    other.close()


class LateStaging(Staging):
    """Copies as a device does that is behind its host: when it is waited for."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._later: list[tuple[Tensor, Tensor]] = []
        self._lock = threading.Lock()

    def __call__(self, x: Tensor) -> Tensor:
        self._later.append((buffer := self._buffer_for(x), x.detach()))
        return buffer

    def release(self) -> None:
        with self._lock:
            for buffer, x in self._later:
                buffer.copy_(x)
            self._later = []

    ready = release


@pytest.mark.parametrize("how", ["step", "load_state_dict", "load"])
def test_whoever_overwrites_the_state_waits_for_the_copies(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Staging", lambda device: LateStaging())
    monkeypatch.setattr(LateStaging, "ready", lambda self: held_back.wait(LONG) and self.release())
    held_back = threading.Event()
    pm, opt = running(d=2)
    pm.save(tmp_path / "first", optimizer=opt)
    with pm.checkpointer(tmp_path, opt, every=1) as ckpt:
        loss = one_step(pm, opt)
        expected = state_of(pm, opt)
        ckpt.step(loss)
        if how == "step":
            one_step(pm, opt)
        elif how == "load_state_dict":
            pm.load_state_dict({name: x * 0 for name, x in pm.state_dict().items()})
        else:
            pm.load(tmp_path / "first", optimizer=opt)
        held_back.set()
    other, others = running()
    with other.checkpointer(tmp_path, others, every=9) as ckpt:
        ckpt.resume()
    assert_same(state_of(other, others), expected)
    pm.close()
    other.close()


def test_a_save_that_is_due_while_one_is_written_waits(
    tmp_path: Path, held: Held, capsys: pytest.CaptureFixture[str]
) -> None:
    pm, opt = running(d=2)
    with pm.checkpointer(tmp_path, opt, every=2) as ckpt:
        for _ in range(7):
            assert ckpt.step(one_step(pm, opt))
        assert held.is_there.wait(LONG) and len(names(tmp_path)) == 1
        held.go()
        ckpt._writer_here.wait(LONG)
        ckpt.step(one_step(pm, opt))
    assert names(tmp_path) == ["step-00000002", "step-00000008"]
    assert capsys.readouterr().err.count("it waits for that") == 1
    pm.close()


def test_one_that_still_waits_at_the_end_is_made_there(tmp_path: Path, held: Held) -> None:
    pm, opt = running(d=2)
    with pm.checkpointer(tmp_path, opt, every=2) as ckpt:
        for _ in range(5):
            ckpt.step(one_step(pm, opt))
        held.go()
    assert names(tmp_path) == ["step-00000002", "step-00000005"]
    pm.close()


def test_the_last_ones_are_kept_and_leftovers_go(tmp_path: Path) -> None:
    pm, opt = running(d=2)
    leftovers = ["step-00000004.part-0a0a0a0a", "step-00000001.gone-0b0b0b0b-7"]
    for name in leftovers:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "notes").mkdir()
    with pm.checkpointer(tmp_path, opt, every=100, keep=2) as ckpt:
        assert ckpt.resume() is None and names(tmp_path) == ["notes"]
        for _ in range(4):
            one_step(pm, opt)
            ckpt.save()
    assert names(tmp_path) == ["notes", "step-00000003", "step-00000004"]
    # One that was being replaced, and whose successor was not there yet.
    (tmp_path / "step-00000004").rename(tmp_path / "step-00000004.old-0c0c0c0c")
    other, others = running()
    with other.checkpointer(tmp_path, others, every=100, keep=2) as ckpt:
        assert ckpt.resume() == tmp_path / "step-00000004" and other.steps == 4
        one_step(other, others)
        ckpt.save()
    assert names(tmp_path) == ["notes", "step-00000004.old-0c0c0c0c", "step-00000005"]
    pm.close()
    other.close()


def saved(folder: Path, count: int) -> None:
    """Checkpoints behind 1, 2, ... steps."""
    pm, opt = running(d=2)
    with pm.checkpointer(folder, opt, every=100) as ckpt:
        for _ in range(count):
            one_step(pm, opt)
            ckpt.save()
    pm.close()


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


FILES = [("__0_0.distcp", 0), ("checkpoint.json", 300)]
OTHER_FILES = [("__1_0.crc", 0), (".metadata", 50), ("extra.pt", 90)]


@pytest.mark.parametrize(
    "file, place", [*FILES, *(pytest.param(*pair, marks=pytest.mark.thorough) for pair in OTHER_FILES)]
)
def test_a_damaged_one_is_put_aside_and_the_one_before_is_taken(
    tmp_path: Path, file: str, place: int, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, 2)
    place = place if file != "__0_0.distcp" else byte_of_a_tensor(tmp_path / "step-00000002", file)
    flip(tmp_path / "step-00000002" / file, place)
    pm, opt = running(t=2)
    with pm.checkpointer(tmp_path, opt, every=100) as ckpt:
        assert ckpt.resume() == tmp_path / "step-00000001" and pm.steps == 1
        aside = [name for name in names(tmp_path) if ".damaged-" in name]
        assert len(aside) == 1 and names(tmp_path)[0] == "step-00000001"
        told = capsys.readouterr().err
        assert f"step-00000002 is damaged ({tmp_path}" in told and file in told and aside[0] in told
        # The same step is saved anew.
        one_step(pm, opt)
        assert ckpt.save() == tmp_path / "step-00000002"
    pm.close()


def byte_of_a_tensor(folder: Path, file: str) -> int:
    places = open_checkpoint(folder).metadata.storage_data.items()
    info = next(
        info for index, info in places if index.fqn.startswith("model.") and info.relative_path == file
    )
    return int(info.offset + info.length // 2)


def test_where_all_are_damaged_nothing_is_begun_anew(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    for number in (1, 2):
        (tmp_path / f"step-0000000{number}" / "__1_0.distcp").unlink()
    pm, opt = running()
    with (
        pytest.raises(
            RuntimeFault,
            match=r"no checkpoint of .* is whole: .*step-00000002: __1_0.distcp is missing; .*00000001",
        ),
        pm.checkpointer(tmp_path, opt, every=1) as ckpt,
    ):
        ckpt.resume()
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    pm.close()


def test_another_model_is_no_damage(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    pm, opt = running(optimizer=torch.optim.Adagrad)
    with pytest.raises(PlanError, match="AdamW"), pm.checkpointer(tmp_path, opt, every=1) as ckpt:
        ckpt.resume()
    assert names(tmp_path) == ["step-00000001"]
    pm.close()


def test_a_failed_save_is_told_at_the_next_step_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = save.write_share

    def full(part: Path, staged: Any, contents: Any) -> None:
        if staged.rank == 1:
            raise OSError(28, "No space left on device")
        right(part, staged, contents)

    pm, opt = running(d=2)
    with pm.checkpointer(tmp_path, opt, every=1) as ckpt:
        ckpt.step(one_step(pm, opt))
        ckpt._writer_here.wait(LONG)
        monkeypatch.setattr(save, "write_share", full)
        ckpt.step(one_step(pm, opt))
        ckpt._writer_here.wait(LONG)
        loss = one_step(pm, opt)
        with pytest.raises(RuntimeFault, match=r"a save failed: rank 0: .*No space left on device"):
            ckpt.step(loss)
        assert names(tmp_path) == ["step-00000001"]
        # Told once; what had failed can be tried again.
        monkeypatch.setattr(save, "write_share", right)
        ckpt.step(one_step(pm, opt))
    assert names(tmp_path) == ["step-00000001", "step-00000004"]
    pm.close()


def test_a_failure_of_the_last_save_is_told_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save, "write_share", mock.Mock(side_effect=OSError("gone")))
    pm, opt = running()
    with (
        pytest.raises(RuntimeFault, match="a save failed: rank 0: gone"),
        pm.checkpointer(tmp_path, opt, every=1) as ckpt,
    ):
        ckpt.step(one_step(pm, opt))
    assert names(tmp_path) == []
    pm.close()


def test_one_run_writes_into_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "PATIENCE", 0.2)
    one, other = running(), running()
    with one[0].checkpointer(tmp_path, one[1], every=1):
        told = rf"another run writes its checkpoints there \(process {os.getpid()} on "
        with pytest.raises(PlanError, match=told), other[0].checkpointer(tmp_path, other[1], every=1):
            pass
    # A child that was forked meanwhile does not hold it.
    with one[0].checkpointer(tmp_path, one[1], every=1):
        ready, end = os.pipe()
        if (child := os.fork()) == 0:
            os.read(ready, 1)
            os._exit(0)
    with other[0].checkpointer(tmp_path, other[1], every=1):
        pass
    os.write(end, b"x")
    os.waitpid(child, 0)
    one[0].close()
    other[0].close()


@pytest.mark.parametrize(
    "number, phase",
    [
        (signal.SIGTERM, "step"),
        (signal.SIGUSR1, "evaluation"),
        (signal.SIGTERM, "write"),
        *(pytest.param(signal.SIGUSR1, phase, marks=pytest.mark.thorough) for phase in ("step", "write")),
    ],
)
def test_a_signal_saves_this_step_and_ends_the_loop(
    tmp_path: Path, number: int, phase: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(number)
    pm, opt = running(t=2)
    with pm.checkpointer(tmp_path, opt, every=3 if phase == "write" else 100) as ckpt:
        while True:
            if pm.steps == 3:
                os.kill(os.getpid(), number)
                if phase == "evaluation":
                    pm.eval_step(*data(0))
                    assert ckpt.is_stopping
            if not ckpt.step(one_step(pm, opt)):
                break
        expected = state_of(pm, opt)
    assert pm.steps == 4 and names(tmp_path)[-1] == "step-00000004"
    assert "asked to end by a signal: saved" in capsys.readouterr().err
    assert signal.getsignal(number) == before
    other, others = running()
    with other.checkpointer(tmp_path, others, every=100) as ckpt:
        ckpt.resume()
    assert_same(state_of(other, others), expected)
    pm.close()
    other.close()


def test_what_one_replica_lost_is_not_saved(tmp_path: Path) -> None:
    pm, opt = running(d=2, check_every=5)
    with (
        pytest.raises(RuntimeFault, match=r"wte.weight differs between ranks 0, 1"),
        pm.checkpointer(tmp_path, opt, every=5) as ckpt,
    ):
        for _ in range(4):
            ckpt.step(one_step(pm, opt))
        loss = one_step(pm, opt)
        pm.rank_parameters(1)["transformer.wte.weight"].data.view(torch.int64).view(-1)[5] ^= 1
        ckpt.step(loss)
    assert names(tmp_path) == []
    pm.close()


class Loader:
    """A loader that keeps its position, as torchdata's does."""

    def __init__(self) -> None:
        self.at, self.epochs = 0, [torch.tensor([3, 1, 2]), torch.tensor([2, 3, 1])]

    def state_dict(self) -> dict[str, Any]:
        # As torchdata's: asked before its epoch has begun, it begins it, and another one comes.
        assert self.at > 0
        return {"at": self.at, "epochs": self.epochs, "nested": {"tuple": (1, None)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epochs = state["at"], state["epochs"]


class Pickled(Loader):
    def state_dict(self) -> dict[str, Any]:
        return {"self": self}


def test_a_loader_goes_on_where_it_was(tmp_path: Path) -> None:
    pm, opt = running(d=2)
    loader = Loader()
    with pm.checkpointer(tmp_path, opt, every=2, extra={"loader": loader}) as ckpt:
        for _ in range(3):
            loader.at += 10
            ckpt.step(one_step(pm, opt))
            # The position at the call: the file is written later.
            loader.epochs[0] += 1
    again = Loader()
    with pm.checkpointer(tmp_path, opt, every=2, extra={"loader": again}) as ckpt:
        ckpt.resume()
    assert again.at == 20 and again.epochs[0].tolist() == [4, 2, 3]
    with (
        pytest.raises(RuntimeFault, match=r"rank 0: extra\['loader'\]: has a state that cannot be read"),
        pm.checkpointer(tmp_path, opt, every=100, extra={"loader": Pickled()}) as ckpt,
    ):
        ckpt.save()
    with (
        pytest.raises(PlanError, match=r"extra\['loader'\]: is a list"),
        pm.checkpointer(tmp_path, opt, every=2, extra={"loader": [1]}),
    ):
        pass
    pm.close()


@pytest.mark.parametrize(
    "settings, told",
    [
        ({"every": 0}, r"pm.checkpointer\(every=0\)"),
        ({"every": True}, "every=True"),
        ({"every": 2.5}, "every=2.5"),
        ({"every": "often"}, "every='often'"),
        ({"every": "auto"}, "how often the run fails is not given"),
        ({"every": 3, "mtbf": 2.0}, "every=3 says how often to save"),
        ({"every": "auto", "mtbf": 0}, "mtbf=0"),
        ({"every": 1, "keep": 0}, "keep=0"),
        ({"every": 1, "optimizer": torch.optim.SGD([torch.ones(1)], lr=1.0)}, "is an SGD over other tensors"),
    ],
)
def test_what_is_refused(tmp_path: Path, settings: dict[str, Any], told: str) -> None:
    pm, _ = running()
    with pytest.raises(PlanError, match=told):
        pm.checkpointer(tmp_path, **settings)
    pm.close()


def test_one_at_a_time_and_only_in_its_block(tmp_path: Path) -> None:
    pm, opt = running()
    closed = pm.checkpointer(tmp_path, opt, every=1)
    with pytest.raises(PlanError, match="is not open"):
        closed.step()
    with closed:
        assert closed.resume() is None
    # Nothing would be saved any more.
    for act in (closed.step, closed.save, closed.resume):
        with pytest.raises(PlanError, match="is not open"):
            act()
    with (
        pm.checkpointer(tmp_path / "a", opt, every=1),
        pytest.raises(PlanError, match="another one of this model is open"),
        pm.checkpointer(tmp_path / "b", opt, every=1),
    ):
        pass
    pm.close()


@pytest.mark.thorough
def test_a_run_that_is_behind_its_folder_is_told_of_it(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    pm, opt = running()
    one_step(pm, opt)
    with pm.checkpointer(tmp_path, opt, every=1) as ckpt:
        with pytest.warns(UserWarning, match="has step-00000003, .*and this run saves step 1"):
            ckpt.save()
        one_step(pm, opt)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ckpt.save()
    pm.close()


@pytest.mark.thorough
def test_a_first_loss_far_from_those_before_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, 6)
    pm, opt = running()
    for loss, count in ((1e3, 1), (1.0, 0)):
        with pm.checkpointer(tmp_path, opt, every=100) as ckpt:
            ckpt.resume()
            ckpt.step(torch.tensor(loss))
            ckpt.step(torch.tensor(1e3))
        assert capsys.readouterr().err.count("are the data the same?") == count
    pm.close()


@pytest.mark.thorough
def test_two_hundred_saves_take_no_more_memory(tmp_path: Path) -> None:
    pm, opt = running(d=2)
    with pm.checkpointer(tmp_path, opt, every=1, keep=1) as ckpt:
        sizes = []
        for _ in range(220):
            ckpt.step(one_step(pm, opt))
            ckpt._writer_here.wait(LONG)
            sizes.append(resident_bytes())
    assert sizes[-1] < 1.05 * sizes[20]
    pm.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
