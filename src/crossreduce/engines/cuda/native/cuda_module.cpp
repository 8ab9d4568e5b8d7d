// The module crossreduce.engines.cuda._cuda: devices, and compiled layouts.
#include "module.hpp"

#include <atomic>

#include "cuda_api.hpp"
#include "plan.hpp"
#include "xla_cuda.hpp"

namespace {

PyObject *failure = nullptr; // a function that makes an error of a call, a device, a code, its name and its text

// Set the error of a failed call of the driver. Returns null.
PyObject *set_fault(const DriverFault &fault) {
    const FaultText text = text_of(fault);
    if (failure == nullptr) return PyErr_Format(PyExc_RuntimeError, "%s failed: error %d", fault.call, fault.code);
    Ref error(PyObject_CallFunction(failure, "siiss", fault.call, fault.device, fault.code, text.name.c_str(),
                                    text.text.c_str()));
    if (error) PyErr_SetObject(reinterpret_cast<PyObject *>(Py_TYPE(error.object)), error.object);
    return nullptr;
}

template <class Run> PyObject *guarded(Run &&run) {
    try {
        return run();
    } catch (const DriverFault &fault) {
        return set_fault(fault);
    } catch (const std::exception &) { // bad_alloc
        return PyErr_NoMemory();
    }
}

// Run without the interpreter's lock: a full queue waits for work that may call Python. Returns None, or null.
template <class Run> PyObject *guarded_unlocked(Run &&run) {
    return guarded([&]() -> PyObject * {
        PyThreadState *state = PyEval_SaveThread();
        try {
            run();
        } catch (...) {
            PyEval_RestoreThread(state);
            throw;
        }
        PyEval_RestoreThread(state);
        Py_RETURN_NONE;
    });
}

PyObject *use(PyObject *, PyObject *maker) {
    Py_INCREF(maker);
    Py_XDECREF(failure);
    failure = maker;
    Py_RETURN_NONE;
}

PyObject *missing(PyObject *, PyObject *) {
    std::string why;
    Ref done(guarded_unlocked([&] { driver(why); }));
    return done ? PyUnicode_FromString(why.c_str()) : nullptr;
}

PyObject *count(PyObject *, PyObject *) {
    int found = 0;
    Ref done(guarded_unlocked([&] {
        std::string why;
        const Driver *call = driver(why);
        if (call != nullptr) require(call->device_get_count(&found), "cuDeviceGetCount", -1);
    }));
    return done ? PyLong_FromLong(found) : nullptr;
}

PyObject *describe(PyObject *, PyObject *args) {
    int number, version = 0;
    if (!PyArg_ParseTuple(args, "i", &number)) return nullptr;
    std::unique_ptr<Device> found;
    char name[256] = "";
    Ref done(guarded_unlocked([&] {
        found = described(number);
        require(opened().device_get_name(name, sizeof name, found->handle), "cuDeviceGetName", number);
        require(opened().driver_get_version(&version), "cuDriverGetVersion", number);
    }));
    if (!done) return nullptr;
    return Py_BuildValue("{s:s,s:i,s:i,s:i}", "name", name, "capability", found->capability, "multiprocessors",
                         found->multiprocessors, "driver", version);
}

PyObject *load(PyObject *, PyObject *args) {
    int number;
    const char *code;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "iy#", &number, &code, &size)) return nullptr;
    return guarded_unlocked([&] { load_kernels(device(number), code); });
}

PyObject *is_loaded(PyObject *, PyObject *args) {
    int number;
    if (!PyArg_ParseTuple(args, "i", &number)) return nullptr;
    bool is = false;
    Ref done(guarded_unlocked([&] { is = device(number).is_loaded; }));
    return done ? PyBool_FromLong(is) : nullptr;
}

PyObject *peers(PyObject *, PyObject *args) {
    int one, other;
    if (!PyArg_ParseTuple(args, "ii", &one, &other)) return nullptr;
    bool enabled = false;
    Ref done(guarded_unlocked([&] { enabled = enable_peer(device(one), device(other)); }));
    return done ? PyBool_FromLong(enabled) : nullptr;
}

PyObject *follow_stream(PyObject *, PyObject *args) {
    int number;
    unsigned long long stream, after;
    if (!PyArg_ParseTuple(args, "iKK", &number, &stream, &after)) return nullptr;
    return guarded_unlocked(
        [&] { follow(device(number), reinterpret_cast<CUstream>(stream), reinterpret_cast<CUstream>(after)); });
}

// ---- plans -----------------------------------------------------------------------------------------------------------

struct PlanObject {
    PyObject_HEAD
    Plan *plan;
    PyObject *otherwise; // the plan that runs instead where peers cannot read the memory; null: not known yet
};

PyTypeObject *plan_type = nullptr;

} // namespace

