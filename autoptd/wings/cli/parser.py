"""The flags of the command line, and its help. Nothing here loads torch, so `--help` is fast.

In: the words after `autoptd`. Out: a namespace with `command` and one attribute per flag. A `--config` file
(TOML, YAML or JSON) sets flags by name; the command line overrides it. A test parses every example of the help.

    parse(["show", "gpt2", "--t", "4"]).t       # 4
"""

from __future__ import annotations

import sys
from argparse import Action, ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from typing import Any, NoReturn

from autoptd.errors import PlanError
from autoptd.ir.actions import SCHEDULES
from autoptd.ir.mesh import BY_DEGREE
from autoptd.ir.plan import nearest
from autoptd.ir.quantities import parse_bytes
from autoptd.options import KEYWORDS
from autoptd.options.elsewhere import remedy_for
from autoptd.wings.cli.request import read_pairs, read_settings

# Flags that must be at least 1, for all commands but plan.
DEGREES = tuple(name for name, keyword in KEYWORDS.items() if keyword.flag == "count")
WITHOUT_FLAG = [name for name, keyword in KEYWORDS.items() if not keyword.flag and name != "loss_fn"]
COUNTS = ("batch", "rows", "seq", "vocab", "steps", "save_every", "keep", "ranks", *DEGREES)


def parse(arguments: Sequence[str]) -> Namespace:
    """Parse the command line; PlanError if it is invalid."""
    parser, commands = make_parser()
    if arguments and arguments[0] in commands:
        chosen = commands[arguments[0]]
        file = _config_of(arguments)
        if file is not None and "config" in _names(chosen):
            # Defaults of the command, so that the command line overrides them.
            chosen.set_defaults(**read_settings(file, _names(chosen) - {"config", "debug", "help"}))
    # Not parse_args, whose error names neither the command nor a similar flag.
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise _unknown_argument(args.command, commands[args.command], unknown[0])
    # The planner checks its own flags, which may take several values.
    for name in COUNTS if args.command != "plan" else ():
        value = getattr(args, name, None)
        if isinstance(value, int) and value < 1:
            raise PlanError(f"{_flag(name)} {value}", "is below 1", "at least 1, or leave it out")
    # MODEL is optional for argparse, because a --config file may set it.
    needs_model = "model" in args and args.command != "plan" and not getattr(args, "list", False)
    if needs_model and args.model is None:
        raise PlanError(
            "MODEL", "is missing", "for example: autoptd show gpt2 (autoptd show --list lists the sizes)"
        )
    # Optional for argparse for the same reason.
    if args.command == "compile" and args.out is None:
        raise PlanError("--out", "is missing", "for example: autoptd compile gpt2 --t 2 --out out")
    return args


class Pairs(Action):
    """A flag `NAME=VALUE` that is given several times, and adds to those of a `--config` file or replaces them."""

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, value: Any, option_string: str | None = None
    ) -> None:
        before = read_pairs(self.dest, getattr(namespace, self.dest))
        setattr(namespace, self.dest, before | read_pairs(self.dest, [value]))


class Parser(ArgumentParser):
    """An `ArgumentParser` that reports errors like all commands: one line with site, fact and remedy."""

    def error(self, message: str) -> NoReturn:
        # argparse says `argument --t: invalid int value: 'x'`, `the following arguments are required: ...`.
        site, _, fact = message.removeprefix("argument ").rpartition(": ")
        raise PlanError(site or self.prog, fact, f"{self.prog} --help lists what it takes")


def _unknown_argument(name: str, command: ArgumentParser, word: str) -> PlanError:
    """Return the error for an argument that a command does not take."""
    if not word.startswith("-"):
        return PlanError(
            word, f"not an argument of autoptd {name}", f"autoptd {name} --help lists what it takes"
        )
    flag = word.partition("=")[0]
    known: list[str] = []
    for action in command._actions:
        known += [option for option in action.option_strings if option.startswith("--")]
    called_here = remedy_for(flag.lstrip("-").replace("-", "_"))
    return PlanError(flag, f"is not a flag of autoptd {name}", called_here or nearest(flag, known))


