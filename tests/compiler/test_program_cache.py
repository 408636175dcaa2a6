"""Programs of other sizes on disk: a second run reads what the first one wrote, and computes the same; what changed is not
read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.compiler import program_cache
from autoptd.program.program import Program
from tests.parity.covering import aliases, compare
from tests.parity.models import batch, gpt


def cut(rows: int, length: int) -> tuple[Tensor, ...]:
    return tuple(x[:, :length].contiguous() for x in batch(rows))


def losses(
    folder: Path, model: nn.Module | None = None, **keywords: Any
) -> tuple[list[float], list[Program], int]:
    """The losses of steps and an evaluation, the programs, and how many were written, not read."""
    about = {"t": 2, "p": 2, "shapes": "exact", "backend": "local", "timeout": 60, **keywords}
    written = 0
    store = program_cache.ProgramCache.store

    def noted(*given: Any) -> None:
        nonlocal written
        written += 1
        store(*given)

    with mock.patch.object(program_cache.ProgramCache, "store", noted):
        model = model or gpt(2).double()
        pm = autoptd.parallelize(model, example_inputs=cut(8, 8), program_cache=folder, **about)
        try:
            found = [float(pm.step(*cut(8, length))) for length in (8, 4, 6, 4)]
            found.append(float(pm.eval_step(*cut(8, 3))))
            gradients = pm.gradients()
            plain = gpt(2).double()
            for length in (8, 4, 6, 4):
                plain(*cut(8, length))[1].backward()
            if not keywords:
                compare("gradient", 0, gradients, {name: p.grad for name, p in aliases(plain).items()})  # type: ignore[misc]
            return found, list(pm.programs), written
        finally:
            pm.close()


def entries(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())


def test_a_second_run_reads_what_the_first_wrote(tmp_path: Path) -> None:
    first, programs, written = losses(tmp_path)
    assert written == len(entries(tmp_path)) == 3  # two that train, one that evaluates; not the first program
    again, read, written = losses(tmp_path)
    assert written == 0 and again == first
    assert [one.fingerprint() for one in read] == [one.fingerprint() for one in programs]
    assert read[0].graphs and not any(one.graphs for one in read[1:])


class Doubling(nn.Module):
    """A model that computes something else in eval mode, on request."""

    def __init__(self, *, doubles: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.drop, self.down, self.doubles = (
            nn.Linear(4, 8),
            nn.Dropout(0.1),
            nn.Linear(8, 4),
            doubles,
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.down(self.drop(torch.tanh(self.up(x))))
        return ((2 * z if self.doubles and not self.training else z) - y).square().mean()


@pytest.mark.parametrize("doubles", [False, True])
def test_a_program_that_was_read_evaluates(doubles: bool, tmp_path: Path) -> None:
    """At the sizes that it trains with: what was read has no graphs, by which the two are compared."""
    model = Doubling(doubles=doubles).double()
    given = torch.linspace(-1, 1, 32).double().view(8, 4), torch.linspace(1, 0, 32).double().view(8, 4)
    fewer = tuple(x[:4] for x in given)
    for is_read in (False, True):
        about: dict[str, Any] = {"p": 2, "num_microbatches": 2, "shapes": "exact", "program_cache": tmp_path}
        pm = autoptd.parallelize(model, backend="local", example_inputs=given, **about)
        try:
            pm.step(*fewer)
            assert bool(pm.programs[1].graphs) != is_read
            if is_read:
                assert abs(pm.eval_step(*fewer) - model.eval()(*fewer)) < 1e-12
        finally:
            pm.close()


@pytest.mark.thorough
@pytest.mark.parametrize(
    "keywords",
    [
        {"seed": 1},
        *(
            pytest.param(keywords, marks=pytest.mark.thorough)
            for keywords in ({"p": 1}, {"fuse": False}, {"num_microbatches": 2}, {"recompute": "full"})
        ),
    ],
    ids=str,
)
def test_other_options_have_other_programs(keywords: dict[str, Any], tmp_path: Path) -> None:
    losses(tmp_path)
    count = len(entries(tmp_path))
    _, _, written = losses(tmp_path, **keywords)
    assert written == 3 and len(entries(tmp_path)) == count + 3


@pytest.mark.thorough
def test_other_models_buffers_and_versions_have_other_programs(tmp_path: Path) -> None:
    losses(tmp_path)
    wider = gpt(2, width=64).double()
    assert losses(tmp_path, wider, seed=0)[2] == 3
    with mock.patch.object(program_cache, "own_sources", lambda: "another"):
        assert losses(tmp_path)[2] == 3
    with mock.patch.object(torch, "__version__", "99.0"):
        assert losses(tmp_path)[2] == 3
    frozen = gpt(2).double()
    frozen.transformer.wpe.weight.requires_grad_(False)
    assert losses(tmp_path, frozen, seed=0)[2] == 3


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def change(path: Path) -> None:
    path.write_text(path.read_text().replace("1", "2"))


HARMS = [
    (shorten, "program.json"),
    (change, "stage_0.py"),
    *(
        pytest.param(harm, name, marks=pytest.mark.thorough)
        for harm in (shorten, change, Path.unlink)
        for name in ("program.json", "stage_0.py", "files.json", "plan.json")
    ),
    pytest.param(shorten, "constants.pt", marks=pytest.mark.thorough),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("harm", "name"), HARMS)
def test_what_is_not_whole_is_written_anew(harm: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    about = {"seed": 0}
    first, _, _ = losses(tmp_path, **about)
    for entry in entries(tmp_path):
        harm(entry / name)
    with pytest.warns(UserWarning, match="is not used, and will be written again"):
        again, _, written = losses(tmp_path, **about)
    assert again == first and written == 3
    assert losses(tmp_path, **about)[2] == 0


def test_a_folder_that_cannot_be_written_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="no program was kept"):
        found, _, written = losses(tmp_path / "file", seed=0)
    assert written == 3 and all(map(torch.isfinite, map(torch.tensor, found)))


def test_operators_of_others_are_not_kept(tmp_path: Path) -> None:
    """They are probed by running them: the same name may compute something else tomorrow."""

    @torch.library.custom_op("tests_cache::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return x * 2

    double.register_fake(lambda x: torch.empty_like(x))
    torch.library.register_autograd("tests_cache::double", lambda ctx, grad: grad * 2)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(64, 8).double()

        def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
            return double(self.embed(ids)).square().mean()

    losses(tmp_path, Twice(), seed=0, p=1, t=1, d=2)
    assert not tmp_path.exists() or not entries(tmp_path)
