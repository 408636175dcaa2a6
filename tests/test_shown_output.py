"""Every block of output that README and docs show comes from a run: a function here makes it, or names the test that does."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.ir.machine import Machine
from autoptd.ir.mesh import Mesh
from autoptd.runtime.step.launch import check_same_source
from autoptd.runtime.world.threads import ThreadWorld, run_ranks
from autoptd.runtime.world.world import Communicators, World
from autoptd.subject.initial.deferred import named_tensors
from autoptd.subject.initial.recipes import Recipes
from autoptd.wings.cli import main
from benchmarks.lib.loss_cases import CASES
from benchmarks.losses import BYTES_AT, LARGE_ROWS, LARGE_VOCAB, LARGE_WIDTH
from examples.gpt import GPT, GPTConfig
from tests.measured import same_words
from tests.model import shown_adapters
from tests.waits import LONG

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"```text\n(.*?)```", re.S)

CHECKS = import_module("autoptd.verify.verify").CHECKS

Show = Callable[[Path, pytest.CaptureFixture[str]], str]
SHOWN: dict[tuple[str, str], Show] = {}  # (page, the words a block begins with) -> what makes its text
ELSEWHERE = {  # (page, the words a block begins with) -> the test that holds it
    (
        "docs/howto/buffers.md",
        "class Updates",
    ): "tests/parity/test_buffers.py::test_the_update_reads_as_the_page_says",
    (
        "docs/howto/trainer.md",
        "PlanError: TrainingArguments",
    ): "tests/integrations/test_page.py::test_the_error_is_the_one_shown",
    ("docs/pipeline.md", ""): "tests/test_docs.py::test_the_walk_through_the_pipeline_is_the_real_dump",
    ("docs/getting-started.md", ""): "tests/test_getting_started.py::test_the_page_is_walked",
    ("docs/howto/hugging-face.md", ""): "tests/integrations/test_ten_minutes.py::test_the_page_is_walked",
    ("docs/faq.md", ""): "tests/test_faq.py::test_an_optimizer_of_torch_is_the_error_that_is_shown",
    (
        "docs/howto/lightning.md",
        "",
    ): "tests/integrations/test_lightning_page.py::test_the_error_is_the_one_shown",
    ("docs/howto/zero.md", ""): "tests/parity/test_divided.py::test_the_page_runs_and_shows_a_file",
    (
        "docs/howto/check-a-launch.md",
        "",
    ): "tests/wings/doctor/test_processes.py::test_four_ranks_look_at_several_meshes",
}


def shows(page: str, begins: str) -> Callable[[Show], Show]:
    def keep(function: Show) -> Show:
        SHOWN[page, begins] = function
        return function

    return keep


def blocks() -> list[tuple[str, str]]:
    """(page, text) of every block of output."""
    return [(str(path.relative_to(ROOT)), text) for path in PAGES for text in BLOCK.findall(path.read_text())]


def pieces(text: str, is_measured: bool) -> list[str]:
    """What stands between the marks `...` of a block, in single spaces; of what was measured, its words alone."""
    if is_measured:
        text = same_words(text)
    return [" ".join(piece.split()) for piece in text.split("...") if piece.strip()]


def claim(page: str, text: str) -> tuple[str, str] | None:
    """The entry for a block: of those that it begins with, the longest."""
    known = [key for key in (*SHOWN, *ELSEWHERE) if key[0] == page and text.startswith(key[1])]
    return max(known, key=lambda key: len(key[1]), default=None)


def refusal(request: Callable[[], Any]) -> str:
    """The error of a request, as the command line shows it."""
    with pytest.raises(autoptd.AutoptdError) as caught:
        request()
    return f"{type(caught.value).__name__}: {caught.value}"


NET = """\
import torch
from torch import Tensor, nn


@torch.library.custom_op("mine::center", mutates_args=())
def center(x: Tensor) -> Tensor:
    return x - x.mean(0)


