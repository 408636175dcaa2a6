"""What `autoptd --help` and `autoptd COMMAND --help` say at length: descriptions, and examples of every command.

In: nothing. Out: text as a terminal shows it. A test parses every example.
"""

from __future__ import annotations

MODEL = """MODEL is one of
  gpt2, gpt3-175b, llama-3-8b, ...   a well-known size; `autoptd show --list` has all of them
  config.json                        a Hugging Face config, or a folder that has one; nothing is downloaded;
                                     train takes the weights that a folder has (--random: does not)
  package.module:factory             a function that returns the model, or (model, example_inputs)
  path/to/file.py:factory            likewise; --set n_layer=4 hands it keywords (to a config: changes it)"""

SHOW = f"""What a model is on t*p*d ranks: memory of a rank, bytes on every link, bubble. No GPU, no weights.

{MODEL}"""
DOCTOR = """Try what the runtime does between ranks, on the ranks, devices and backend at hand: every collective and channel,
with right results, in the order of schedules, and how fast beside the link; a wrong or slow pair of ranks is named.

Under torchrun all ranks take part; alone it checks one process and ranks as threads. Ends with 0 if all is right
(slowness alone is no failure), 1 if something is wrong."""
CHECKPOINT = """Look after checkpoints, in one process: no GPU, no model.

ACTION is one of
  list      the checkpoints of a run, and what saves left that did not end
  show      what one holds: its step, mesh, sizes, groups of the optimizer, last losses
  verify    read every byte and compare it with its CRC32; ends with 1 if any was changed
  convert   write its weights as safetensors (--to hf), or with the optimizer as one file of torch.save (--to torch);
            or make a checkpoint of such a folder or file (--from hf, --from torch)"""
PLAN = "Search for the fastest (t, p, d, v, b) on a cluster. No GPU, no weights."

# By command; "" is `autoptd --help` itself.
EXAMPLES = {
    "": """  autoptd show gpt3-175b --t 8 --p 12 --d 8 --v 4 --num-microbatches 64
  autoptd compile examples/gpt.py:make_gpt --t 2 --p 2 --out out
  autoptd train examples/gpt.py:make_gpt --t 2 --p 2 --backend local --steps 20
  autoptd simulate --p 4 --num-microbatches 8""",
    "show": """  autoptd show gpt2 --t 4 --p 2 --v 2
  autoptd show examples/gpt.py                                          # the models of a file, and their keywords
  autoptd show gpt3-175b --t 8 --p 12 --d 8 --v 4 --num-microbatches 64 --machine a100
  autoptd show gpt-1t --t 8 --p 64 --d 6 --precision bf16 --storage-bandwidth 273 --mtbf 3.1   # checkpoints, too
  autoptd show llama-3-8b --set num_hidden_layers=4 --t 8 --out out     # pictures and report.html
  autoptd show gpt2 --t 2 --explain transformer.h.0.mlp.c_fc            # why it is split as it is""",
    "compile": """  autoptd compile examples/gpt.py:make_gpt --t 2 --p 2 --v 2 --out out
  python out/stage_0.py --check                                         # one stage alone, on random numbers""",
    "verify": """  autoptd verify examples/gpt.py:make_gpt --t 2 --p 2 --d 2 --seq 16
  autoptd verify gpt2 --set n_layer=2 --set n_embd=64 --set n_head=4 --t 4 --seq 16""",
    "train": """  autoptd train examples/gpt.py:make_gpt --t 2 --p 2 --backend local --steps 20
  torchrun --nproc-per-node 4 -m -- autoptd train examples/gpt.py:make_gpt --t 2 --p 2 --log run.jsonl
  torchrun --nproc-per-node 4 -m -- autoptd train ... --save ckpts --keep 3 --resume       # the same command again goes on
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
    "doctor": """  autoptd doctor                                                        # one process, and ranks as threads
  torchrun --nproc-per-node 8 -m -- autoptd doctor                      # all links of a node
  torchrun --nnodes 2 --nproc-per-node 8 ... -m -- autoptd doctor --t 8 --p 2 --json doctor.json""",
    "checkpoint": """  autoptd checkpoint list ckpts
  autoptd checkpoint show ckpts/step-00001000
  autoptd checkpoint verify ckpts/step-00001000
  autoptd checkpoint convert ckpts/step-00001000 --to hf --out weights
  autoptd checkpoint convert ckpts/step-00001000 --to torch --out model.pt
  autoptd checkpoint convert model.pt --from torch --out ckpts/step-00000000""",
    "completion": """  autoptd completion bash > ~/.local/share/bash-completion/completions/autoptd
  eval "$(autoptd completion zsh)"                                      # in ~/.zshrc, behind compinit""",
}

__all__ = ["CHECKPOINT", "DOCTOR", "EXAMPLES", "MODEL", "PLAN", "SHOW"]
