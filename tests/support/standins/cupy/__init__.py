"""A stand-in for CuPy on machines without a GPU: the part of CuPy 14 that crossreduce and its tests use.

Arrays of 8 devices are in host memory, and NumPy computes with them. Names, parameters, dtypes and errors are those of
CuPy 14.2.0 (its sources and its wheel). As in CuPy, an operation on an array of another device than the current one
raises an error (as if the devices had no peer access), work is queued on current streams, kernels flush subnormal
float32 numbers to 0, and NaNs lose their payload. ``_machine`` has the memory, and finds work that is not ordered.
"""

import builtins
import ctypes
import inspect

import ml_dtypes  # noqa: F401 - gives NumPy the dtype "bfloat16"
import numpy as np

from . import _machine, cuda

__version__ = "14.2.0"
_CHARS = "?bBhHiIlLqQeEfdFD"


def _dtype(dtype):
    made = np.dtype(dtype)
    if made.char not in _CHARS or not made.isnative:
        raise ValueError(f"Unsupported dtype {made}")
    return made


class ndarray:  # noqa: N801
    """An array on a device; ``_layout`` is NumPy's view of the memory, without waiting for the devices."""

    __array_priority__ = 100
    __hash__ = None

    def __init__(self, shape, dtype=float, order="C"):
        plain = np.empty(shape, _dtype(dtype), order)
        self.data, self.base, self._layout = cuda.alloc(plain.nbytes), None, plain
        if plain.size:
            memory = (ctypes.c_char * plain.nbytes).from_address(self.data.ptr)
            self._layout = np.ndarray(plain.shape, plain.dtype, memory, 0, plain.strides)

    def _host(self):
        """Return NumPy's view of the memory when all work is done."""
        _machine.synchronize()
        return self._layout

    def _view_of(self, layout):
        """Return a view, given NumPy's view of the same memory."""
        made = object.__new__(type(self))
        first, own = (x.__array_interface__["data"][0] for x in (layout, self._layout))
        made.data = self.data + (first - own if layout.size and self.size else 0)
        made.base, made._layout = self if self.base is None else self.base, layout
        return made

    dtype = property(lambda self: self._layout.dtype)
    shape = property(lambda self: self._layout.shape)
    strides = property(lambda self: self._layout.strides)
    size = property(lambda self: self._layout.size)
    nbytes = property(lambda self: self._layout.nbytes)
    ndim = property(lambda self: self._layout.ndim)
    flags = property(lambda self: self._layout.flags)
    device = property(lambda self: self.data.device)
    T = property(lambda self: self._view_of(self._layout.T))
    real = property(lambda self: self._view_of(self._layout.real))
    imag = property(lambda self: self._view_of(self._layout.imag))

    def astype(self, dtype, order="K", copy=True):
        dtype = _dtype(dtype)
        layout = self._layout.astype(self.dtype, order=order, copy=False)  # has the order of the result
        if dtype == self.dtype and not copy and (order == "K" or layout.strides == self.strides):
            return self
        made = ndarray(self.shape, dtype, order="F" if layout.flags.fnc else "C")
        if not self.size:  # CuPy checks no device then
            return made
        cuda._launch([self], [made])
        with np.errstate(all="ignore"):
            made._host()[...] = self._host() if dtype == self.dtype else _flush(self._host()).astype(dtype)
        return made if dtype == self.dtype else _finish(made)

    def copy(self, order="C"):
        if not self.size or self.data.device_id == cuda.runtime.getDevice():
            return self.astype(self.dtype, order=order)
        with cuda.Device(self.data.device_id):  # queued on a stream that the copy does not wait for, as in CuPy
            x = self.astype(self.dtype, order=order, copy=False)
        if not (x.flags.c_contiguous or x.flags.f_contiguous):
            raise NotImplementedError("CuPy cannot copy non-contiguous array between devices.")
        made = ndarray(x.shape, x.dtype, order="C" if x.flags.c_contiguous else "F")
        cuda._queue([x], [made])
        made._host()[...] = x._host()
        return made

    def view(self, kind):
        if not (inspect.isclass(kind) and issubclass(kind, ndarray)):
            return self._view_of(self._layout.view(_dtype(kind)))
        made = self._view_of(self._layout)
        made.__class__ = kind
        return made

    def reshape(self, *shape):
        layout = self._layout.reshape(shape[0] if len(shape) == 1 else shape)
        if self.size and not np.shares_memory(layout, self._layout):
            return self.copy().reshape(*shape)
        return self._view_of(layout)

    def get(self):
        stream = cuda.get_current_stream()
        with cuda.Device(self.data.device_id):
            if not self.flags.c_contiguous:
                with stream:
                    return self.copy().get()
            self.data.mem.access(stream._on(self.data.device_id), False)
            stream.synchronize()
            return self._host().copy()

    def __len__(self):
        return len(self._layout)

    def __array__(self, dtype=None):
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        if method != "__call__" or ufunc.__name__ not in _UFUNCS:
            return NotImplemented
        return _UFUNCS[ufunc.__name__](*inputs, **kwargs)

    def __array_function__(self, func, types, args, kwargs):
        return globals()[func.__name__](*args, **kwargs) if func.__name__ in globals() else NotImplemented

    def __deepcopy__(self, memo):
        with self.device:
            return self.copy()

    @staticmethod
    def _indices(slices):
        """Return indices as NumPy's, and the arrays among them on the current device."""
        parts = slices if isinstance(slices, tuple) else (slices,)
        basic = (slice, int, np.integer, type(...), type(None))
        given = [x if isinstance(x, basic) else asarray(x) for x in parts]
        arrays = [x for x in given if isinstance(x, ndarray)]
        return tuple(x._host() if isinstance(x, ndarray) else x for x in given), arrays

    def __getitem__(self, slices):
        index, arrays = self._indices(slices)
        if not arrays:
            found = self._layout[index]
            return self._view_of(found if isinstance(found, np.ndarray) else self._layout[(*index, ...)])
        layout = self._layout[index]
        made = ndarray(layout.shape, self.dtype)
        cuda._launch([self, *arrays], [made])
        made._host()[...] = self._host()[index]
        return made

    def __setitem__(self, slices, value):
        index, arrays = self._indices(slices)
        if isinstance(value, np.ndarray) and value.ndim:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        if not isinstance(value, ndarray):
            cuda._launch(arrays, [self])
            self._host()[index] = value
            return
        if arrays:  # CuPy writes rows that are listed twice in any order
            rows = index[0] if len(index) == 1 else np.stack(np.broadcast_arrays(*index), -1)
            assert len(np.unique(rows, axis=0)) == len(rows), "the order of these writes is not defined"
        target = self if arrays else self[slices]
        if not arrays and target.data.ptr == value.data.ptr and target.strides == value.strides:
            return  # the same memory
        copies = target.flags.c_contiguous and value.dtype == self.dtype and target.shape == value.shape
        whole = not arrays and copies and target.strides == value.strides
        (cuda._queue if whole else cuda._launch)([value, *arrays], [self])
        self._host()[index] = value._host()

    def __matmul__(self, other):
        made = ndarray((self._layout @ other._layout).shape, self.dtype)
        cuda._launch([self, other], [made])
        made._host()[...] = self._host() @ other._host()
        return made


