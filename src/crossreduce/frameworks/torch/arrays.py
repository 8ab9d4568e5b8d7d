"""PyTorch: tensors in host memory, which all devices ``cpu:k`` share, and on accelerators.

``array`` detaches tensors, so autograd records no operation of this module. Copies run on the current stream of each
device, like torch's own copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any, Final

import torch
from torch.autograd import forward_ad
from torch.nn.parameter import is_lazy

from ...devices import parse
from ...errors import DeviceError, UnsupportedError, shown
from ...kernels.overlap import overlaps
from ...ops import ALONG_AXIS, DTYPES, ELEMENTWISE, Numbers, ReduceOp
from ...packing import Cut
from ...values import IndexedSlices, TensorSpec
from ..base import Array, Sparse, ThreadModes
from ..numpy.arrays import index_error, numbers_of

_BINARY: Final[dict[ReduceOp, Any]] = {op: getattr(torch, name) for op, name in ELEMENTWISE.items()}
_KINDS: Final = ("cuda", "xpu", "mps")
_NAMES: Final[dict[Any, str]] = {getattr(torch, name): name for name in DTYPES}
DTYPES_BY_NAME: Final[dict[str, Any]] = {name: dtype for dtype, name in _NAMES.items()}
# Bound once, since `is_transformed` runs in every call.
_interpreter: Final = torch._C._functorch.peek_interpreter_stack
_dispatch_modes: Final = torch._C._len_torch_dispatch_stack
_is_jit_tracing: Final = torch._C._is_tracing
_PROXY: Final = torch._C._TorchDispatchModeKey.PROXY
_is_of_func: Final = torch._C._functorch.is_functorch_wrapped_tensor
_is_tracked_by_func: Final = torch._C._functorch.is_gradtrackingtensor
# torch can store and copy these dtypes, but has no kernels for their sums, minima and maxima.
_WITHOUT_KERNELS: Final = frozenset({"uint16", "uint32", "uint64"})


@lru_cache(maxsize=1024)
def _numbers(op: ReduceOp, dtype: str, count: int, default: Any) -> Numbers:
    """Return how torch computes an op over ``count`` components. ``default`` is torch's default dtype."""
    if dtype in _WITHOUT_KERNELS:
        remedy = "cast to a signed integer that is wide enough, such as torch.int64"
        raise UnsupportedError.of(f"PyTorch cannot compute with {dtype}.", f"op {op.value}, dtype {dtype}", remedy)
    return numbers_of(op, dtype, count, _NAMES[default])


@lru_cache(maxsize=4096)
def _place(device: str) -> Any:
    """Return the physical ``torch.device`` of a canonical name."""
    place = parse(device)
    return torch.device("cpu") if place.kind == "cpu" else torch.device(place.kind, place.index)


def _count(kind: str) -> int:
    module = getattr(torch, kind, None) if kind in _KINDS else None
    return 0 if module is None else int(module.device_count())


@lru_cache(maxsize=1024)
def _require(devices: tuple[str, ...]) -> None:
    """Raise a ``DeviceError`` if torch lacks one of these devices."""
    for device in devices:
        place = parse(device)
        if place.host or (place.kind != "cpu" and place.index >= _count(place.kind)):
            here = [f"{kind}:{index}" for kind in _KINDS for index in range(_count(kind))]
            without = place.kind == "cuda" and torch.version.cuda is None and torch.version.hip is None
            raise DeviceError.of(
                f"PyTorch has no such device in this process{': it was built without CUDA' if without else ''}.",
                device,
                ", ".join(['"cpu:0", "cpu:1", ... (all host memory)', *(f'"{name}"' for name in here)])
                + (f'; "{here[0]}#1" is a second logical device on {here[0]}' if here else ""),
            )