@center.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


torch.library.register_autograd("mine::center", lambda ctx, grad: grad - grad.mean(0))


class Fn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class Net(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.mid, self.last = nn.Linear(8, 8), middle, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.mid(self.first(x))).square().mean()


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class Apply(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Fn.apply(x)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.n(x)


class Center(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mine.center(x)
"""
OWN_MODEL, INSPECT, LENGTHS = "docs/bring-your-own-model.md", "docs/howto/inspect.md", "docs/howto/lengths.md"
ROWS = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


def gpt_batch() -> tuple[Tensor, Tensor]:
    ids, targets = torch.randint(64, (2, 8, 16), generator=torch.Generator().manual_seed(0))
    return ids, targets


def small_gpt() -> GPT:
    return GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=16, vocab_size=64))


@shows(OWN_MODEL, "TraceError: output of the model")
def _no_loss(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    ids = torch.zeros(2, 16, dtype=torch.long)
    return refusal(lambda: autoptd.compile(small_gpt(), example_inputs=(ids,)))


def _refused(model: str, **degrees: int) -> Show:
    """The error about a model of net.py."""

    def show(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
        found = own_models(folder)
        return refusal(
            lambda: autoptd.compile(found["Net"](found[model]()), **degrees, example_inputs=(ROWS,))
        )

    return show


shows(OWN_MODEL, "TraceError: .../net.py")(_refused("Branch"))
shows(OWN_MODEL, "TraceError: autograd.Function")(_refused("Apply"))


@shows(OWN_MODEL, "PlanError: example_inputs")
def _plan_errors(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    net = own_models(folder)["Net"](nn.Identity())
    requests = (
        lambda: autoptd.compile(net, d=3, example_inputs=(ROWS,)),
        lambda: autoptd.parallelize(net, t=2, p=2, example_inputs=(ROWS,)),
    )
    told = [refusal(request) for request in requests]
    told += [_refused("Norm", num_microbatches=4)(folder, capsys), _refused("Center", d=2)(folder, capsys)]
    return "\n".join(told)


@shows(INSPECT, "175 G parameters")
def _headline(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    words = "show gpt3-175b --t 8 --p 12 --d 8 --v 4 --num-microbatches 64 --machine a100"
    assert f"`autoptd {words}`" in (ROOT / INSPECT).read_text()
    assert main(words.split()) == 0
    return capsys.readouterr().out


@shows(LENGTHS, "PlanError: pm.step")
def _one_program_too_many(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    ids = torch.zeros(4, 16, dtype=torch.long)
    about = {"backend": "local", "shapes": "exact", "max_programs": 2, "example_inputs": (ids, ids)}
    pm = autoptd.parallelize(small_gpt(), t=2, **about)
    try:
        pm.step(ids[:, :8].contiguous(), ids[:, :8].contiguous())
        return refusal(lambda: pm.step(ids[:, :12].contiguous(), ids[:, :12].contiguous()))
    finally:
        pm.close()


@shows(LENGTHS, "PlanError: shapes: padding")
def _padding_is_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    class Everything(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 8), nn.Linear(8, 8)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            logits = self.head(self.embed(ids)).flatten(0, 1)
            return F.cross_entropy(logits, labels.flatten(), reduction="none").mean()

    ids = torch.zeros(4, 16, dtype=torch.long)
    about = {"backend": "local", "shapes": "bucket", "example_inputs": (ids, ids)}
    return refusal(lambda: autoptd.parallelize(Everything(), t=2, **about))


@shows("docs/howto/checkpoints.md", "$ autoptd show gpt-1t")
def _checkpoint_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    words = "show gpt-1t --t 8 --p 64 --d 6 --precision bf16 --storage-bandwidth 273 --mtbf 3.1"
    assert main(words.split()) == 0
    return f"$ autoptd {words}\n{capsys.readouterr().out}"


@shows(OWN_MODEL, "PlanError: num_microbatches=3")
def _microbatches(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    return refusal(
        lambda: autoptd.compile(
            nn.Linear(8, 1), loss_fn=F.mse_loss, num_microbatches=3, example_inputs=(ROWS,)
        )
    )


@shows(OWN_MODEL, "t=2 p=1 d=1")
def _verified(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    torch.manual_seed(0)
    with mock.patch.object(
        import_module("autoptd.verify.verify"), "CHECKS", CHECKS
    ):  # tests leave most of them out
        return str(autoptd.verify(small_gpt(), t=2, num_microbatches=4, example_inputs=gpt_batch()))


@shows(OWN_MODEL, "PlanError: weights=")
def _other_weights(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = dict.fromkeys(
        ("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2
    )
    sizes |= {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 64}
    saved = LlamaForCausalLM(LlamaConfig(**sizes, attention_bias=True, tie_word_embeddings=True))
    saved.save_pretrained(folder / "llama-small")
    ids, _ = gpt_batch()
    call = {"input_ids": ids, "labels": ids}
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.chdir(folder)
        model = LlamaForCausalLM(LlamaConfig(**sizes))
        return refusal(
            lambda: autoptd.parallelize(
                model, t=2, backend="local", example_inputs=call, weights="llama-small"
            )
        )


@shows(OWN_MODEL, "RuntimeFault: step 1")
def _nan(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    model = small_gpt()
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    pm = autoptd.parallelize(model, t=2, backend="local", example_inputs=gpt_batch())
    try:
        return refusal(lambda: pm.step(*gpt_batch()))
    finally:
        pm.close()


@shows("docs/howto/train-on-8-gpus.md", "step  120/1000")
def _progress(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    words = "train examples/gpt.py:make_gpt --set n_layer=2 --t 2 --p 2 --backend local --random"
    assert main([*words.split(), *"--steps 4 --batch 4 --seq 8 --measure-every 1".split()]) == 0
    lines = capsys.readouterr().err.splitlines()
    return next(line for line in lines if "compute" in line and "norm" in line)


@shows("docs/howto/read-a-hang.md", "RuntimeFault: rank 2")
def _hang(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    there, leave = threading.Event(), threading.Event()

    def body(world: World) -> None:
        world.everyone().all_reduce(torch.ones(1), "h.0")
        if world.rank == 2:
            world.at = "F1.2"
            assert there.wait(LONG)
            shared.timeout = 0.3
            world.incoming(0).receive([((1,), torch.float32)], "RECV_F1.2<0").wait()
        else:
            world.at = "F0.2"
            if world.rank == 0:
                there.set()
            leave.wait(LONG)

    communicators = Communicators(owners=((0, 1),), links=((0, 1), (1, 0)))
    shared = ThreadWorld(Mesh(t=2, p=2), communicators)
    try:
        return refusal(lambda: run_ranks(shared, body))
    finally:
        leave.set()


@shows("docs/howto/huge-models.md", "RuntimeFault: rank 0")
def _other_initial_values(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    sources = []
    for rank in range(2):
        numpy.random.seed(rank)
        with autoptd.deferred():
            model = nn.ModuleDict({"head": nn.Linear(4, 4)})
            model["head"].bias.data.copy_(torch.from_numpy(numpy.random.rand(4)))
        sources.append(Recipes(named_tensors(model)))
    world = ThreadWorld(Mesh(d=2))
    text = refusal(lambda: run_ranks(world, lambda rank: check_same_source(sources[rank.rank], rank)))
    # Both raise; the first one is told.
    return text.replace("RuntimeFault: rank 1", "RuntimeFault: rank 0")


@shows("docs/howto/huge-models.md", "PlanError: model")
def _on_meta(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    with torch.device("meta"):
        model = GPT(GPTConfig())
    return refusal(lambda: autoptd.parallelize(model, t=2, backend="local", example_inputs=gpt_batch()))


MEASURED = {  # (page, the words a block begins with): numbers of the machine, not compared
    (OWN_MODEL, "t=2 p=1 d=1"),
    ("docs/howto/train-on-8-gpus.md", "step  120/1000"),
    ("docs/howto/read-a-hang.md", "RuntimeFault: rank 2"),
}


def own_models(folder: Path) -> dict[str, Any]:
    """What a user's file net.py defines."""
    path = folder / "net.py"
    path.write_text(NET)
    found: dict[str, Any] = {"__name__": "net"}
    exec(compile(NET, str(path), "exec"), found)
    return found


LOSSES = "docs/howto/losses.md"


def emitted_loss(name: str, **sizes: Any) -> str:
    """What the last stage has of a loss."""
    case = CASES[name]
    # Without values: one model is large.
    with torch.device("meta"):
        model = case.make(*sizes.get("model", ()))
    call = {name: x.to("meta") for name, x in case.call(*sizes.get("call", ())).items()}
    program = autoptd.compile(model, example_inputs=call, **sizes["mesh"])
    return program.sources["stage_0.py"].replace("  # [64, 8, 1]", "")


@shows(LOSSES, "        batch_sum")
def a_masked_mean(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    return emitted_loss("masked_mean_clamped", mesh={"num_microbatches": 2})


@shows(LOSSES, "        # AG fwd, RS bwd")
def rows_of_the_whole_batch(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    return emitted_loss("contrastive", mesh={"d": 2})


@shows(LOSSES, "        log_softmax")
def log_probabilities(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    sizes = {"model": (LARGE_VOCAB, LARGE_WIDTH), "call": (LARGE_ROWS, LARGE_VOCAB)}
    return emitted_loss("focal", mesh=BYTES_AT, **sizes)


@shows(LOSSES, "PlanError: model: aten.matmul")
def losses_that_mix_rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    refused = [CASES[name] for name in ("contrastive", "load_balancing")]  # asked for several microbatches
    texts = []
    for case in refused:
        model, call = case.make(), case.call()
        texts.append(refusal(partial(autoptd.compile, model, num_microbatches=2, example_inputs=call)))
    return "\n".join(texts)


ADAPTERS = "docs/howto/lora.md"
shows(ADAPTERS, "all trained")(shown_adapters.costs)
shows(ADAPTERS, "PlanError: pm.load_adapter")(shown_adapters.refused_folders)
shows(ADAPTERS, "TraceError: base_model")(shown_adapters.quantised_base)


def test_every_block_of_output_is_held() -> None:
    unclaimed = [(page, text.splitlines()[0]) for page, text in blocks() if claim(page, text) is None]
    assert not unclaimed
    assert {claim(page, text) for page, text in blocks()} >= {*SHOWN, *ELSEWHERE}, (
        "an entry that no block needs"
    )
    for (page, _), test in ELSEWHERE.items():
        file, _, name = test.partition("::")
        source = (ROOT / file).read_text()
        assert f"def {name}(" in source and Path(page).name in source, test


def each_block() -> list[Any]:
    """The keys of `SHOWN`; what compiles a hundred layers is thorough."""
    large = ((INSPECT, "175 G parameters"), ("docs/howto/checkpoints.md", "$ autoptd show gpt-1t"))
    slow = {key: [pytest.mark.thorough] for key in large}
    return [
        pytest.param(key, id=f"{Path(key[0]).stem}: {key[1]}", marks=slow.get(key, []))
        for key in sorted(SHOWN)
    ]


@pytest.mark.parametrize("key", each_block())
def test_what_is_shown_comes_from_a_run(
    key: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoptd.ir.machine.DEFAULT", Machine())  # not that of the tests
    made = " ".join(pieces(SHOWN[key](tmp_path, capsys).replace("...", ""), key in MEASURED))
    shown = [text for page, text in blocks() if claim(page, text) == key]
    for text in shown:
        for piece in pieces(text, key in MEASURED):
            assert piece in made
