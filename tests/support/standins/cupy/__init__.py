"""A stand-in for CuPy on machines without a GPU: the part of CuPy 14 that crossreduce and its tests use.

Arrays of 8 devices are in host memory, and NumPy computes with them. Names, parameters, dtypes and errors are those of
CuPy 14.2.0 (its sources and its wheel). As in CuPy, an operation on an array of another device than the current one
raises an error (as if the devices had no peer access), work is queued on current streams, kernels flush subnormal
float32 numbers to 0, and NaNs lose their payload. ``_machine`` has the memory, and finds work that is not ordered.
"""

import builtins
import ctypes
import inspect
import math

import ml_dtypes  # noqa: F401 - gives NumPy the dtype "bfloat16"
import numpy as np

from . import _machine, cuda

__version__ = "14.2.0"
_CHARS = "?bBhHiIlLqQeEfdFD"


def _dtype(dtype):
    made = np.dtype(dtype)
    if not made.isnative:
        raise ValueError(f"Unsupported dtype {made} with big-endian byte-order")
    if made.char not in _CHARS:
        raise ValueError(f"Unsupported dtype {made}")
    return made


class _Flags:
    def __init__(self, x):
        host = x._layout()
        self.c_contiguous, self.f_contiguous = host.flags.c_contiguous, host.flags.f_contiguous
        self.owndata = x.base is None


