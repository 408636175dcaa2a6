"""An SFTTrainer on ranks: batches are those of TRL, and losses, norms, metrics and weights those of its one process."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autoptd.errors import PlanError
from tests.forks import told
from tests.integrations.runs import (
    LENGTH,
    VOCAB,
    Ended,
    Trainer,
    arguments,
    differences,
    finished,
    gpt2,
    llama,
)

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from autoptd.integrations.trl import OBEYED, REFUSED, ForCausalLMLoss, SFTTrainer  # noqa: E402

WORDS = ["<pad>", "<end>", "<user>", "<model>"]
WORDS += [f"w{number}" for number in range(VOCAB - len(WORDS))]
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}<user> {{ message['content'] }} {% else %}<model> "
    "{% generation %}{{ message['content'] }} <end>{% endgeneration %} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<model> {% endif %}"
)
# TRL computes in float32.
LOGGED, WEIGHTS = 2e-6, 2e-6


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")
    datasets.disable_progress_bars()


def tokenizer() -> Any:
    words = tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="w0")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokens = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "w0"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, chat_template=TEMPLATE, **tokens)


def words(count: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    return " ".join(WORDS[4 + int(x)] for x in torch.randint(VOCAB - 4, (count,), generator=generator))


def rows(kind: str, count: int) -> Any:
    """A dataset in one of TRL's forms; rows of 3 to 11 tokens."""
    made: list[dict[str, Any]] = []
    for row in range(count):
        ask, answer = words(1 + row % 3, row), words(1 + row % 4, count + row) + " <end>"
        spoken = [
            {"role": "user", "content": ask},
            {"role": "assistant", "content": answer[: -len(" <end>")]},
        ]
        ids = [(row + place) % VOCAB for place in range(3 + row % 5)]
        # The labels of every other four rows are ignored.
        labels = [x if row // 4 % 2 else -100 for x in ids]
        made.append(
            {
                "text": {"text": f"{ask} {answer}"},
                "other": {"other": f"{ask} {answer}"},
                "completion": {"prompt": ask + " ", "completion": answer},
                "messages": {"messages": spoken},
                "spoken": {"prompt": spoken[:1], "completion": spoken[1:]},
                "ids": {"input_ids": ids, "labels": labels},
            }[kind]
        )
    return datasets.Dataset.from_list(made)


def config(folder: Path, rows: int = 2, **others: Any) -> Any:
    usual: dict[str, Any] = {"per_device_train_batch_size": rows, "per_device_eval_batch_size": rows}
    usual |= {"max_steps": 3, "learning_rate": 1e-2, "max_grad_norm": 0.5, "logging_steps": 1}
    # With less, rounding of small gradients decides on updates.
    usual |= {"adam_epsilon": 1e-5}
    usual |= {"bf16": False, "activation_checkpointing": False, "max_length": LENGTH, "save_strategy": "no"}
    usual |= {"use_cpu": True, "disable_tqdm": True, "report_to": "none"}
    return trl.SFTConfig(str(folder), **{**usual, **others})


PARTS = ("eval_dataset", "compute_metrics", "preprocess_logits_for_metrics", "peft_config", "formatting_func")


def made(
    mesh: Mapping[str, int] | None, folder: Path, data: Any, make: Callable[[], Any] = gpt2, **how: Any
) -> Any:
    """A trainer on ranks as threads; without a mesh, that of TRL."""
    parts = {name: how.pop(name) for name in PARTS if name in how}
    parts |= {"train_dataset": data, "processing_class": tokenizer()}
    torch.manual_seed(5)
    if mesh is None:
        return trl.SFTTrainer(make(), args=config(folder / "one", **how), **parts)
    return SFTTrainer(
        make(), args=config(folder / "ranks", **how), **parts, parallel={"backend": "local", **mesh}
    )


def check(mesh: Mapping[str, int], folder: Path, data: Any, make: Any = gpt2, **how: Any) -> Ended:
    """Compare a run on ranks with one of TRL in one process; return the former."""
    expected = finished(made(None, folder, data, make, rows=2 * mesh.get("d", 1), **how))
    found = finished(made(mesh, folder, data, make, **how))
    assert is_close(found, expected)
    return found


def is_close(found: Ended, expected: Ended) -> bool:
    """Tell whether two runs agree, but for what TRL logs of the outputs of training steps and of experts."""
    left_out = ("entropy", "mean_token_accuracy", "aux_loss", "eval_aux_loss")
    for log in expected.logs:
        for name in left_out:
            log.pop(name, None)
    logged, weights = differences(found, expected)
    return logged < LOGGED and weights < WEIGHTS


# what is trained


def chosen(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def metrics(found: Any) -> dict[str, float]:
    return {"sum": float((found.predictions * found.label_ids).sum())}


MESHES: list[dict[str, int]] = [{"t": 2}, {"p": 2}, {"d": 2}]


@pytest.mark.parametrize(
    "mesh", [{"t": 2, "p": 2}, *(pytest.param(mesh, marks=pytest.mark.thorough) for mesh in MESHES)], ids=str
)
def test_a_run_is_that_of_trl(mesh: dict[str, int], tmp_path: Path) -> None:
    """Two batches an update, of several lengths; evaluated with an odd last one, and with metrics."""
    how = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    how |= {"eval_dataset": rows("text", 5), "compute_metrics": metrics}
    how |= {"preprocess_logits_for_metrics": chosen, "activation_checkpointing": True}
    check(mesh, tmp_path, rows("text", 22), **how)


@pytest.mark.parametrize(
    ("kind", "how", "mesh"),
    [
        ("completion", {"max_grad_norm": 0.0}, {"d": 2}),
        pytest.param("spoken", {"assistant_only_loss": True}, {"t": 2}, marks=pytest.mark.thorough),
        pytest.param("messages", {"assistant_only_loss": True}, {"d": 2}, marks=pytest.mark.thorough),
        pytest.param(
            "text", {"packing": True, "packing_strategy": "wrapped"}, {"d": 2}, marks=pytest.mark.thorough
        ),
    ],
    ids=str,
)
def test_labels_are_those_of_trl(
    kind: str, how: dict[str, Any], mesh: dict[str, int], tmp_path: Path
) -> None:
    """With a whole epoch, whose last batch is odd, and evaluations for the loss alone."""
    how = {**how, "max_steps": -1, "num_train_epochs": 1, "eval_strategy": "epoch"}
    check(mesh, tmp_path, rows(kind, 11), llama, eval_dataset=rows(kind, 5), **how)


@pytest.mark.parametrize("kind", ["dft", pytest.param("nll", marks=pytest.mark.thorough)])
def test_losses_are_those_of_trl(kind: str, tmp_path: Path) -> None:
    """The labels of the first two batches are all ignored."""
    how = {"loss_type": kind, "max_length": None, "train_sampling_strategy": "sequential", "max_steps": 4}
    found = check({"t": 2}, tmp_path, rows("ids", 8), llama, eval_dataset=rows("ids", 6), **how)
    assert [log["loss"] > 0 for log in found.logs[:4]] == [False, False, True, True]
    # The other loss, of the same model.
    trainer = made({"t": 2}, tmp_path, rows("ids", 8), lambda: found.trainer.model)
    assert trainer.model.loss_function is ForCausalLMLoss


def test_adapters_are_trained_saved_and_resumed(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    how = {"save_strategy": "steps", "save_steps": 2, "activation_checkpointing": True}
    how |= {"peft_config": peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")}
    full = check({"t": 2}, tmp_path, rows("text", 22), llama, **how)
    names = [
        sorted(path.name for path in (tmp_path / run / "checkpoint-2").iterdir()) for run in ("one", "ranks")
    ]
    assert set(names[1]) - {"autoptd"} == set(names[0]) - {"optimizer.pt", "scheduler.pt"}
    trainer = made({"t": 2}, tmp_path, rows("text", 22), llama, **how)
    found = finished(trainer, resume_from_checkpoint=str(tmp_path / "ranks" / "checkpoint-2"))
    assert all(torch.equal(x, full.weights[name]) for name, x in found.weights.items())
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "ranks" / "checkpoint-3")
    assert all(torch.equal(x, full.weights[name]) for name, x in loaded.named_parameters())


@pytest.mark.thorough
def test_the_most_accurate_model_is_loaded(tmp_path: Path) -> None:
    how = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "max_steps": 4,
    }
    how |= {"load_best_model_at_end": True, "metric_for_best_model": "mean_token_accuracy"}
    found = check({"d": 2}, tmp_path, rows("text", 22), eval_dataset=rows("text", 5), **how)
    assert found.trainer.state.best_metric > 0


@pytest.mark.thorough
def test_a_stream_is_read_as_by_trl(tmp_path: Path) -> None:
    data = rows("text", 22).to_iterable_dataset()
    args = check({"d": 2}, tmp_path, data).trainer.args
    # The same arguments for another trainer.
    SFTTrainer(gpt2(), args, train_dataset=data, processing_class=tokenizer(), parallel={"backend": "local"})


def mixtral() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": VOCAB}
    sizes |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    torch.manual_seed(1)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))


