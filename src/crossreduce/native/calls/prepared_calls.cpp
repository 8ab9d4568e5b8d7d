#include "prepared_calls.hpp"

#include "cuda_api.hpp"
#include "per_thread.hpp"

PyTypeObject *reduce_op;
PyObject *ops_by_name, *default_options, *name_threads;

namespace {

constexpr size_t MAX_PREPARED = 4096;
// A thread keeps the memory of a batch of at most this many arrays: about 160 bytes per array.
constexpr size_t MAX_KEPT_ARRAYS = 1 << 16;
const PerThread<std::unique_ptr<Batch>> kept_batches;

struct Queued { // a plan that will run, with its arguments
    PyObject *plan;
    CudaApi::Words addresses, streams;
    std::vector<TemporaryMemory> temporary;
};

// Choose the plan of a run, for the arrays of a batch and the results in `batch.targets`, and allocate its temporary memory.
// Return false, perhaps with an error set, if only the path in Python can handle the call.
bool prepare_plan(const Batch &batch, const Run &run, Queued &to) {
    for (to.plan = run.plan; to.plan != nullptr; to.plan = cuda_api->otherwise(to.plan)) {
        const std::vector<int> &devices = *cuda_api->devices(to.plan);
        const std::vector<int64_t> &scratch = *cuda_api->scratch(to.plan);
        to.addresses.clear(), to.temporary.clear();
        to.addresses.reserve(batch.sources.size() + batch.targets.size() + devices.size());
        to.streams.assign(devices.size(), 0);
        for (const Source &source : batch.sources) to.addresses.push_back(reinterpret_cast<uint64_t>(source.data));
        for (char *target : batch.targets) to.addresses.push_back(reinterpret_cast<uint64_t>(target));
        for (size_t k = 0; k < devices.size(); k++) {
            to.addresses.push_back(0);
            if (!batch.access->stream(devices[k], to.streams[k])) return false;
            if (scratch[k] == 0) continue;
            to.temporary.push_back(batch.access->temporary(devices[k], scratch[k]));
            if (to.temporary.back() == nullptr) return false; // torch's own allocation raises a better error
            to.addresses.back() = reinterpret_cast<uint64_t>(to.temporary.back().get());
        }
        const CudaApi::Fit fit = cuda_api->fit(to.plan, to.addresses, to.streams);
        if (fit != CudaApi::IS_UNREADABLE) return fit == CudaApi::FITS; // only the path in Python can give memory to a graph
    }
    return false;
}

// Put the results of a plan, new arrays, into a list, and their memory into `batch.targets`. Return false with an error set
// if that fails. The results of one replica share a block of memory: allocating each would take longer than all the rest.
bool make_results(Batch &batch, const Run &run, PyObject *results) {
    const bool in_blocks = run.block_nbytes > 0 && (run.tensors.size() > 1 || batch.access->prefers_blocks());
    batch.targets.assign(run.tensors.size() * batch.destinations, nullptr);
    for (size_t r = 0; r < batch.destinations; r++) {
        const auto like = [&](size_t k) { return batch.arrays[run.tensors[k] * batch.replicas + run.likes[r]]; };
        char *begin = nullptr;
        Ref block(in_blocks ? batch.access->make_block(like(0), run.block_nbytes, &begin) : nullptr);
        if (in_blocks && !block) return false;
        for (size_t k = 0; k < run.tensors.size(); k++) {
            const auto &[sizes, strides] = run.forms[k];
            char *&data = batch.targets[k * batch.destinations + r];
            const bool is_inside = in_blocks && sizes != nullptr;
            PyObject *array = is_inside ? batch.access->make_in(block.object, sizes, strides, run.offsets[k])
                                        : batch.access->make_like(like(k), &data);
            if (array == nullptr) return false;
            if (is_inside) data = begin + run.offsets[k] * run.result_size;
            const size_t at = run.tensors[k] * batch.destinations + r;
            if (PyList_SetItem(results, static_cast<Py_ssize_t>(at), array) < 0) return false;
        }
    }
    return true;
}

// Run a prepared call. Return the results, tensor after tensor, in a new list; or null with an error set.
PyObject *run_prepared(Batch &batch, const Prepared &prepared) {
    std::vector<int> threads;
    for (const Run &run : prepared.runs) { // before anything is allocated, since this may raise
        threads.push_back(1);
        if (!run.threaded) continue;
        Ref number(PyObject_CallMethodObjArgs(run.executable, name_threads, nullptr));
        if (!number) return nullptr;
        const long found = PyLong_AsLong(number.object);
        if (found == -1 && PyErr_Occurred()) return nullptr;
        threads.back() = static_cast<int>(found);
    }
    Ref results(PyList_New(static_cast<Py_ssize_t>(batch.tensors() * batch.destinations)));
    if (!results) return nullptr;
    std::vector<Queued> queued; // nothing is queued before all memory is there
    for (size_t number = 0; number < prepared.runs.size(); number++) {
        const Run &run = prepared.runs[number];
        batch.sources.clear(), batch.targets.clear();
        const bool is_made = run.plan != nullptr && batch.outs.empty();
        if (is_made && !make_results(batch, run, results.object)) return nullptr;
        for (size_t tensor : run.tensors) {
            for (size_t k = 0; k < batch.replicas; k++)
                batch.sources.push_back({batch.views[tensor * batch.replicas + k].data, nullptr});
            for (size_t r = 0; r < batch.destinations && !is_made; r++) {
                const size_t at = tensor * batch.destinations + r;
                PyObject *array;
                char *data;
                if (batch.outs.empty()) {
                    array = batch.access->make(batch.first(tensor), run.dtype, run.result_size, &data);
                    if (array == nullptr) return nullptr;
                } else {
                    array = batch.outs[at];
                    data = batch.out_views[at].data;
                    Py_INCREF(array);
                }
                batch.targets.push_back(data);
                if (PyList_SetItem(results.object, static_cast<Py_ssize_t>(at), array) < 0) return nullptr;
            }
        }
        if (run.plan != nullptr) {
            queued.emplace_back();
            if (!prepare_plan(batch, run, queued.back())) {
                forget_error();
                return nullptr;
            }
            continue;
        }
        const bool small = kernel_api->traffic_nbytes(*run.kernel) <= MAX_NBYTES_WITH_LOCK;
        const auto execute = [&](int on, bool streaming) {
            return kernel_api->run(*run.kernel, batch.sources, batch.targets, on, streaming);
        };
        if (!(small ? execute(1, false) : without_lock(false, [&] { return execute(threads[number], run.streaming); })))
            return PyErr_NoMemory();
    }
    for (const Queued &one : queued)
        if (!cuda_api->run(one.plan, one.addresses, one.streams)) return nullptr;
    if (!batch.outs.empty()) {
        Ref written(PyList_AsTuple(results.object));
        if (!written || !batch.access->mark_written(written.object)) return nullptr;
    }
    Py_INCREF(results.object);
    return results.object;
}

} // namespace

