"""Fine-tune a causal LM of Hugging Face with the Trainer of transformers, over tensor and pipeline ranks.

In: nothing (a small Llama on the bytes of Python's help topics), or `--model FOLDER` with weights and tokenizer.
Out: checkpoints in `--out`, and a folder `final` that `from_pretrained` loads. Run it again to resume.

    torchrun --nproc-per-node 4 -- examples/hf_finetune.py --t 2 --p 2 --model llama-8b --data my.txt --lr 2e-5
    python examples/hf_finetune.py --t 2 --p 2 --backend local                  # ranks as threads
"""

from argparse import ArgumentParser
from pathlib import Path

import torch
from text import load_tokens
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer_utils import get_last_checkpoint

from autoptd.integrations.transformers import Trainer  # changed: the import

parser = ArgumentParser(description=__doc__.splitlines()[0])
for degree in "tpd":
    parser.add_argument(f"--{degree}", type=int, default=1)
parser.add_argument("--backend", help="local: ranks are threads")
parser.add_argument("--model", help="folder with a model and its tokenizer")
parser.add_argument("--data", help="text file")
parser.add_argument("--out", default="out/finetuned")
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--lr", type=float, default=1e-3)
numbers = {"layers": 4, "hidden": 128, "length": 256, "rows": 2}
numbers |= {"steps": 100, "save-every": 20, "eval-rows": 32}
for name, number in numbers.items():
    parser.add_argument(f"--{name}", type=int, default=number, help="default %(default)s")
args = parser.parse_args()

tokens, tokenizer = load_tokens(args.data), None
if args.model:
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    tokens = torch.tensor(tokenizer(bytes(tokens.tolist()).decode())["input_ids"])
    # Transformers keeps the dtype of the file; in bfloat16, small updates would be rounded away.
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
else:
    sizes = {"hidden_size": args.hidden, "intermediate_size": 2 * args.hidden}
    config = LlamaConfig(vocab_size=256, num_hidden_layers=args.layers, num_attention_heads=4, **sizes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
rows = tokens[: len(tokens) // args.length * args.length].view(-1, args.length)
data = [{"input_ids": row, "labels": row} for row in rows]


def choose(logits, labels):
    """Run on the ranks, so that only the chosen tokens are gathered, not the logits."""
    return logits.argmax(-1)


def accuracy(found):
    return {"accuracy": float((found.predictions[:, :-1] == found.label_ids[:, 1:]).mean())}


settings = TrainingArguments(
    args.out,
    max_steps=args.steps,
    per_device_train_batch_size=args.rows,
    gradient_accumulation_steps=4,  # the microbatches of one step
    learning_rate=args.lr,
    bf16=args.bf16,
    use_cpu=not torch.cuda.is_available(),
    logging_steps=5,
    eval_strategy="steps",
    eval_steps=args.save_every,
    save_steps=args.save_every,
    save_total_limit=2,
)
trainer = Trainer(
    model,
    settings,
    train_dataset=data[args.eval_rows :],
    eval_dataset=data[: args.eval_rows],
    processing_class=tokenizer,  # saved with the model
    data_collator=default_data_collator,  # all rows have one length
    compute_metrics=accuracy,
    preprocess_logits_for_metrics=choose,
    parallel={"t": args.t, "p": args.p, "d": args.d, "backend": args.backend},  # added: the mesh
)
trainer.train(resume_from_checkpoint=get_last_checkpoint(args.out) if Path(args.out).exists() else None)
trainer.log_metrics("eval", trainer.evaluate())
trainer.save_model(f"{args.out}/final")
trainer.ranks.close()
