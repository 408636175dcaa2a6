"""The script for long sequences: c=2 has the losses of c=1, and less memory per rank."""

from __future__ import annotations

import pytest

from tests.examples.running import numbers_after, run

SIZES = "--length 256 --hidden 16 --layers 2 --heads 2 --steps 3 --backend local"


def test_two_ranks_share_the_sequence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("examples/long_context.py", f"{SIZES} --c 2", monkeypatch)
    text = capsys.readouterr().out
    assert numbers_after("c=2: ", text)[0] < 0.75 * numbers_after("c=1: ", text)[0]
    run("examples/long_context.py", f"{SIZES} --c 1", monkeypatch)
    expected = numbers_after("loss ", capsys.readouterr().out)
    found = numbers_after("loss ", text)
    assert len(found) == 3 and found[-1] < found[0]
    assert all(abs(a - b) <= 1e-5 for a, b in zip(found, expected, strict=True))