@pytest.mark.thorough
@pytest.mark.parametrize(("mesh", "weight"), [({"t": 2}, 0.5), ({"d": 2}, 0.5), ({"d": 2}, 0.0)], ids=str)
def test_experts_are_balanced_as_by_trl(mesh: dict[str, int], weight: float, tmp_path: Path) -> None:
    """With the weight of the arguments, which is not that of the config."""
    found = check(mesh, tmp_path, rows("text", 22), mixtral, router_aux_loss_coef=weight)
    # Of four experts with two choices, the balance is 2 at least.
    assert (found.logs[0]["loss"] > 4) == (weight > 0)


@pytest.mark.thorough
@pytest.mark.processes
def test_processes_train_as_trl(tmp_path: Path) -> None:
    found = told(Path(__file__).parent / "sft_ranks.py", 2, str(tmp_path))
    data = {"eval_dataset": rows("completion", 5), "eval_strategy": "epoch"}
    expected = finished(made(None, tmp_path, rows("completion", 22), rows=4, **data))
    for rank in found:
        weights = {name: torch.tensor(x) for name, x in rank["weights"].items()}
        expected = Ended(expected.trainer, [dict(log) for log in expected.logs], expected.weights)
        assert is_close(Ended(None, rank["logs"], weights), expected)


