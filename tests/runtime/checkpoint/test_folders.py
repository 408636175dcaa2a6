"""What users have beside checkpoints, and how they name things, is theirs; a save that is told to be there is there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import autoptd
from autoptd.errors import PlanError, RuntimeFault
from autoptd.runtime.checkpoint import save
from autoptd.runtime.checkpoint.commit import LOCK
from tests.runtime.checkpoint.models import assert_same, running, state_of, train

Running = tuple[autoptd.ParallelModel, torch.optim.Optimizer]


@pytest.fixture(scope="module")
def run() -> Iterator[Running]:
    pm, opt = running(t=2)
    train(pm, opt, 1)
    yield pm, opt
    pm.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK)


def test_what_is_named_alike_is_not_removed(run: Running, tmp_path: Path) -> None:
    """A copy that a user put aside, and parts of data, are no leftovers; nor is the copy a checkpoint to resume."""
    pm, opt = run
    pm.save(tmp_path / "best", optimizer=opt)
    (tmp_path / "best").rename(tmp_path / "best.old-monday")
    (tmp_path / "best.part-2").mkdir()
    pm.save(tmp_path / "best", optimizer=opt)
    assert names(tmp_path) == ["best", "best.old-monday", "best.part-2"]
    others = ["corpus.part-00001.txt", "step-00000007.gone-bad", "step-00000009.old-bad", "text.part-1"]
    for name in others[1:]:
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "checkpoint.json").write_text("{}")
    (tmp_path / "run" / others[0]).write_text("a line")
    with pm.checkpointer(tmp_path / "run", opt, every=100) as ckpt:
        assert ckpt.resume() is None
        last = ckpt.save()
    assert names(tmp_path / "run") == sorted([*others, last.name])


def test_a_name_with_part_in_it_is_a_name(run: Running, tmp_path: Path) -> None:
    pm, opt = run
    pm.save(tmp_path / "run.part-2", optimizer=opt)
    pm.load(tmp_path / "run.part-2", optimizer=opt)
    with pytest.raises(PlanError, match="is named like the temporary folder of a save"):
        pm.save(tmp_path / "run.part-0123abcd", optimizer=opt)


@pytest.mark.parametrize("name", [".", ".."])
def test_a_path_without_a_name(run: Running, name: str) -> None:
    with pytest.raises(PlanError, match="must name a new directory"):
        run[0].save(name)


def test_an_empty_path(run: Running) -> None:
    pm = run[0]
    for act in (pm.save, pm.load, lambda folder: pm.checkpointer(folder, every=1)):
        with pytest.raises(PlanError, match="'' is not a valid directory path"):
            act("")


def test_what_is_no_path(run: Running) -> None:
    """An address would be a folder here, which is gone with the machine."""
    pm = run[0]
    acts = pm.save, pm.load, lambda folder: pm.checkpointer(folder, every=1)
    for act in acts:
        with pytest.raises(PlanError, match="'s3://bucket/run' is an address, not a folder"):
            act("s3://bucket/run")
        for folder in (None, 3, b"run"):
            with pytest.raises(PlanError, match="is not a valid directory path"):
                act(folder)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="every=None"):
        pm.checkpointer("run", every=None)  # type: ignore[arg-type]


def test_links_are_not_replaced_and_what_they_lead_to_is_kept(run: Running, tmp_path: Path) -> None:
    pm, opt = run
    pm.save(tmp_path / "first", optimizer=opt)
    before = names(tmp_path / "first")
    (tmp_path / "latest").symlink_to("first")
    with pytest.raises(PlanError, match="is a symbolic link to 'first'"):
        pm.save(tmp_path / "latest", optimizer=opt)
    pm.load(tmp_path / "latest", optimizer=opt)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-00000000").symlink_to(tmp_path / "first")
    with pm.checkpointer(tmp_path / "run", opt, every=100, keep=1) as ckpt:
        last = ckpt.save()
    assert names(tmp_path / "run") == [last.name]
    assert names(tmp_path / "first") == before


def test_a_folder_within_a_checkpoint_goes_with_it(run: Running, tmp_path: Path) -> None:
    pm, opt = run
    for _ in range(2):
        pm.save(tmp_path / "saved", optimizer=opt)
        (tmp_path / "saved" / "hf").mkdir()
        (tmp_path / "saved" / "hf" / "notes").write_text("exported")
    pm.save(tmp_path / "saved", optimizer=opt)
    assert names(tmp_path) == ["saved"] and "hf" not in names(tmp_path / "saved")


def test_a_relative_folder_stays_where_it_is(
    run: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pm, opt = run
    monkeypatch.chdir(tmp_path)
    with pm.checkpointer("ckpts", opt, every=100) as ckpt:
        train(pm, opt, 1)
        first = ckpt.save()
        (tmp_path / "elsewhere").mkdir()
        os.chdir(tmp_path / "elsewhere")
        train(pm, opt, 1)
        last = ckpt.save()
    assert names(tmp_path / "ckpts") == [first.name, last.name] and last.is_dir()
    assert names(tmp_path / "elsewhere") == []


def test_a_save_that_failed_is_made_when_it_is_asked_for_again(run: Running, tmp_path: Path) -> None:
    pm, opt = run
    with pm.checkpointer(tmp_path, opt, every=100) as ckpt:
        with (
            mock.patch.object(save, "write_share", side_effect=OSError("disk full")),
            pytest.raises(RuntimeFault, match="disk full"),
        ):
            ckpt.save()
        assert ckpt.save().is_dir()
    pm.load(tmp_path / f"step-{pm.steps:08d}", optimizer=opt)


def test_a_step_that_was_saved_before_is_saved_as_it_is_now(run: Running, tmp_path: Path) -> None:
    """Where parameters were edited since, and where the run was set back and came to the same step again."""
    pm, opt = run
    with pm.checkpointer(tmp_path, opt, every=1) as ckpt:
        first = ckpt.save()
        train(pm, opt, 1)
        ckpt.step()
        ckpt._writer_here.wait(60)
        pm.load(first, optimizer=opt)
        opt.param_groups[0]["lr"] *= 2
        train(pm, opt, 1)
        ckpt.step()
        ckpt._writer_here.wait(60)
        expected = state_of(pm, opt)
        pm.load(tmp_path / f"step-{pm.steps:08d}", optimizer=opt)
        assert_same(state_of(pm, opt), expected)
        for parameter in pm.parameters():
            parameter.data.mul_(0.5)
        expected = state_of(pm, opt)
        pm.load(ckpt.save(), optimizer=opt)
        assert_same(state_of(pm, opt), expected)


def refuse(patch: pytest.MonkeyPatch, call: str, part: str) -> None:
    """Let a call of `os` fail for paths that have `part` in them, as it does where files are another user's."""
    right = getattr(os, call)

    def refused(path: Any, *others: Any) -> Any:
        if part in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return right(path, *others)

    patch.setattr(os, call, refused)


