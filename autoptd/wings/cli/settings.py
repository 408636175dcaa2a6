"""Read flags from a TOML, YAML or JSON file, by name with underscores or dashes.

In: a file, and the flags of a command. Out: a dict of settings.

    # run.toml
    model = "gpt2"
    t = 2
    num_microbatches = 8
    set = { n_layer = 4 }

    read_settings("run.toml", {"model", "t", "num_microbatches", "set"})["t"]       # 2
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from autoptd.errors import PlanError, a_type
from autoptd.ir.plan import nearest

# Flags that are NAME=VALUE on the command line, and mappings in a file.
PAIRS = ("set", "option")


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


__all__ = [
    "PAIRS",
    "check_folder",
    "check_new_file",
    "check_readable",
    "check_writable",
    "read_pairs",
    "read_settings",
]