class Torch:
    """The ``Framework`` of PyTorch tensors and parameters."""

    name = "torch"
    times = staticmethod(torch.mul)
    writes_variables = True

    def array(self, value: Any) -> Array | Sparse:
        if isinstance(value, IndexedSlices):
            return Sparse("IndexedSlices", self._plain(value.values), self._plain(value.indices), value.dense_shape)
        if isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo:
            # Do not coalesce the tensor: that would sort, and to_dense sums the values of equal indices anyway.
            value = value.detach()
            return Sparse("torch.sparse_coo", self._plain(value._values()), value._indices().t(), tuple(value.shape))
        return self._plain(value)

    def _plain(self, value: Any) -> Array:
        plain = isinstance(value, torch.Tensor) and value.layout is torch.strided and value.dtype in _NAMES
        if not plain or value.is_meta or value.is_nested or is_lazy(value) or _has_no_elements(value):
            raise _unsupported_error(value)
        if type(value) is not torch.Tensor or (value.requires_grad and not _is_tracked_by_func(value)):
            value = value.detach().as_subclass(torch.Tensor)
        if value.is_conj() or value.is_neg():
            value = value.resolve_conj().resolve_neg()
        return value

    def spec(self, x: Array) -> TensorSpec:
        return TensorSpec(tuple(x.shape), _NAMES[x.dtype])

    def uniform(self, values: tuple[Any, ...]) -> TensorSpec | None:
        first = values[0]
        if type(first) is not torch.Tensor or first.dtype not in _NAMES or first.is_nested:
            return None
        dtype, shape = first.dtype, first.shape
        for x in values:
            if type(x) is not torch.Tensor or x.dtype is not dtype or x.is_nested or x.shape != shape:
                return None
            if not x.is_cpu or x.requires_grad or x.is_conj() or x.is_neg() or x.layout is not torch.strided:
                return None
        return TensorSpec(tuple(shape), _NAMES[dtype])

    def require(self, devices: tuple[str, ...]) -> None:
        _require(devices)

    def numbers(self, op: ReduceOp, dtype: str, count: int) -> Numbers:
        # torch's true division of integers returns the default dtype, which may change between calls.
        return _numbers(op, dtype, count, torch.get_default_dtype())

    def to_device(self, x: Array, device: str) -> Array:
        place = _place(device)
        return x if x.device == place else x.to(place)

    def pack(self, xs: Sequence[Array]) -> Array:
        if len(xs) == 1:  # lazy zeros have no memory, and cannot be written into
            return xs[0].reshape(-1).clone() if torch._is_zerotensor(xs[0]) else xs[0].reshape(-1)
        return torch.cat([x.reshape(-1) for x in xs])

    def slice(self, flat: Array, start: int, stop: int) -> Array:
        return flat[start:stop]

    def combine(self, xs: Sequence[Array], numbers: Numbers, final: bool, donated: int) -> Array:
        binary, wide = _BINARY[numbers.op], DTYPES_BY_NAME[numbers.accumulator]
        if wide.is_complex and binary is torch.add:
            # torch adds a + 1 * b with a complex 1. So if one part of b is NaN or inf, both parts of the sum are NaN.
            # Add real and imaginary parts as real numbers instead.
            part = _NAMES[wide.to_real()]
            real = numbers._replace(dtype=part, accumulator=part, result=part)
            return torch.view_as_complex(self.combine([torch.view_as_real(x) for x in xs], real, final, donated))
        in_place = not is_transformed()  # torch.func rejects the argument out
        first = xs[0].to(wide)
        target = xs[donated] if donated >= 0 else None if first is xs[0] else first
        out = binary(first, xs[1], out=target if in_place else None)
        for x in xs[2:]:
            out = binary(out, x, out=out if in_place else None)
        if final:
            if numbers.divisor != 1:
                _divide_in_place(out, numbers.divisor)
            return out.to(DTYPES_BY_NAME[numbers.result])
        return out

    def finish(self, x: Array, numbers: Numbers) -> Array:
        if numbers.divisor != 1:
            x = x.to(DTYPES_BY_NAME[numbers.accumulator], copy=True)
            _divide_in_place(x, numbers.divisor)
        return x.to(DTYPES_BY_NAME[numbers.result])

    def unpack(self, parts: Sequence[Array], cuts: tuple[Cut, ...], fresh: bool) -> list[Array]:
        if fresh and len(parts) == len(cuts) == 1:
            return [parts[0].view(cuts[0][0])]
        # The pieces tile each part in order, so one split returns views of all of them.
        sizes: list[list[int]] = [[] for _ in parts]
        for _, pieces in cuts:
            for part, start, stop in pieces:
                sizes[part].append(stop - start)
        views = [iter(part.split(part_sizes)) for part, part_sizes in zip(parts, sizes, strict=True)]
        tensors = []
        for shape, pieces in cuts:
            if len(pieces) == 1:
                tensors.append(next(views[pieces[0][0]]).view(shape).clone(memory_format=torch.contiguous_format))
            else:
                tensors.append(torch.cat([next(views[part]) for part, _, _ in pieces]).view(shape))
        return tensors

    def clone(self, x: Array) -> Array:
        return x.clone(memory_format=torch.contiguous_format)

    def concat(self, xs: Sequence[Array], axis: int) -> Array:
        return torch.cat(list(xs), dim=axis)

    def require_alike(self, xs: Sequence[Array], spec: TensorSpec) -> list[Array]:
        return list(xs)  # without tracing every shape is known

    def to_dense(self, sparse: Sparse, shape: tuple[int, ...], dtype: str) -> Array:
        values, indices = sparse.values, sparse.indices
        columns = indices.long().reshape(len(indices), indices.shape[1] if indices.ndim > 1 else 1).unbind(1)
        rows = torch.zeros_like(columns[0])
        for axis, column in enumerate(columns):
            if column.numel() and (column.min() < 0 or column.max() >= shape[axis]):
                raise index_error(int(column.min()), int(column.max()), shape[axis:])
            rows = rows * shape[axis] + column
        values = values.to(DTYPES_BY_NAME[dtype])
        out = values.new_zeros((math.prod(shape[: len(columns)]), *shape[len(columns) :]))
        # The order of additions must be fixed: index_put_ adds in parallel on the host, and index_add_ on accelerators.
        if out.device.type == "cpu":
            out.index_add_(0, rows, values)
        else:
            out.index_put_((rows,), values, accumulate=True)
        return out.view(shape)

    def rebuild_sparse(self, sparse: Sparse) -> Any:
        if sparse.kind == "IndexedSlices":
            return IndexedSlices(sparse.values, sparse.indices, sparse.shape)
        return torch.sparse_coo_tensor(sparse.indices.t(), sparse.values, sparse.shape, check_invariants=False)

    def writable_array(self, value: Any, device: str) -> Array:
        x = self._plain(value)
        problem = ""
        if x.device != _place(device):
            problem = "results need tensors that are on their destination."
        elif is_transformed():
            problem = "results cannot be written into tensors while torch transforms, traces or compiles."
        elif has_no_memory(x):
            problem = "results need tensors that have memory."
        elif is_frozen(value):
            problem = "results cannot be written into tensors of an inference mode that has ended."
        if problem:
            remedy = "torch.empty(shape, dtype=..., device=...), outside torch.func, dispatch and inference modes"
            raise UnsupportedError.of(problem, f"{type(value).__name__} on {value.device}, for {device}", remedy)
        if x.data_ptr() != value.data_ptr() or not x.is_contiguous():
            fault = "without a pending conjugation or negation" if value.is_contiguous() else "that are contiguous"
            problem = f"results need tensors {fault}."
            given = f"{TensorSpec(tuple(value.shape), _NAMES[value.dtype])}, strides {tuple(value.stride())}"
            raise UnsupportedError.of(problem, given, "torch.empty(shape, dtype=...)")
        return x

    def memory_range(self, x: Array) -> tuple[int, int, bool]:
        start = x.data_ptr()
        if x.is_contiguous() or not x.numel():
            return start, start + x.nbytes, bool(x.is_contiguous())
        last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        return start, start + (last + 1) * x.element_size(), False

    def write(self, target: Array, x: Array) -> None:
        target.copy_(x)

    def accelerators(self) -> tuple[str, ...]:
        return tuple(f"{kind}:{index}" for kind in _KINDS for index in range(_count(kind)))

    def thread_modes(self) -> ThreadModes:
        inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        default = torch.get_default_device()
        casts = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in ("cpu", "cuda", "xpu")  # not mps, which torch 2.4's autocast functions reject
            if torch.is_autocast_enabled(kind)
        ]

        # A thread that uses the caller's streams needs no synchronization with the caller.
        streams = [torch.cuda.current_stream(k) for k in range(_count("cuda"))] if torch.cuda.is_initialized() else []

        @contextmanager
        def within(device: str) -> Iterator[None]:
            place = parse(device)
            here = place.kind != "cpu" and place.index < _count(place.kind)  # it is an accelerator of torch
            with ExitStack() as stack:
                if here and place.kind == "cuda":
                    stack.enter_context(torch.cuda.device(place.index))
                    if streams:
                        stack.enter_context(torch.cuda.stream(streams[place.index]))
                if default.type != "cpu":  # torch.device is also a context: new tensors are made on it
                    stack.enter_context(_place(device) if here and default.type == place.kind else default)
                stack.enter_context(torch.inference_mode() if inference else torch.set_grad_enabled(grad))
                for kind, dtype, cached in casts:
                    stack.enter_context(torch.autocast(kind, dtype, cache_enabled=cached))
                yield

        return within

    def is_recorded(self, x: Any) -> bool:
        if is_transformed():
            problem = "tensors that torch transforms, traces or compiles cannot be reduced across threads."
            remedy = "reduce outside of it: the result of torch.func.grad, not the function that it differentiates"
            raise UnsupportedError.of(problem, f"a {type(x).__name__} inside such a transformation", remedy)
        if not torch.is_grad_enabled():
            return False
        if isinstance(x, torch.Tensor) and x.layout is torch.strided:
            return bool(x.requires_grad)
        parts = (x.values, x.indices) if isinstance(x, IndexedSlices) else (x,)
        if any(isinstance(part, torch.Tensor) and part.requires_grad for part in parts):
            problem = "an all-reduce of sparse values has no gradient."
            raise UnsupportedError.of(problem, shown(x), "tensor.detach(), or dense values")
        return False

    def differentiable(
        self, xs: Sequence[Array], results: Sequence[Array], gradient: Callable[[Sequence[Array]], Sequence[Array]]
    ) -> list[Array]:
        # autograd cannot save a result for a later backward if the thread that computed it was in inference mode.
        saveable = [x.clone() if x.is_inference() else x for x in results]
        return list(_AcrossReplicas.apply(gradient, saveable, *xs))

    def variable_values(self, olds: Sequence[Array] | None, xs: Sequence[Array], devices: Sequence[str]) -> list[Array]:
        if olds is None:
            return [self.clone(x) for x in xs]
        # Keep the old tensors, since an optimizer may refer to them.
        targets = list(map(self.writable_array, olds, devices))
        ranges = [self.memory_range(target) for target in targets]
        # A value may share memory with a component that is written before the value is read.
        values = [self.clone(x) if overlaps(self.memory_range(x), ranges) else x for x in xs]
        for target, value in zip(targets, values, strict=True):
            self.write(target, value)
        return list(olds)

    def reduce_axis(self, op: ReduceOp, x: Array, axis: int, numbers: Numbers) -> Array:
        dtype = DTYPES_BY_NAME[numbers.accumulator]
        return getattr(torch, ALONG_AXIS[ELEMENTWISE[op]])(x.to(dtype), axis).to(dtype)