@pytest.mark.parametrize("call, part", [("unlink", "step-00000001.gone"), ("rename", "step-00000001")])
def test_one_that_cannot_be_removed_ends_no_run(
    tmp_path: Path,
    call: str,
    part: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is told is that the new one is there, and what stays; once, and training goes on."""
    pm, opt = running()
    with pm.checkpointer(tmp_path, opt, every=1, keep=1) as ckpt:
        for step in range(4):
            train(pm, opt, 1)
            if step == 1:
                refuse(monkeypatch, call, part)
            assert ckpt.step()
            ckpt._writer_here.wait(60)
    told = capsys.readouterr().err
    assert f"{tmp_path / 'step-00000002'} is saved and complete; old files could not be removed" in told
    assert f"could not be removed: {tmp_path / part}" in told and "(Permission denied)" in told
    assert told.count("could not be removed") == 1
    first, *others = names(tmp_path)
    assert first.startswith(part) and others == ["step-00000004"]
    with pm.checkpointer(tmp_path, opt, every=1, keep=1) as ckpt:
        assert ckpt.resume() == tmp_path / "step-00000004"
    told = capsys.readouterr().err
    assert ("what earlier runs left could not be removed" in told) == (call == "unlink")
    pm.close()


def test_what_a_save_has_replaced_and_cannot_remove_is_a_warning(
    run: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pm, opt = run
    pm.save(tmp_path / "best", optimizer=opt)
    refuse(monkeypatch, "unlink", ".old-")
    with pytest.warns(UserWarning, match=r"best is saved and complete; .* could not be removed: .*best.old-"):
        pm.save(tmp_path / "best", optimizer=opt)
    pm.load(tmp_path / "best", optimizer=opt)