Plan *plan_in(PyObject *object) {
    return plan_type != nullptr && Py_TYPE(object) == plan_type ? reinterpret_cast<PlanObject *>(object)->plan : nullptr;
}

namespace {

// What graphs owned that are destroyed. A thread of the driver adds it, which must not call Python. Never destroyed.
std::mutex &dropped_lock = *new std::mutex;
std::vector<PyObject *> &dropped = *new std::vector<PyObject *>;
std::atomic<bool> has_dropped{false};

void drop(void *owned) {
    std::lock_guard<std::mutex> locked(dropped_lock);
    dropped.push_back(static_cast<PyObject *>(owned));
    has_dropped = true;
}

void release_dropped() {
    if (!has_dropped) return;
    std::vector<PyObject *> found;
    {
        std::lock_guard<std::mutex> locked(dropped_lock);
        found.swap(dropped);
        has_dropped = false;
    }
    for (PyObject *each : found) Py_DECREF(each);
}

bool read_places(PyObject *sequence, std::vector<Place> &to) {
    return read_each(sequence, [&](PyObject *pair) {
        Place place;
        long long offset;
        if (!PyArg_ParseTuple(pair, "IL", &place.row, &offset)) return false;
        place.offset = offset;
        to.push_back(place);
        return true;
    });
}

// Read a dict with the fields of `_cuda.pyi`'s Launch.
bool read_launch(Plan &plan, PyObject *dict) {
    Launching made;
    int on, large;
    const char *name;
    PyObject *nbytes, *orders, *parts;
    const char *const names[] = {"device", "kernel", "large",       "sources", "results", "stack", "divisor", "kind",
                                 "values", "units",  "unit_nbytes", "orders",  "parts",   nullptr};
    Ref none(PyTuple_New(0));
    if (!none || !PyArg_ParseTupleAndKeywords(none.object, dict, "$ispiiidIiiOOO", const_cast<char **>(names), &on, &name,
                                              &large, &made.sources, &made.results, &made.stack, &made.divisor, &made.kind,
                                              &made.values, &made.units, &nbytes, &orders, &parts))
        return false;
    made.large = large != 0;
    made.function = function(*plan.devices.at(static_cast<size_t>(on)), name);
    const bool read = read_ints(nbytes, made.unit_nbytes) && read_each(orders, [&](PyObject *order) {
        unsigned long long push, fold, twice, wide;
        if (!PyArg_ParseTuple(order, "KKKK", &push, &fold, &twice, &wide)) return false;
        made.orders.push_back({push, fold, twice, wide});
        return true;
    }) && read_each(parts, [&](PyObject *part) {
        long long size;
        int order;
        PyObject *places;
        if (!PyArg_ParseTuple(part, "LiO", &size, &order, &places)) return false;
        made.parts.push_back({size, static_cast<uint16_t>(order), made.places.size()});
        return read_places(places, made.places);
    });
    const auto count = static_cast<size_t>(made.sources + made.results);
    if (read && (made.places.size() != made.parts.size() * count || made.unit_nbytes.size() != made.orders.size() * count))
        return value_error("a launch is malformed");
    plan.launches.push_back(std::move(made));
    return read;
}

bool read_copy(Plan &plan, PyObject *tuple) {
    Copying made;
    PyObject *places;
    unsigned long long nbytes;
    if (!PyArg_ParseTuple(tuple, "iiOK", &made.from, &made.to, &places, &nbytes)) return false;
    std::vector<Place> ends;
    if (!read_places(places, ends)) return false;
    made.source = ends.at(0);
    made.target = ends.at(1);
    made.nbytes = static_cast<size_t>(nbytes);
    plan.copies.push_back(made);
    return true;
}

// `devices` are numbers; `streams` pairs (position, position or -1); `operations` tuples (launch or None, copy or None,
// stream, waits, event); for the others see plan.hpp.
PyObject *plan_new(PyTypeObject *type, PyObject *args, PyObject *named) {
    PyObject *numbers, *streams, *scratch, *operations, *begins, *ends, *resumes;
    int reads_peers;
    const char *const names[] = {"devices", "streams", "scratch", "operations", "begins",
                                 "ends",    "resumes", "reads_peers", nullptr};
    if (!PyArg_ParseTupleAndKeywords(args, named, "$OOOOOOOp", const_cast<char **>(names), &numbers, &streams, &scratch,
                                     &operations, &begins, &ends, &resumes, &reads_peers))
        return nullptr;
    return guarded([&]() -> PyObject * {
        auto made = std::make_unique<Plan>();
        made->reads_peers = reads_peers != 0;
        if (!read_ints(numbers, made->numbers) || !read_ints(scratch, made->scratch)) return nullptr;
        Ref done(guarded_unlocked([&] {
            for (const int number : made->numbers) made->devices.push_back(&device(number));
        }));
        if (!done) return nullptr;
        const bool read = read_each(streams, [&](PyObject *pair) {
            StreamOf stream;
            if (!PyArg_ParseTuple(pair, "ii", &stream.device, &stream.to)) return false;
            made->streams.push_back(stream);
            return true;
        }) && read_each(operations, [&](PyObject *tuple) {
            PyObject *launch, *copy, *waits;
            Operating one;
            if (!PyArg_ParseTuple(tuple, "OOiOi", &launch, &copy, &one.stream, &waits, &one.event)) return false;
            one.is_copy = launch == Py_None;
            one.number = one.is_copy ? made->copies.size() : made->launches.size();
            made->events = std::max(made->events, one.event + 1);
            if (!read_ints(waits, one.waits)) return false;
            made->operations.push_back(one);
            return one.is_copy ? read_copy(*made, copy) : read_launch(*made, launch);
        });
        if (!read || !read_ints(begins, made->begins) || !read_ints(ends, made->ends) || !read_ints(resumes, made->resumes))
            return nullptr;
        return make_object<PlanObject>(type, [&](PlanObject &self) {
            self.plan = made.release();
            return true;
        });
    });
}

void plan_dealloc(PyObject *object) {
    PlanObject &self = *reinterpret_cast<PlanObject *>(object);
    Py_XDECREF(self.otherwise);
    Py_BEGIN_ALLOW_THREADS // its events and streams are those of the driver
    delete self.plan;
    Py_END_ALLOW_THREADS
    free_object(object);
}

PyObject *plan_use_otherwise(PyObject *object, PyObject *other) {
    PyObject *&kept = reinterpret_cast<PlanObject *>(object)->otherwise;
    if (plan_in(other) == nullptr || other == object) return value_error("another plan is needed"), nullptr;
    if (kept == nullptr) { // else another thread was faster
        Py_INCREF(other);
        kept = other;
    }
    Py_RETURN_NONE;
}

// Append the addresses of rows.
bool read_addresses(PyObject *rows, std::vector<uint64_t> &to) {
    return read_each(rows, [&](PyObject *row) {
        return read_each(row, [&](PyObject *one) {
            const size_t value = PyLong_AsSize_t(one); // PyLong_AsUnsignedLongLong takes several times as long
            to.push_back(value);
            return value != static_cast<size_t>(-1) || !PyErr_Occurred();
        });
    });
}

// Queue the operations of a plan, and let a graph that captures them keep `owners` (null: nothing). Returns 1; or 0 if
// peers cannot read the memory, and nothing was queued (only with `checks`); or -1 with an error set.
int run_plan(PyObject *object, const std::vector<uint64_t> &addresses, const std::vector<uint64_t> &streams,
             PyObject *owners, bool checks) {
    Plan &plan = *reinterpret_cast<PlanObject *>(object)->plan;
    if (streams.size() != plan.devices.size()) return value_error("one stream per device is needed"), -1;
    release_dropped();
    bool is_queued = false, is_kept = false;
    Py_XINCREF(owners);
    Ref done(guarded_unlocked([&] {
        if (checks && plan.reads_peers && !are_peer_readable(addresses, plan.devices)) return;
        std::vector<CUstream> current;
        for (const uint64_t stream : streams) current.push_back(reinterpret_cast<CUstream>(stream));
        CUgraph graph = plan.run(addresses, current, owners != nullptr);
        is_queued = true;
        is_kept = graph != nullptr && owners != nullptr;
        if (is_kept) keep_in_graph(graph, owners, drop);
    }));
    if (!is_kept) Py_XDECREF(owners);
    return done ? is_queued : -1;
}

PyObject *plan_run(PyObject *object, PyObject *args) {
    PyObject *sources, *results, *scratch, *currents, *owners;
    if (!PyArg_ParseTuple(args, "OOOOO", &sources, &results, &scratch, &currents, &owners)) return nullptr;
    try {
        std::vector<uint64_t> addresses, streams;
        if (!read_addresses(sources, addresses) || !read_addresses(results, addresses) ||
            !read_addresses(scratch, addresses) || !read_addresses(currents, streams))
            return nullptr;
        const int ran = run_plan(object, addresses, streams, owners == Py_None ? nullptr : owners, true);
        return ran < 0 ? nullptr : PyBool_FromLong(ran);
    } catch (const std::exception &) { // bad_alloc
        return PyErr_NoMemory();
    }
}

PyObject *reads_rightly(PyObject *, PyObject *args) {
    PyObject *copy;
    int owner;
    unsigned long long nbytes;
    if (!PyArg_ParseTuple(args, "OiK", &copy, &owner, &nbytes)) return nullptr;
    Plan *plan = plan_in(copy);
    if (plan == nullptr || plan->devices.size() != 1) return value_error("a plan of one device is needed"), nullptr;
    bool is_right = false;
    Ref done(guarded_unlocked(
        [&] { is_right = reads_peer_rightly(*plan, *plan->devices[0], device(owner), static_cast<size_t>(nbytes)); }));
    return done ? PyBool_FromLong(is_right) : nullptr;
}

PyMethodDef plan_methods[] = {
    {"run", plan_run, METH_VARARGS,
     "run(sources, results, scratch, streams, owners): queue the operations, given rows of addresses and a row of streams. "
     "Return false if peers cannot read the memory; then nothing was queued. A graph that captures the run keeps `owners`, "
     "unless they are None."},
    {"use_otherwise", plan_use_otherwise, METH_O,
     "use_otherwise(plan): set the plan that compiled code runs instead where peers cannot read the memory."},
    {nullptr, nullptr, 0, nullptr}};
PyType_Slot plan_slots[] = {{Py_tp_new, reinterpret_cast<void *>(plan_new)},
                            {Py_tp_dealloc, reinterpret_cast<void *>(plan_dealloc)},
                            {Py_tp_methods, plan_methods},
                            {0, nullptr}};

PyMethodDef functions[] = {
    {"use", use, METH_O, "use(function): it makes the error of a call, a device, a code, its name and its text."},
    {"missing", missing, METH_NOARGS, "Open the driver; return why it cannot be used, or an empty text."},
    {"device_count", count, METH_NOARGS, "Return the number of devices; 0 without a driver."},
    {"describe", describe, METH_VARARGS, "describe(device): return its name, capability, multiprocessors and driver, without a context."},
    {"load", load, METH_VARARGS, "load(device, code): load kernels, unless they are loaded already."},
    {"is_loaded", is_loaded, METH_VARARGS, "is_loaded(device): return whether its kernels are loaded."},
    {"enable_peer", peers, METH_VARARGS,
     "enable_peer(device, other): let kernels on a device read the memory of another one; return whether they can."},
    {"reads_peer_rightly", reads_rightly, METH_VARARGS,
     "reads_peer_rightly(copy, owner, nbytes): let a plan that copies one row to another read a pattern of a peer; return "
     "whether it is right."},
    {"follow", follow_stream, METH_VARARGS,
     "follow(device, stream, after): let work that is queued later in a stream run after what is in another one."},
    {nullptr, nullptr, 0, nullptr}};

CudaApi api = {
    [](PyObject *object) -> const std::vector<int> * {
        const Plan *plan = plan_in(object);
        return plan == nullptr ? nullptr : &plan->numbers;
    },
    [](PyObject *object) -> const std::vector<int64_t> * {
        const Plan *plan = plan_in(object);
        return plan == nullptr ? nullptr : &plan->scratch;
    },
    [](PyObject *object) { return reinterpret_cast<PlanObject *>(object)->otherwise; },
    [](PyObject *object, const std::vector<uint64_t> &addresses, const std::vector<uint64_t> &streams) {
        const Plan &plan = *reinterpret_cast<PlanObject *>(object)->plan;
        if (plan.devices.size() == 1) return CudaApi::FITS;
        CudaApi::Fit fit = CudaApi::FITS;
        Ref done(guarded_unlocked([&] {
            if (capturing(*plan.devices[0], reinterpret_cast<CUstream>(streams[0])).is) fit = CudaApi::IS_CAPTURED;
            else if (plan.reads_peers && !are_peer_readable(addresses, plan.devices)) fit = CudaApi::IS_UNREADABLE;
        }));
        return done ? fit : CudaApi::FAILED;
    },
    [](PyObject *plan, const std::vector<uint64_t> &addresses, const std::vector<uint64_t> &streams) {
        return run_plan(plan, addresses, streams, nullptr, false) == 1;
    }};

int fill(PyObject *module) {
    if (add_class<PlanObject>(module, "crossreduce.engines.cuda._cuda.Plan", plan_slots) < 0) return -1;
    plan_type = reinterpret_cast<PyTypeObject *>(PyObject_GetAttrString(module, "Plan")); // never released
    Ref capsule(PyCapsule_New(&api, CUDA_API, nullptr));
    if (PyModule_AddFunctions(module, xla_cuda_functions) < 0) return -1;
    return plan_type != nullptr && capsule && PyModule_AddObjectRef(module, "API", capsule.object) == 0 ? 0 : -1;
}

PyModuleDef_Slot module_slots[] = {{Py_mod_exec, reinterpret_cast<void *>(fill)}, END_OF_MODULE_SLOTS};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_cuda", "Compiled layouts on CUDA devices; see crossreduce.engines.cuda.",
                          0, functions, module_slots, nullptr, nullptr, nullptr};

} // namespace

PyMODINIT_FUNC PyInit__cuda() { return PyModuleDef_Init(&definition); }
