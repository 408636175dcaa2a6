"""A tour for a notebook: ranks as threads of this process, next to the same model on one device.

Run the `# %%` cells one by one (VS Code, Jupyter with jupytext, Spyder), or all of them with `python examples/threads.py`.
"""

# %% A model for one device, and a global batch of 8 rows
import copy

import torch
from gpt import GPT, GPTConfig
from text import batches, load_tokens, unigram_entropy

import autoptd

torch.manual_seed(0)
model = GPT(GPTConfig(n_layer=2, n_embd=32, block_size=32))
twin = copy.deepcopy(model)  # trains on one device
tokens = load_tokens()
*train, test = batches(tokens, batch=8, length=32, steps=11, seed=0)

# %% The same model on 8 ranks: 2 tensor x 2 pipeline x 2 data parallel
pm = autoptd.parallelize(model, t=2, p=2, d=2, backend="local", example_inputs=test)
optimizer = pm.optimizer(torch.optim.AdamW, lr=1e-2)

# %% How a module is split, and what the alternatives would cost
print(pm.program.explain("transformer.h.0.mlp.c_fc"))

# %% The picture of a layer: as the last line of a cell, a notebook shows it
pm.program.graph("layer")

# %% The code that the first pipeline stage runs
print(pm.program.sources["stage_0.py"])

# %% One step, and the gradient of one parameter, on the ranks and on one device
loss = pm.step(*train[0])
_, expected = twin(*train[0])
expected.backward()
name = "transformer.h.0.mlp.c_fc.weight"
difference = (pm.gradients()[name] - twin.get_parameter(name).grad).abs().max()
print(f"loss {loss:.6f} on the ranks, {expected:.6f} on one device; gradients differ by {difference:.1e}")
optimizer.zero_grad()
twin.zero_grad()

# %% Train both
single = torch.optim.AdamW(twin.parameters(), lr=1e-2)
for batch in train:
    loss = pm.step(*batch)
    optimizer.step()
    optimizer.zero_grad()
    _, expected = twin(*batch)
    expected.backward()
    single.step()
    single.zero_grad()
    print(f"loss {loss:.6f} on the ranks, {expected:.6f} on one device")

# %% The bytes that each rank holds
for rank, memory in pm.memory().items():
    print(rank, memory)


# %% Evaluate: the loss, and a function that runs on the ranks, as a part of the model
def correct(output, idx, targets):
    logits, _ = output
    return (logits.argmax(-1) == targets).sum()


loss, right = pm.eval_step(*test, outputs=correct)
print(
    f"evaluation: loss {loss:.6f} (unigrams: {unigram_entropy(tokens):.4f}), {right} of {test[1].numel()} right"
)

# %% The trained weights go back into the model, under its names
model.load_state_dict(pm.state_dict())
pm.close()
print(f"evaluation: loss {model(*test)[1]:.6f} with these weights on one device")
