"""Run by `test_initial.py` as one of some ranks over gloo: a deferred model, of which each rank makes its own slices.

Prints one JSON line: names whose values are not those of `materialize`, how many there are, and the loss of a step. With
`--own-bias` the constructor draws from NumPy as well, and rank 1 has another state of that than the others.
"""

from __future__ import annotations

import json
import os
import sys

import numpy
import torch

import autoptd
from examples.gpt import GPT, GPTConfig
from tests.parity.models import batch

CONFIG = GPTConfig(vocab_size=61, block_size=8, n_layer=2, n_head=4, n_embd=32)


def main(is_drawing: bool) -> None:
    numpy.random.seed(int(os.environ["RANK"]) == 1)
    with autoptd.deferred(seed=3):
        model = GPT(CONFIG)
        if is_drawing:
            bias = torch.from_numpy(numpy.random.rand(32))
            model.transformer.ln_f.bias.data.copy_(bias)
    mesh = {"t": 2, "d": int(os.environ["WORLD_SIZE"]) // 2}
    keywords = {**mesh, "zero": 1 if mesh["d"] > 1 else 0, "precision": "bf16-mixed"}
    pm = autoptd.parallelize(model, **keywords, example_inputs=batch(8, 61), timeout=60)
    state, wanted = pm.state_dict(), autoptd.materialize(model).state_dict()
    other = [name for name, x in state.items() if not torch.equal(x, wanted[name])]
    # All ranks step; only rank 0 has a state dict.
    loss = float(pm.step(*pm.local_batch(*batch(8, 61))))
    print(json.dumps({"other": other, "names": len(state), "loss": loss}))
    pm.close()


if __name__ == "__main__":
    main("--own-bias" in sys.argv)
