"""What all tests share: traces, but in the tests of tracing."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoptd import trace
from tests import traces


@pytest.fixture(autouse=True)
def traced_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if Path(__file__).parent / "trace" not in request.path.parents:
        monkeypatch.setattr(trace, "capture", traces.capture)
