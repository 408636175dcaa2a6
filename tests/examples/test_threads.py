"""The tour for a notebook: the ranks agree with one device in every cell, before and after training."""

from __future__ import annotations

import pytest

from tests.examples.running import numbers_after, run


def test_the_ranks_agree_with_one_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = run("examples/threads.py", "", monkeypatch)
    text = capsys.readouterr().out
    assert names["difference"] < 1e-6
    losses = numbers_after("loss ", text)
    single = numbers_after("on the ranks, ", text)
    assert len(losses) == len(single) + 2 == 13
    assert all(abs(a - b) <= 1e-5 for a, b in zip(losses[: len(single)], single, strict=True))
    assert losses[-1] == pytest.approx(losses[-2], abs=1e-5) and losses[-1] < losses[0] - 1
    assert "class Stage0" in text and "transformer.h.0.mlp.c_fc" in text
    assert 0 < int(names["right"]) <= names["test"][1].numel()
