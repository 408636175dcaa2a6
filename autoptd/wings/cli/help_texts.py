"""What `autoptd --help` and `autoptd COMMAND --help` say at length: descriptions, and examples of every command.

In: nothing. Out: text as a terminal shows it. A test parses every example.
"""

from __future__ import annotations

from autoptd.ir.mesh import BY_DEGREE

MODEL = """MODEL is one of
  gpt2, gpt3-175b, llama-3-8b, ...   a well-known size; `autoptd show --list` prints all of them
  config.json                        a Hugging Face config, or a directory with one; nothing is downloaded.
                                     train loads the weights in the directory, if any (unless --random)
  package.module:factory             a function that returns the model, or (model, example_inputs)
  path/to/file.py:factory            the same, from a file; --set n_layer=4 passes keyword arguments"""

SHOW = f"""Report memory per rank, bytes on every link and the pipeline bubble of a model on t*p*d ranks.
Needs no GPU and no weights.

{MODEL}"""
DOCTOR = """Run every collective and channel of the runtime on these ranks, devices and backend: check the results, then
compare the speed with the link's. Names each wrong or slow pair of ranks.

Under torchrun all ranks take part; without it, one process and ranks as threads are checked. The exit code is 0
if all results are right (slow links are reported, not failed), else 1."""
CHECKPOINT = """Inspect and convert checkpoints in one process, without a GPU or the model.

ACTION is one of
  list      list the checkpoints of a run, and leftovers of unfinished saves
  show      print step, mesh, sizes, optimizer groups and last losses of a checkpoint
  verify    compare every byte with its CRC32; the exit code is 1 if any differs
  convert   write the weights as safetensors (--to hf), or weights and optimizer state as one torch.save file
            (--to torch); or make a checkpoint from either (--from hf, --from torch)"""
PLAN = "Search for the fastest (t, p, d, v, b) on a cluster. Needs no GPU and no weights."

# By command; "" is `autoptd --help` itself.
EXAMPLES = {
    "": """  autoptd show gpt3-175b --t 8 --p 12 --d 8 --v 4 --num-microbatches 64
  autoptd compile examples/gpt.py:make_gpt --t 2 --p 2 --out out
  autoptd train examples/gpt.py:make_gpt --t 2 --p 2 --backend local --steps 20
  autoptd simulate --p 4 --num-microbatches 8""",
    "show": """  autoptd show gpt2 --t 4 --p 2 --v 2
  autoptd show examples/gpt.py                                          # lists the models in a file
  autoptd show gpt3-175b --t 8 --p 12 --d 8 --v 4 --num-microbatches 64 --machine a100
  autoptd show gpt-1t --t 8 --p 64 --d 6 --precision bf16 --storage-bandwidth 273 --mtbf 3.1   # checkpoint cost
  autoptd show llama-3-8b --set num_hidden_layers=4 --t 8 --out out     # pictures and report.html
  autoptd show gpt2 --t 2 --explain transformer.h.0.mlp.c_fc            # explains the split""",
    "compile": """  autoptd compile examples/gpt.py:make_gpt --t 2 --p 2 --v 2 --out out
  python out/stage_0.py --check                                         # runs one stage alone on random inputs""",
    "verify": """  autoptd verify examples/gpt.py:make_gpt --t 2 --p 2 --d 2 --seq 16
  autoptd verify gpt2 --set n_layer=2 --set n_embd=64 --set n_head=4 --t 4 --seq 16""",
    "train": """  autoptd train examples/gpt.py:make_gpt --t 2 --p 2 --backend local --steps 20
  torchrun --nproc-per-node 4 -m -- autoptd train examples/gpt.py:make_gpt --t 2 --p 2 --log run.jsonl
  torchrun --nproc-per-node 4 -m -- autoptd train ... --save ckpts --keep 3 --resume       # rerun to continue
  autoptd train --config run.toml --lr 1e-4""",
    "simulate": """  autoptd simulate --p 4 --num-microbatches 8
  autoptd simulate --p 4 --num-microbatches 8 --schedule zb_h1 --out schedule.svg
  autoptd simulate --schedule mine.txt --p 2""",
    "diff": """  autoptd diff out/a out/b
  autoptd diff plan.json out""",
    "plan": """  autoptd plan gpt3-175b --gpus 768 --batch 1536 --recompute full --precision bf16
  autoptd plan --layers 12 --hidden 1024 --heads 16 --seq 1024 --gpus 64 --batch 512 --cluster mine.toml --explain
  autoptd plan gpt2 --gpus 8 --batch 64 --cluster laptop-cpu --out plan.json    # then: autoptd train ... --plan plan.json""",
    "measure": """  autoptd measure mine.toml --ranks 4
  autoptd plan gpt2 --gpus 4 --batch 16 --cluster mine.toml""",
    "doctor": """  autoptd doctor                                                        # one process, ranks as threads
  torchrun --nproc-per-node 8 -m -- autoptd doctor                      # all links of a node
  torchrun --nnodes 2 --nproc-per-node 8 ... -m -- autoptd doctor --t 8 --p 2 --json doctor.json""",
    "checkpoint": """  autoptd checkpoint list ckpts
  autoptd checkpoint show ckpts/step-00001000
  autoptd checkpoint verify ckpts/step-00001000
  autoptd checkpoint convert ckpts/step-00001000 --to hf --out weights
  autoptd checkpoint convert ckpts/step-00001000 --to torch --out model.pt
  autoptd checkpoint convert model.pt --from torch --out ckpts/step-00000000""",
    "completion": """  autoptd completion bash > ~/.local/share/bash-completion/completions/autoptd
  eval "$(autoptd completion zsh)"                                      # in ~/.zshrc, after compinit""",
}

# Flags of the planner by name: sizes of the model, then constraints that take numbers.
SIZES = {
    "layers": "transformer layers",
    "hidden": "hidden size",
    "heads": "attention heads",
    "seq": "sequence length",
    "vocab": "vocabulary size",
    "ffn": "hidden size of the MLP (default 4 * hidden)",
    "kv_heads": "key and value heads (default: heads)",
    "head_dim": "size of a head (default hidden / heads)",
    "mlp_matrices": "weight matrices of an MLP: 2, or 3 if gated",
}
COUNTED = {
    **{name: f"{axis.word}-parallel degree" for name, axis in BY_DEGREE.items()},
    "v": "model chunks per pipeline rank",
    "microbatch": "samples per microbatch",
}

__all__ = ["CHECKPOINT", "COUNTED", "DOCTOR", "EXAMPLES", "MODEL", "PLAN", "SHOW", "SIZES"]