class ndarray:  # noqa: N801
    """An array on a device."""

    __array_priority__ = 100
    __hash__ = None

    def __init__(self, shape, dtype=float, memptr=None, strides=None, order="C"):
        self.shape = tuple(int(n) for n in shape) if np.iterable(shape) else (int(shape),)
        self.dtype, self.base = _dtype(dtype), None
        if strides is not None and memptr is None:
            raise ValueError("memptr is required if strides is given.")
        self.size = math.prod(self.shape)
        self.nbytes = self.size * self.dtype.itemsize
        self.data = cuda.alloc(self.nbytes) if memptr is None else memptr
        self.strides = np.ndarray(self.shape, self.dtype, b"\0" * self.nbytes, order=order).strides
        if strides is not None:
            self.strides = tuple(strides)

    def _layout(self):
        """Return NumPy's view of the memory, without waiting for the devices."""
        block = self.data.mem
        if not self.size:
            return np.empty(self.shape, self.dtype)
        memory = (ctypes.c_char * block.nbytes).from_address(block.address)
        return np.ndarray(self.shape, self.dtype, memory, self.data.ptr - block.address, self.strides)

    def _host(self):
        """Return NumPy's view of the memory when all work is done."""
        _machine.synchronize()
        return self._layout()

    def _view_of(self, host):
        """Return a view, given NumPy's view of the same memory."""
        offset = host.__array_interface__["data"][0] - self.data.ptr if host.size and self.size else 0
        made = type(self)(host.shape, host.dtype, self.data + offset, host.strides)
        made.base = self if self.base is None else self.base
        return made

    flags = property(_Flags)
    device = property(lambda self: self.data.device)
    ndim = property(lambda self: len(self.shape))
    itemsize = property(lambda self: self.dtype.itemsize)
    T = property(lambda self: self._view_of(self._layout().T))
    real = property(lambda self: self._view_of(self._layout().real))
    imag = property(lambda self: self._view_of(self._layout().imag))

    @property
    def __cuda_array_interface__(self):
        strides = None if self.flags.c_contiguous else self.strides
        made = {"shape": self.shape, "typestr": self.dtype.str, "descr": self.dtype.descr, "version": 3}
        return made | {"strides": strides, "data": (self.data.ptr, False), "stream": 1}

    def astype(self, dtype, order="K", casting=None, subok=None, copy=True):
        if casting is not None or subok is not None:
            raise TypeError("casting is not supported yet" if casting is not None else "subok is not supported yet")
        dtype = _dtype(dtype)
        layout = self._layout().astype(self.dtype, order=order, copy=False)  # has the order of the result
        if dtype == self.dtype and not copy and (order == "K" or layout.strides == self.strides):
            return self
        made = ndarray(self.shape, dtype, order="F" if layout.flags.fnc else "C")
        if not self.size:  # CuPy checks no device then
            return made
        cuda._launch([self], [made])
        with np.errstate(all="ignore"):
            made._host()[...] = self._host() if dtype == self.dtype else _flush(self._host()).astype(dtype)
        if dtype != self.dtype:
            _finish(made)
        return made

    def copy(self, order="C"):
        if not self.size or self.data.device_id == cuda.runtime.getDevice():
            return self.astype(self.dtype, order=order)
        with cuda._using(self.data.device_id):  # queued on a stream that the copy does not wait for, as in CuPy
            x = self.astype(self.dtype, order=order, copy=False)
        if not (x.flags.c_contiguous or x.flags.f_contiguous):
            raise NotImplementedError("CuPy cannot copy non-contiguous array between devices.")
        made = ndarray(x.shape, x.dtype, order="C" if x.flags.c_contiguous else "F")
        cuda._queue([x], [made])
        made._host()[...] = x._host()
        return made

    def view(self, dtype=None, type=None):  # noqa: A002
        if dtype is not None and inspect.isclass(dtype) and issubclass(dtype, ndarray):
            dtype, type = None, dtype  # noqa: A001
        made = self._view_of(self._layout() if dtype is None else self._layout().view(_dtype(dtype)))
        if type is not None:
            made.__class__ = type
        return made

    def reshape(self, *shape, order="C", copy=None):
        assert (order, copy) == ("C", None), "not in the stand-in"
        shape = shape[0] if len(shape) == 1 else shape
        layout = self._layout()
        if self.size and not np.shares_memory(layout.reshape(shape), layout):
            return self.copy().reshape(shape)
        return self._view_of(layout.reshape(shape))

    def fill(self, value):
        self[...] = value

    def get(self, stream=None, order="C", out=None, blocking=True):
        assert (stream, order, out, blocking) == (None, "C", None, True), "not in the stand-in"
        stream = cuda.get_current_stream()
        with cuda._using(self.data.device_id):
            if not self.flags.c_contiguous:
                with stream:
                    return self.copy().get()
            self.data.mem.access(stream._on(self.data.device_id), False)
            stream.synchronize()
            return self._host().copy()

    def __len__(self):
        return len(self._layout())

    def __array__(self, dtype=None):
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. "
            "Please use `.get()` to construct a NumPy array explicitly."
        )

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
            found = self._layout()[index]
            return self._view_of(found if isinstance(found, np.ndarray) else self._layout()[(*index, ...)])
        layout = self._layout()[index]
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

    def max(self, axis=None, out=None, keepdims=False):
        return _reduced(np.max, self, axis, keepdims, self.dtype)

    def min(self, axis=None, out=None, keepdims=False):
        return _reduced(np.min, self, axis, keepdims, self.dtype)

    def sum(self, axis=None, dtype=None, out=None, keepdims=False):
        return _reduced(np.sum, self, axis, keepdims, dtype)

    def prod(self, axis=None, dtype=None, out=None, keepdims=False):
        return _reduced(np.prod, self, axis, keepdims, dtype)

    def __matmul__(self, other):
        made = ndarray((self._layout() @ other._layout()).shape, self.dtype)
        cuda._launch([self, other], [made])
        made._host()[...] = self._host() @ other._host()
        return made