def _parts(host):
    """Return the real numbers of an array, complex ones as two."""
    return (host.real, host.imag) if host.dtype.kind == "c" else (host,)


def _flush(host):
    """Return an array without subnormal float32 numbers. (A bfloat16 becomes a float32 before it is computed with.)"""
    if host.dtype.char not in "fFE":
        return host
    made = host.copy()
    for part in _parts(made):
        part[np.abs(part) < np.finfo(np.float32).tiny] *= 0  # keeps the sign
    return made


def _finish(x):
    """Flush the results of a kernel, and change the payload of NaNs."""
    host = x._host()
    host[...] = _flush(host)
    for part in _parts(host) if host.dtype.kind in "fcV" else ():
        with np.errstate(all="ignore"):
            part[np.isnan(part)] = -np.nan
    return x


class ufunc:  # noqa: N801
    """An elementwise function, with CuPy's types."""

    def __init__(self, name, types, function):
        self.name, self.types, self._function = f"cupy_{name}", types, function

    def _loop(self, args, dtype):
        # As in CuPy, division in a given dtype does not use the integers' function.
        for signature in self.types if dtype is None else [c for c in self.types if c != "qq->d"]:
            given, result = ([np.dtype("bfloat16" if c == "E" else c) for c in cs] for cs in signature.split("->"))
            if result[0] == dtype if dtype is not None else all(map(_can_cast, args, given)):
                return given, result[0]
        raise TypeError(f"Wrong type ({dtype or [x.dtype for x in args]}) of arguments for {self.name}")

    def __call__(self, *args, **kwargs):
        out, dtype = kwargs.pop("out", None), kwargs.pop("dtype", None)
        out = out[0] if isinstance(out, tuple) else out
        if kwargs or any(isinstance(x, np.ndarray) for x in args):
            raise TypeError(f"Wrong arguments of {self.name}: {args}, {kwargs}")
        given, result = self._loop(args, None if dtype is None else np.dtype(dtype))
        arrays = [x for x in args if isinstance(x, ndarray)]
        shape = np.broadcast_shapes(*(x.shape for x in arrays))
        if out is None:
            out = ndarray(shape, result)
            out.__class__ = next((type(x) for x in arrays if type(x) is not ndarray), ndarray)
        elif not np.can_cast(result, out.dtype, "same_kind") or out.shape != shape:
            raise TypeError(f"Cannot write {result!r} of shape {shape} into {out.dtype!r} of shape {out.shape}")
        cuda._launch(arrays, [out])
        with np.errstate(all="ignore"):
            inputs = [x._host() if isinstance(x, ndarray) else np.asarray(x) for x in args]
            made = self._function(*(_flush(x).astype(kind) for x, kind in zip(inputs, given, strict=True)))
            out._host()[...] = made.astype(result).astype(out.dtype)
        return _finish(out)