uint64_t hash_of(const std::vector<int64_t> &signature) { // FNV-1a on words, with a final mix
    uint64_t hash = 0xcbf29ce484222325;
    for (int64_t word : signature) hash = (hash ^ static_cast<uint64_t>(word)) * 0x100000001b3, hash ^= hash >> 29;
    return hash;
}

bool same_sizes(const ArrayView &a, const ArrayView &b) {
    return a.axes == b.axes && std::equal(a.sizes, a.sizes + a.axes, b.sizes);
}

void Batch::clear() {
    for (PyObject *object : owned) Py_DECREF(object);
    owned.clear(), arrays.clear(), outs.clear(), views.clear(), out_views.clear(), signature.clear(), extents.clear();
    replicas = destinations = 0, access = nullptr;
}

BatchLease::BatchLease() {
    if (auto *kept = kept_batches.get()) batch = std::move(*kept);
    if (batch == nullptr) batch = std::make_unique<Batch>();
}

BatchLease::~BatchLease() {
    batch->clear(); // this may run Python code, which may make a call
    if (batch->arrays.capacity() + batch->outs.capacity() > MAX_KEPT_ARRAYS) return;
    if (auto *kept = kept_batches.get()) *kept = std::move(batch);
}

bool append(PyObject *tuple, size_t size, std::vector<PyObject *> &to) {
    if (tuple == nullptr || !PyTuple_Check(tuple) || static_cast<size_t>(PyTuple_Size(tuple)) != size) return false;
    for (size_t k = 0; k < size; k++) to.push_back(PyTuple_GetItem(tuple, static_cast<Py_ssize_t>(k)));
    return true;
}

