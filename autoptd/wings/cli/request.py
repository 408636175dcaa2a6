"""Check a command's request before torch is loaded and a model is built, and read its settings.

In: the parsed arguments. Out: the keywords of `parallelize` and the rows of a batch; PlanError for a missing file, an
unwritable directory, an unknown name or missing ranks. A TOML, YAML or JSON file sets flags by name, with underscores or
dashes (`read_settings`):

    # run.toml
    model = "gpt2"
    t = 2
    num_microbatches = 8
    set = { n_layer = 4 }
"""

from __future__ import annotations

import json
import os
import tomllib
from argparse import Namespace
from collections.abc import Callable, Collection, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from autoptd.errors import PlanError, a_type
from autoptd.ir.mesh import Mesh
from autoptd.ir.plan import load_plan, nearest
from autoptd.options import KEYWORDS, Options, make_options
from autoptd.wings.cli.known import KNOWN

# Keywords of `parallelize` that are not options, and the commands that take them.
BESIDES = {"weights": ("train",)}


def check_request(args: Namespace) -> None:
    """Raise PlanError for an invalid request, as far as it can be detected without torch."""
    if check := CHECKS.get(args.command):
        check(args)


def keywords_of(args: Namespace) -> dict[str, Any]:
    """Return the requested keywords of `parallelize`."""
    flags = {name: getattr(args, name, None) for name, keyword in KEYWORDS.items() if keyword.flag}
    # Left out rather than None, so that a plan or the default decides.
    given = {name: value for name, value in flags.items() if value is not None}
    return given | read_pairs("option", args.option)


def options_of(args: Namespace) -> Options:
    """Return the requested options; PlanError if they are invalid or contradict each other."""
    keywords = keywords_of(args)
    return make_options(
        **{name: value for name, value in keywords.items() if args.command not in BESIDES.get(name, ())}
    )


def rows_of(args: Namespace) -> int:
    """Return the global batch size; flags override the plan."""
    if args.batch is not None and args.rows is not None:
        raise PlanError("--batch and --rows", "both set the batch size", "pass one of them")
    if args.batch is not None:
        return int(args.batch)
    plan = load_plan(args.plan) if args.plan else {}
    mesh = plan.get("mesh", {})
    # Degrees are never 0 (the parser rejects it), so `or` falls through only for None.
    p, d = (getattr(args, name) or mesh.get(name, 1) for name in ("p", "d"))
    m = args.num_microbatches or plan.get("num_microbatches") or 4 * p
    return int(d * m * (args.rows or 1))


def check_model(name: str, is_listed: bool = False) -> None:
    """Raise PlanError for a MODEL that cannot exist; with `is_listed`, a file without a factory name is
    allowed.
    """
    path, (where, _, _) = Path(name), name.rpartition(":")
    if name in KNOWN or path.suffix == ".json" or (path / "config.json").is_file():
        if name not in KNOWN and path.suffix == ".json":
            check_readable("MODEL", name, "pass a transformers config.json")
        if find_spec("transformers") is None:
            raise PlanError(f"MODEL {name}", "needs the package transformers", "pip install 'autoptd[hf]'")
    elif where.endswith(".py") or path.suffix == ".py":
        check_readable("MODEL", where or name, "path/to/file.py:factory")
        if not where and not is_listed:
            remedy = f"{name}:factory; autoptd show {name} lists its models"
            raise PlanError(f"MODEL {name}", "is a file that may define several models", remedy)
    elif not where:
        remedy = f"{nearest(name, KNOWN)}; a config.json; package.module:factory; path/to/file.py:factory"
        raise PlanError(f"MODEL {name}", "is not a well-known size, config or factory", remedy)


def _check_program(args: Namespace) -> None:
    """Check the arguments of `show` and `compile`."""
    if getattr(args, "list", False):
        return
    check_model(args.model, is_listed=args.command == "show")
    _check_call(args)
    if args.out is not None:
        check_folder("--out", args.out)


def _check_verify(args: Namespace) -> None:
    check_model(args.model)
    _check_call(args)


def _check_call(args: Namespace) -> None:
    """Check options and batch, except for those that the planner will choose."""
    read_pairs("set", args.set)
    if "auto" not in keywords_of(args).values():
        options_of(args)
        rows_of(args)


def _check_train(args: Namespace) -> None:
    check_model(args.model)
    read_pairs("set", args.set)
    options = options_of(args)
    check_launch(options.mesh, options.backend)
    rows, replicas = rows_of(args), options.mesh.replicas
    if rows % replicas:
        degrees = options.mesh.product_text(options.mesh.batch_axes)
        raise PlanError(f"--batch {rows}", f"does not divide over {degrees}", f"a multiple of {replicas}")
    weights = keywords_of(args).get("weights")
    if weights is not None and not Path(weights).exists():
        raise PlanError(
            f"weights={weights}", "no such directory", "pass a checkpoint or a Hugging Face directory"
        )
    if args.data is not None:
        check_readable("--data", args.data, "pass a text file")
    if args.resume and args.save is None:
        raise PlanError("--resume", "needs a directory", "add --save DIR with the previous run's directory")
    if args.tensorboard is not None and find_spec("tensorboard") is None:
        raise PlanError(
            f"--tensorboard {args.tensorboard}",
            "the package tensorboard is missing",
            "pip install tensorboard",
        )
    if args.log is not None:
        check_new_file("--log", args.log)
    for flag in ("out", "save", "tensorboard"):
        if (folder := getattr(args, flag)) is not None:
            check_folder(f"--{flag}", folder)


