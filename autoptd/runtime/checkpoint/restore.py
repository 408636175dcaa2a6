"""Check that a checkpoint fits the model, then load it into the storage of all ranks: one rank reads each
byte.

In: a checkpoint, a program, a rank's parameters and the optimizer. Out: a PlanError that lists everything
that does not fit, before anything is loaded; then the parameters, in storage and as stages use them, and the
optimizer's state.

    missing, unexpected = check_model(checkpoint, program, buffers, strict=True)
    plan = Restoration(checkpoint, params, optimizer.state)
    plan.read()                                      # may raise: see `runtime/world/agree.py`
    plan.spread()

Loading is a collective of all ranks. Every rank reads the share that it would write, directly into storage,
without a second copy in memory; after the ranks have agreed that all succeeded, the shares are sent to the
ranks with copies, and to the other owners of tied parameters.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from autoptd.errors import PlanError, RuntimeFault
from autoptd.ir.buffers import bytes_of
from autoptd.ir.rectangles import Item
from autoptd.program.about import about_model, module_hashes
from autoptd.program.pieces import Shares, holder_axes, holders, share_stage, view_of
from autoptd.program.program import Program
from autoptd.program.specs import ParamSpec
from autoptd.runtime.checkpoint.manifest import Manifest, decode, encode, fqn, rows_of
from autoptd.runtime.checkpoint.read import Checkpoint, Want
from autoptd.runtime.params.fingerprint import fingerprint_of_model
from autoptd.runtime.params.parameters import RankParameters, owners
from autoptd.runtime.params.parts import dtype_of
from autoptd.runtime.params.storage import alias
from autoptd.runtime.world.world import World

SITE = "pm.load"
# How many names an error lists.
MOST_NAMED = 5
# Bytes that are sent at once: the host frees small memory blocks at once, and keeps larger ones.
MOST_BYTES = 4 << 20
OptimizerState = MutableMapping[torch.Tensor, dict[str, Any]]


def check_model(
    checkpoint: Checkpoint, program: Program, buffers: Mapping[str, torch.Tensor], strict: bool
) -> tuple[list[str], list[str]]:
    """Return (missing, unexpected) names; PlanError for anything else that does not fit and, if `strict`, for
    these.
    """
    manifest = checkpoint.manifest
    own = {name for spec in program.params for name in spec.aliases} | buffers.keys()
    filled = {spec.name for spec in program.params if math.prod(spec.shape)} | buffers.keys()
    missing = sorted(name for name in filled if fqn(name, "") not in manifest.tensors)
    unexpected = sorted(checkpoint.names.keys() - own)
    findings = []
    if strict and missing:
        findings.append(f"lacks {_some(missing)}")
    if strict and unexpected:
        findings.append(f"has {_some(unexpected)}, not in the model")
    for spec in program.params:
        findings += _misfits(spec, manifest)
    for name, x in buffers.items():
        record = manifest.tensors.get(fqn(name, ""))
        if record is not None and record.shape != tuple(x.shape):
            findings.append(f"{name} has shape {record.shape}, not {tuple(x.shape)}")
    if strict:
        findings += _other_ties(program, manifest)
        findings += _other_atoms(program, manifest)
        findings += _other_operators(program, manifest)
    if findings:
        remedy = "a checkpoint of this model, with the same sizes"
        raise PlanError(SITE, f"{checkpoint.path}: {_some(findings, '; ')}", remedy)
    _check_seed(program, manifest, strict)
    return missing, unexpected


def _some(names: Collection[str], separator: str = ", ") -> str:
    """List a few names."""
    shown = list(names)[:MOST_NAMED]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return separator.join(shown) + more


def _misfits(spec: ParamSpec, manifest: Manifest) -> Iterator[str]:
    """Yield the reason why a saved tensor cannot become the parameter."""
    record = manifest.tensors.get(fqn(spec.name, ""))
    if record is None:
        return
    if record.shape != spec.shape:
        yield f"{spec.name} has shape {record.shape}, not {spec.shape}"
    elif not _is_held(dtype_of(record.dtype), dtype_of(spec.storage.dtype)):
        yield f"{spec.name} is {record.dtype}, not {spec.storage.dtype}"


def _is_held(saved: torch.dtype, stored: torch.dtype) -> bool:
    """Tell whether the dtype `stored` represents all numbers of `saved`, as float64 does for float32."""
    is_wider = saved.is_floating_point and stored.is_floating_point and stored.itemsize > saved.itemsize
    return saved == stored or is_wider


def _other_ties(program: Program, manifest: Manifest) -> Iterator[str]:
    """Yield parameters with other ties than when they were saved."""
    saved: Mapping[str, Any] | None = manifest.about.get("names")
    if saved is None:
        return
    for spec in program.params:
        was = set(saved.get(spec.name, [spec.name]))
        if was != set(spec.aliases) and fqn(spec.name, "") in manifest.tensors:
            yield f"{spec.name} was tied to {_ties(was - {spec.name})}, now to {_ties({*spec.aliases} - {spec.name})}"


def _ties(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _other_atoms(program: Program, manifest: Manifest) -> Iterator[str]:
    """Yield parameters of the same shape but with other atoms: 4 heads of 8 are not 8 heads of 4."""
    saved: Mapping[str, Any] = manifest.about.get("model", {})
    for name, entry in about_model(program).items():
        was = saved.get(name)
        if was is not None and _plain(was["dims"]) != _plain(entry["dims"]):
            yield f"{name} was {_plain(was['dims'])}, now {_plain(entry['dims'])}"


def _other_operators(program: Program, manifest: Manifest) -> Iterator[str]:
    """Yield the first module that computed something else; only warn if torch has another version, which may
    trace differently.
    """
    saved: Mapping[str, str] = manifest.about.get("prints", {})
    prints = module_hashes(program)
    module = next((module for module, text in prints.items() if saved.get(module, text) != text), None)
    if module is None:
        return
    text = f"{module or 'the model'} was made of other operators, or other numbers in them"
    if manifest.about["torch"] == torch.__version__:
        yield text
    else:
        warnings.warn(f"{SITE}: {text}, with torch {manifest.about['torch']}", stacklevel=2)


def _plain(dims: Any) -> Any:
    """Return nested sequences as lists."""
    return [_plain(item) for item in dims] if isinstance(dims, (list, tuple)) else dims


def _check_seed(program: Program, manifest: Manifest, strict: bool) -> None:
    """Raise PlanError if dropout would draw other masks than before."""
    seed = manifest.about.get("seed", program.seed)
    if strict and program.dropouts and seed != program.seed:
        fact = f"was saved with seed={seed}, and dropout masks would now be drawn with seed={program.seed}"
        raise PlanError(SITE, fact, f"parallelize(..., seed={seed}); or strict=False")


def check_optimizer_state(program: Program, manifest: Manifest) -> None:
    """Raise PlanError if the state of some parameters of the optimizer has been lost."""
    record = manifest.optimizer or {}
    known = {*manifest.state, *manifest.values}
    # Frozen parameters have no state; an optimizer without any was saved before its first step, or needs
    # none.
    frozen = {spec.name for spec in program.params if not spec.requires_grad}
    names = [name for group in record.get("groups", ()) for name in group["params"]]
    lost = [name for name in names if name not in known | frozen | {*record.get("stateless", ())}]
    if known and lost:
        fact = f"has no optimizer state of {_some(lost)}, only of other parameters"
        raise PlanError(SITE, fact, "another checkpoint; or load without optimizer=, and strict=False")


def check_fingerprint(checkpoint: Checkpoint, params: RankParameters) -> None:
    """Raise RuntimeFault if any bit of the weights differs from the saved ones; a collective of all ranks.

    Weights whose dtype or names have changed cannot be compared.
    """
    saved = checkpoint.manifest.about.get("fingerprint")
    specs = params.program.params
    is_same = all(_is_as_saved(spec, checkpoint.manifest) for spec in specs)
    if saved is None or not is_same:
        return
    found = fingerprint_of_model(params)
    if found != saved:
        fact = f"the weights have the fingerprint {found} after loading, not {saved} as when they were saved"
        raise RuntimeFault(f"{SITE}: {checkpoint.path}", fact, "load the checkpoint before it, and report it")


def _is_as_saved(spec: ParamSpec, manifest: Manifest) -> bool:
    """Tell whether a parameter was saved under its name, in the dtype in which it is stored."""
    record = manifest.tensors.get(fqn(spec.name, ""))
    known = manifest.about.get("model", {})
    return record is not None and record.dtype == spec.storage.dtype and spec.name in known


class Restoration:
    """The part of one rank in loading a checkpoint; `state` is the optimizer's, None to leave it unchanged.

    `homes` has the parameters that are stepped as a whole; the state of one is read by its home alone.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        params: RankParameters,
        state: OptimizerState | None,
        homes: Mapping[str, torch.Tensor | None] | None = None,
    ) -> None:
        self.checkpoint, self.params, self.state, self.homes = checkpoint, params, state, homes or {}
        self._at_home = {name: x for name, x in self.homes.items() if x is not None}
        self._specs = {spec.name: spec for spec in params.specs}
        self._reader = checkpoint.reader()
        manifest = checkpoint.manifest
        self._keys: dict[str, list[str]] = {}
        self._others: dict[str, list[str]] = {}
        for spec in params.specs if state is not None else ():
            if spec.name in self.homes:
                continue
            self._keys[spec.name], self._others[spec.name] = split_keys(manifest, spec)
        # The tensors of this rank, by parameter and key.
        self._into: dict[tuple[str, str], torch.Tensor] = {}
        self._small: dict[tuple[str, str], torch.Tensor] = {}
        self._shares = lru_cache(self._share)

    @property
    def nbytes(self) -> int:
        """The number of bytes that this rank has read."""
        return self._reader.nbytes

    def read(self) -> None:
        """Read this rank's share into its storage; RuntimeFault if a file was changed."""
        # A pending gather would overwrite the loaded values.
        self.params.wait()
        for name, stored in self.params.stored.items():
            # An alias, so that this is not mistaken for edits by the user, which would differ from rank to
            # rank.
            self._into[name, ""] = alias(stored)
            for key in self._keys.get(name, ()):
                self._into[name, key] = self._moment(name, key, stored)
        shares = self._shares(self.params.world.pipeline_rank)
        mine = self.params.world.rank
        wants = [self._want(item) for item in shares.items[mine] if self._has(item)]
        small = []
        for name, first in shares.first.items():
            for key in self._others.get(name, ()) if first == mine else ():
                record = self.checkpoint.manifest.tensors[fqn(name, key)]
                x = torch.empty(record.shape, dtype=dtype_of(record.dtype), device="cpu")
                self._small[name, key] = x
                small.append(Want(fqn(name, key), (0,) * x.dim(), x))
        self._reader.fill([*wants, *small, *self._wants_at_home()])

    def _wants_at_home(self) -> Iterator[Want]:
        """Yield the state of the parameters whose home this rank is, in new tensors."""
        manifest = self.checkpoint.manifest
        for name, home in self._at_home.items():
            for key in manifest.state.get(name, ()):
                record = manifest.tensors[fqn(name, key)]
                # As torch's optimizers load it: a step count stays on the host.
                dtype, device = self._dtype(name, key, home), "cpu" if key == "step" else home.device
                x = self._into[name, key] = torch.zeros(record.shape, dtype=dtype, device=device)
                yield Want(fqn(name, key), (0,) * x.dim(), x)

    def spread(self) -> None:
        """Send the tensors read to the other ranks, and update parameters and optimizer; a collective."""
        world = self.params.world
        self._spread_copies()
        self._spread_tied()
        # Most are single numbers, which are sent much faster than tensors.
        numbers = {name: x if x.dim() else encode(x, SITE) for name, x in self._small.items()}
        for some in world.everyone().gather_objects(numbers, SITE):
            for name, value in some.items():
                self._small[name] = value if isinstance(value, torch.Tensor) else decode(value)
        self._set_state()
        # Otherwise the load would be mistaken for an edit by the user.
        self.params.publish()
        self.params.wait()
        self.params.absorb_edits()

    def _has(self, item: Item) -> bool:
        return fqn(item.name, item.key) in self.checkpoint.manifest.tensors

    def _share(self, pipeline_rank: int) -> Shares:
        # By the sizes in the file, which are the same on all ranks.
        tensors = self.checkpoint.manifest.tensors
        keys = {}
        for name, names in self._keys.items():
            keys[name] = {key: dtype_of(tensors[fqn(name, key)].dtype).itemsize for key in names}
        return share_stage(self.params.program, pipeline_rank, keys)

    def _moment(self, name: str, key: str, stored: torch.Tensor) -> torch.Tensor:
        """Return the tensor of the optimizer's state to fill: the existing one, or a new one."""
        assert self.state is not None
        own = self.state.get(stored, {}).get(key)
        if isinstance(own, torch.Tensor) and own.shape == stored.shape and own.is_contiguous():
            return own
        return torch.zeros(stored.shape, dtype=self._dtype(name, key, stored), device=stored.device)

    def _beside(self, name: str, key: str, stored: torch.Tensor) -> torch.Tensor:
        """Return a tensor of another shape than its parameter: a step count, or statistics of rows."""
        small = self._small[name, key]
        if not small.dim():
            return small.clone()
        return small.to(stored.device, self._dtype(name, key, stored), copy=True)

    def _dtype(self, name: str, key: str, stored: torch.Tensor) -> torch.dtype:
        # Usually in the saved dtype, with the same bits: products of NAdam are float32 for any parameter. But
        # a state in the dtype of its parameter follows it to a wider one, as when torch's optimizers load it.
        tensors = self.checkpoint.manifest.tensors
        saved, parameter = tensors[fqn(name, key)].dtype, tensors.get(fqn(name, ""))
        is_own = key != "step" and parameter is not None and parameter.dtype == saved
        dtype = stored.dtype if is_own else dtype_of(saved)
        return dtype

    def _want(self, item: Item) -> Want:
        part = item.rectangle
        view = view_of(self._into[item.name, item.key], part)
        return Want(fqn(item.name, item.key), part.offsets, view)

    def _spread_copies(self) -> None:
        """Send each share from the rank that read it to those that store the same."""
        world = self.params.world
        mesh = world.mesh
        for rank, items in sorted(self._shares(world.pipeline_rank).items.items()):
            views: dict[tuple[str, ...], list[torch.Tensor]] = {}
            for item in items:
                spec = self._specs[item.name]
                axes = holder_axes(spec, mesh)
                if axes and self._has(item) and rank in holders(spec, mesh, world.rank):
                    view = view_of(self._into[item.name, item.key], item.rectangle)
                    views.setdefault(axes, []).extend(
                        part for _, part in rows_of(view, item.rectangle.offsets, MOST_BYTES)
                    )
            for axes, some in views.items():
                for together in _batches(some):
                    _send(world, axes, rank, together)

    def _spread_tied(self) -> None:
        """Send tied parameters from their first owner to the others, which store the same part."""
        world = self.params.world
        for spec in self.params.specs:
            places = owners(self.params.program, spec)
            if len(places) < 2 or world.pipeline_rank not in places:
                continue
            group = world.owners(places)
            source = group.ranks.index(world.mesh.at_stage(world.rank, places[0]))
            for key in ["", *self._keys.get(spec.name, ())]:
                x = self._into.get((spec.name, key))
                if x is None or fqn(spec.name, key) not in self.checkpoint.manifest.tensors:
                    continue
                for part in x.view(-1).split(MOST_BYTES // x.element_size()):
                    part.copy_(group.broadcast(part, source, f"load {spec.name}"))

    def _set_state(self) -> None:
        """Set the optimizer's state of this rank's parameters; remove entries that the checkpoint does not
        have.
        """
        if self.state is None:
            return
        elsewhere = self.homes.keys() - self._at_home.keys()
        for name, stored in {**self.params.stored, **self._at_home}.items():
            if name in elsewhere:
                continue
            own: dict[str, Any] = {}
            for key in self.checkpoint.manifest.state.get(name, ()):
                if name in self._at_home or key in self._keys[name]:
                    own[key] = self._into[name, key]
                else:
                    own[key] = self._beside(name, key, stored)
            values = self.checkpoint.manifest.values.get(name, {})
            own |= {key: decode(value) for key, value in values.items()}
            if own:
                self.state[stored] = own
            else:
                self.state.pop(stored, None)


def split_keys(manifest: Manifest, spec: ParamSpec) -> tuple[list[str], list[str]]:
    """Return the keys of a parameter's state: tensors of its shape, and others, such as a step count."""
    like: list[str] = []
    others: list[str] = []
    for key in manifest.state.get(spec.name, ()):
        record = manifest.tensors[fqn(spec.name, key)]
        is_like = record.shape == spec.shape and not (key == "step" and not record.shape)
        (like if is_like else others).append(key)
    return like, others


def _batches(views: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield tensors in groups of about `MOST_BYTES`, in order, since a call for each of them would mostly
    wait.
    """
    batch: list[torch.Tensor] = []
    nbytes = 0
    for view in views:
        if batch and nbytes + view.nbytes > MOST_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(view)
        nbytes += view.nbytes
    if batch:
        yield batch


def _send(world: World, axes: tuple[str, ...], source: int, views: Sequence[torch.Tensor]) -> None:
    """Send `views` of rank `source` to the ranks that differ from it along `axes` only; a collective of these
    ranks.
    """
    sizes = [view.nbytes for view in views]
    packed = torch.empty(sum(sizes), dtype=torch.uint8, device=views[0].device)
    if world.rank == source:
        torch.cat([bytes_of(view) for view in views], out=packed)
    received = world.broadcast_from(source, packed, axes, f"{SITE}: copies")
    for view, part in zip(views, received.split(sizes), strict=True) if world.rank != source else ():
        # Cloned, as an element may not begin at any byte.
        view.copy_(part.clone().view(view.dtype).view(view.shape))
