"""Build the module that MODEL names on the command line, and a batch for it.

In: `gpt2`, `config.json`, `package.module:factory` or `path/to/file.py:factory`, and keyword arguments. Out:
`Subject`. Without weights (`make_without_weights`), parameters are fake tensors, which have a device but no
memory; buffers and a batch from the factory keep their values.

    subject = find_model("gpt2", {"n_layer": 2})
    model = make_without_weights(subject)
    batch = make_batch(subject, model, rows=8, length=128)
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from autoptd.errors import AutoptdError, PlanError, a_type
from autoptd.ir.plan import nearest
from autoptd.subject.match_folder import fake_mode, fake_parameter
from autoptd.wings.cli.known import KNOWN
from autoptd.wings.cli.request import check_model

# Sequence length if neither the user nor the model gives one.
LENGTH = 128
# Names of the maximum sequence length in configs.
LENGTHS = ("block_size", "max_position_embeddings", "n_positions")
# Cap for a sequence length taken from a config: some allow millions of tokens.
MAX_LENGTH = 8192
# Entries of a config.json that are not config values.
UNSET = ("model_type", "transformers_version")
# Names that configs with rotary embeddings accept but do not list.
ROTARY = ("rope_theta", "rope_scaling")
# Weight files in a directory.
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*")
# Kinds of `*args` and `**kwargs` parameters.
UNNAMED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
# Functions with which modules create parameters.
MADE_EMPTY = (torch.empty, torch.rand, torch.randn)
# Larger tensors are created on meta right away: see `_Empty`.
LARGE = 1 << 30


@dataclass(frozen=True)
class Subject:
    """The model that MODEL names: `make()` returns the module, or (module, example_inputs)."""

    name: str
    make: Callable[[], Any]
    # Parameter dtype unless the user gives one.
    dtype: str = ""
    # Tokens per row; 0: take it from the config.
    length: int = 0
    # Built without attention masks: rows must fit into the attention window.
    is_causal_only: bool = False


def find_model(name: str, keywords: Mapping[str, Any]) -> Subject:
    """Return the model called `name`; PlanError if there is none, or if it does not take these keywords."""
    check_model(name)
    if name in KNOWN:
        known = KNOWN[name]
        values = {**known.values, **keywords}
        length = next((int(values[key]) for key in LENGTHS if key in keywords), known.length)
        config = {"model_type": known.kind, **known.values}
        return Subject(
            name, lambda: _from_config(name, config, keywords, _causal()), "bfloat16", length, True
        )
    path = Path(name)
    if path.suffix == ".json" or (path / "config.json").is_file():
        values = _read_config(path if path.is_file() else path / "config.json")
        return Subject(name, lambda: _from_config(name, values, keywords))
    factory = _find_factory(name)
    return Subject(name, lambda: _call(name, factory, keywords))


def factories_in(file: str) -> list[str]:
    """Return one line for each function and nn.Module class in a file: its MODEL argument and its keywords.

    Those without required keywords come first. PlanError if there is none.
    """
    module = _load_file(Path(file))
    found = {key: value for key, value in vars(module).items() if _is_factory_of(module, key, value)}
    if not found:
        remedy = "define a function that returns the module"
        raise PlanError(f"MODEL {file}", "defines no function and no nn.Module class", remedy)
    width = len(file) + max(map(len, found)) + 1
    lines: list[tuple[int, str]] = []
    for name, factory in found.items():
        taken = inspect.signature(factory).parameters.values()
        needed = [one.name for one in taken if one.default is one.empty and one.kind not in UNNAMED]
        words = ", ".join(str(one) for one in taken)
        if needed:
            words += f"  (needs {', '.join(f'--set {name}=' for name in needed)})"
        lines.append((len(needed), f"{f'{file}:{name}':{width}}  {words}".rstrip()))
    # Stable sort: ties keep the order of the file.
    return [line for _, line in sorted(lines, key=lambda pair: pair[0])]


def _causal() -> str:
    """Register an attention for transformers that is causal without a mask, and return its name.

    Otherwise the trace would build a mask of rows x length x length. All models in `KNOWN` are causal
    decoders, which need no mask for rows without padding; `length_of` keeps rows within the window of those
    that have one.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
    # transformers before 4.53 has no such registry.
    except ImportError:
        return "sdpa"
    AttentionInterface.register("causal_sdpa", sdpa_attention_forward)
    AttentionMaskInterface.register("causal_sdpa", lambda *args, **kwargs: None)
    return "causal_sdpa"


