"""What is asked of a command, and what of it can be refused at once: before torch is loaded and a model is built.

In: the parsed arguments. Out: the keywords of `parallelize`, the rows of a batch; PlanError for a file that is not there, a
folder that cannot be written, a name that nothing has, ranks that nobody started.

    check_request(parse(["train", "mine.py:make", "--data", "none.txt"]))       # PlanError: --data none.txt: ...
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from autoptd.errors import PlanError
from autoptd.ir.mesh import Mesh
from autoptd.ir.plan import load_plan, nearest
from autoptd.options import KEYWORDS, Options, make_options
from autoptd.wings.cli.known import KNOWN
from autoptd.wings.cli.settings import check_folder, check_new_file, check_readable, read_pairs

# Keywords of `parallelize` that are not among its options, and commands that take them.
BESIDES = {"weights": ("train",)}


def check_request(asked: Namespace) -> None:
    """Raise PlanError for what cannot be done, as far as that can be told without torch."""
    if check := CHECKS.get(asked.command):
        check(asked)


def keywords_of(asked: Namespace) -> dict[str, Any]:
    """Return the keywords of `parallelize` that were asked for."""
    flags = {name: getattr(asked, name, None) for name, keyword in KEYWORDS.items() if keyword.flag}
    # Left out, not None: then a plan or the default decides.
    given = {name: value for name, value in flags.items() if value is not None}
    return given | read_pairs("option", asked.option)


def options_of(asked: Namespace) -> Options:
    """Return the options that were asked for; PlanError for those that do not exist, or not together."""
    keywords = keywords_of(asked)
    return make_options(
        **{name: value for name, value in keywords.items() if asked.command not in BESIDES.get(name, ())}
    )


def rows_of(asked: Namespace) -> int:
    """Return the samples of the global batch; flags go before what a plan says."""
    if asked.batch is not None and asked.rows is not None:
        raise PlanError("--batch and --rows", "both say how many samples a microbatch has", "one of the two")
    if asked.batch is not None:
        return int(asked.batch)
    plan = load_plan(asked.plan) if asked.plan else {}
    mesh = plan.get("mesh", {})
    # No degree is 0 (the parser refuses it), so `or` falls through for None alone.
    p, d = (getattr(asked, name) or mesh.get(name, 1) for name in ("p", "d"))
    m = asked.num_microbatches or plan.get("num_microbatches") or 4 * p
    return int(d * m * (asked.rows or 1))


def check_model(name: str, is_listed: bool = False) -> None:
    """Raise PlanError for a MODEL that cannot be there; with `is_listed` a file without a name is one."""
    path, (where, _, _) = Path(name), name.rpartition(":")
    if name in KNOWN or path.suffix == ".json" or (path / "config.json").is_file():
        if name not in KNOWN and path.suffix == ".json":
            check_readable("MODEL", name, "a config.json of transformers")
        if find_spec("transformers") is None:
            raise PlanError(f"MODEL {name}", "needs the package transformers", "pip install 'autoptd[hf]'")
    elif where.endswith(".py") or path.suffix == ".py":
        check_readable("MODEL", where or name, "path/to/file.py:factory")
        if not where and not is_listed:
            remedy = f"{name}:factory; autoptd show {name} lists what it has"
            raise PlanError(f"MODEL {name}", "is a file, which may have several models", remedy)
    elif not where:
        remedy = f"{nearest(name, KNOWN)}; a config.json; package.module:factory; path/to/file.py:factory"
        raise PlanError(f"MODEL {name}", "is not a well-known size, config or factory", remedy)


def _check_program(asked: Namespace) -> None:
    """Check what `show` and `compile` are asked."""
    if getattr(asked, "list", False):
        return
    check_model(asked.model, is_listed=asked.command == "show")
    _check_call(asked)
    if asked.out is not None:
        check_folder("--out", asked.out)


def _check_verify(asked: Namespace) -> None:
    check_model(asked.model)
    _check_call(asked)


def _check_call(asked: Namespace) -> None:
    """Check options and batch, but for what the planner is to choose."""
    read_pairs("set", asked.set)
    if "auto" not in keywords_of(asked).values():
        options_of(asked)
        rows_of(asked)


def _check_train(asked: Namespace) -> None:
    check_model(asked.model)
    read_pairs("set", asked.set)
    options = options_of(asked)
    check_launch(options.mesh, options.backend)
    rows, replicas = rows_of(asked), options.mesh.replicas
    if rows % replicas:
        degrees = options.mesh.product_text(options.mesh.batch_axes)
        raise PlanError(f"--batch {rows}", f"does not divide over {degrees}", f"a multiple of {replicas}")
    weights = keywords_of(asked).get("weights")
    if weights is not None and not Path(weights).exists():
        raise PlanError(
            f"weights={weights}", "there is no such folder", "a checkpoint, or a Hugging Face folder"
        )
    if asked.data is not None:
        check_readable("--data", asked.data, "a text file")
    if asked.resume and asked.save is None:
        raise PlanError("--resume", "says no folder", "--save DIR, where the run before has saved")
    if asked.tensorboard is not None and find_spec("tensorboard") is None:
        raise PlanError(
            f"--tensorboard {asked.tensorboard}", "the package is missing", "pip install tensorboard"
        )
    if asked.log is not None:
        check_new_file("--log", asked.log)
    for flag in ("out", "save", "tensorboard"):
        if (folder := getattr(asked, flag)) is not None:
            check_folder(f"--{flag}", folder)


def check_launch(mesh: Mesh, backend: str | None) -> None:
    """Raise PlanError where ranks are to be processes, and torchrun has started none, or not as many as are asked for.

    A command makes no process group before this, so that the environment tells, as `runtime/step/launch.py` looks again.
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
                f"{mesh}", f"{ranks} asked for, and torchrun has not started this process", remedy
            )
    elif (size := int(os.environ["WORLD_SIZE"])) != mesh.size:
        fact = f"{'*'.join(mesh.degrees)} is {mesh.size} ({mesh})"
        remedy = f"torchrun --nproc-per-node {mesh.size} ..., or degrees whose product is {size}"
        raise PlanError(f"world size {size}", fact, remedy)


def _check_plan(asked: Namespace) -> None:
    if asked.model is not None and (asked.model not in KNOWN or asked.set):
        check_model(asked.model)


CHECKS: dict[str, Callable[[Namespace], None]] = {
    "show": _check_program,
    "compile": _check_program,
    "verify": _check_verify,
    "train": _check_train,
    "plan": _check_plan,
}

__all__ = ["check_launch", "check_model", "check_request", "keywords_of", "options_of", "rows_of"]