class _AcrossReplicas(torch.autograd.Function):  # type: ignore[misc]
    """Records, in one replica's autograd graph, results that were computed from the tensors of all replicas."""

    @staticmethod
    def forward(ctx: Any, gradient: Any, results: list[Array], *_: Array) -> tuple[Array, ...]:
        ctx.gradient = gradient
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Array) -> tuple[Any, ...]:
        return None, None, *ctx.gradient(grads)


def is_transformed() -> bool:
    """Return whether tensors may be tracers, as in torch.func, forward_ad, torch.compile, jit.trace, dispatch modes."""
    return (
        _interpreter() is not None
        or _dispatch_modes() > 0
        or torch.compiler.is_compiling()
        or _is_jit_tracing()
        or forward_ad._current_level >= 0
    )


def is_transformed_at_run_time() -> bool:
    """Return ``is_transformed()`` in half of its time, for code that torch.compile cannot trace."""
    return (
        _interpreter() is not None
        or _dispatch_modes() > 0
        or torch.compiler._is_compiling_flag
        or _is_jit_tracing()
        or forward_ad._current_level >= 0
    )


def is_in_mode() -> bool:
    """Return whether modes of this thread, which other threads lack, change or record the operations on tensors."""
    return _dispatch_modes() > 0 or _interpreter() is not None or _is_jit_tracing()


