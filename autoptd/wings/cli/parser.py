"""What may be asked on the command line. No torch here: `--help` answers at once.

In: the words after `autoptd`. Out: a namespace, `command` and one attribute per flag. A file given by
`--config` (TOML, YAML or JSON) holds flags by their names; what is on the command line goes before it.

    parse(["show", "gpt2", "--t", "4"]).t       # 4
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from typing import Any, NoReturn

from autoptd import __version__
from autoptd.elsewhere import remedy_for
from autoptd.errors import PlanError
from autoptd.ir.mesh import BY_DEGREE
from autoptd.ir.plan import nearest
from autoptd.ir.schedules import SCHEDULES
from autoptd.options import KEYWORDS
from autoptd.wings.cli.flags import FLAGS, as_bytes, as_count_or_auto, as_level, as_numbers, as_switch
from autoptd.wings.cli.help_texts import CHECKPOINT, DOCTOR, EXAMPLES, MODEL, PLAN, SHOW
from autoptd.wings.cli.settings import read_settings

SIZES = ("layers", "hidden", "heads", "seq", "vocab", "ffn", "kv_heads", "head_dim", "mlp_matrices")
# Flags that are at least 1, of all commands but plan.
DEGREES = tuple(name for name, keyword in KEYWORDS.items() if keyword.flag == "count")
WITHOUT_FLAG = [name for name, keyword in KEYWORDS.items() if not keyword.flag and name != "loss_fn"]
COUNTS = ("batch", "rows", "seq", "vocab", "steps", "save_every", "keep", "ranks", *DEGREES)


def parse(arguments: Sequence[str]) -> Namespace:
    """Return what is asked; PlanError for what cannot be asked."""
    parser, commands = make_parser()
    if arguments and arguments[0] in commands:
        chosen = commands[arguments[0]]
        file = _config_of(arguments)
        if file is not None and "config" in _names(chosen):
            # As defaults of the command, so that what stands on the command line goes before them.
            chosen.set_defaults(**read_settings(file, _names(chosen) - {"config", "debug", "help"}))
    # Not parse_args: its error says neither which command, nor what the flag is called here.
    asked, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise _unknown_argument(asked.command, commands[asked.command], unknown[0])
    # The planner checks its own, of which some may be several values.
    for name in COUNTS if asked.command != "plan" else ():
        value = getattr(asked, name, None)
        if isinstance(value, int) and value < 1:
            raise PlanError(f"{_flag(name)} {value}", "is below 1", "a count of at least 1, or leave it out")
    # MODEL is optional to argparse, which does not see that the file of --config may have it.
    needs_model = "model" in asked and asked.command != "plan" and not getattr(asked, "list", False)
    if needs_model and asked.model is None:
        raise PlanError(
            "MODEL", "is missing", "for example: autoptd show gpt2 (autoptd show --list names the sizes)"
        )
    # Likewise.
    if asked.command == "compile" and asked.out is None:
        raise PlanError("--out", "is missing", "for example: autoptd compile gpt2 --t 2 --out out")
    return asked


class Parser(ArgumentParser):
    """An `ArgumentParser` whose errors are those of all commands: one line that names site, fact and remedy."""

    def error(self, message: str) -> NoReturn:
        # argparse says `argument --t: invalid int value: 'x'`, `the following arguments are required: ...`.
        site, _, fact = message.removeprefix("argument ").rpartition(": ")
        raise PlanError(site or self.prog, fact, f"{self.prog} --help lists what it takes")


def _unknown_argument(name: str, command: ArgumentParser, word: str) -> PlanError:
    """What is said of an argument that a command does not take."""
    if not word.startswith("-"):
        return PlanError(
            word, f"autoptd {name} does not take it", f"autoptd {name} --help lists what it takes"
        )
    flag = word.partition("=")[0]
    known: list[str] = []
    for action in command._actions:
        known += [option for option in action.option_strings if option.startswith("--")]
    called_here = remedy_for(flag.lstrip("-").replace("-", "_"))
    return PlanError(flag, f"is not a flag of autoptd {name}", called_here or nearest(flag, known))


def make_parser() -> tuple[ArgumentParser, dict[str, ArgumentParser]]:
    """Return the parser, and those of its commands by name."""
    parser = Parser(
        "autoptd",
        description="Write the model for one device; train it on any (t, p, d).",
        epilog=f"examples:\n{EXAMPLES['']}\n\nautoptd COMMAND --help says more.",
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"autoptd {__version__}")
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
            # `--conf run.toml` would be taken as --config by argparse, but `_config_of` would not read the
            # file.
            allow_abbrev=False,
        )
        commands[name].add_argument("--debug", action="store_true", help="show the traceback of an error")
        commands[name].add_argument(
            "-q", "--quiet", action="store_true", help="do not say on stderr what is done"
        )
        return commands[name]

    show = command("show", "what a model costs on t*p*d ranks: memory, traffic, bubble", SHOW)
    # Before MODEL is asked for: `show --list` needs none.
    show.add_argument("--list", action="store_true", help="list the well-known sizes")
    _add_model(show)
    show.add_argument("--out", metavar="DIR", help="write the pictures and report.html there")
    show.add_argument("--explain", metavar="MODULE", help="say how tp splits a module or parameter, and why")
    show.add_argument("--json", action="store_true", help="print the numbers as JSON")
    show.add_argument(
        "--storage-bandwidth", type=float, metavar="GB/S", help="of all ranks together: how long a save takes"
    )
    show.add_argument(
        "--mtbf", type=float, metavar="HOURS", help="between faults of the whole job: how often to save"
    )

    compile = command(
        "compile", "write the program: a Python file per stage, the plan, pictures, a report", MODEL
    )
    _add_model(compile)
    compile.add_argument(
        "--out", metavar="DIR", help="where to; has to be given, here or in the file of --config"
    )

    verify = command("verify", "train model and partition side by side in float64, compare everything", MODEL)
    _add_model(verify)
    verify.add_argument("--steps", type=int, default=5, help="optimizer steps (default %(default)s)")

    train = command(
        "train", "train on text, a token a byte: alone, with ranks as threads, or under torchrun", MODEL
    )
    _add_model(train)
    _add_training(train)

    simulate = command("simulate", "run a schedule on paper: bubble, waits, saved activations")
    _add_simulation(simulate)

    diff = command("diff", "what differs between two plans or saved programs")
    diff.add_argument("a", metavar="A", help="a plan.json, or a folder with one")
    diff.add_argument("b", metavar="B", help="likewise")

    plan = command("plan", "choose (t, p, d, v, b) for a cluster, and say why", f"{PLAN}\n\n{MODEL}")
    _add_planning(plan)

    measure = command("measure", "describe this machine to the planner: products, memory, collectives")
    measure.add_argument("file", metavar="FILE", help="the TOML file to write")
    measure.add_argument(
        "--ranks", type=int, default=2, help="processes that take part in collectives (default %(default)s)"
    )

    doctor = command(
        "doctor", "try every collective and channel on the ranks at hand; name what is wrong or slow", DOCTOR
    )
    _add_examination(doctor)

    checkpoint = command("checkpoint", "list, show, verify or convert checkpoints", CHECKPOINT)
    _add_checkpoints(checkpoint)

    completion = command("completion", "print what completes commands and flags in a shell")
    completion.add_argument("shell", choices=("bash", "zsh"))
    return parser, commands


def _add_model(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?")
    sizes = parser.add_argument_group("the model and its batch")
    sizes.add_argument(
        "--set", action="append", metavar="NAME=VALUE", help="a keyword of the factory or the config"
    )
    sizes.add_argument(
        "--dtype", help="of the parameters, e.g. bfloat16 (show and compile: of well-known sizes, too)"
    )
    sizes.add_argument("--seq", type=int, metavar="N", help="sequence length (default: the model's, or 128)")
    sizes.add_argument(
        "--vocab", type=int, metavar="N", help="token ids are below this (default: the model's)"
    )
    sizes.add_argument("--batch", type=int, metavar="N", help="samples of the global batch")
    sizes.add_argument(
        "--rows", type=int, metavar="N", help="samples of a microbatch, instead of --batch (default 1)"
    )

    mesh = parser.add_argument_group("the mesh and the plan: names are those of autoptd.parallelize")
    _add_keywords(mesh, is_for_training=False)
    mesh.add_argument(
        "--option",
        action="append",
        metavar="NAME=VALUE",
        help=f"a keyword without a flag: {', '.join(WITHOUT_FLAG)} (train: weights too)",
    )
    parser.add_argument("--config", metavar="FILE", help="flags from a TOML, YAML or JSON file")


def _add_keywords(group: Any, is_for_training: bool) -> None:
    """Add the flags of the keywords of `parallelize`, as `Options` declares them."""
    for name, keyword in KEYWORDS.items():
        if keyword.flag and keyword.is_for_training == is_for_training:
            # What the keyword says of itself goes before what all flags of its kind have.
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
        help="begin with random weights, where the folder MODEL has some of its own",
    )
    run.add_argument("--deferred", action="store_true", help="each rank makes its own slices of the weights")
    run.add_argument("--data", metavar="FILE", help="text (default: Python's own help topics)")
    run.add_argument("--steps", type=int, default=100, help="(default %(default)s)")
    run.add_argument("--lr", type=float, default=1e-3, help="of AdamW (default %(default)s)")
    run.add_argument("--weight-decay", type=float, default=0.01, help="(default %(default)s)")
    run.add_argument("--clip", type=float, default=1.0, help="of the gradient's norm (default %(default)s)")
    run.add_argument("--log", metavar="FILE", help="a JSON object a step")
    run.add_argument("--tensorboard", metavar="DIR", help="where the package tensorboard is installed")
    run.add_argument(
        "--peak",
        type=float,
        metavar="FLOPS",
        help="of a rank, for the MFU (default: a known GPU's, for the dtype of the parameters)",
    )
    run.add_argument("--measure-every", type=int, default=10, metavar="N", help="where time goes; 0: never")
    run.add_argument("--save", metavar="DIR", help="where checkpoints are written, beside training")
    run.add_argument(
        "--save-every",
        type=as_count_or_auto,
        default=100,
        metavar="N|auto",
        help="steps; auto: by what a save takes, and --mtbf (default %(default)s)",
    )
    run.add_argument("--mtbf", type=float, metavar="HOURS", help="between faults of the whole job")
    run.add_argument("--keep", type=int, metavar="K", help="the last checkpoints (default: all)")
    run.add_argument("--resume", action="store_true", help="from the last one of --save, if there is one")
    run.add_argument("--out", metavar="DIR", help="write program, pictures and report.html of the run there")


def _add_examination(parser: ArgumentParser) -> None:
    # No defaults: with any of these given one mesh is checked, without them several.
    for name, axis in BY_DEGREE.items():
        words = f"{axis.word}-parallel degree"
        parser.add_argument(f"--{name}", type=int, metavar="N", help=f"{words} (default: several meshes)")
    parser.add_argument(
        "--backend", choices=("gloo", "nccl"), help="(default: nccl on CUDA devices, else gloo)"
    )
    parser.add_argument("--device", help="of a rank (default: the GPU of LOCAL_RANK, else cpu)")
    parser.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="of a rank that hangs (default %(default)g)",
    )
    parser.add_argument(
        "--cluster", help="whose links to compare with: a name, or a TOML file (default: by the device)"
    )
    parser.add_argument("--json", metavar="FILE", help="write all that was found")


def _add_checkpoints(parser: ArgumentParser) -> None:
    parser.add_argument("action", metavar="ACTION", choices=("list", "show", "verify", "convert"))
    parser.add_argument(
        "folder", metavar="PATH", help="a checkpoint; for list, the folder of a run; what --from says"
    )
    parser.add_argument(
        "--to", choices=("hf", "torch"), help="for convert: safetensors, or one file of torch.save"
    )
    parser.add_argument(
        "--from", dest="source", choices=("hf", "torch"), help="for convert: PATH is one of these instead"
    )
    parser.add_argument(
        "--out", metavar="PATH", help="for convert: the folder (of --to torch, file) to write"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_simulation(parser: ArgumentParser) -> None:
    parser.add_argument("--p", type=int, required=True, help="pipeline ranks")
    parser.add_argument(
        "--v", type=int, default=1, help="model chunks per pipeline rank (default %(default)s)"
    )
    parser.add_argument("--num-microbatches", type=int, help="per step (default 4p; a file's own)")
    parser.add_argument(
        "--schedule", help=f"{', '.join(SCHEDULES)}, or a file (default: 1f1b, interleaved where v > 1)"
    )
    parser.add_argument(
        "--forward", type=float, default=1.0, help="time of a stage's forward (default %(default)s)"
    )
    parser.add_argument("--backward", type=float, default=2.0, help="likewise (default %(default)s)")
    parser.add_argument("--link", type=float, default=0.0, help="time of a message (default %(default)s)")
    parser.add_argument("--out", metavar="FILE", help="write the chart: schedule.svg")


def _add_planning(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", nargs="?", help="its config gives the sizes")
    parser.add_argument(
        "--set", action="append", metavar="NAME=VALUE", help="a keyword of the factory or the config"
    )
    sizes = parser.add_argument_group("the sizes: instead of MODEL, or other than its own")
    sizes.add_argument("--shape", metavar="FILE", help="a JSON file with these sizes")
    for name in SIZES:
        sizes.add_argument(_flag(name), type=int, metavar="N")
    where = parser.add_argument_group("where, and what for")
    where.add_argument("--gpus", type=int, metavar="N", help="all are used")
    where.add_argument("--batch", type=int, metavar="N", help="sequences of a step")
    where.add_argument(
        "--cluster",
        "--machine",
        default="dgx-a100",
        help="h100, dgx-h100, ..., or a TOML file (default %(default)s)",
    )
    where.add_argument("--memory", type=as_bytes, metavar="BYTES", help="of a GPU: 80e9, 80GB or 80GiB")
    constraints = parser.add_argument_group(
        "constraints: a value, or several; the planner chooses what is left out"
    )
    for name in ("t", "p", "d", "c", "v", "microbatch"):
        constraints.add_argument(f"--{name}", type=as_numbers, metavar="N[,N]")
    constraints.add_argument(
        "--sequence-parallel", nargs="?", const=True, type=as_switch, metavar="true|false|any"
    )
    constraints.add_argument("--recompute", metavar="none|selective|full|full:1/2|any")
    constraints.add_argument("--zero", type=as_level, metavar="0|1|2|3|any")
    constraints.add_argument(
        "--precision", "--dtype", metavar="fp32|bf16|fp16", help="of the weights (default fp32)"
    )
    constraints.add_argument("--schedule", metavar="NAME|any", help="any: zero bubble too, and breadth first")
    constraints.add_argument("--placement", metavar="ranks|any", help="of mesh axes on the nodes")
    constraints.add_argument("--software", help="the generation that the times are of: docs/planner.md")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--keep", type=int, default=10, metavar="N", help="how many plans to list (default %(default)s)"
    )
    output.add_argument("--explain", action="store_true", help="say why")
    output.add_argument(
        "--when", action="store_true", help="instead: which strategy when, on one GPU, one node, slow network"
    )
    output.add_argument(
        "--out", metavar="FILE", help="write plan.json of the best: --plan FILE of the other commands"
    )
    parser.add_argument("--config", metavar="FILE", help="flags from a TOML, YAML or JSON file")


def _config_of(arguments: Sequence[str]) -> str | None:
    # By hand, as the file's values must be known before argparse runs.
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if word == "--config":
            return following
        if word.startswith("--config="):
            return word.partition("=")[2]
    return None


def _names(parser: ArgumentParser) -> set[str]:
    return {action.dest for action in parser._actions}


__all__ = ["make_parser", "parse"]
