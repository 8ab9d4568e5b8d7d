// Prepared calls: their parts, and how a call is recognised and run.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "arrays.hpp"
#include "overlap.hpp"

struct Run { // one kernel or plan, which reduces some tensors of a batch
    PyObject *executable;
    const Kernel *kernel; // null: on CUDA devices, by `plan`
    PyObject *plan;
    std::vector<int> devices;     // of the results
    std::vector<size_t> likes;    // of a plan: for each result, a replica on the same device
    // Of a plan, for each tensor: sizes and strides of a result as tuples (null: it is empty), and its place in a block, in
    // elements; and the bytes of a block.
    std::vector<std::pair<PyObject *, PyObject *>> forms;
    std::vector<size_t> offsets;
    size_t block_nbytes;
    size_t itemsize, result_size; // bytes of an element of the arrays and of the results
    std::vector<size_t> tensors;
    bool streaming, threaded;
    int64_t dtype; // of the results
};

struct Prepared {
    std::vector<int64_t> signature;
    std::vector<Run> runs;
    PyObject *kept = nullptr; // a tuple of objects that must live as long as this
    uint64_t number; // of no other one
    Prepared();
    ~Prepared() { Py_XDECREF(kept); }
};

// The calls that one op has prepared.
class Calls {
  public:
    PyObject *tables = nullptr; // by key (see `key_of`): the number of a map

    ~Calls() { Py_XDECREF(tables); }
    // Return a prepared call, or null. An error may be set: the key cannot be hashed.
    std::shared_ptr<Prepared> find(PyObject *key, const std::vector<int64_t> &signature);
    // Add a call. If there are very many, forget all others. Return false with an error set if that fails.
    bool add(PyObject *key, std::shared_ptr<Prepared> prepared);

  private:
    using Map = std::unordered_multimap<uint64_t, std::shared_ptr<Prepared>>;
    std::mutex lock; // of the members below; no Python code runs under it
    std::unordered_map<size_t, Map> maps;
    std::unordered_map<size_t, std::shared_ptr<Prepared>> last; // of each map: the one that was found or added last
    size_t count = 0, next = 0; // of calls; the next number of a map, which is never used again
};

// The arrays of one call.
struct Batch {
    size_t replicas = 0, destinations = 0;
    // Tensor after tensor: each replica's array, each destination's; for each tensor, a tuple of the latter, unless they
    // are of lists; and each destination's result. All are borrowed.
    std::vector<PyObject *> arrays, outs, out_tuples, results;
    std::vector<PyObject *> owned;        // references that are kept during the call
    const ArrayAccess *access = nullptr;
    std::vector<ArrayView> views, out_views;
    std::vector<int64_t> signature; // dtypes and sizes
    std::vector<Source> sources;    // of one kernel, and the memory of its results
    std::vector<char *> targets;
    std::vector<Extent> extents, scratch; // see find_overlap
    // A prepared call, and the addresses of arrays that share no memory in it.
    uint64_t apart_in = 0;
    std::vector<const char *> apart, addresses;

    // Forget everything but the memory of the vectors.
    void clear();
    size_t tensors() const { return arrays.size() / replicas; }
    const ArrayView &first(size_t tensor) const { return views[tensor * replicas]; }

    // Keep a new reference, and return it.
    PyObject *own(PyObject *object) {
        if (object != nullptr) owned.push_back(object);
        return object;
    }

    // View all arrays, and set the signature. Return false if they cannot be used here.
    bool view_arrays();
    // View the arrays of `outs`. Return false if they do not fit the results, or share memory with other arrays.
    bool view_outs(const Prepared &prepared);

  private:
    bool are_apart(const Prepared &prepared);
};

// A batch that lives as long as this object. Its memory is that of the thread's last batch, unless that was very large:
// whenever memory of 64 KiB and more is freed, glibc merges all small free blocks, and new results must split them again.
class BatchLease {
  public:
    BatchLease();
    ~BatchLease();
    BatchLease(const BatchLease &) = delete;
    BatchLease &operator=(const BatchLease &) = delete;
    Batch &operator*() const { return *batch; }

  private:
    std::unique_ptr<Batch> batch;
};

// Append the elements of a tuple to `to`. Return false if it is not a tuple of `size`.
bool append(PyObject *tuple, size_t size, std::vector<PyObject *> &to);

// Return the key of calls with the same op, options and devices; or null with an error set. A number of replicas stands
// for the devices on which their arrays are.
PyObject *key_of(PyObject *op, PyObject *options, PyObject *sources, PyObject *destinations, bool with_out);

// Run a call if it was prepared, and set the results of the batch. If not, return false; then an error may be set.
bool run(Calls &calls, PyObject *op, PyObject *options, PyObject *sources, PyObject *destinations, Batch &batch);

// Ignore an error, since the call is not handled here; but keep Ctrl-C.
void forget_error();

// Forget an error; then return None, which a method returns for a call that it does not handle, or null for Ctrl-C.
PyObject *none_or_error();

// Return the ReduceOp that an argument is or names, borrowed; or null, for which an error may be set.
PyObject *read_op(PyObject *op);

bool same_sizes(const ArrayView &a, const ArrayView &b);
uint64_t hash_of(const std::vector<int64_t> &signature);

// Classes and values of the package, kept until the process ends.
extern PyTypeObject *reduce_op;
extern PyObject *ops_by_name, *default_options, *name_threads;

// Add the class RankCalls, or TorchCalls. Return -1 with an error set if that fails.
int add_rank_calls(PyObject *module);
int add_torch_calls(PyObject *module);
PyObject *use_torch_options(PyObject *, PyObject *args);

// Do what RankCalls.run does for its six arguments. `begun`: if not null, count the call there when it begins. `written`: tell
// the framework then that the last argument, the result, is written.
PyObject *run_rank_call(PyObject *rank_calls, PyObject *const *arguments, int64_t *begun, bool written);