bool Batch::are_those_of(const Prepared &prepared) {
    if (prepared.checks == nullptr || arrays.size() != prepared.arrays || outs.size() != prepared.outs) return false;
    access = access_of(arrays[0]);
    if (access == nullptr || !access->is_usable()) return false;
    const auto all = [](PyObject *check, const std::vector<PyObject *> &of) {
        Ref tuple(tuple_of(of)), found(tuple ? PyObject_CallObject(check, tuple.object) : nullptr);
        return found.object == Py_True;
    };
    if (prepared.is_in_place ? outs != arrays : !outs.empty() && !all(prepared.checks_outs, outs)) return false;
    return all(prepared.checks, arrays);
}

bool Batch::view_arrays(bool are_checked) {
    if (arrays.empty()) return false;
    if (are_checked) {
        views.resize(arrays.size());
        for (size_t k = 0; k < arrays.size(); k++)
            if (!access->view_checked(arrays[k], views[k])) return false;
        return true;
    }
    access = access_of(arrays[0]);
    if (access == nullptr || !access->is_usable()) return false;
    views.resize(arrays.size());
    signature.reserve(4 * tensors());
    for (size_t k = 0; k < arrays.size(); k++) {
        ArrayView &view = views[k];
        if (!access->view(arrays[k], false, view)) return false;
        const ArrayView &first = views[k - k % replicas];
        if (view.dtype != first.dtype || !same_sizes(view, first)) return false;
        if (k % replicas == 0) {
            signature.push_back(view.dtype);
            signature.push_back(view.axes);
            signature.insert(signature.end(), view.sizes, view.sizes + view.axes);
        }
        if (view.device == HOST && first.device == HOST) continue;
        signature.push_back(-1); // not a size or a dtype
        signature.push_back(view.device);
    }
    return true;
}

bool Batch::view_outs(const Prepared &prepared, bool are_checked) {
    out_views.resize(outs.size());
    for (const Run &run : prepared.runs)
        for (size_t tensor : run.tensors) {
            const ArrayView &like = first(tensor);
            size_t in = run.itemsize, out = run.result_size;
            for (int axis = 0; axis < like.axes; axis++)
                in *= static_cast<size_t>(like.sizes[axis]), out *= static_cast<size_t>(like.sizes[axis]);
            ArrayView *targets = &out_views[tensor * destinations];
            for (size_t r = 0; r < destinations; r++) {
                PyObject *array = outs[tensor * destinations + r];
                if (are_checked && prepared.is_in_place) targets[r] = views[tensor * replicas + r];
                else if (are_checked ? !access->view_checked(array, targets[r])
                                     : access_of(array) != access || !access->view(array, true, targets[r]))
                    return false;
                if (targets[r].dtype != run.dtype || targets[r].device != run.devices[r] || !same_sizes(targets[r], like))
                    return false;
                if (out > 0)
                    extents.push_back({targets[r].data, targets[r].data + out, 0, static_cast<int64_t>(r)});
            }
            for (size_t k = 0; in > 0 && k < replicas; k++) {
                const char *data = views[tensor * replicas + k].data;
                const auto is_source = [&](const ArrayView &view) { return view.data == data; };
                if (in != out || std::none_of(targets, targets + destinations, is_source))
                    extents.push_back({data, data + in, 0, -1});
            }
        }
    return find_overlap(extents, scratch) == nullptr;
}