def make_parser() -> tuple[ArgumentParser, dict[str, ArgumentParser]]:
    """Return the parser, and the parsers of its commands by name."""
    parser = Parser(
        "autoptd",
        description="Write the model for one device; train it on any (t, p, d).",
        epilog=f"examples:\n{EXAMPLES['']}\n\nautoptd COMMAND --help lists the flags of a command.",
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    # By name, as the package imports this module.
    version = sys.modules["autoptd"].__version__
    parser.add_argument("--version", action="version", version=f"autoptd {version}")
    # The order of these calls is the order in `autoptd --help`.
    places = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands: dict[str, ArgumentParser] = {}

    def command(name: str, words: str, description: str = "") -> ArgumentParser:
        commands[name] = places.add_parser(
            name,
            help=words,
            description=description or words,
            epilog=f"examples:\n{EXAMPLES[name]}" if name in EXAMPLES else None,
            formatter_class=RawDescriptionHelpFormatter,
            # argparse would accept `--conf run.toml`, but `_config_of` would not read the file.
            allow_abbrev=False,
        )
        commands[name].add_argument("--debug", action="store_true", help="print tracebacks")
        commands[name].add_argument(
            "-q", "--quiet", action="store_true", help="no progress messages on stderr"
        )
        return commands[name]

    show = command("show", "report memory, traffic and bubble of a model on t*p*d ranks", SHOW)
    # Before MODEL, which `show --list` does not need.
    show.add_argument("--list", action="store_true", help="list the well-known sizes")
    _add_model(show)
    show.add_argument("--out", metavar="DIR", help="directory for pictures and report.html")
    show.add_argument("--explain", metavar="MODULE", help="explain how tp splits a module or parameter")
    show.add_argument("--json", action="store_true", help="print the numbers as JSON")
    show.add_argument(
        "--storage-bandwidth",
        type=float,
        metavar="GB/S",
        help="aggregate storage bandwidth; predicts how long a save takes",
    )
    show.add_argument(
        "--mtbf",
        type=float,
        metavar="HOURS",
        help="mean time between failures of the job; suggests how often to save",
    )

    compile = command(
        "compile", "write the program: one Python file per stage, plan.json, pictures, a report", MODEL
    )
    _add_model(compile)
    compile.add_argument(
        "--out", metavar="DIR", help="output directory (required, here or in the --config file)"
    )

    verify = command("verify", "train a model with and without partitioning in float64, and compare", MODEL)
    _add_model(verify)
    verify.add_argument("--steps", type=int, default=5, help="optimizer steps (default %(default)s)")

    train = command(
        "train", "train on text, one token per byte: one process, ranks as threads, or torchrun", MODEL
    )
    _add_model(train)
    _add_training(train)

    simulate = command("simulate", "simulate a pipeline schedule: bubble, idle time, saved activations")
    _add_simulation(simulate)

    diff = command("diff", "compare two plans or saved programs")
    diff.add_argument("a", metavar="A", help="a plan.json, or a directory with one")
    diff.add_argument("b", metavar="B", help="the same")

    plan = command("plan", "search for the fastest (t, p, d, v, b) on a cluster", f"{PLAN}\n\n{MODEL}")
    _add_planning(plan)

    measure = command("measure", "benchmark this machine for the planner: GEMMs, memory, collectives")
    measure.add_argument("file", metavar="FILE", help="the TOML file to write")
    measure.add_argument(
        "--ranks", type=int, default=2, help="processes in the measured collectives (default %(default)s)"
    )

    doctor = command(
        "doctor", "check and time every collective on these ranks; name wrong or slow pairs", DOCTOR
    )
    _add_examination(doctor)

    checkpoint = command("checkpoint", "list, show, verify or convert checkpoints", CHECKPOINT)
    _add_checkpoints(checkpoint)

    completion = command("completion", "print a shell completion script")
    completion.add_argument("shell", choices=("bash", "zsh"))
    return parser, commands


def _add_model(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?")
    sizes = parser.add_argument_group("model and batch")
    sizes.add_argument("--set", action=Pairs, metavar="NAME=VALUE", help="factory keyword or config field")
    # `show` and `compile` take bfloat16 for the well-known sizes.
    sizes.add_argument("--dtype", help="parameter dtype, e.g. bfloat16 (default: the model's)")
    sizes.add_argument("--seq", type=int, metavar="N", help="sequence length (default: the model's, or 128)")
    sizes.add_argument("--vocab", type=int, metavar="N", help="vocabulary size (default: the model's)")
    sizes.add_argument("--batch", type=int, metavar="N", help="global batch size in samples")
    sizes.add_argument(
        "--rows", type=int, metavar="N", help="samples per microbatch, instead of --batch (default 1)"
    )

    mesh = parser.add_argument_group("mesh and plan (the keywords of autoptd.parallelize)")
    _add_keywords(mesh, is_for_training=False)
    mesh.add_argument(
        "--option",
        action=Pairs,
        metavar="NAME=VALUE",
        help=f"any other keyword: {', '.join(WITHOUT_FLAG)} (and weights, for train)",
    )
    parser.add_argument("--config", metavar="FILE", help="read flags from a TOML, YAML or JSON file")


def _add_keywords(group: Any, is_for_training: bool) -> None:
    """Add the flags that `Options` declares."""
    for name, keyword in KEYWORDS.items():
        if keyword.flag and keyword.is_for_training == is_for_training:
            # The keyword's own settings override those of its kind.
            about = dict(FLAGS[keyword.flag])
            if keyword.metavar:
                about["metavar"] = keyword.metavar
            if keyword.flag == "choice":
                about["choices"] = keyword.choices
            group.add_argument(_flag(name), help=keyword.help, **about)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _add_training(parser: ArgumentParser) -> None:
    run = parser.add_argument_group("training")
    _add_keywords(run, is_for_training=True)
    run.add_argument(
        "--random",
        action="store_true",
        help="start from random weights, even if the directory MODEL contains weights",
    )
    run.add_argument(
        "--deferred", action="store_true", help="initialize on each rank only the weight slices that it holds"
    )
    run.add_argument("--data", metavar="FILE", help="text file to train on (default: Python's help topics)")
    run.add_argument("--steps", type=int, default=100, help="optimizer steps (default %(default)s)")
    run.add_argument("--lr", type=float, default=1e-3, help="learning rate of AdamW (default %(default)s)")
    run.add_argument(
        "--weight-decay", type=float, default=0.01, help="weight decay of AdamW (default %(default)s)"
    )
    run.add_argument("--clip", type=float, default=1.0, help="maximum gradient norm (default %(default)s)")
    run.add_argument("--log", metavar="FILE", help="write one JSON object per step")
    run.add_argument("--tensorboard", metavar="DIR", help="directory for TensorBoard event files")
    run.add_argument(
        "--peak",
        type=float,
        metavar="FLOPS",
        help="peak FLOP/s per rank, for MFU (default: the GPU's, if known)",
    )
    run.add_argument(
        "--measure-every", type=int, default=10, metavar="N", help="profile every N-th step; 0: never"
    )
    run.add_argument("--save", metavar="DIR", help="checkpoint directory; saves run in the background")
    run.add_argument(
        "--save-every",
        type=as_count_or_auto,
        default=100,
        metavar="N|auto",
        help="steps between saves; auto: from save time and --mtbf (default %(default)s)",
    )
    run.add_argument("--mtbf", type=float, metavar="HOURS", help="mean time between failures of the job")
    run.add_argument("--keep", type=int, metavar="K", help="keep only the last K checkpoints (default: all)")
    run.add_argument(
        "--resume", action="store_true", help="resume from the latest checkpoint in --save, if any"
    )
    run.add_argument("--out", metavar="DIR", help="directory for the program, pictures and report.html")


def _add_examination(parser: ArgumentParser) -> None:
    # No defaults: one mesh is tested if any of these is given, else several.
    for name, axis in BY_DEGREE.items():
        words = f"{axis.word}-parallel degree"
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{words} (default: several meshes)")
    parser.add_argument(
        "--backend", choices=("gloo", "nccl"), help="backend (default: nccl on CUDA devices, else gloo)"
    )
    parser.add_argument(
        "--device", help="device of each rank (default: the GPU numbered LOCAL_RANK, else cpu)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long a rank may hang (default %(default)g)",
    )
    parser.add_argument(
        "--cluster", help="expected link speeds: a cluster name or TOML file (default: by device)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the full report as JSON")


def _add_checkpoints(parser: ArgumentParser) -> None:
    parser.add_argument("action", metavar="ACTION", choices=("list", "show", "verify", "convert"))
    parser.add_argument(
        "folder", metavar="PATH", help="a checkpoint (list: a run's checkpoint directory; --from: the input)"
    )
    parser.add_argument(
        "--to", choices=("hf", "torch"), help="convert: output format: safetensors, or one torch.save file"
    )
    parser.add_argument(
        "--from",
        dest="source",
        choices=("hf", "torch"),
        help="convert: format of PATH, to make a checkpoint of it",
    )
    parser.add_argument(
        "--out", metavar="PATH", help="convert: output directory (for --to torch, output file)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_simulation(parser: ArgumentParser) -> None:
    parser.add_argument("--p", type=int, required=True, help="pipeline ranks")
    parser.add_argument(
        "--v", type=int, default=1, help="model chunks per pipeline rank (default %(default)s)"
    )
    parser.add_argument(
        "--num-microbatches", type=int, help="microbatches per step (default 4p, or the schedule file's)"
    )
    parser.add_argument(
        "--schedule", help=f"{', '.join(SCHEDULES)}, or a file (default: 1f1b; interleaved if v > 1)"
    )
    parser.add_argument(
        "--forward", type=float, default=1.0, help="time of one stage's forward (default %(default)s)"
    )
    parser.add_argument(
        "--backward", type=float, default=2.0, help="time of one stage's backward (default %(default)s)"
    )
    parser.add_argument("--link", type=float, default=0.0, help="time of one message (default %(default)s)")
    parser.add_argument("--out", metavar="FILE", help="write the schedule chart as SVG")


def _add_planning(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", help="read the sizes from this model's config")
    parser.add_argument("--set", action=Pairs, metavar="NAME=VALUE", help="factory keyword or config field")
    sizes = parser.add_argument_group("sizes (instead of MODEL, or overriding it)")
    sizes.add_argument("--shape", metavar="FILE", help="read these sizes from a JSON file")
    for name, words in SIZES.items():
        sizes.add_argument(_flag(name), type=int, metavar="N", help=words)
    where = parser.add_argument_group("cluster and batch")
    where.add_argument("--gpus", type=int, metavar="N", help="number of GPUs; every plan uses all of them")
    where.add_argument("--batch", type=int, metavar="N", help="global batch size in sequences")
    where.add_argument(
        "--cluster",
        "--machine",
        default="dgx-a100",
        help="cluster name (h100, dgx-h100, ...) or TOML file (default %(default)s)",
    )
    where.add_argument("--memory", type=as_bytes, metavar="BYTES", help="memory per GPU: 80e9, 80GB or 80GiB")
    constraints = parser.add_argument_group(
        "constraints (one value or several; the planner chooses the rest)"
    )
    for name, words in COUNTED.items():
        constraints.add_argument(f"--{name}", type=as_numbers, metavar="N[,N]", help=words)
    constraints.add_argument(
        "--sequence-parallel",
        nargs="?",
        const=True,
        type=as_switch,
        metavar="true|false|any",
        help="sequence parallelism",
    )
    constraints.add_argument(
        "--recompute", metavar="none|selective|full|full:1/2|any", help="activation recomputation"
    )
    constraints.add_argument("--zero", type=as_level, metavar="0|1|2|3|any", help="ZeRO stage")
    constraints.add_argument(
        "--precision", "--dtype", metavar="fp32|bf16|fp16", help="weight dtype (default fp32)"
    )
    constraints.add_argument(
        "--schedule", metavar="NAME|any", help="any: consider zero-bubble and breadth-first schedules too"
    )
    constraints.add_argument("--placement", metavar="ranks|any", help="placement of mesh axes on nodes")
    constraints.add_argument(
        "--software", help="software generation of the measured efficiencies (docs/planner.md)"
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--keep", type=int, default=10, metavar="N", help="number of plans to list (default %(default)s)"
    )
    output.add_argument("--explain", action="store_true", help="explain the choice")
    output.add_argument(
        "--when",
        action="store_true",
        help="compare strategies on one GPU, one node and a slow network instead",
    )
    output.add_argument("--out", metavar="FILE", help="write the best plan, for --plan of the other commands")
    parser.add_argument("--config", metavar="FILE", help="read flags from a TOML, YAML or JSON file")


def _config_of(arguments: Sequence[str]) -> str | None:
    # By hand, as the file must be read before argparse runs.
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if word == "--config":
            return following
        if word.startswith("--config="):
            return word.partition("=")[2]
    return None


def _names(parser: ArgumentParser) -> set[str]:
    return {action.dest for action in parser._actions}


def as_bytes(text: str) -> float:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is not a size in bytes, such as 80e9, 80GB or 80GiB") from error


def as_stage(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def as_switch(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text.lower(), text)


def as_list(text: str) -> list[str]:
    return text.split(",")


def as_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ArgumentTypeError(
            f"{text!r} is not a number or a comma-separated list of numbers, such as 2 or 1,2,4"
        ) from error


def as_level(text: str) -> int | str:
    # "any", or an invalid value that the planner reports.
    return int(text) if text.isdigit() else text


def as_count_or_auto(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is neither a number nor auto") from error


# The keywords for argparse, by `options.Keyword.flag`.
FLAGS: dict[str, dict[str, Any]] = {
    "text": {},
    "count": {"type": int, "metavar": "N"},
    "number": {"type": int},
    "stage": {"type": as_stage, "metavar": "N"},
    "float": {"type": float, "metavar": "X"},
    # None rather than False: an absent flag must not contradict a plan or a file.
    "on": {"action": "store_true", "default": None},
    # `--flag`, `--flag true` and `--flag false`.
    "switch": {"type": as_switch, "nargs": "?", "const": True},
    "choice": {"type": as_switch},
    "list": {"type": as_list},
    "bytes": {"type": as_bytes, "metavar": "BYTES"},
}


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
