"""Train a LoRA adapter of PEFT on a causal LM of Hugging Face, over ranks; load it back on one device.

In: nothing (a small Llama on the bytes of Python's help topics), or `--model FOLDER` and `--data FILE`. Out: the
folder `--out` in PEFT's format, and the loss with it on the ranks and on one device, which must be the same.

    torchrun --nproc-per-node 4 -- examples/lora.py --t 2 --p 2 --model llama-8b --data my.txt
    python examples/lora.py --t 2 --p 2 --backend local                         # ranks as threads
"""

import os
from argparse import ArgumentParser

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from text import batches, load_tokens
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import autoptd

parser = ArgumentParser(description=__doc__.splitlines()[0])
for degree in "tpd":
    parser.add_argument(f"--{degree}", type=int, default=1)
parser.add_argument("--backend", help="local: ranks are threads")
parser.add_argument("--model", help="folder with a model and its tokenizer")
parser.add_argument("--data", help="text file")
parser.add_argument("--out", default="out/adapter")
parser.add_argument("--lr", type=float, default=1e-3)
numbers = {"layers": 4, "hidden": 128, "length": 256, "batch": 16, "steps": 50, "rank": 16}
for name, number in numbers.items():
    parser.add_argument(f"--{name}", type=int, default=number, help="default %(default)s")
args = parser.parse_args()


def make_base():
    if args.model:
        return AutoModelForCausalLM.from_pretrained(args.model)
    sizes = {"hidden_size": args.hidden, "intermediate_size": 2 * args.hidden}
    config = LlamaConfig(vocab_size=256, num_hidden_layers=args.layers, num_attention_heads=4, **sizes)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


def say(text):
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


tokens = load_tokens(args.data)
if args.model:
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokens = torch.tensor(tokenizer(bytes(tokens.tolist()).decode())["input_ids"])
rows = [
    {"input_ids": x, "labels": x} for x, _ in batches(tokens, args.batch, args.length, args.steps + 1, seed=0)
]
*train, test = rows

lora = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules="all-linear", task_type="CAUSAL_LM")
torch.manual_seed(0)
model = get_peft_model(make_base(), lora)
pm = autoptd.parallelize(model, args.t, args.p, args.d, backend=args.backend, example_inputs=test)
optimizer = pm.optimizer(torch.optim.AdamW, lr=args.lr)  # over the adapter: all else is frozen
before = pm.eval_step(pm.local_batch(test))
for step, batch in enumerate(train):
    loss = pm.step(pm.local_batch(batch))
    pm.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        say(f"step {step}: loss {loss:.4f}")
after = pm.eval_step(pm.local_batch(test))
pm.save_adapter(args.out)
held = pm.memory()
pm.close()

say(f"evaluation: {before:.6f} -> {after:.6f}")
say("\n".join(f"rank {rank}: {memory}" for rank, memory in held.items()))
if pm.rank == 0:
    loaded = PeftModel.from_pretrained(make_base(), args.out).eval()
    with torch.no_grad():
        print(f"loaded by PEFT, on one device: {loaded(**test).loss:.6f}")
