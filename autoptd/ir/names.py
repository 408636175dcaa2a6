r"""Names that emitted files reserve, and ways to write the user's names in them.

No input, argument or variable may take a reserved name. A user's argument may shadow any other builtin
(`input`); a variable of ours shadows none. Names of modules and parameters may contain any character but a
dot, so there are three ways to write one: as a variable (`free_name`), as a string (`quoted`), and in a
comment (`shown`).

    free_name("class")          # "class_"
    quoted('a "b"')             # the text "a \"b\"", with its quotes
    shown("a\nb")              # one line: a, a backslash, n, b
"""

from __future__ import annotations

import builtins
import keyword
import re
import unicodedata

from autoptd.ir.mesh import MESH_AXES

USED = frozenset({"self", "w", "b", "i", "F", "torch", "rt", "float", "range", *MESH_AXES, *keyword.kwlist})
RESERVED = frozenset({*USED, *dir(builtins)})
# Methods of a namespace of weights: a module of this name is accessed as an item.
METHODS = frozenset({"at"})
# Attributes of a stage (`runtime/step/stage.py`), which the method for a user's module must not shadow.
OF_STAGE = frozenset(
    "activations again batch_sum buffers count counts deferred device draw draw_masks drawing "
    "dropped forward fused groups is_compiled keep_output keep_part kept layers main_grads outputs parts rounds run sums "
    "totals weights".split()
)


def identifier(text: str, prefix: str = "p_") -> str:
    """Turn a text into a Python identifier: `p_0_weight` for "0.weight".

    Python compares identifiers in NFKC, and would treat "ﬁ" and "fi" as one variable.
    """
    name = re.sub(r"\W", "_", unicodedata.normalize("NFKC", text))
    if not name.isidentifier():
        name = f"{prefix}{name}"
    return name if name.isidentifier() else re.sub(r"\W", "_", name, flags=re.ASCII)


def free_name(wanted: str) -> str:
    """Turn `wanted` into a variable name, with a `_` appended if the name is reserved."""
    name = identifier(wanted)
    return f"{name}_" if name in RESERVED else name


def free_method(wanted: str) -> str:
    """Turn `wanted` into the name of a stage's method; names for its recipe and for batch sums are made
    elsewhere.
    """
    name = free_name(identifier(wanted, "layer_"))
    is_taken = name in OF_STAGE or name.startswith(("_", "batch_sums_")) or name.endswith("_again")
    return f"layer_{name}_" if is_taken else name


def quoted(text: str) -> str:
    """Return a text as an ASCII Python string literal."""
    return '"' + "".join(_escaped(letter) if letter in '"\\' else _printed(letter) for letter in text) + '"'


def shown(text: str) -> str:
    """Return a text for use in a comment: on one line, of printable characters."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else _escaped(letter) for letter in text)


def in_docstring(text: str) -> str:
    """Return a text for use in a docstring, which it cannot terminate."""
    return re.sub(r'"(?="|$)', r"\"", shown(text).replace("\\", "\\\\"))


def _printed(letter: str) -> str:
    return letter if " " <= letter <= "~" else _escaped(letter)


def _escaped(letter: str) -> str:
    """Return the escape sequence of a character."""
    return f"\\{letter}" if letter in '"\\' else ascii(letter)[1:-1]


def layer_of(path: str) -> str:
    """Return a module's path up to its first number, else its first name: `transformer.h.3` for all modules
    in that layer.
    """
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return parts[0]


def is_within(path: str, module: str) -> bool:
    """Tell whether the module at `path` is `module`, or lies within it."""
    return path == module or path.startswith(f"{module}.")


def star(text: str) -> str:
    """Return `transformer.h.*.attn` for `transformer.h.3.attn`: numbers in module paths become stars."""
    # "h.3", "h.3.attn: row", and "0.weight" of a Sequential; not the 2 of "model.py:2" or of "dim 2".
    return re.sub(r"(?<=\.)\d+(?=[.: ]|$)|\b\d+(?=\.[a-z_])", "*", text)


def any_layer(name: str) -> str:
    """Replace the numbers in a name by stars: `h.*.ln.weight` for `h.3.ln.weight`."""
    return re.sub(r"\b\d+\b", "*", name)