def _from_config(
    name: str, values: Mapping[str, Any], keywords: Mapping[str, Any], attention: str | None = None
) -> nn.Module:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    # `check_model` found the package, so the installation is broken.
    except ImportError as error:
        fact = f"the package transformers cannot be imported: {error}"
        raise PlanError(f"MODEL {name}", fact, "pip install 'autoptd[hf]'") from error
    kind = keywords.get("model_type", values.get("model_type"))
    if not kind:
        raise PlanError(f"MODEL {name}", "has no model_type", "pass a transformers config")
    given = {key: value for key, value in values.items() if key not in UNSET}
    changes = {key: value for key, value in keywords.items() if key not in UNSET}
    try:
        _check_names(AutoConfig.for_model(kind, **given), given, changes)
        config = AutoConfig.for_model(kind, **{**given, **changes})
        config.use_cache = False
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    except AutoptdError:
        raise
    # The validators of transformers and huggingface_hub raise their own exception types.
    except Exception as error:
        fact = f"transformers cannot build a decoder from it: {' '.join(str(error).split())}"
        raise PlanError(
            f"MODEL {name}", fact, "use another config" + " or other --set values" * bool(changes)
        ) from error
    if getattr(model, "loss_type", "") is None:
        # The loss that transformers would fall back to with a warning.
        model.loss_type = "ForCausalLM"
    return model  # type: ignore[no-any-return]


def _check_names(config: Any, given: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Reject names that a config does not have: transformers would accept them silently, without effect."""
    made = inspect.signature(type(config)).parameters
    known = {*vars(config), *config.to_dict(), *config.attribute_map, *made, *given}
    known |= set(ROTARY) if "rope_parameters" in known else set()
    for key in changes:
        if key not in known:
            names = sorted(name for name in known if not name.startswith("_"))
            raise PlanError(f"--set {key}", f"is not a field of {type(config).__name__}", nearest(key, names))


def _read_config(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PlanError(
            f"MODEL {path}", f"cannot be read: {error}", "pass a transformers config.json"
        ) from error
    if not isinstance(found, dict):
        raise PlanError(f"MODEL {path}", f"is {a_type(found)}", "pass a transformers config.json")
    return found


def _find_factory(name: str) -> Callable[..., Any]:
    where, _, attribute = name.rpartition(":")
    module = _load_file(Path(where)) if where.endswith(".py") else _load_module(where)
    found = getattr(module, attribute, None)
    if not callable(found):
        known = [key for key, value in vars(module).items() if _is_factory_of(module, key, value)]
        remedy = nearest(attribute, known) if known else "define a function that returns the module"
        raise PlanError(f"MODEL {name}", f"{where} defines no function {attribute}", remedy)
    return found  # type: ignore[no-any-return]


def _is_factory_of(module: ModuleType, name: str, thing: Any) -> bool:
    """Tell whether a function or nn.Module class is public and defined in this file."""
    is_module = inspect.isclass(thing) and issubclass(thing, nn.Module)
    is_own = getattr(thing, "__module__", None) == module.__name__
    return is_own and not name.startswith("_") and (is_module or inspect.isfunction(thing))


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module in `sys.modules`.
    sys.modules[path.stem] = module
    # The file may import its siblings.
    sys.path.insert(0, str(path.parent.resolve()))
    _import(str(path), lambda: spec.loader.exec_module(module))  # type: ignore[union-attr]
    return module


def _load_module(name: str) -> ModuleType:
    sys.path.insert(0, "")
    return _import(name, lambda: importlib.import_module(name))  # type: ignore[no-any-return]


def _import(name: str, load: Callable[[], Any]) -> Any:
    """Run the user's file or module; PlanError if it is missing or raises."""
    try:
        return load()
    except AutoptdError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            remedy = "pass an importable module, or path/to/file.py:factory"
            raise PlanError(f"MODEL {name}", str(error), remedy) from error
        fact = f"imports {error.name}, which is not installed"
        remedy = "install it into this environment; --debug shows where it is imported"
        raise PlanError(f"MODEL {name}", fact, remedy) from error
    except Exception as error:
        fact = f"raises on import: {type(error).__name__}: {' '.join(str(error).split())}"
        remedy = "fix the file; --debug shows where it fails"
        raise PlanError(f"MODEL {name}", fact, remedy) from error


def _call(name: str, factory: Callable[..., Any], keywords: Mapping[str, Any]) -> Any:
    remedy = "pass the factory's keywords with --set NAME=VALUE"
    try:
        inspect.signature(factory).bind(**keywords)
    except TypeError as error:
        raise PlanError(f"MODEL {name}", str(error), remedy) from error
    try:
        return factory(**keywords)
    except AutoptdError:
        raise
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in keywords.items())
        fact = (
            f"the factory raises when called with {given or 'no arguments'}: {type(error).__name__}: {error}"
        )
        raise PlanError(f"MODEL {name}", fact, f"{remedy}; --debug shows where it fails") from error