def is_traced() -> bool:
    """Return whether this thread's operations on tensors are recorded, by make_fx or torch.jit.trace."""
    return (_dispatch_modes() and torch._C._get_dispatch_mode(_PROXY) is not None) or _is_jit_tracing()


def is_frozen(x: Array) -> bool:
    """Return whether a tensor was made in an inference mode that has ended: torch does not allow writes into it."""
    return bool(x.is_inference()) and not torch.is_inference_mode_enabled()


def has_no_memory(x: Array) -> bool:
    """Return whether a tensor has elements but no memory, such as a fake tensor or lazily allocated zeros.

    The address of a part of a storage whose memory was freed is the part's offset.
    """
    return bool(x.data_ptr() == x.storage_offset() * x.element_size() and x.numel())


def _increment_version_of_each(tensors: Sequence[Array]) -> None:
    for x in tensors:
        if not x.is_inference():
            torch.autograd.graph.increment_version(x)


def _version_function() -> Callable[[Sequence[Array]], None]:
    increment: Callable[[Sequence[Array]], None] = torch._C._increment_version
    try:
        increment([])
    except RuntimeError:  # in torch 2.4, which accepts a single tensor only
        return _increment_version_of_each
    return increment


increment_versions: Final = _version_function()
"""Tell autograd that these tensors are written, so that a backward pass that needs their old values fails.

This is what torch.autograd.graph.increment_version calls, after it has wrapped a single tensor in a tuple.
"""