# what it is trained on

TRAINED: list[tuple[str, dict[str, Any]]] = [
    ("text", {"max_length": 4, "pad_token": "w1", "eos_token": "w2"}),
    ("other", {"dataset_text_field": "other", "shuffle_dataset": True}),
    (
        "other",
        {"formatting_func": lambda row: row["other"] + " w5", "truncation_mode": "keep_end", "max_length": 4},
    ),
    ("text", {"packing": True, "packing_strategy": "wrapped", "eval_packing": False}),
    ("completion", {"pad_to_multiple_of": 4}),
    ("completion", {"completion_only_loss": False}),
    ("spoken", {}),
    ("messages", {"assistant_only_loss": True, "chat_template_path": "template.jinja"}),
    ("ids", {"dataset_kwargs": {"skip_prepare_dataset": True}}),
]


@pytest.mark.parametrize(
    ("kind", "how"),
    # A pool of processes takes seconds.
    [*TRAINED, pytest.param("text", {"dataset_num_proc": 1}, marks=pytest.mark.thorough)],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_batches_are_those_of_trl(
    kind: str, how: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "template.jinja").write_text(TEMPLATE.replace("<user> ", "<user> w7 "))
    monkeypatch.chdir(tmp_path)
    how = {**how, "eval_dataset": rows(kind, 5)}
    pair = [
        made({"d": 2}, tmp_path, rows(kind, 11), **how),
        made(None, tmp_path, rows(kind, 11), rows=4, **how),
    ]
    assert pair[0].model.config.to_dict() == pair[1].model.config.to_dict()
    for name in ("get_train_dataloader", "get_eval_dataloader"):
        found, expected = ([dict(batch) for batch in getattr(trainer, name)()] for trainer in pair)
        assert len(found) == len(expected) > 1
        for batch, other in zip(found, expected, strict=True):
            assert batch.keys() == other.keys()
            assert all(torch.equal(x, other[key]) for key, x in batch.items())


def test_models_and_arguments_are_made_as_by_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpt2().save_pretrained(tmp_path / "small")
    tokenizer().save_pretrained(tmp_path / "small")
    how = {"model_init_kwargs": {"dtype": "bfloat16"}, "trust_remote_code": True}
    parts = {"train_dataset": rows("text", 4), "parallel": {"backend": "local", "t": 2}}
    trainer = SFTTrainer(str(tmp_path / "small"), config(tmp_path, **how), **parts)
    assert trainer.model.dtype == torch.bfloat16
    args = arguments(tmp_path / "out", activation_checkpointing=True, warmup_steps=3)
    pair = [
        cls(gpt2(), args, train_dataset=rows("text", 4), processing_class=tokenizer(), **others)
        for cls, others in ((SFTTrainer, {"parallel": parts["parallel"]}), (trl.SFTTrainer, {}))
    ]
    assert pair[0].args.to_dict() == pair[1].args.to_dict()
    monkeypatch.chdir(tmp_path)
    # Its default, which is an error without a GPU.
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    usual = SFTTrainer(str(tmp_path / "small"), **parts).args
    assert isinstance(usual, trl.SFTConfig) and usual.output_dir == "small-SFT"


# what is refused


def test_every_field_is_in_one_table() -> None:
    fields = {field.name for field in dataclasses.fields(trl.SFTConfig)}
    fields -= {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert fields == OBEYED | set(REFUSED) and not OBEYED & set(REFUSED)
    text = Path(__file__).read_text()
    assert not [name for name in OBEYED if f'"{name}":' not in text and f"{name}=" not in text]


@pytest.mark.parametrize(
    ("how", "fact"),
    [
        ({"padding_free": True}, "padding_free=True: all rows become one"),
        ({"packing": True}, "packing_strategy='bfd': all rows become one.*'wrapped'"),
        ({"packing": True, "packing_strategy": "bfd_split"}, "packing_strategy='bfd_split'"),
        ({"activation_offloading": True}, "activation_offloading=True: activations stay"),
        (
            {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"selective": True}},
            "gradient_checkpointing_kwargs: selective: .*parallel={'recompute': 'selective'",
        ),
        ({"label_smoothing_factor": 0.1, "padding_free": True}, "padding_free=.*label_smoothing_factor=0.1"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
    ],
    ids=str,
)
def test_settings_are_refused_by_name(how: dict[str, Any], fact: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=rf"^TrainingArguments: .*{fact}"):
        made({"t": 2}, tmp_path, rows("text", 4), **how)


class Own(transformers.GPT2LMHeadModel):  # type: ignore[misc]
    """A model with a forward of its own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


def own() -> nn.Module:
    return Own(gpt2().config)


def weighed() -> nn.Module:
    model = gpt2()
    model.loss_function = len  # type: ignore[assignment]
    return model


def jetmoe() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": VOCAB}
    sizes |= {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
    }
    return transformers.JetMoeForCausalLM(transformers.JetMoeConfig(**sizes))


@pytest.mark.parametrize(
    ("make", "how", "fact"),
    [
        (jetmoe, {"router_aux_loss_coef": 0.1}, "router_aux_loss_coef: a JetMoeForCausalLM weights"),
        (own, {}, "model: an Own has another loss"),
        (weighed, {}, "model: a GPT2LMHeadModel has another loss"),
        (mixtral, {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps: the balance of experts"),
    ],
)
def test_models_with_another_loss_are_refused(
    make: Callable[[], nn.Module], how: dict[str, Any], fact: str, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=rf"^SFTTrainer: {fact}"):
        made({"t": 2}, tmp_path, rows("text", 4), make, **how)


def test_parts_of_another_run_are_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(PlanError, match="peft_config: virtual tokens"):
        made({"t": 2}, tmp_path, rows("text", 4), llama, peft_config=prompt)

    class Processor(transformers.ProcessorMixin):  # type: ignore[misc]
        """Of a model that reads images."""

        def __init__(self, tokenizer: Any = None) -> None:
            super().__init__(tokenizer)

    images = rows("text", 4).add_column("image", [[0.5]] * 4)
    parts = {"train_dataset": images, "processing_class": Processor(tokenizer())}
    with pytest.raises(PlanError, match=r"^SFTTrainer: train_dataset: has images"):
        SFTTrainer(llama(), config(tmp_path), **parts, parallel={"backend": "local", "t": 2})

    class Changed(SFTTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError

    parts = {"train_dataset": rows("text", 4), "processing_class": tokenizer()}
    with pytest.raises(PlanError, match=r"^Changed: compute_loss: is not called"):
        Changed(gpt2(), config(tmp_path), **parts, parallel={"backend": "local", "t": 2})

    class Pairs(Trainer, trl.DPOTrainer):  # type: ignore[misc]
        """Another trainer of TRL, with a loss of its own."""

    with pytest.raises(PlanError, match=r"^Pairs: compute_loss: is not called"):
        Pairs(gpt2(), args=arguments(tmp_path), parallel={"backend": "local", "t": 2})
    trainer = made({"t": 2}, tmp_path, rows("text", 4))
    trainer.data_collator = lambda found: {
        "input_ids": torch.ones(2, 4).long(),
        "labels": torch.ones(2, 4).long(),
    }
    with pytest.raises(PlanError, match="its batches have no attention_mask"):
        trainer.train()
    trainer.pm.close()


def test_the_script_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    page = (Path(__file__).parents[2] / "docs/howto/trainer.md").read_text()
    (script,) = re.findall(r"<!-- run: trl -->\n```python\n(.*?)```", page, re.S)
    monkeypatch.chdir(tmp_path)
    found = {"model": llama(), "tokenizer": tokenizer(), "conversations": rows("messages", 16)}
    found |= {
        "SFTConfig": partial(trl.SFTConfig, use_cpu=True, report_to="none"),
        "LoraConfig": peft.LoraConfig,
    }
    exec(script.replace('parallel={"t"', 'parallel={"backend": "local", "t"'), found)
    trainer = found["trainer"]
    assert trainer.state.global_step == 2 and trainer.pm.options.mesh.size == 8
    # Defaults of SFTConfig.
    assert trainer.options.precision == "bf16-mixed" and trainer.model.is_activation_checkpointing
    trainer.pm.close()
