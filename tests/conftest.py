"""What all tests share: traces, but in the tests of tracing, and a machine on which small models are split in many ways.

Collectives that start at once, and dear memory, let the sizes of tensors decide, however small: plans have embeddings in
shards, gathers and scatters, which on a real machine models of the size of tests would not have. The real ones are named in
`passes/test_expected_plans.py`, and drawn by the fuzzer. Small logits count as large, so that losses are made in chunks.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from autoptd import trace
from autoptd.ir import machine
from autoptd.passes.fusion import losses
from tests import traces


@pytest.fixture(autouse=True)
def traced_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if Path(__file__).parent / "trace" not in request.path.parents:
        monkeypatch.setattr(trace, "capture", traces.capture)


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
