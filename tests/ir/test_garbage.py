"""The collector rests while a program is compiled, and works where real tensors are made."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn

import autoptd
from autoptd.ir.scopes import paused_collection


def test_it_rests_while_a_program_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    met: dict[str, bool] = {}

    def noted(run: Callable[..., Any], name: str, *args: Any) -> Any:
        met[name] = gc.isenabled()
        return run(*args)

    # The comparison has the model's own numbers, and makes gradients of them.
    is_on = {
        "trace.capture": False,
        "trace.compare": True,
        "trace.capture_again": False,
        "compiler.memory_search.place": False,
    }
    for path in is_on:
        home, _, name = path.rpartition(".")
        owner = import_module(f"autoptd.{home}")
        monkeypatch.setattr(owner, name, partial(noted, getattr(owner, name), path))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    call = {"input": torch.zeros(4, 8), "targets": torch.zeros(4, 8)}
    autoptd.compile(model, t=2, num_microbatches=2, loss_fn=nn.functional.mse_loss, example_inputs=call)
    assert met == is_on
    assert gc.isenabled()


@pytest.mark.parametrize("is_on", [True, False])
def test_it_is_left_as_it_was(is_on: bool) -> None:
    """Also where the block fails, and where the user does without the collector."""
    (gc.enable if is_on else gc.disable)()
    try:
        with pytest.raises(ValueError), paused_collection():
            with paused_collection():
                pass
            assert not gc.isenabled()
            raise ValueError
        assert gc.isenabled() == is_on
    finally:
        gc.enable()
