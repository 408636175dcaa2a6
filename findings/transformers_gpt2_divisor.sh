#!/usr/bin/env bash
# transformers 5.24.0, accelerate 1.15.0, torch 2.13.0: Trainer's loss of GPT2LMHeadModel is (s-1)/s of the model's own loss, in training
# and in evaluation, and so are the gradients; other causal language models are right.
#
# Trainer counts the labels of a batch and hands the count to the model, which divides its sum by it. A causal loss has no prediction for
# the first label of a row, and Trainer leaves these labels out if model.loss_type says that the model shifts them. GPT2LMHeadModel shifts,
# but has no loss_type. With rows of 8 tokens, 32 labels are counted where 28 have a prediction.
#
# Expected output, as ratios to the loss that the model returns by itself:
#   GPT2LMHeadModel: train 0.875, eval 0.875
#   LlamaForCausalLM: train 1.000, eval 1.000
#   GPTNeoXForCausalLM: train 1.000, eval 1.000
#   BloomForCausalLM: train 1.000, eval 1.000
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy transformers==5.24.0 accelerate==1.15.0

cat > "$folder/show.py" <<'PY'
import sys

import torch
import transformers
from transformers import BloomConfig, GPT2Config, GPTNeoXConfig, LlamaConfig, Trainer, TrainingArguments

ids = torch.randint(1, 32, (4, 8), generator=torch.Generator().manual_seed(0))
rows = [{"input_ids": row, "labels": row} for row in ids]
small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}
MODELS = {
    "GPT2LMHeadModel": GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=8),
    "LlamaForCausalLM": LlamaConfig(**small, intermediate_size=32),
    "GPTNeoXForCausalLM": GPTNeoXConfig(**small, intermediate_size=32),
    "BloomForCausalLM": BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=32),
}
for name, config in MODELS.items():
    torch.manual_seed(0)
    model = getattr(transformers, name)(config)
    for module in model.modules():  # no dropout
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    right = model(input_ids=ids, labels=ids).loss.item()
    args = TrainingArguments(
        sys.argv[1], per_device_train_batch_size=4, per_device_eval_batch_size=4, max_steps=1, learning_rate=0.0,
        optim="sgd", logging_steps=1, save_strategy="no", use_cpu=True, disable_tqdm=True, report_to="none",
    )
    trainer = Trainer(model, args, train_dataset=rows, eval_dataset=rows)
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.train()
    trained = next(log["loss"] for log in trainer.state.log_history if "loss" in log)
    print(f"{name}: train {trained / right:.3f}, eval {evaluated / right:.3f}", file=sys.stderr)
PY
cat > "$folder/expected" <<'TXT'
GPT2LMHeadModel: train 0.875, eval 0.875
LlamaForCausalLM: train 1.000, eval 1.000
GPTNeoXForCausalLM: train 1.000, eval 1.000
BloomForCausalLM: train 1.000, eval 1.000
TXT
timeout 300 "$folder/env/bin/python" -W ignore "$folder/show.py" "$folder/out" > "$folder/log" 2> "$folder/stderr" || { cat "$folder/stderr" >&2; exit 1; }
grep -E "^[A-Za-z0-9]+: train " "$folder/stderr" > "$folder/found"
cat "$folder/found"
diff "$folder/expected" "$folder/found"
