#!/usr/bin/env bash
# transformers 5.24.0, accelerate 1.15.0, torch 2.13.0: with gradient_accumulation_steps=k, Trainer multiplies loss and gradients by k for
# models whose loss is a mean that ignores num_items_in_batch: T5, and the classifiers of BERT, GPT-2 and Llama.
#
# Trainer counts the labels of all accumulated batches and hands the count to models whose forward takes **kwargs, which the loss of causal
# language models divides its sum by. For these it then adds losses up without dividing by k. The forwards below take **kwargs as well, so
# they get the count, but their loss is F.cross_entropy's mean. One update by SGD with 4 rows, as one batch, as 2 of 2, as 4 of 1: it should
# be the same three times. With clipping by norm or Adam only the logged loss gives it away. The causal model in the last row is right.
#
# Expected output:
#   T5ForConditionalGeneration: loss 1.00 2.00 4.00, update 1.00 2.00 4.00
#   BertForSequenceClassification: loss 1.00 2.00 4.00, update 1.00 2.00 4.00
#   GPT2ForSequenceClassification: loss 1.00 2.00 4.00, update 1.00 2.00 4.00
#   LlamaForSequenceClassification: loss 1.00 2.00 4.00, update 1.00 2.00 4.00
#   LlamaForCausalLM: loss 1.00 1.00 1.00, update 1.00 1.00 1.00
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy transformers==5.24.0 accelerate==1.15.0

cat > "$folder/show.py" <<'PY'
import sys

import torch
import transformers
from transformers import BertConfig, GPT2Config, LlamaConfig, T5Config, Trainer, TrainingArguments

ids = torch.randint(1, 32, (4, 8), generator=torch.Generator().manual_seed(0))
classes = [{"input_ids": row, "labels": torch.tensor(number % 2)} for number, row in enumerate(ids)]
texts = [{"input_ids": row, "labels": row} for row in ids]
small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 32}
MODELS = {
    "T5ForConditionalGeneration": (
        T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=32, dropout_rate=0.0,
                 decoder_start_token_id=0),
        texts,
    ),
    "BertForSequenceClassification": (BertConfig(**small, max_position_embeddings=8), classes),
    "GPT2ForSequenceClassification": (
        GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=8, pad_token_id=0), classes,
    ),
    "LlamaForSequenceClassification": (LlamaConfig(**small, pad_token_id=0), classes),
    "LlamaForCausalLM": (LlamaConfig(**small), texts),
}


def update(name, config, data, batches):
    torch.manual_seed(0)
    model = getattr(transformers, name)(config)
    for module in model.modules():  # no dropout
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    before = [p.detach().clone() for p in model.parameters()]
    args = TrainingArguments(
        sys.argv[1], per_device_train_batch_size=4 // batches, gradient_accumulation_steps=batches, max_steps=1,
        learning_rate=0.1, optim="sgd", max_grad_norm=0.0, logging_steps=1, save_strategy="no", use_cpu=True,
        disable_tqdm=True, report_to="none",
    )
    trainer = Trainer(model, args, train_dataset=data)
    trainer.train()
    moved = torch.stack([(p - old).norm() for p, old in zip(model.parameters(), before)]).norm().item()
    return trainer.state.log_history[0]["loss"], moved


for name, (config, data) in MODELS.items():
    runs = [update(name, config, data, batches) for batches in (1, 2, 4)]
    losses, moves = zip(*[[one / first for one, first in zip(run, runs[0])] for run in runs])
    told = [" ".join(f"{ratio:.2f}" for ratio in ratios) for ratios in (losses, moves)]
    print(f"{name}: loss {told[0]}, update {told[1]}", file=sys.stderr)
PY
cat > "$folder/expected" <<'TXT'
T5ForConditionalGeneration: loss 1.00 2.00 4.00, update 1.00 2.00 4.00
BertForSequenceClassification: loss 1.00 2.00 4.00, update 1.00 2.00 4.00
GPT2ForSequenceClassification: loss 1.00 2.00 4.00, update 1.00 2.00 4.00
LlamaForSequenceClassification: loss 1.00 2.00 4.00, update 1.00 2.00 4.00
LlamaForCausalLM: loss 1.00 1.00 1.00, update 1.00 1.00 1.00
TXT
timeout 300 "$folder/env/bin/python" -W ignore "$folder/show.py" "$folder/out" > "$folder/log" 2> "$folder/stderr" || { cat "$folder/stderr" >&2; exit 1; }
grep -E "^[A-Za-z0-9]+: loss " "$folder/stderr" > "$folder/found"
cat "$folder/found"
diff "$folder/expected" "$folder/found"
