// Collectives among processes as a custom call of XLA on the CPU: the devices of this process meet here.
//
// XLA calls `execute` once per device of this process. When all of them have arrived, their call is put into the queue of
// its processes, from which a thread in Python takes it (jax/process_group.py), exchanges data with the other processes,
// and reports the end. Meanwhile, the devices wait in the call for PATIENCE, and then return futures, as in xla_call.cpp:
// so they occupy no threads that other operations need, and calls of one process may arrive in any order.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu_handlers.hpp"
#include "thread_pool.hpp"

namespace {

using namespace xla;
using Clock = std::chrono::steady_clock;
using Ints = std::vector<int64_t>;

constexpr std::chrono::milliseconds PATIENCE{5}; // see xla_call.cpp
constexpr std::chrono::seconds CHECK{1};         // between two looks for devices that do not arrive

struct CallSite { // a custom call of an executable
    std::string text;   // describes the call, and is the same in all processes
    Ints processes;     // of each number of a device; the positions of a group are consecutive
    int64_t positions;  // of a group
    int64_t serial;     // of this site in this process
    int64_t twin;       // how many equal sites the same program had before
};

struct Arrival { // of a device
    bool here = false;
    std::vector<void *> buffers; // the operands, then the results
    const Api *api = nullptr;
    XLA_FFI_Future *future = nullptr; // null: the device waits in its call
};

struct Call {
    std::shared_ptr<CallSite> site;
    int64_t run, group, id = 0;
    Clock::time_point began = Clock::now();
    std::map<int64_t, Arrival> arrivals; // of the positions in this process
    size_t arrived = 0;
    bool done = false;
    std::string fault; // the error that each device gets, and its code
    ErrorCode code = INTERNAL;
    std::condition_variable changed;
};

struct Queue { // the calls of one set of processes that wait for the thread in Python
    std::deque<std::shared_ptr<Call>> calls;
    std::condition_variable added;
    bool claimed = false;
};

struct Completion {
    std::shared_ptr<Call> call;
    Arrival *arrival;
};

// Never destroyed: threads may use them while the process exits. `lock` is the lock of all of them.
std::mutex &lock = *new std::mutex;
std::list<std::shared_ptr<Call>> &open_calls = *new std::list<std::shared_ptr<Call>>; // not all devices have arrived
std::map<int64_t, std::shared_ptr<Call>> &running = *new std::map<int64_t, std::shared_ptr<Call>>;
std::map<Ints, Queue> &queues = *new std::map<Ints, Queue>;
std::map<std::string, int64_t> &known = *new std::map<std::string, int64_t>; // how many sites have a text
std::map<std::pair<std::thread::id, std::string>, int64_t> &twins =
    *new std::map<std::pair<std::thread::id, std::string>, int64_t>; // of the program that a thread compiles
std::condition_variable &unclaimed = *new std::condition_variable;
std::list<Completion> &completions = *new std::list<Completion>;
int64_t own_process = 0, next_serial = 0, next_id = 0;
std::chrono::duration<double> limit{40}; // how long devices wait for a missing one of their process
XLA_FFI_TypeId site_type{0};

// ---- the end of a call ---------------------------------------------------------------------------------------------

// Complete the future of a device, and continue with the device's program in this thread. Returns null.
void *complete_one(void *) {
#if defined(__x86_64__)
    _mm_setcsr(_mm_getcsr() | 0x8040); // flush subnormal numbers, like the threads in which XLA runs programs
#endif
    std::unique_lock<std::mutex> locked(lock);
    const Completion own = std::move(completions.front());
    completions.pop_front();
    locked.unlock();
    const Api *api = own.arrival->api;
    if (own.call->fault.empty()) {
        XLA_FFI_Future_SetAvailable_Args done = {sizeof done, nullptr, own.arrival->future};
        api->XLA_FFI_Future_SetAvailable(&done);
    } else {
        XLA_FFI_Future_SetError_Args failed = {sizeof failed, nullptr, own.arrival->future,
                                               error_of(api, own.call->code, own.call->fault)};
        api->XLA_FFI_Future_SetError(&failed);
    }
    return nullptr;
}

// Let all devices of a call continue. The caller has the lock, which is released.
void finish(std::unique_lock<std::mutex> &locked, const std::shared_ptr<Call> &call) {
    call->done = true;
    size_t futures = 0;
    for (auto &one : call->arrivals)
        if (one.second.future != nullptr) {
            completions.push_back({call, &one.second});
            futures++;
        }
    locked.unlock();
    call->changed.notify_all();
    for (; futures > 0; futures--) // each in a thread of its own: see `finish` in xla_call.cpp
        if (!start_thread(complete_one)) complete_one(nullptr);
}

std::string missing_text(const Call &call) {
    std::string here, missing;
    for (const auto &one : call.arrivals) {
        std::string &list = one.second.here ? here : missing;
        list += (list.empty() ? "" : ", ") + std::to_string(one.first);
    }
    return "position " + missing + " of process " + std::to_string(own_process) +
           " did not arrive at a collective of crossreduce.jax in time.\n  given: position " + here + " arrived; " +
           call.site->text + "\n  try:   call it on every device, not in a branch that only some of them take; a device "
           "that is only late needs a larger CROSSREDUCE_JAX_TIMEOUT";
}

// ---- the handlers --------------------------------------------------------------------------------------------------

void destroy_site(void *state) {
    auto *site = static_cast<std::shared_ptr<CallSite> *>(state);
    std::lock_guard<std::mutex> locked(lock);
    const auto found = known.find((*site)->text);
    if (--found->second == 0) known.erase(found);
    delete site;
}

// Make the state of a call site.
Error *make_site(CallFrame &frame) {
    const auto *text = static_cast<const XLA_FFI_ByteSpan *>(attribute(frame, "call", XLA_FFI_AttrType_STRING));
    const auto *numbers = static_cast<const XLA_FFI_Array *>(attribute(frame, "processes", XLA_FFI_AttrType_ARRAY));
    if (text == nullptr || numbers == nullptr || numbers->dtype != XLA_FFI_DataType_S64 || numbers->size < 2)
        return error_of(frame.api, INVALID_ARGUMENT, "the attributes of crossreduce's call are invalid");
    const auto *values = static_cast<const int64_t *>(numbers->data); // the positions, then the processes
    auto site = std::make_shared<CallSite>();
    site->text.assign(text->ptr, text->len);
    site->positions = values[0];
    site->processes.assign(values + 1, values + numbers->size);
    auto own = std::make_unique<std::shared_ptr<CallSite>>(site);
    {
        std::lock_guard<std::mutex> locked(lock);
        site->serial = next_serial++;
        site->twin = twins[{std::this_thread::get_id(), site->text}]++;
        known[site->text]++;
    }
    XLA_FFI_State_Set_Args state = {sizeof state, nullptr, frame.ctx, INSTANTIATE, &site_type, own.get()};
    Error *error = frame.api->XLA_FFI_State_Set(&state);
    void *kept = own.release();
    if (error != nullptr) destroy_site(kept);
    return error;
}

Error *instantiate(CallFrame *frame) {
    static const XLA_FFI_TypeInfo info = {sizeof(XLA_FFI_TypeInfo), nullptr, destroy_site};
    if (Error *error = register_state(frame->api, "crossreduce_process_call_site", info, site_type)) return error;
    return is_metadata_call(*frame, 0, site_type) ? nullptr : guarded(*frame, make_site);
}

// Return the size of an element, or 0 for types that no collective has.
size_t itemsize_of(XLA_FFI_DataType dtype) {
    switch (dtype) {
    case XLA_FFI_DataType_PRED: case XLA_FFI_DataType_S8: case XLA_FFI_DataType_U8: return 1;
    case XLA_FFI_DataType_S16: case XLA_FFI_DataType_U16: case XLA_FFI_DataType_F16: case XLA_FFI_DataType_BF16:
        return 2;
    case XLA_FFI_DataType_S32: case XLA_FFI_DataType_U32: case XLA_FFI_DataType_F32: return 4;
    case XLA_FFI_DataType_S64: case XLA_FFI_DataType_U64: case XLA_FFI_DataType_F64: case XLA_FFI_DataType_C64: return 8;
    case XLA_FFI_DataType_C128: return 16;
    default: return 0;
    }
}

// Return the open call of a device. Add one unless it exists. The caller has the lock.
std::shared_ptr<Call> find_call(const std::shared_ptr<CallSite> &site, int64_t run, int64_t group) {
    for (const auto &one : open_calls)
        if (one->site == site && one->run == run && one->group == group) return one;
    auto call = std::make_shared<Call>();
    call->site = site;
    call->run = run, call->group = group;
    for (int64_t k = 0; k < site->positions; k++)
        if (site->processes[static_cast<size_t>(group * site->positions + k)] == own_process) call->arrivals[k];
    open_calls.push_back(call);
    return call;
}

// Put a call of which all devices have arrived into the queue of its processes. The caller has the lock.
void enqueue(const std::shared_ptr<Call> &call) {
    call->id = next_id++;
    const auto first = call->site->processes.begin() + call->group * call->site->positions;
    Ints members(first, first + call->site->positions);
    std::sort(members.begin(), members.end());
    members.erase(std::unique(members.begin(), members.end()), members.end());
    Queue &queue = queues[members];
    queue.calls.push_back(call);
    (queue.claimed ? queue.added : unclaimed).notify_one();
}

Error *arrive(CallFrame &frame) {
    const Api *api = frame.api;
    void *state;
    int64_t run;
    if (Error *error = read_call(frame, site_type, state, run)) return error;
    const auto &site = *static_cast<std::shared_ptr<CallSite> *>(state);
    const auto data_of = [](void *buffer) { return static_cast<XLA_FFI_Buffer *>(buffer)->data; };
    std::vector<void *> buffers;
    for (int64_t k = 0; k + 1 < frame.args.size; k++) buffers.push_back(data_of(frame.args.args[k]));
    for (int64_t k = 0; k < frame.rets.size; k++) {
        const auto &result = *static_cast<XLA_FFI_Buffer *>(frame.rets.rets[k]);
        auto nbytes = static_cast<size_t>(itemsize_of(result.dtype));
        for (int64_t axis = 0; axis < result.rank; axis++) nbytes *= static_cast<size_t>(result.dims[axis]);
        if (std::find(buffers.begin(), buffers.end(), result.data) == buffers.end())
            advise(static_cast<char *>(result.data), nbytes);
        buffers.push_back(result.data);
    }
    // The last operand is the number of the device: the positions of a group are consecutive.
    const int64_t number = *static_cast<const int32_t *>(data_of(frame.args.args[frame.args.size - 1]));

    std::unique_lock<std::mutex> locked(lock);
    const std::shared_ptr<Call> call = find_call(site, run, number / site->positions);
    const auto found = call->arrivals.find(number % site->positions);
    if (found == call->arrivals.end() || found->second.here)
        return error_of(api, INTERNAL, "a device arrived twice at one collective, or is not one of this process");
    Arrival &own = found->second;
    own.here = true;
    own.buffers = std::move(buffers);
    own.api = api;
    if (++call->arrived == call->arrivals.size()) {
        open_calls.remove(call);
        if (!call->done) enqueue(call);
    }
    if (!call->changed.wait_for(locked, PATIENCE, [&] { return call->done; })) {
        XLA_FFI_Future_Create_Args made = {sizeof(XLA_FFI_Future_Create_Args), nullptr, nullptr};
        if (Error *error = api->XLA_FFI_Future_Create(&made)) return error;
        frame.future = own.future = made.future;
        return nullptr;
    }
    return call->fault.empty() ? nullptr : error_of(api, call->code, call->fault);
}

// Called once per device and run of a custom call.
Error *execute(CallFrame *frame) {
    return is_metadata_call(*frame, 0, {0}) ? nullptr : guarded(*frame, arrive);
}

// ---- functions for Python ------------------------------------------------------------------------------------------

PyObject *handlers(PyObject *, PyObject *args) {
    long long process;
    double limit_s;
    if (!PyArg_ParseTuple(args, "Ld", &process, &limit_s)) return nullptr;
    {
        std::lock_guard<std::mutex> locked(lock);
        own_process = process;
        limit = std::chrono::duration<double>(limit_s);
    }
    return handlers_of(instantiate, execute);
}

PyObject *tuple_of(const Ints &numbers) {
    PyObject *made = PyTuple_New(static_cast<Py_ssize_t>(numbers.size()));
    for (size_t k = 0; made != nullptr && k < numbers.size(); k++)
        PyTuple_SetItem(made, static_cast<Py_ssize_t>(k), PyLong_FromLongLong(numbers[k]));
    return made;
}

// Fail the calls for which devices are missing too long. Return whether one was found. The caller has the lock, which
// is released for a moment then.
bool expire(std::unique_lock<std::mutex> &locked) {
    const auto late = Clock::now() - std::chrono::duration_cast<Clock::duration>(limit);
    for (const auto &call : open_calls)
        if (!call->done && call->began < late) {
            const std::shared_ptr<Call> kept = call;
            kept->fault = missing_text(*kept);
            kept->code = DEADLINE_EXCEEDED;
            finish(locked, kept);
            locked.lock();
            return true;
        }
    return false;
}

PyObject *next_processes(PyObject *, PyObject *) {
    const auto *members = without_lock<const Ints *>(nullptr, [] {
        std::unique_lock<std::mutex> locked(lock);
        for (;;) {
            for (auto &one : queues)
                if (!one.second.claimed && !one.second.calls.empty()) {
                    one.second.claimed = true;
                    return &one.first;
                }
            if (!expire(locked)) unclaimed.wait_for(locked, CHECK);
        }
    });
    return members == nullptr ? PyErr_NoMemory() : tuple_of(*members);
}

PyObject *next_call(PyObject *, PyObject *args) {
    PyObject *processes;
    double timeout_s;
    if (!PyArg_ParseTuple(args, "Od", &processes, &timeout_s)) return nullptr;
    Ints members;
    if (!read_ints(processes, members)) return nullptr;
    const auto call = without_lock<std::shared_ptr<Call>>(nullptr, [&]() -> std::shared_ptr<Call> {
        std::unique_lock<std::mutex> locked(lock);
        Queue &queue = queues[members];
        const auto has_call = [&] { return !queue.calls.empty(); };
        if (timeout_s < 0) queue.added.wait(locked, has_call);
        else if (!has_call() && timeout_s == 0) return nullptr; // to wait for no time would take 80 us
        else if (!queue.added.wait_for(locked, std::chrono::duration<double>(timeout_s), has_call)) return nullptr;
        auto found = queue.calls.front();
        queue.calls.pop_front();
        return running[found->id] = found;
    });
    if (call == nullptr) Py_RETURN_NONE;
    Ints addresses;
    for (const auto &one : call->arrivals)
        for (const void *buffer : one.second.buffers) addresses.push_back(reinterpret_cast<int64_t>(buffer));
    Ref found(tuple_of(addresses));
    if (!found) return nullptr;
    return Py_BuildValue("LLLLs#O", static_cast<long long>(call->id), static_cast<long long>(call->site->serial),
                         static_cast<long long>(call->site->twin), static_cast<long long>(call->group),
                         call->site->text.data(), static_cast<Py_ssize_t>(call->site->text.size()), found.object);
}

PyObject *finish_call(PyObject *, PyObject *args) {
    long long id;
    const char *fault;
    Py_ssize_t length;
    if (!PyArg_ParseTuple(args, "Ls#", &id, &fault, &length)) return nullptr;
    without_lock<bool>(false, [&] {
        std::unique_lock<std::mutex> locked(lock);
        const auto found = running.find(id);
        if (found == running.end()) return false;
        const std::shared_ptr<Call> call = found->second;
        running.erase(found);
        call->fault.assign(fault, static_cast<size_t>(length));
        finish(locked, call);
        return true;
    });
    Py_RETURN_NONE;
}

PyObject *is_known(PyObject *, PyObject *args) {
    const char *text;
    Py_ssize_t length;
    if (!PyArg_ParseTuple(args, "s#", &text, &length)) return nullptr;
    std::lock_guard<std::mutex> locked(lock);
    return PyBool_FromLong(known.count(std::string(text, static_cast<size_t>(length))) > 0);
}

PyObject *end_program(PyObject *, PyObject *) {
    std::lock_guard<std::mutex> locked(lock);
    const auto own = std::this_thread::get_id();
    for (auto at = twins.begin(); at != twins.end();) at = at->first.first == own ? twins.erase(at) : std::next(at);
    Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"process_call_handlers", handlers, METH_VARARGS,
     "process_call_handlers(process, limit_s): configure the custom call; return its handlers by stage."},
    {"next_processes", next_processes, METH_NOARGS,
     "next_processes(): wait for a call of a set of processes that was not returned before; return these processes."},
    {"next_call", next_call, METH_VARARGS,
     "next_call(processes, timeout_s): return the next call of these processes as (id, site, twin, group, text, "
     "addresses); None: there was none in time. A timeout below 0 has no end."},
    {"finish_call", finish_call, METH_VARARGS, "finish_call(id, fault): end a call; fault: the error, or \"\"."},
    {"is_known_call", is_known, METH_VARARGS, "is_known_call(text): whether a compiled program has such a call."},
    {"end_program", end_program, METH_NOARGS, "end_program(): this thread has compiled a program."},
    {nullptr, nullptr, 0, nullptr}};

} // namespace

int add_process_calls(PyObject *module) { return PyModule_AddFunctions(module, functions); }
