"""The script with a Trainer: it saves, resumes, measures its accuracy, and ends with a folder that transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.examples.running import run

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

NAME = "examples/hf_finetune.py"
SIZES = "--layers 2 --hidden 16 --length 16 --rows 1 --eval-rows 4 --save-every 2 --t 2 --p 2 --backend local"


def accuracy_of_one_device(folder: Path, rows: list[dict[str, Any]]) -> float:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.stack([row["input_ids"] for row in rows])
    with torch.no_grad():
        chosen = model(input_ids=ids).logits.argmax(-1)
    return float((chosen[:, :-1] == ids[:, 1:]).float().mean())


def test_it_resumes_and_ends_with_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(NAME, f"{SIZES} --steps 2 --out {tmp_path}", monkeypatch)
    names = run(NAME, f"{SIZES} --steps 4 --out {tmp_path}", monkeypatch)
    history = names["trainer"].state.log_history
    # The first two steps are in the history that the checkpoint has.
    assert [log["step"] for log in history if "eval_accuracy" in log] == [2, 4, 4]
    assert names["trainer"].state.global_step == 4 and (tmp_path / "checkpoint-2/autoptd").is_dir()
    expected = accuracy_of_one_device(tmp_path / "final", names["data"][:4])
    assert abs(history[-1]["eval_accuracy"] - expected) < 1e-6


def test_a_folder_with_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, text = tmp_path / "base", tmp_path / "mine.txt"
    text.write_text("the cat sat on the mat and the dog sat on the cat " * 20)
    words = {word: number for number, word in enumerate(sorted({*text.read_text().split(), "[UNK]"}))}
    known = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    known.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=known).save_pretrained(base)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=len(words), **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(base)
    out = tmp_path / "out"
    run(NAME, f"{SIZES} --steps 2 --model {base} --data {text} --out {out}", monkeypatch)
    assert transformers.AutoTokenizer.from_pretrained(out / "final")("the cat")["input_ids"] == [
        words["the"],
        words["cat"],
    ]