def _has_no_elements(x: Array) -> bool:
    """Return whether a strided tensor wraps other tensors, or has lost the memory of its elements."""
    if _is_of_func(x):  # its memory is that of other tensors, which only its transformation can read
        return _interpreter() is None
    if type(x) is torch.Tensor or type(x) is torch.nn.Parameter:
        return not x.untyped_storage().nbytes() and bool(x.numel())
    return hasattr(x, "__tensor_flatten__") or (not hasattr(x, "fake_mode") and has_no_memory(x))


def _divide_in_place(x: Array, divisor: float) -> None:
    """Divide and round once, so that the mean of n ones is 1."""
    if x.is_complex():  # torch's complex division rounds several times, and turns inf into NaN
        x = torch.view_as_real(x)
    # If the divisor is a Python number, accelerators multiply by its rounded reciprocal, and 41 * (1 / 41) is not 1 in
    # float32. If it is a tensor on the same accelerator, they divide.
    x.div_(divisor if x.device.type == "cpu" else x.new_full((), divisor))


def _unsupported_error(value: Any) -> UnsupportedError:
    """Return the error for a value that cannot be reduced, with the reason and a remedy for its kind."""
    if not isinstance(value, torch.Tensor):
        return UnsupportedError.of("this is not a tensor that can be reduced.", shown(value), "a torch.Tensor")
    # repr(value) may need elements that do not exist.
    given = f"{type(value).__name__}, layout {value.layout}, dtype {value.dtype}, device {value.device}"
    if is_lazy(value):
        return UnsupportedError.of("a lazy parameter has no elements yet.", given, "run the module once")
    if value.is_meta:
        remedy = "module.to_empty(device=...), and then load the values"
        return UnsupportedError.of("meta tensors have no elements.", given, remedy)
    if value.is_quantized:
        return UnsupportedError.of("quantized tensors cannot be reduced.", given, "tensor.dequantize()")
    if value.is_nested:
        remedy = "reduce each of tensor.unbind(), or tensor.values()"
        return UnsupportedError.of("nested tensors cannot be reduced.", given, remedy)
    if hasattr(value, "full_tensor"):
        remedy = "tensor.to_local() or tensor.full_tensor()"
        return UnsupportedError.of("a DTensor is spread over several devices.", given, remedy)
    if value.layout is not torch.strided:
        remedy = "tensor.to_dense()" if "sparse" not in str(value.layout) else "tensor.to_sparse_coo() or .to_dense()"
        return UnsupportedError.of(f"tensors of layout {value.layout} cannot be reduced.", given, remedy)
    if _is_of_func(value):
        remedy = "reduce it inside the function that torch.func transforms, or use the function's result"
        return UnsupportedError.of("a tensor of a transformation by torch.func that has ended.", given, remedy)
    if not value.untyped_storage().nbytes():
        remedy = "use the tensor before its storage is freed, for example by FSDP"
        return UnsupportedError.of("the memory of a tensor's elements was freed.", given, remedy)
    if value.dtype not in _NAMES:
        remedy = "cast to one of " + ", ".join(DTYPES_BY_NAME)
        return UnsupportedError.of(f"arrays of dtype {value.dtype} cannot be reduced.", given, remedy)
    return UnsupportedError.of("this subclass wraps other tensors.", given, "the tensors that it wraps")


FRAMEWORK = Torch()