def check_launch(mesh: Mesh, backend: str | None) -> None:
    """Raise PlanError if the ranks are to be processes and torchrun started none, or another number of them.

    No command creates a process group before this, so the environment tells; `runtime/step/launch.py` checks
    again.
    """
    if backend == "local":
        return
    if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        if mesh.size > 1 or backend is not None:
            ranks = f"{mesh.size} rank{'s are' if mesh.size > 1 else ' is'}"
            remedy = (
                f"torchrun --nproc-per-node {mesh.size} -m -- autoptd train ..., or --backend local: threads"
            )
            raise PlanError(
                f"{mesh}", f"{ranks} requested, but this process was not started by torchrun", remedy
            )
    elif (size := int(os.environ["WORLD_SIZE"])) != mesh.size:
        fact = f"{'*'.join(mesh.degrees)} is {mesh.size} ({mesh})"
        remedy = f"torchrun --nproc-per-node {mesh.size} ..., or degrees whose product is {size}"
        raise PlanError(f"world size {size}", fact, remedy)


def _check_plan(args: Namespace) -> None:
    if args.model is not None and (args.model not in KNOWN or args.set):
        check_model(args.model)


CHECKS: dict[str, Callable[[Namespace], None]] = {
    "show": _check_program,
    "compile": _check_program,
    "verify": _check_verify,
    "train": _check_train,
    "plan": _check_plan,
}


def read_settings(path: str, known: Collection[str]) -> dict[str, Any]:
    """Return the settings in a file; PlanError if it cannot be read or contains an unknown flag."""
    try:
        text = Path(path).read_text()
        found = _parse(path, text)
    except (OSError, ValueError) as error:
        raise PlanError(
            f"--config {path}", f"cannot be read: {error}", "pass a TOML, YAML or JSON file"
        ) from error
    if not isinstance(found, dict):
        raise PlanError(f"--config {path}", f"is {a_type(found)}", "flags by name, such as t = 2")
    settings = {str(key).replace("-", "_"): value for key, value in found.items()}
    for key in settings:
        if key not in known:
            remedy = nearest(key, sorted(known))
            raise PlanError(f"--config {path}: {key}", "is not a flag of this command", remedy)
    return settings


def _parse(path: str, text: str) -> Any:
    kind = Path(path).suffix
    if kind == ".json":
        return json.loads(text)
    if kind in (".yaml", ".yml"):
        try:
            # Optional: TOML needs no package.
            import yaml
        except ImportError as error:
            raise PlanError(
                f"--config {path}", "needs the package pyyaml", "pip install pyyaml, or TOML"
            ) from error
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            # The exception type of the JSON and TOML parsers.
            raise ValueError(str(error)) from error
    return tomllib.loads(text)


def check_writable(flag: str, path: str) -> None:
    """Raise PlanError if a file cannot be written, before work would be lost."""
    file = Path(path)
    if file.is_dir():
        raise PlanError(f"{flag} {path}", "is a directory", "pass a file name")
    if not file.parent.is_dir():
        raise PlanError(
            f"{flag} {path}", f"there is no directory {file.parent}", "create it, or choose another"
        )
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise PlanError(f"{flag} {path}", "is not writable", "choose another name")


def check_readable(flag: str, path: str, remedy: str) -> None:
    """Raise PlanError if there is no readable file."""
    file = Path(path)
    if not file.exists():
        raise PlanError(f"{flag} {path}", "no such file", remedy)
    if file.is_dir():
        raise PlanError(f"{flag} {path}", "is a directory", remedy)
    if not os.access(file, os.R_OK):
        raise PlanError(f"{flag} {path}", "is not readable", remedy)


def check_folder(flag: str, path: str) -> None:
    """Raise PlanError if a directory, which may not exist yet, is not writable."""
    folder = Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise PlanError(f"{flag} {path}", f"{folder} is a file", "choose a directory")
    if not os.access(folder, os.W_OK):
        raise PlanError(f"{flag} {path}", f"{folder} is not writable", "choose another directory")


def check_new_file(flag: str, path: str) -> None:
    """Raise PlanError if a file cannot be written; neither it nor its directory need exist."""
    if Path(path).exists():
        check_writable(flag, path)
    else:
        check_folder(flag, str(Path(path).parent))


def read_pairs(flag: str, given: Mapping[str, Any] | Iterable[str] | None) -> dict[str, Any]:
    """Return `{"n_layer": 4}` for `["n_layer=4"]`: values are parsed as JSON if possible, else taken as text."""
    if isinstance(given, Mapping):
        return dict(given)
    pairs = {}
    for pair in given or ():
        name, equals, text = pair.partition("=")
        if not (name and equals):
            raise PlanError(f"--{flag} {pair}", "is not NAME=VALUE", f"--{flag} n_layer=4")
        try:
            pairs[name.replace("-", "_")] = json.loads(text)
        except ValueError:
            # Python's spelling; anything else is text: `--set attn=flash`.
            pairs[name.replace("-", "_")] = {"True": True, "False": False, "None": None}.get(text, text)
    return pairs