def _reduced(function, x, axis, keepdims, dtype):
    typed = {} if function in (np.max, np.min) or dtype is None else {"dtype": dtype}
    found = np.asarray(function(_flush(x._host()), axis=axis, keepdims=keepdims, **typed))
    made = ndarray(found.shape, found.dtype)
    cuda._launch([x], [made])
    made._host()[...] = found
    return _finish(made)


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
        self.nin = len(types[0].partition("->")[0])

    def _loop(self, args, dtype):
        # As in CuPy, division in a given dtype does not use the integers' function.
        for signature in self.types if dtype is None else [c for c in self.types if c != "qq->d"]:
            given, result = ([np.dtype("bfloat16" if c == "E" else c) for c in cs] for cs in signature.split("->"))
            if result[0] == dtype if dtype is not None else all(map(_can_cast, args, given)):
                return given, result[0]
        raise TypeError(f"Wrong type ({dtype or [x.dtype for x in args]}) of arguments for {self.name}")

    def __call__(self, *args, **kwargs):
        out, dtype = kwargs.pop("out", None), kwargs.pop("dtype", None)
        casting = kwargs.pop("casting", "same_kind")
        if kwargs:
            raise TypeError(f"Wrong arguments {kwargs}")
        if len(args) != self.nin:
            raise TypeError(f"Wrong number of arguments for {self.name!r}.")
        out = out[0] if isinstance(out, tuple) else out
        for x in args:
            if isinstance(x, np.ndarray):
                raise TypeError(f"Unsupported type {type(x)}")
        given, result = self._loop(args, None if dtype is None else np.dtype(dtype))
        arrays = [x for x in args if isinstance(x, ndarray)]
        shape = np.broadcast_shapes(*(x.shape for x in arrays))
        if out is None:
            out = ndarray(shape, result)
            out.__class__ = next((type(x) for x in arrays if type(x) is not ndarray), ndarray)
        elif not np.can_cast(result, out.dtype, casting):
            raise TypeError(f"Cannot cast output from {result!r} to {out.dtype!r} according to the rule '{casting}'")
        elif out.shape != shape:
            raise ValueError("Out shape is mismatched")
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


def array(obj, dtype=None, copy=True, order="K", subok=False, ndmin=0, *, blocking=False):
    """Return an array on the current device."""
    assert (subok, ndmin, blocking) == (False, 0, False), "not in the stand-in"
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


def asarray(a, dtype=None, order=None, *, copy=None, blocking=False):
    """Return an array on the current device: the same one, if it is there."""
    return array(a, dtype, copy, order or "K", blocking=blocking)


def asnumpy(a, stream=None, order="C", out=None, *, blocking=True):
    """Return an array as a NumPy array."""
    return a.get(stream, order, out, blocking) if isinstance(a, ndarray) else np.asarray(a, order=order)


def empty(shape, dtype=float, order="C"):
    """Return a new array that is not written."""
    return ndarray(shape, dtype, order=order)


def full(shape, fill_value, dtype=None, order="C"):
    """Return a new array of one number."""
    made = ndarray(shape, np.asarray(fill_value).dtype if dtype is None else dtype, order=order)
    made.fill(fill_value)
    return made


def zeros(shape, dtype=float, order="C"):
    """Return a new array of zeros."""
    return full(shape, 0, dtype, order)


def concatenate(tup, axis=0, out=None, *, dtype=None, casting="same_kind"):
    """Join arrays of the current device along an axis."""
    assert (out, dtype, casting) == (None, None, "same_kind"), "not in the stand-in"
    if axis is None:
        tup, axis = [x.reshape(-1) for x in tup], 0
    for x in tup:
        if not isinstance(x, ndarray):
            raise TypeError("Only cupy arrays can be concatenated")
        if not x.ndim:
            raise TypeError("zero-dimensional arrays cannot be concatenated")
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
    return a.data.ptr + low, a.data.ptr + high + a.itemsize


def sum(a, axis=None, dtype=None, out=None, keepdims=False):  # noqa: A001
    """Return the sum along an axis."""
    return a.sum(axis, dtype, out, keepdims)


def prod(a, axis=None, dtype=None, out=None, keepdims=False):
    """Return the product along an axis."""
    return a.prod(axis, dtype, out, keepdims)


def amin(a, axis=None, out=None, keepdims=False):
    """Return the minimum along an axis."""
    return a.min(axis, out, keepdims)


def amax(a, axis=None, out=None, keepdims=False):
    """Return the maximum along an axis."""
    return a.max(axis, out, keepdims)


def get_default_memory_pool():
    """Return CuPy's pool of device memory."""
    return cuda._pool