def weights_in(name: str) -> Path | None:
    """Return the directory that MODEL names if it has weights next to its config."""
    path = Path(name)
    is_folder = (path / "config.json").is_file()
    return path if is_folder and any(any(path.glob(pattern)) for pattern in WEIGHTS) else None


def make_with_weights(subject: Subject, dtype: str | None = None) -> tuple[nn.Module, Any]:
    """Return the module, with its parameters in `dtype` if given, and the example_inputs of its factory, if
    any.
    """
    return _split(subject, subject.make(), dtype)


def make_without_weights(subject: Subject, dtype: str | None = None) -> tuple[nn.Module, Any]:
    """Return the same with fake CPU tensors as parameters, which take no memory."""
    hook = register_module_parameter_registration_hook(_Empty.replacements())  # type: ignore[arg-type]
    try:
        with _Empty():
            made = subject.make()
    finally:
        hook.remove()
    model, inputs = _split(subject, made, dtype or subject.dtype)
    mode, fakes = fake_mode(), dict[int, nn.Parameter]()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in fakes:
                fakes[id(parameter)] = fake_parameter(parameter, mode)
            setattr(module, name, fakes[id(parameter)])
    return model, inputs


class _Empty(TorchFunctionMode):
    """A context that creates a model without memory for its parameters.

    A tensor moves to meta when it is registered as a parameter, before it is filled; until then,
    uninitialized memory takes no physical pages. Tensors larger than `LARGE` are on meta from the start,
    since the machine may lack memory for a single one. Everything else, such as tables in buffers and the
    factory's batch, is left alone.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func in MADE_EMPTY and given.get("device") is None and given.get("out") is None:
            on_meta = {**given, "device": "meta", "generator": None, "pin_memory": False}
            if func is torch.empty:
                del on_meta["generator"]
            made = func(*args, **on_meta)
            if made.nbytes > LARGE:
                return made
        return func(*args, **given)

    @staticmethod
    def replacements() -> Callable[[nn.Module, str, nn.Parameter], nn.Parameter | None]:
        """Return a registration hook that replaces a new parameter with one on meta, and tied parameters with
        the same one.
        """
        found = WeakIdKeyDictionary()

        def replace(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
            if parameter.is_meta or is_lazy(parameter) or type(parameter) is not nn.Parameter:
                return None
            if parameter not in found:
                found[parameter] = nn.Parameter(
                    torch.empty_like(parameter, device="meta"), parameter.requires_grad
                )
            return found[parameter]  # type: ignore[no-any-return]

        return replace


def _split(subject: Subject, made: Any, dtype: str | None) -> tuple[nn.Module, Any]:
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        fact = f"the factory returns {a_type(model)}"
        raise PlanError(
            f"MODEL {subject.name}", fact, "return the torch.nn.Module, or (module, example_inputs)"
        )
    if dtype:
        found = getattr(
            torch, {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}.get(dtype, dtype), None
        )
        if not isinstance(found, torch.dtype):
            raise PlanError(f"--dtype {dtype}", "is not a torch dtype", "bfloat16, float32, ...")
        model = model.to(found)
    return model, inputs


def length_of(subject: Subject, model: nn.Module, requested: int | None) -> int:
    """Choose the sequence length: the requested one, else the known size's, else the config's.

    PlanError beyond the attention window of a known size.
    """
    config = getattr(model, "config", None)
    lengths = [getattr(config, name, None) for name in LENGTHS]
    longest = next((length for length in lengths if isinstance(length, int)), LENGTH)
    length = requested if requested is not None else subject.length or min(longest, MAX_LENGTH)
    window = getattr(config, "sliding_window", None)
    if subject.is_causal_only and isinstance(window, int) and length > window:
        fact = f"{subject.name} attends to {window} tokens, and models by name are built without that window"
        raise PlanError(f"--seq {length}", fact, f"--seq {window} or less, or a config.json for the model")
    return length


def vocabulary_of(model: nn.Module, requested: int | None) -> int:
    """Return the vocabulary size: the requested one, else the config's, else 256."""
    return (
        requested
        if requested is not None
        else int(getattr(getattr(model, "config", None), "vocab_size", 256))
    )


def as_call(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    """Return a decoder's arguments for ids `x` and next ids `y`: `(x, y)`, or keywords if it takes labels.

    Models from transformers shift labels themselves.
    """
    takes = inspect.signature(model.forward).parameters
    return {"input_ids": x, "labels": x} if {"input_ids", "labels"} <= takes.keys() else (x, y)
