"""What all tests share: traces, but in the tests of tracing, and a machine on which small models are split in many ways.

Collectives that start at once, and dear memory, let the sizes of tensors decide, however small: plans have embeddings in
shards, gathers and scatters, which on a real machine models of the size of tests would not have. The real ones are named in
`passes/solve/test_expected_plans.py`, and drawn by the fuzzer. Small logits count as large, so that losses are made in chunks.
"""

from __future__ import annotations

import gc
import importlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from autoptd import trace
from autoptd.ir import machine
from autoptd.passes.fusion import losses
from tests import traces

# Of the cases of a test one in so many runs by default, by folder or as `@pytest.mark.one_in(n)` says.
ONE_IN = {"parity": 48, "hostile": 12, "runtime/checkpoint": 6}
# Chosen by themselves.
CHOSEN = ("parity/test_covering.py",)


def pytest_configure() -> None:
    """Give each of several workers a core of its own: on two, threads that take turns would wake each other, for a fifth of
    the time.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        if int(os.environ["PYTEST_XDIST_WORKER_COUNT"]) <= len(cores):
            # One that takes the place of a crashed worker has a new number.
            os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark most of many cases as thorough: the first stays, and those that a hash of their names draws, the same each time.

    Not every n-th: of models times meshes that could be all models on the same mesh. Whatever order they are collected in.
    """
    # One fork server, which takes seconds to start, is enough where all that needs one runs on one of two workers; and what
    # is long does not come last.
    items.sort(key=lambda item: item.get_closest_marker("processes") is None)
    of_one: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        if (
            isinstance(item, pytest.Function)
            and hasattr(item, "callspec")
            and not item.get_closest_marker("thorough")
        ):
            of_one.setdefault((item.path, item.originalname), []).append(item)
    for (path, _), cases in of_one.items():
        first = min(cases, key=lambda case: sum(case.callspec.indices.values()))
        for case in cases:
            if case is not first and zlib.crc32(case.name.encode()) % one_in(first, path):
                case.add_marker("thorough")


def one_in(item: pytest.Item, path: Path) -> int:
    """Return of how many cases of a test one runs by default."""
    if marker := item.get_closest_marker("one_in"):
        return int(marker.args[0])
    if str(path).endswith(CHOSEN):
        return 1
    folders = (str(folder) for folder in path.relative_to(Path(__file__).parent).parents)
    return next((ONE_IN[folder] for folder in folders if folder in ONE_IN), 1)


def pytest_collection_finish() -> None:
    """Python's collector goes less often through what tests keep and import. Nothing is frozen: each trace would count that."""
    gc.set_threshold(20_000, 20, 50)


@pytest.fixture(autouse=True)
def traced_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if Path(__file__).parent / "trace" not in request.path.parents:
        monkeypatch.setattr(trace, "capture", traces.capture)
        monkeypatch.setattr(trace, "capture_again", traces.capture_again)


@pytest.fixture(autouse=True, scope="session")
def collectives_start_at_once() -> Iterator[None]:
    with mock.patch.object(machine, "DEFAULT", machine.Machine(latency=1e-9, per_saved_byte=1e-12)):
        yield


@pytest.fixture(autouse=True, scope="session")
def verify_trains_only() -> Iterator[None]:
    """One dtype, no save, no evaluation: `parity/covering.py` has them for all that is combined."""
    with mock.patch.object(importlib.import_module("autoptd.verify.verify"), "CHECKS", ()):
        yield


@pytest.fixture(autouse=True, scope="session")
def logits_are_large() -> Iterator[None]:
    with mock.patch.object(losses, "MIN_LOGITS_BYTES", 0):
        yield