def _can_cast(x, dtype):
    if isinstance(x, ndarray):
        return np.can_cast(x.dtype, dtype)
    return np.result_type(type(x)(0), dtype) == dtype


_ALL = [f"{c}{c}->{c}" for c in _CHARS]
_DIVIDE = ["qq->d", *(f"{c}{c}->{c}" for c in "eEfdFD")]
_UFUNCS = {
    "add": ufunc("add", _ALL, np.add),
    "subtract": ufunc("subtract", _ALL[1:], np.subtract),
    "multiply": ufunc("multiply", _ALL, np.multiply),
    "minimum": ufunc("minimum", _ALL, np.minimum),
    "maximum": ufunc("maximum", _ALL, np.maximum),
    "true_divide": ufunc("true_divide", _DIVIDE, np.true_divide),
    "exp": ufunc("exp", [f"{c}->{c}" for c in "efd"], np.exp),
    "log": ufunc("log", [f"{c}->{c}" for c in "efd"], np.log),
    "greater": ufunc("greater", [f"{c}{c}->?" for c in _CHARS], np.greater),
    "equal": ufunc("equal", [f"{c}{c}->?" for c in _CHARS], np.equal),
}
_UFUNCS["divide"] = _UFUNCS["true_divide"]
globals().update(_UFUNCS)
for _name, _method in {"add": "add", "subtract": "sub", "multiply": "mul", "true_divide": "truediv"}.items():
    setattr(ndarray, f"__{_method}__", lambda x, y, f=_UFUNCS[_name]: f(x, y))
    setattr(ndarray, f"__r{_method}__", lambda x, y, f=_UFUNCS[_name]: f(y, x))
    setattr(ndarray, f"__i{_method}__", lambda x, y, f=_UFUNCS[_name]: f(x, y, out=x))
ndarray.__gt__ = lambda x, y: _UFUNCS["greater"](x, y)
ndarray.__eq__ = lambda x, y: _UFUNCS["equal"](x, y)


def _reduction(function):
    def reduced(a, axis=None, dtype=None, keepdims=False):
        typed = {} if dtype is None else {"dtype": dtype}
        found = np.asarray(function(_flush(a._host()), axis=axis, keepdims=keepdims, **typed))
        made = ndarray(found.shape, found.dtype)
        cuda._launch([a], [made])
        made._host()[...] = found
        return _finish(made)

    return reduced


sum, prod, amin, amax = map(_reduction, (np.sum, np.prod, np.min, np.max))  # noqa: A001
ndarray.sum, ndarray.prod, ndarray.min, ndarray.max = sum, prod, amin, amax


def array(obj, dtype=None, copy=True, order="K"):
    """Return an array on the current device."""
    if isinstance(obj, ndarray):
        dtype = obj.dtype if dtype is None else dtype
        if obj.data.device_id == cuda.runtime.getDevice():
            return obj.astype(dtype, order=order, copy=bool(copy))
        return obj.copy(order=order).astype(dtype, copy=False)
    host = np.asarray(obj, dtype)
    host = host.astype(host.dtype.newbyteorder("="), copy=False)
    made = ndarray(host.shape, host.dtype)
    cuda._launch([], [made])
    made._host()[...] = host
    return made


def asarray(a, dtype=None, order=None, *, copy=None):
    """Return an array on the current device: the same one, if it is there."""
    return array(a, dtype, copy, order or "K")


def asnumpy(a):
    """Return an array as a NumPy array."""
    return a.get() if isinstance(a, ndarray) else np.asarray(a)


def empty(shape, dtype=float, order="C"):
    """Return a new array that is not written."""
    return ndarray(shape, dtype, order=order)


def zeros(shape, dtype=float, order="C"):
    """Return a new array of zeros."""
    made = ndarray(shape, dtype, order=order)
    made[...] = 0
    return made


def concatenate(tup, axis=0):
    """Join arrays of the current device along an axis."""
    if not all(isinstance(x, ndarray) and x.ndim for x in tup):
        raise TypeError("Only cupy arrays that are not zero-dimensional can be concatenated")
    found = np.concatenate([x._host() for x in tup], axis)
    made = ndarray(found.shape, found.dtype)
    cuda._launch(tup, [made])
    made._host()[...] = found
    return made


def byte_bounds(a):
    """Return the addresses of an array's first byte and of the one after its last."""
    if not a.size:
        return a.data.ptr, a.data.ptr
    reach = [(n - 1) * step for n, step in zip(a.shape, a.strides, strict=True)]
    low, high = (builtins.sum(pick(step, 0) for step in reach) for pick in (min, max))
    return a.data.ptr + low, a.data.ptr + high + a.dtype.itemsize


def get_default_memory_pool():
    """Return CuPy's pool of device memory."""
    return cuda._pool
