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

// Make the results of a plan, new arrays, and put their memory into `batch.targets`. Return false with an error set
// if that fails. The results of one replica share a block of memory: allocating each would take longer than all the rest.
bool make_results(Batch &batch, const Run &run) {
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
            batch.results[run.tensors[k] * batch.destinations + r] = batch.own(array);
        }
    }
    return true;
}

// Run a prepared call. Return false with an error set if that fails.
bool run_prepared(Batch &batch, const Prepared &prepared) {
    std::vector<int> threads;
    for (const Run &run : prepared.runs) { // before anything is allocated, since this may raise
        threads.push_back(1);
        if (!run.threaded) continue;
        Ref number(PyObject_CallMethodObjArgs(run.executable, name_threads, nullptr));
        if (!number) return false;
        const long found = PyLong_AsLong(number.object);
        if (found == -1 && PyErr_Occurred()) return false;
        threads.back() = static_cast<int>(found);
    }
    batch.results.assign(batch.tensors() * batch.destinations, nullptr);
    batch.owned.reserve(batch.owned.size() + batch.results.size());
    std::vector<Queued> queued; // nothing is queued before all memory is there
    for (size_t number = 0; number < prepared.runs.size(); number++) {
        const Run &run = prepared.runs[number];
        batch.sources.clear(), batch.targets.clear();
        const bool is_made = run.plan != nullptr && batch.outs.empty();
        if (is_made && !make_results(batch, run)) return false;
        for (size_t tensor : run.tensors) {
            for (size_t k = 0; k < batch.replicas; k++)
                batch.sources.push_back({batch.views[tensor * batch.replicas + k].data, nullptr});
            for (size_t r = 0; r < batch.destinations && !is_made; r++) {
                const size_t at = tensor * batch.destinations + r;
                char *data = batch.outs.empty() ? nullptr : batch.out_views[at].data;
                PyObject *&array = batch.results[at];
                if (!batch.outs.empty()) array = batch.outs[at];
                else array = batch.own(batch.access->make(batch.first(tensor), run.dtype, run.result_size, &data));
                if (array == nullptr) return false;
                batch.targets.push_back(data);
            }
        }
        if (run.plan != nullptr) {
            queued.emplace_back();
            if (!prepare_plan(batch, run, queued.back())) {
                forget_error();
                return false;
            }
            continue;
        }
        const bool small = kernel_api->traffic_nbytes(*run.kernel) <= MAX_NBYTES_WITH_LOCK;
        const auto execute = [&](int on, bool streaming) {
            return kernel_api->run(*run.kernel, batch.sources, batch.targets, on, streaming);
        };
        if (!(small ? execute(1, false) : without_lock(false, [&] { return execute(threads[number], run.streaming); })))
            return PyErr_NoMemory() != nullptr;
    }
    for (const Queued &one : queued)
        if (!cuda_api->run(one.plan, one.addresses, one.streams)) return false;
    return batch.outs.empty() || batch.access->mark_written(batch.outs);
}

} // namespace

Prepared::Prepared() {
    static std::atomic<uint64_t> made{0};
    number = ++made;
}

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
    owned.clear(), arrays.clear(), outs.clear(), out_tuples.clear(), results.clear(), signature.clear();
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

bool Batch::view_arrays() {
    if (arrays.empty()) return false;
    access = access_of(arrays[0]);
    if (access == nullptr || !access->is_usable() || !access->view_all(arrays, outs == arrays, views)) return false;
    signature.reserve(2 * arrays.size() + 4 * tensors());
    for (size_t k = 0; k < arrays.size(); k++) {
        const ArrayView &view = views[k], &first = views[k - k % replicas];
        if (view.dtype != first.dtype || !same_sizes(view, first)) return false;
        if (k % replicas == 0) {
            signature.push_back(view.dtype);
            signature.push_back(view.axes);
            signature.insert(signature.end(), view.sizes, view.sizes + view.axes);
        }
        if (view.device == HOST && first.device == HOST) continue;
        signature.push_back(HOST - 1 - view.device); // negative, and so neither a size nor a dtype
    }
    return true;
}

bool Batch::view_outs(const Prepared &prepared) {
    if (outs == arrays) out_views = views;
    else if (!access->view_all(outs, true, out_views)) return false;
    for (const Run &run : prepared.runs)
        for (size_t tensor : run.tensors) {
            const ArrayView &like = first(tensor), *targets = &out_views[tensor * destinations];
            for (size_t r = 0; r < destinations; r++)
                if (targets[r].dtype != run.dtype || targets[r].device != run.devices[r] || !same_sizes(targets[r], like))
                    return false;
        }
    // Most programs pass the same arrays again and again.
    addresses.resize(views.size() + out_views.size());
    const auto data = [](const ArrayView &view) { return view.data; };
    std::transform(out_views.begin(), out_views.end(), std::transform(views.begin(), views.end(), addresses.begin(), data), data);
    if (apart_in == prepared.number && addresses == apart) return true;
    if (!are_apart(prepared)) return false;
    apart_in = prepared.number;
    apart.swap(addresses);
    return true;
}

// Return whether no result shares memory with another array, unless it is the source itself.
bool Batch::are_apart(const Prepared &prepared) {
    extents.clear();
    for (const Run &run : prepared.runs)
        for (size_t tensor : run.tensors) {
            const ArrayView &like = first(tensor), *targets = &out_views[tensor * destinations];
            size_t in = run.itemsize, out = run.result_size;
            for (int axis = 0; axis < like.axes; axis++)
                in *= static_cast<size_t>(like.sizes[axis]), out *= static_cast<size_t>(like.sizes[axis]);
            for (size_t r = 0; out > 0 && r < destinations; r++)
                extents.push_back({targets[r].data, targets[r].data + out, 0, static_cast<int64_t>(r)});
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

std::shared_ptr<Prepared> Calls::find(PyObject *key, const std::vector<int64_t> &signature) {
    PyObject *number = PyDict_GetItemWithError(tables, key);
    if (number == nullptr) return nullptr;
    const size_t at = PyLong_AsSize_t(number);
    const std::lock_guard<std::mutex> guard(lock);
    if (const auto recent = last.find(at); recent != last.end() && recent->second->signature == signature)
        return recent->second;
    const uint64_t hash = hash_of(signature);
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

bool run(Calls &calls, PyObject *op, PyObject *options, PyObject *sources, PyObject *destinations, Batch &batch) {
    op = read_op(op);
    Ref key(op != nullptr && !batch.arrays.empty() ? key_of(op, options, sources, destinations, !batch.outs.empty()) : nullptr);
    const auto prepared = key && batch.view_arrays() ? calls.find(key.object, batch.signature) : nullptr;
    if (prepared != nullptr && (batch.outs.empty() || batch.view_outs(*prepared))) return run_prepared(batch, *prepared);
    forget_error();
    return false;
}
