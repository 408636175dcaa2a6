"""Tell the user's Python code, and that of model libraries, from torch's and Python's own.

In: a code object, a frame, or an exception. Out: whether its instructions are watched; the user's source line; the
line of the forward that made a node of a trace.

    users_line()                                        # "net.py:41"
    ForwardLines(Watched.forward.__code__).innermost()  # "net.py:41", "x = self.lin(x)"
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import types
from functools import cache

import torch

TRACE = os.path.dirname(__file__) + os.sep
OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
TORCH = os.path.dirname(torch.__file__) + os.sep
TORCH_NN = os.path.join(TORCH, "nn", "")
STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
# Files of nn.Module's own methods: register, remove, change mode.
TORCH_MODULES = tuple(os.path.join(TORCH, "nn", "modules", name) for name in ("module.py", "container.py"))
# Methods that run at every call, or set the attribute named in the user's calling instruction.
NO_STATE = {
    "_call_impl",
    "_wrapped_call_impl",
    "inner",
    "__getattr__",
    "__setattr__",
    "__delattr__",
    "__init__",
}
# Callbacks of weak dicts, which run whenever a torch object is freed.
CALLBACKS = {"remove", "_remove", "_commit_removals"}
# Methods whose lines are shown: the others are those of a LightningModule.
FORWARDS = ("forward", "training_step", "validation_step", "test_step")
# Modules of the standard library that keep caches and logs; the others may keep the user's data.
LIBRARY = {"logging", "warnings", "re", "typing", "inspect", "contextlib", "importlib", "linecache"}
LIBRARY |= {"traceback", "tokenize", "dis", "ast", "types", "enum", "dataclasses", "abc", "_py_abc", "copy"}
LIBRARY |= {"unittest", "doctest", "pdb", "bdb", "cmd", "code", "codeop", "zipimport", "pkgutil", "runpy"}
# Installed packages that are not watched: numerics, symbolics, and helpers of model hubs.
PASSED = {"numpy", "sympy", "mpmath", "networkx", "functorch", "triton", "optree", "filelock", "tqdm"}
PASSED |= {"huggingface_hub", "packaging", "requests", "fsspec", "torchgen", "_pytest", "pluggy", "pytest"}


def is_users(code: types.CodeType) -> bool:
    """Tell whether the instructions of a code object are watched, as the user's or as called by it."""
    kind = _kind_of(code.co_filename)
    if code.co_name in CALLBACKS and "weakref" in code.co_filename:
        return False
    return kind in ("user", "standard") or (kind == "modules" and code.co_name not in NO_STATE)


def is_called_by_user(frame: types.FrameType) -> bool:
    """Tell whether a watched frame is the user's or called from there: torch itself uses the same code."""
    shown: types.FrameType | None = frame
    while shown is not None and is_users(shown.f_code):
        if _kind_of(shown.f_code.co_filename) == "user":
            return True
        shown = shown.f_back
    return False


def may_read(code: types.CodeType) -> bool:
    """Tell whether code may read state that affects a forward: watched code, and that of torch.nn."""
    return bool(_kind_of(code.co_filename)) or code.co_filename.startswith(TORCH_NN)


def is_users_module(module: types.ModuleType) -> bool:
    """Tell whether a Python module is the user's, or a model library."""
    return _kind_of(getattr(module, "__file__", None) or "<frozen >") == "user"


def is_writing(code: types.CodeType) -> bool:
    """Tell whether code checks the class of a value in order to store it: ours, nn.Parameter's, and nn.Module's setattr."""
    file = code.co_filename
    if file == TORCH_MODULES[0]:
        return code.co_name == "__setattr__"
    return file.startswith(OWN) or file == f"{TORCH_NN}parameter.py"


@cache
def _kind_of(file: str) -> str:
    """Return "user", "standard" (of Python's library), "modules" (of torch's nn.Module) or "" for a file."""
    if file in TORCH_MODULES:
        return "modules"
    # Modules frozen into the interpreter.
    if file.startswith("<frozen "):
        return "" if file[len("<frozen ") : -1].split(".")[0] in LIBRARY else "standard"
    # `<eval_with_key>` is the code of torch.fx graphs.
    if file.startswith((OWN, TORCH)) or file.startswith("<eval_with_key>"):
        return ""
    for root in ("site-packages", "dist-packages"):
        if f"{os.sep}{root}{os.sep}" in file:
            return "" if _first_name(file.rpartition(f"{os.sep}{root}{os.sep}")[2]) in PASSED else "user"
    if file.startswith(STANDARD):
        return "" if _first_name(file.removeprefix(STANDARD)) in LIBRARY else "standard"
    return "user"


def _first_name(path: str) -> str:
    return path.split(os.sep)[0].removesuffix(".py")


def line_of(frame: types.FrameType) -> str:
    """Return `file.py:41` of a frame's running line; for library frames, of the calling user line."""
    shown: types.FrameType | None = frame
    while shown is not None and _kind_of(shown.f_code.co_filename) != "user":
        shown = shown.f_back
    shown = shown or frame
    return f"{os.path.basename(shown.f_code.co_filename)}:{shown.f_lineno}"


def users_line() -> str:
    """Return `file.py:41` of the user's innermost running line."""
    return line_of(sys._getframe(1))


class ForwardLines:
    """Find the source line of the innermost `forward` that runs, up to the one of code `root`."""

    def __init__(self, root: types.CodeType) -> None:
        self._root = root
        self._texts: dict[tuple[str, int], tuple[str, str]] = {}

    def innermost(self) -> tuple[str, str]:
        """Return (`net.py:41`, its text) of the user's innermost forward; ("", "") if none runs."""
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not self._root:
            file = frame.f_code.co_filename
            if frame.f_code.co_name in FORWARDS and not file.startswith((TORCH, TRACE)):
                # Not by code object: equal ones may be from different files.
                line = file, frame.f_lineno
                if line not in self._texts:
                    text = linecache.getline(*line).strip()
                    self._texts[line] = f"{os.path.basename(file)}:{frame.f_lineno}", text
                return self._texts[line]
            frame = frame.f_back
        return "", ""
