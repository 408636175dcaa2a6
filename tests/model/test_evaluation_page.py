"""docs/howto/evaluation.md is run from top to bottom, beside one device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

PAGE = Path(__file__).parents[2] / "docs/howto/evaluation.md"
BLOCKS = re.findall(r"<!-- run: python -->\n```python\n(.*?)```", PAGE.read_text(), re.S)


def test_the_page_is_run() -> None:
    pytest.importorskip("transformers")
    found: dict[str, Any] = {}
    for block in BLOCKS:
        exec(compile(block, str(PAGE), "exec"), found)
    torch.manual_seed(0)
    ids = torch.randint(64, (8, 16))
    model = found["LlamaForCausalLM"](found["config"]).eval()
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        text = found["text"].clone()
        text[:, 8:] = 0
        for position in range(8, 16):
            text[:, position] = model(input_ids=text).logits[:, position - 1].argmax(-1)
    torch.testing.assert_close(found["logits"], logits, rtol=1e-4, atol=1e-5)
    right = logits[:, :-1].argmax(-1) == ids[:, 1:]
    assert found["accuracy"] == right.float().mean()
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(found["perplexity"].float(), loss.exp(), rtol=1e-5, atol=0)
    assert torch.equal(found["text"], text)
    # One program for each number of rows and each of the outputs.
    assert len(found["pm"].sizes.evaluating) == 4
    found["pm"].close()