PyObject *key_of(PyObject *op, PyObject *options, PyObject *sources, PyObject *destinations, bool with_out) {
    // The default options are the most frequent ones, and their hash is computed in Python.
    return PyTuple_Pack(5, op, options == default_options ? Py_None : options, sources, destinations,
                        with_out ? Py_True : Py_False);
}

PyObject *tuple_of(const std::vector<PyObject *> &objects) {
    PyObject *made = PyTuple_New(static_cast<Py_ssize_t>(objects.size()));
    for (size_t k = 0; made != nullptr && k < objects.size(); k++) {
        Py_INCREF(objects[k]);
        PyTuple_SetItem(made, static_cast<Py_ssize_t>(k), objects[k]);
    }
    return made;
}

std::shared_ptr<Prepared> Calls::latest(PyObject *key) {
    PyObject *number = PyDict_GetItemWithError(tables, key);
    if (number == nullptr) return nullptr;
    const std::lock_guard<std::mutex> guard(lock);
    const auto found = last.find(PyLong_AsSize_t(number));
    return found == last.end() ? nullptr : found->second;
}

std::shared_ptr<Prepared> Calls::find(PyObject *key, const std::vector<int64_t> &signature) {
    PyObject *number = PyDict_GetItemWithError(tables, key);
    if (number == nullptr) return nullptr;
    const uint64_t hash = hash_of(signature);
    const size_t at = PyLong_AsSize_t(number);
    const std::lock_guard<std::mutex> guard(lock);
    const auto map = maps.find(at);
    if (map == maps.end()) return nullptr; // another thread has removed it
    const auto [begin, end] = map->second.equal_range(hash);
    for (auto one = begin; one != end; ++one)
        if (one->second->signature == signature) return last[at] = one->second;
    return nullptr;
}

bool Calls::add(PyObject *key, std::shared_ptr<Prepared> prepared) {
    std::unordered_map<size_t, Map> forgotten; // destroyed without the lock
    std::unordered_map<size_t, std::shared_ptr<Prepared>> forgotten_last;
    size_t unused;
    {
        const std::lock_guard<std::mutex> guard(lock);
        unused = next++;
        if (count >= MAX_PREPARED) forgotten.swap(maps), forgotten_last.swap(last), count = 0;
    }
    if (!forgotten.empty()) PyDict_Clear(tables);
    Ref fresh(PyLong_FromSize_t(unused));
    Ref number(fresh ? PyObject_CallMethod(tables, "setdefault", "OO", key, fresh.object) : nullptr);
    if (!number) return false;
    const size_t at = PyLong_AsSize_t(number.object);
    const uint64_t hash = hash_of(prepared->signature);
    const std::lock_guard<std::mutex> guard(lock);
    last[at] = prepared;
    maps[at].emplace(hash, std::move(prepared));
    count++;
    return true;
}

void forget_error() {
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear();
}

PyObject *none_or_error() {
    forget_error();
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
}

PyObject *read_op(PyObject *op) {
    if (PyUnicode_CheckExact(op)) return PyDict_GetItemWithError(ops_by_name, op);
    return Py_TYPE(op) == reduce_op ? op : nullptr;
}

PyObject *run(Calls &calls, PyObject *op, PyObject *options, PyObject *sources, PyObject *destinations, Batch &batch) {
    op = read_op(op);
    Ref key(op != nullptr && !batch.arrays.empty() ? key_of(op, options, sources, destinations, !batch.outs.empty()) : nullptr);
    std::shared_ptr<Prepared> prepared(key && calls.has_checks ? calls.latest(key.object) : nullptr);
    const bool are_checked = prepared != nullptr && batch.are_those_of(*prepared);
    if (are_checked && !batch.view_arrays(true)) prepared = nullptr;
    if (key && !are_checked) {
        forget_error();
        if (PyErr_Occurred()) return nullptr; // Ctrl-C
        prepared = batch.view_arrays() ? calls.find(key.object, batch.signature) : nullptr;
    }
    if (prepared != nullptr && (batch.outs.empty() || batch.view_outs(*prepared, are_checked)))
        return run_prepared(batch, *prepared);
    forget_error();
    return nullptr;
}
