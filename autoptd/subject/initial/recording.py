"""Record the operators of a constructor on fake tensors, which take no memory.

In: a constructor that runs under a `Recording`. Out: its operators on a tape, to make its tensors later.

    recording = Recording(seed=0)
    with recording.open():
        model = nn.Linear(8, 8)
    Replay(recording.tape, keys).make([recording.place_of(model.weight)])

The fake tensors stay bound to their recording, which continues: `model.half()` is recorded as well. But after
the block nothing can be drawn, and values cannot be read. If the constructor itself reads values (`.item()`,
the shape of `x.nonzero()`), the operands are made immediately.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autoptd.compat import (
    DATA_DEPENDENT,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    tree_leaves,
    tree_map,
    without_modes,
)
from autoptd.errors import PlanError
from autoptd.ir.buffers import bytes_of
from autoptd.subject.initial.tape import Constant, Draw, Place, Replay, Step, Streams, Tape

aten = torch.ops.aten
SITE = "autoptd.deferred"
# In-place operators that do not read what they write to.
OVERWRITING = {
    aten.bernoulli_.float,
    aten.cauchy_.default,
    aten.copy_.default,
    aten.exponential_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.geometric_.default,
    aten.log_normal_.default,
    aten.normal_.default,
    aten.random_.default,
    aten.random_.to,
    getattr(aten.random_, "from"),
    aten.uniform_.default,
    aten.zero_.default,
}
# In torch.nn.init: draws until all numbers are accepted, which is recorded as one operator.
UNTIL_ACCEPTED = "_no_grad_trunc_normal_"


class Recording(FakeTensorMode):
    """A mode that records operators on its fake tensors; with `order`, draws follow one another as in torch."""

    def __init__(self, seed: int = 0, *, order: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.tape = Tape(seed, order)
        self._numbers: dict[int, int] = {}
        # Kept alive: another storage at the same address would be mistaken for one of them.
        self._storages: list[torch.UntypedStorage] = []
        # While the constructor runs.
        self._streams: Streams | None = None
        # By id: tensors with values that were read, and copies of them.
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}
        # By address: storages that began as copies of memory outside of torch.
        self._arrays: dict[int, list[int]] = {}
        self._is_inside = False
        # For values that the constructor reads: it keeps the states of streams.
        self._replay = Replay(self.tape, {})

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        # Copies of its tensors are tensors of the same recording.
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        remedy = "model = autoptd.materialize(model), or pm.save(folder)"
        raise PlanError(SITE, "a deferred model has no values that could be saved", remedy)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Record what runs in a `with` block."""
        streams = self._streams = Streams(self.tape.seed)
        # One list, which grows.
        self.tape.roots = streams.roots
        try:
            with self._as_one_operator(), _Arrays(), self:
                self._warn_at_once()
                yield
            self._check_seen()
            self._check_arrays()
        finally:
            self._streams = None
            self._seen.clear()
            self._arrays.clear()
            # It holds the values that were read last.
            self._replay = Replay(self.tape, {})
            streams.close()

    def _warn_at_once(self) -> None:
        """Trigger a warning that torch gives once, when `copy.deepcopy` asks a fake tensor for its address."""
        self._is_inside = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.empty(1).data_ptr()
        self._is_inside = False

    def place_of(self, x: Tensor) -> Place:
        """Return where a fake tensor of this recording lies."""
        if x.layout != torch.strided:
            fact = f"a constructor makes a tensor of layout {x.layout}"
            raise PlanError(SITE, fact, "dense tensors, or build the model on a real device")
        tape, storage = self.tape, x.untyped_storage()
        number = self._numbers.get(storage._cdata)
        if number is None:
            number = self._numbers[storage._cdata] = len(self._storages)
            self._storages.append(storage)
            tape.sizes.append(0)
            tape.writers.append([])
        tape.sizes[number] = max(tape.sizes[number], storage.nbytes())
        size, stride = tuple(x.shape), tuple(x.stride())
        return Place(number, x.dtype, size, stride, int(x.storage_offset()), x.is_conj(), x.is_neg())

    def __torch_dispatch__(  # type: ignore[override]
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        # The parts of an operator are not operators of the constructor.
        if self._is_inside:
            return super().__torch_dispatch__(func, types, args, kwargs)
        self._is_inside = True
        try:
            return self._run(func, types, args, kwargs)
        finally:
            self._is_inside = False
            # Weak references to fakes, with which torch refuses `module.to(dtype)`.
            self.fake_tensor_converter.tensor_memo.clear()

    def _run(self, func: OpOverload, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lifted = args[0] if func is aten.lift_fresh.default else None
        if lifted is not None:
            # A tensor of torch.tensor or NumPy. Lifted, it would be a constant, whose operators torch does
            # not show.
            func = aten.clone.default
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        written = _written(func, args, kwargs)
        is_draw = torch.Tag.nondeterministic_seeded in func.tags
        is_real = bool(tensors) and not any(isinstance(x, FakeTensor) for x in tensors)
        # A view of a tensor from outside must stay one.
        if is_real and not is_draw and (written or func.is_view):
            with without_modes():
                return func(*args, **kwargs)
        for x in written:
            if not isinstance(x, FakeTensor):
                fact = (
                    f"{func} writes to a tensor of shape {tuple(x.shape)} that was made outside of the block"
                )
                raise PlanError(SITE, fact, "make it in the block, or .clone() it there")
        # Before it runs, since an operator may change the strides of an operand.
        operands = self._encode(args), self._encode(kwargs)
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except DATA_DEPENDENT:
            result = self._answer(func, *operands)
        draw = (kwargs.get("generator"),) if is_draw else None
        self._record(func, *operands, tree_leaves(result), written, draw)
        # torch can resize its own memory, but not an array's.
        if lifted is not None and not (memory := lifted.untyped_storage()).resizable() and memory.nbytes():
            made = self.place_of(result)  # type: ignore[arg-type]
            self._arrays.setdefault(memory.data_ptr(), []).append(made.storage)
        return result

    def _encode(self, operands: Any) -> Any:
        """Return operands in recorded form."""

        def encode(x: Any) -> Any:
            if isinstance(x, FakeTensor):
                if x.fake_mode is not self:
                    fact = "one operator uses tensors of two deferred blocks"
                    raise PlanError(SITE, fact, "build both in one block, or materialize one of them")
                return self.place_of(x)
            if isinstance(x, Tensor):
                return Constant(self._copy_of(x))
            # A replay has its own.
            return None if isinstance(x, torch.Generator) else x

        return tree_map(encode, operands)

    def _copy_of(self, x: Tensor) -> Tensor:
        with without_modes():
            _, copy = self._seen.get(id(x), (x, None))
            if copy is None or not _is_same(x, copy):
                copy = x.detach().clone()
            if self._streams is not None:
                self._seen[id(x)] = x, copy
        return copy

    def _check_seen(self) -> None:
        """Refuse a constructor that changes values after torch has read them, such as the NumPy array of a
        tensor.
        """
        with without_modes():
            changed = [x for x, copy in self._seen.values() if not _is_same(x, copy)]
        if changed:
            fact = f"values of shape {tuple(changed[0].shape)} from outside of torch were changed after torch had read them"
            raise PlanError(SITE, fact, "fill an array before it becomes a tensor")

    def _check_arrays(self) -> None:
        """Refuse writes to tensors that share the memory of one NumPy array."""
        for storages in self._arrays.values():
            # The copy itself is one write.
            is_written = any(len(self.tape.writers[storage]) > 1 for storage in storages)
            if len(storages) > 1 and is_written:
                fact = "two tensors share the memory of one array, and the constructor writes to it"
                raise PlanError(SITE, fact, "torch.tensor(array), which copies it")

    def _record(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        results: list[Any],
        written: list[Tensor],
        draw: tuple[torch.Generator | None] | None,
        is_overwriting: bool = False,
    ) -> None:
        """Put an operator on the tape; `draw` holds its generator, if it draws."""
        made = [x for x in results if isinstance(x, Tensor)]
        if self._streams is not None and any(x.is_meta for x in made):
            fact = "a constructor makes tensors on the meta device, where initialisation does nothing"
            raise PlanError(SITE, fact, "leave device='meta' out: no memory is taken in the block either")
        reads = {x.storage for x in tree_leaves((args, kwargs)) if isinstance(x, Place)}
        places = tuple(self.place_of(x) for x in made)
        writes = {place.storage for place in places} - reads
        covered = set(writes)
        for x in written:
            storage = self.place_of(x).storage
            writes.add(storage)
            others = [other for other in tree_leaves((args[1:], kwargs)) if isinstance(other, Place)]
            is_read = any(other.storage == storage for other in others)
            if (is_overwriting or function in OVERWRITING) and not is_read:
                reads.discard(storage)
                covered |= {storage} if _fills(x) else set()
        if not writes:
            return
        drawn = self._draw(function, *draw) if draw is not None else None
        sets = frozenset(reads), frozenset(writes), frozenset(covered)
        self.tape.add(Step(function, args, kwargs, places, *sets, torch.get_default_dtype(), drawn))

    def _draw(self, function: Callable[..., Any], generator: torch.Generator | None) -> Draw:
        """Record that the next step draws."""
        number, tape = len(self.tape.steps), self.tape
        if self._streams is None:
            fact = f"{function} draws for a deferred model after its block"
            remedy = "draw in the block; to run the model, give it values: autoptd.materialize(model)"
            raise PlanError(SITE, fact, remedy)
        with without_modes():
            draw = self._streams.draw(number, generator)
        if draw.root == 0 and not tape.order and number in self._streams.rewound:
            fact = "the constructor resets torch's random state, but draws by name have no order"
            raise PlanError(SITE, fact, "deferred(seed, order=True), which draws as torch does")
        return draw

    def _answer(self, func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return a result that depends on values: a number, or fake tensors whose sizes depend on values."""
        if self._streams is None:
            fact = f"{func} asks for values of a deferred model, which has none yet"
            raise PlanError(SITE, fact, "model = autoptd.materialize(model)")
        result = self._called(func, args, kwargs)

        def fake(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)

        # Inside an operator, so that allocations here are not recorded.
        with self:
            return tree_map(fake, result)

    def array_of(self, x: Tensor) -> Any:
        """Return the values of a fake tensor as an array of NumPy, which cannot be written to."""
        place = self.place_of(x)
        array = self._called(Tensor.numpy, (place,), {})
        # A write to the tensor's own array would change the tensor.
        array.flags.writeable = False
        return array

    def _called(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a function on real operands. From then on, the values of their draws are fixed."""
        tape = self.tape
        for number in tape.makers({x.storage for x in tree_leaves((args, kwargs)) if isinstance(x, Place)}):
            if tape.is_named(number):
                tape.asked.setdefault(number, len(tape.asked))
        return self._replay.call(func, args, kwargs)

    @contextmanager
    def _as_one_operator(self) -> Iterator[None]:
        """Record the function that draws until all numbers are accepted as one operator."""
        functions = vars(torch.nn.init)
        plain = functions.get(UNTIL_ACCEPTED)
        if plain is None:
            # Another release, where it reads values, which are made for it.
            yield
            return

        def recorded(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not isinstance(tensor, FakeTensor) or tensor.fake_mode is not self:
                return plain(tensor, *args, **kwargs)  # type: ignore[no-any-return]
            generator = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Generator)), None)
            operands = self._encode((tensor, *args)), self._encode(kwargs)
            self._record(plain, *operands, [tensor], [tensor], (generator,), is_overwriting=True)
            return tensor

        functions[UNTIL_ACCEPTED] = recorded
        try:
            yield
        finally:
            functions[UNTIL_ACCEPTED] = plain


class _Arrays(TorchFunctionMode):
    """Returns NumPy arrays of fake tensors, which torch does for real tensors only."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mode = args[0].fake_mode if args and isinstance(args[0], FakeTensor) else None
        if func in (Tensor.numpy, Tensor.__array__) and mode is not None:
            array = mode.array_of(args[0]) if isinstance(mode, Recording) else func(*args)
            dtype = args[1] if func is Tensor.__array__ and len(args) > 1 else None
            return array if dtype is None else array.astype(dtype)
        return func(*args, **(kwargs or {}))


def _written(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator writes to, besides its own results."""
    found = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [x for x in tree_leaves(given) if isinstance(x, Tensor)]
    return found


def _fills(x: Tensor) -> bool:
    """Tell whether a tensor covers every byte of its storage."""
    dims = sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1)
    elements = 1
    for stride, size in dims:
        if stride != elements:
            return False
        elements *= size
    return elements == x.numel() and x.nbytes == x.untyped_storage().nbytes()


def _is_same(x: Tensor, copy: Tensor) -> bool:
    """Tell whether the bits are the same, so that NaN equals itself."""
    return torch.equal(bytes_of(x), bytes_of(copy))
