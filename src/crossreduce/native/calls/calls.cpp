// The compiled call path: calls that were made before, with arrays of the same dtypes and sizes, run again without a
// Python object or frame per array.
//
// It only recognises: the first call of its kind takes the path in Python, which checks, plans and explains, and then
// adds a prepared call. A later call runs here if everything that the first one depended on is the same: op, options,
// devices, and of every array its class, dtype, sizes, C order and place in host memory. Otherwise, also if results
// share memory with other arrays, this returns None, and the path in Python handles the call.
#include "cuda_api.hpp"
#include "prepared_calls.hpp"

#include <algorithm>

const KernelApi *kernel_api = nullptr;
const CudaApi *cuda_api = nullptr;

namespace {

PyObject *name_values, *name_devices; // interned
PyTypeObject *per_replica, *mirrored;
PyObject *device_names;

struct CallsObject {
    PyObject_HEAD
    Calls *calls;
};

// ---- Python's values --------------------------------------------------------------------------------------------

bool is_distributed(PyObject *value) { return Py_TYPE(value) == per_replica || Py_TYPE(value) == mirrored; }

// Return a new reference to the devices that a `destinations` argument names; null: the call is not handled here.
PyObject *devices_of(PyObject *destinations) {
    if (is_distributed(destinations)) return PyObject_GetAttr(destinations, name_devices);
    return PyUnicode_CheckExact(destinations) ? PyObject_CallFunctionObjArgs(device_names, destinations, nullptr)
                                              : nullptr;
}

bool are_equal(PyObject *a, PyObject *b) { return a == b || PyObject_RichCompareBool(a, b, Py_EQ) == 1; }

// Add a value, and `out` unless it is None, to a batch. All must have the same devices, which the first one sets.
bool add_value(Batch &batch, PyObject *value, PyObject *destinations, PyObject *out, PyObject *&sources,
               PyObject *&devices) {
    if (!is_distributed(value)) return false;
    PyObject *values = batch.own(PyObject_GetAttr(value, name_values));
    PyObject *own = batch.own(PyObject_GetAttr(value, name_devices));
    PyObject *to = destinations == value ? own : batch.own(devices_of(destinations));
    if (values == nullptr || own == nullptr || to == nullptr || !PyTuple_Check(own) || !PyTuple_Check(to)) return false;
    if (sources == nullptr) {
        sources = own, devices = to;
        batch.replicas = static_cast<size_t>(PyTuple_Size(own));
        batch.destinations = static_cast<size_t>(PyTuple_Size(to));
    }
    if (!are_equal(sources, own) || !are_equal(devices, to) || !append(values, batch.replicas, batch.arrays))
        return false;
    if (out == Py_None) return true;
    if (!is_distributed(out)) return false;
    PyObject *arrays = batch.own(PyObject_GetAttr(out, name_values));
    batch.out_tuples.push_back(arrays);
    PyObject *places = batch.own(PyObject_GetAttr(out, name_devices));
    return arrays != nullptr && places != nullptr && are_equal(places, devices) &&
           append(arrays, batch.destinations, batch.outs);
}

// Return a Mirrored of the results of a tensor.
PyObject *mirrored_of(const Batch &batch, size_t tensor, PyObject *devices) {
    const auto begin = batch.results.begin() + static_cast<std::ptrdiff_t>(tensor * batch.destinations);
    const bool is_given = !batch.out_tuples.empty();
    Ref fresh(is_given ? nullptr : tuple_of({begin, begin + static_cast<std::ptrdiff_t>(batch.destinations)}));
    PyObject *values = is_given ? batch.out_tuples[tensor] : fresh.object;
    Ref made(values != nullptr ? PyType_GenericAlloc(mirrored, 0) : nullptr);
    if (!made || PyObject_SetAttr(made.object, name_values, values) < 0 ||
        PyObject_SetAttr(made.object, name_devices, devices) < 0)
        return nullptr;
    Py_INCREF(made.object);
    return made.object;
}

// Return what a method returns: null, for an error; None, if there is neither an error nor a result.
PyObject *result_or_none(PyObject *result) { return result != nullptr || PyErr_Occurred() ? result : none_or_error(); }

Calls &calls_of(PyObject *object) { return *reinterpret_cast<CallsObject *>(object)->calls; }

bool has_arguments(Py_ssize_t given, Py_ssize_t expected) {
    if (given == expected) return true;
    PyErr_Format(PyExc_TypeError, "%zd arguments expected, %zd given", expected, given);
    return false;
}

PyObject *reduce(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (!has_arguments(count, 5)) return nullptr;
    PyObject *op = arguments[0], *value = arguments[1], *destinations = arguments[2], *options = arguments[3],
             *out = arguments[4], *sources = nullptr, *devices = nullptr;
    try {
        const BatchLease lease;
        Batch &batch = *lease;
        if (!add_value(batch, value, destinations, out, sources, devices)) {
            return none_or_error();
        }
        const bool ran = run(calls_of(self), op, options, sources, devices, batch);
        return result_or_none(ran ? mirrored_of(batch, 0, devices) : nullptr);
    } catch (const std::exception &) { // bad_alloc
        return PyErr_NoMemory();
    }
}

PyObject *batch_reduce(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (!has_arguments(count, 4)) return nullptr;
    PyObject *op = arguments[0], *pairs = arguments[1], *options = arguments[2], *outs = arguments[3],
             *sources = nullptr, *devices = nullptr;
    const bool with_out = outs != Py_None;
    try {
        const BatchLease lease;
        Batch &batch = *lease;
        bool known = PyList_CheckExact(pairs) && (!with_out || PyList_CheckExact(outs));
        const Py_ssize_t size = known ? PyList_Size(pairs) : 0;
        known = known && size > 0 && (!with_out || PyList_Size(outs) == size);
        for (Py_ssize_t k = 0; known && k < size; k++) {
            PyObject *pair = batch.own(item(pairs, k)), *out = with_out ? batch.own(item(outs, k)) : Py_None;
            known = pair != nullptr && out != nullptr && PyTuple_Check(pair) && PyTuple_Size(pair) == 2 &&
                    (out != Py_None || !with_out) && add_value(batch, PyTuple_GetItem(pair, 0), PyTuple_GetItem(pair, 1),
                                                              out, sources, devices);
        }
        if (!known) {
            return none_or_error();
        }
        if (!run(calls_of(self), op, options, sources, devices, batch)) return result_or_none(nullptr);
        Ref made(PyList_New(size));
        for (Py_ssize_t k = 0; made && k < size; k++) {
            PyObject *one = mirrored_of(batch, static_cast<size_t>(k), devices);
            if (one == nullptr || PyList_SetItem(made.object, k, one) < 0) return nullptr;
        }
        Py_XINCREF(made.object);
        return made.object;
    } catch (const std::exception &) {
        return PyErr_NoMemory();
    }
}

// Add the arrays of lists, one per replica, so that those of one tensor are neighbours.
bool add_lists(Batch &batch, PyObject *lists, std::vector<PyObject *> &to) {
    if (!PyList_CheckExact(lists) || static_cast<size_t>(PyList_Size(lists)) != batch.replicas) return false;
    std::vector<PyObject *> rows; // copies, since another thread may change the lists
    for (size_t k = 0; k < batch.replicas; k++) {
        Ref row(item(lists, static_cast<Py_ssize_t>(k)));
        rows.push_back(row && PyList_CheckExact(row.object) ? batch.own(PyList_AsTuple(row.object)) : nullptr);
        if (rows[k] == nullptr || PyTuple_Size(rows[k]) != PyTuple_Size(rows[0])) return false;
    }
    for (Py_ssize_t tensor = 0; tensor < PyTuple_Size(rows[0]); tensor++)
        for (PyObject *row : rows) to.push_back(PyTuple_GetItem(row, tensor));
    return true;
}

PyObject *all_reduce(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (!has_arguments(count, 5)) return nullptr;
    PyObject *op = arguments[0], *lists = arguments[1], *devices = arguments[2], *options = arguments[3],
             *outs = arguments[4];
    try {
        const BatchLease lease;
        Batch &batch = *lease;
        bool known = PyList_CheckExact(lists) && (devices == Py_None || PyTuple_Check(devices));
        const Py_ssize_t size = known ? devices == Py_None ? PyList_Size(lists) : PyTuple_Size(devices) : 0;
        batch.replicas = batch.destinations = static_cast<size_t>(size);
        known = size > 0 && add_lists(batch, lists, batch.arrays) && !batch.arrays.empty();
        if (known && outs != Py_None)
            known = add_lists(batch, outs, batch.outs) && batch.outs.size() == batch.arrays.size();
        if (!known) {
            return none_or_error();
        }
        Ref replicated(PyLong_FromSize_t(batch.replicas));
        PyObject *on = devices == Py_None ? replicated.object : devices;
        if (!replicated || !run(calls_of(self), op, options, on, on, batch)) return result_or_none(nullptr);
        const auto replicas = static_cast<Py_ssize_t>(batch.replicas), tensors = static_cast<Py_ssize_t>(batch.tensors());
        Ref made(PyList_New(replicas));
        for (Py_ssize_t k = 0; made && k < replicas; k++) {
            PyObject *row = PyList_New(tensors);
            if (row == nullptr || PyList_SetItem(made.object, k, row) < 0) return nullptr;
            for (Py_ssize_t tensor = 0; tensor < tensors; tensor++) {
                PyObject *one = batch.results[static_cast<size_t>(tensor * replicas + k)];
                Py_INCREF(one);
                if (PyList_SetItem(row, tensor, one) < 0) return nullptr;
            }
        }
        Py_XINCREF(made.object);
        return made.object;
    } catch (const std::exception &) {
        return PyErr_NoMemory();
    }
}

// Set where each result of a plan lies in a block, aligned as if it had memory of its own. Return false with an error set if
// that fails.
bool add_forms(Run &run, const Batch &batch, PyObject *kept) {
    run.block_nbytes = 0;
    const size_t alignment = batch.access->alignment();
    for (size_t tensor : run.tensors) {
        const ArrayView &view = batch.first(tensor);
        Ref sizes(PyTuple_New(view.axes)), strides(PyTuple_New(view.axes));
        if (!sizes || !strides) return false;
        int64_t step = 1;
        for (int axis = view.axes - 1; axis >= 0; axis--) {
            PyObject *size = PyLong_FromLongLong(view.sizes[axis]), *stride = PyLong_FromLongLong(step);
            if (PyTuple_SetItem(sizes.object, axis, size) < 0 || PyTuple_SetItem(strides.object, axis, stride) < 0 ||
                size == nullptr || stride == nullptr)
                return false;
            step *= view.sizes[axis];
        }
        run.offsets.push_back(run.block_nbytes / run.result_size);
        if (step == 0) {
            run.forms.emplace_back(nullptr, nullptr);
            continue;
        }
        if (PyList_Append(kept, sizes.object) < 0 || PyList_Append(kept, strides.object) < 0) return false;
        run.forms.emplace_back(sizes.object, strides.object);
        run.block_nbytes += (static_cast<size_t>(step) * run.result_size + alignment - 1) / alignment * alignment;
    }
    return true;
}

// Read (kernel, executable, tensors, streaming, threaded).
bool read_run(PyObject *fields, const Batch &batch, PyObject *results, PyObject *kept, Prepared &prepared) {
    PyObject *kernel, *executable, *tensors;
    int streaming, threaded;
    Run run{};
    if (!PyArg_ParseTuple(fields, "OOOpp", &kernel, &executable, &tensors, &streaming, &threaded)) return false;
    if (!read_ints(tensors, run.tensors)) return false;
    run.executable = executable;
    run.streaming = streaming != 0, run.threaded = threaded != 0;
    run.kernel = kernel_api->kernel_of(kernel);
    if (run.kernel != nullptr) {
        if (run.tensors.size() != run.kernel->sizes.size() || static_cast<size_t>(run.kernel->sources) != batch.replicas ||
            static_cast<size_t>(run.kernel->results) != batch.destinations)
            return value_error("the kernel does not fit the batch");
        run.itemsize = ITEMSIZES[run.kernel->dtype], run.result_size = ITEMSIZES[run.kernel->result];
    } else { // a plan of the CUDA engine, whose module is imported already
        PyErr_Clear();
        if (cuda_api == nullptr) cuda_api = static_cast<const CudaApi *>(PyCapsule_Import(CUDA_API, 0));
        if (cuda_api == nullptr) return false;
        if (cuda_api->devices(kernel) == nullptr) return value_error("this is neither a kernel nor a plan");
        run.plan = kernel;
    }
    for (size_t tensor : run.tensors)
        if (tensor >= batch.tensors()) return value_error("a tensor is out of range");
    Ref row(item(results, static_cast<Py_ssize_t>(run.tensors[0])));
    for (size_t r = 0; row && r < batch.destinations; r++) {
        Ref result(item(row.object, static_cast<Py_ssize_t>(r)));
        ArrayView view;
        if (!result || access_of(result.object) != batch.access || !batch.access->view(result.object, false, view))
            return false;
        run.dtype = view.dtype;
        run.devices.push_back(view.device);
        if (run.plan != nullptr) { // of tensors: their dtypes contain the number of bits
            const ArrayView *own = &batch.first(run.tensors[0]);
            const auto there = [&](const ArrayView &one) { return one.device == view.device && one.dtype == view.dtype; };
            const ArrayView *found = r < batch.replicas && there(own[r]) ? own + r : std::find_if(own, own + batch.replicas, there);
            run.likes.push_back(static_cast<size_t>(found - own));
            if (view.device == HOST || run.likes.back() == batch.replicas) return false;
            run.itemsize = static_cast<size_t>(batch.first(run.tensors[0]).dtype >> 8) / 8;
            run.result_size = static_cast<size_t>(view.dtype >> 8) / 8;
        }
    }
    if (run.plan != nullptr && !add_forms(run, batch, kept)) return false;
    const auto dtype_of = run.dtype;
    prepared.runs.push_back(std::move(run));
    PyObject *dtype = batch.access->dtype_object(dtype_of);
    return PyList_Append(kept, kernel) == 0 && PyList_Append(kept, executable) == 0 &&
           (dtype == nullptr || PyList_Append(kept, dtype) == 0);
}

PyObject *add(PyObject *self, PyObject *args) {
    PyObject *op, *options, *sources, *destinations, *rows, *results, *runs;
    int is_default, with_out;
    if (!PyArg_ParseTuple(args, "OOO!O!pOOpO", &op, &options, &PyTuple_Type, &sources, &PyTuple_Type, &destinations,
                          &is_default, &rows, &results, &with_out, &runs))
        return nullptr;
    Calls &calls = calls_of(self);
    try {
        const BatchLease lease;
        Batch &batch = *lease;
        batch.replicas = static_cast<size_t>(PyTuple_Size(sources));
        batch.destinations = static_cast<size_t>(PyTuple_Size(destinations));
        const auto read_row = [&](PyObject *row) {
            return append(row, batch.replicas, batch.arrays) || value_error("a row must be a tuple of arrays");
        };
        if (!read_each(rows, read_row)) return nullptr;
        Ref key(key_of(op, options, sources, destinations, with_out != 0)), kept(PyList_New(0));
        if (!key || !kept) return nullptr;
        const bool usable = batch.view_arrays() && calls.find(key.object, batch.signature) == nullptr;
        if (!usable || PyErr_Occurred()) { // an error: for example, the options cannot be hashed
            return none_or_error();
        }
        auto prepared = std::make_shared<Prepared>();
        prepared->signature = batch.signature;
        const auto read_one = [&](PyObject *one) { return read_run(one, batch, results, kept.object, *prepared); };
        if (!read_each(runs, read_one)) { // a result may be one that only the path in Python writes into
            return none_or_error();
        }
        for (size_t tensor = 0; tensor < batch.tensors(); tensor++) {
            PyObject *dtype = batch.access->dtype_object(batch.first(tensor).dtype);
            if (dtype != nullptr && PyList_Append(kept.object, dtype) < 0) return nullptr;
        }
        prepared->kept = PyList_AsTuple(kept.object);
        if (prepared->kept == nullptr || !calls.add(key.object, prepared)) return nullptr;
        if (is_default) { // the same call without devices: the signature says on which devices its arrays are
            Ref replicated(PyLong_FromSize_t(batch.replicas));
            Ref without(key_of(op, options, replicated.object, replicated.object, with_out != 0));
            if (!without || !calls.add(without.object, prepared)) return nullptr;
        }
    } catch (const std::exception &) {
        return PyErr_NoMemory();
    }
    Py_RETURN_NONE;
}

PyObject *calls_new(PyTypeObject *type, PyObject *, PyObject *) {
    return make_object<CallsObject>(type, [](CallsObject &self) {
        self.calls = new Calls();
        self.calls->tables = PyDict_New();
        return self.calls->tables != nullptr;
    });
}

void calls_dealloc(PyObject *object) {
    delete reinterpret_cast<CallsObject *>(object)->calls;
    free_object(object);
}

// Set the classes and functions of the package: they are given, since this module imports nothing.
PyObject *use(PyObject *, PyObject *args) {
    PyObject *given[6];
    Py_ssize_t offset;
    if (!PyArg_ParseTuple(args, "OOOOOOn", &given[0], &given[1], &given[2], &given[3], &given[4], &given[5], &offset))
        return nullptr;
    large_array_offset = static_cast<size_t>(offset);
    for (PyObject *one : given) Py_INCREF(one); // until the process ends
    per_replica = reinterpret_cast<PyTypeObject *>(given[0]);
    mirrored = reinterpret_cast<PyTypeObject *>(given[1]);
    reduce_op = reinterpret_cast<PyTypeObject *>(given[2]);
    ops_by_name = given[3], device_names = given[4], default_options = given[5];
    Py_RETURN_NONE;
}

PyMethodDef calls_methods[] = {
    {"reduce", as_function(reduce), METH_FASTCALL,
     "reduce(op, value, destinations, options, out): return a Mirrored, or None if the call was not prepared."},
    {"batch_reduce", as_function(batch_reduce), METH_FASTCALL,
     "batch_reduce(op, pairs, options, out): return a list of Mirrored, or None if the call was not prepared."},
    {"all_reduce", as_function(all_reduce), METH_FASTCALL,
     "all_reduce(op, lists, devices, options, outs): reduce lists of arrays, one per replica; return such lists of "
     "results, or None if the call was not prepared. devices: None stands for those of the arrays."},
    {"add", add, METH_VARARGS,
     "add(op, options, sources, destinations, is_default, rows, results, with_out, runs): prepare a call. `rows` has for "
     "each tensor a tuple of its arrays, `results` one of its results; a run is (kernel, executable, tensors, streaming, "
     "threaded). `is_default`: a call that names no devices has these."},
    {nullptr, nullptr, 0, nullptr}};

PyMethodDef functions[] = {
    {"use", use, METH_VARARGS,
     "use(per_replica, mirrored, reduce_op, ops_by_name, device_names, default_options, large_array_offset): set what the "
     "calls need."},
    {"use_torch", use_torch, METH_VARARGS,
     "use_torch(tensor_type, exchange_api, is_transformed, mark_dirty, empty_like, int8, uint8): accept tensors of "
     "exactly this class."},
    {"use_torch_layout", use_torch_layout, METH_VARARGS,
     "use_torch_layout(plain, special): read tensors without torch's functions if facts about plain tensors are where they "
     "are expected, and none of the special ones can be read in this way. Return whether this is so."},
    {"use_torch_options", use_torch_options, METH_VARARGS,
     "use_torch_options(timeouts, kinds): read a group's settings and the options of calls where tuples of an object and a "
     "number show that their numbers are. `kinds`: for each collective (class, least bytes, ops, is_async, limits, roots), "
     "each None if the class has no such number. Return whether all places are known."},
    {"use_torch_devices", use_torch_devices, METH_VARARGS,
     "use_torch_devices(is_filled, block, reinterpret, scratch, alignment): set how memory on CUDA devices is allocated."},
    {"use_device_type", use_device_type, METH_O,
     "use_device_type(number): the DLDeviceType of tensors on CUDA devices; for tests, which have the CPU's, 1."},
    {nullptr, nullptr, 0, nullptr}};

int fill(PyObject *module) {
    kernel_api = static_cast<const KernelApi *>(PyCapsule_Import(KERNEL_API, 0));
    name_values = PyUnicode_InternFromString("_values");
    name_devices = PyUnicode_InternFromString("_devices");
    name_threads = PyUnicode_InternFromString("threads");
    if (kernel_api == nullptr || !name_values || !name_devices || !name_threads || load_numpy() < 0) return -1;
    if (add_class<CallsObject>(module, "crossreduce.engines.host._calls.Calls", calls_new, calls_dealloc, calls_methods) < 0) return -1;
    return add_rank_calls(module) < 0 ? -1 : add_torch_calls(module);
}

PyModuleDef_Slot slots[] = {{Py_mod_exec, reinterpret_cast<void *>(fill)}, END_OF_MODULE_SLOTS};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_calls", "The compiled call path; see native/calls/calls.cpp.",
                          0, functions, slots, nullptr, nullptr, nullptr};

} // namespace

const ArrayAccess *access_of(PyObject *array) {
    const ArrayAccess *found = numpy_access(array);
    return found != nullptr ? found : torch_access(array);
}

PyMODINIT_FUNC PyInit__calls() { return PyModuleDef_Init(&definition); }
