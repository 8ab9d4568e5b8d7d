// All-reduce as a custom call of XLA on the CPU: the devices of one process meet here.
//
// XLA calls `execute` once per device. The device that arrives last reduces the arrays of all devices, with one run of a
// kernel, in the order of the positions. The other devices wait in the call, but not for long: XLA runs independent
// operations in any order and on any threads, so a device may wait here while another one waits in a collective of XLA,
// and each is needed by the other. If not all devices have arrived after PATIENCE, those that wait return futures from
// their calls, and their threads are free for other operations; XLA continues with what follows a call when its future is
// complete.
//
// Devices meet by the call site (a state that XLA makes once per custom call of an executable, also if two calls come
// from one line of the program), the run of the executable, and the group of positions. A call site runs again, in a
// loop, only after its earlier call is complete on that device, so each key has at most one open meeting.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cpu_handlers.hpp"
#include "thread_pool.hpp"

namespace {

using namespace xla;
using Clock = std::chrono::steady_clock;

// How long the device that arrives first waits in its call, and all others with it. Going on by a future takes about
// 100 us longer than to return from the call. A timer that ends before the next tick of the kernel (4 ms) costs 20 us on
// a virtual machine, 10 % of a small all-reduce.
constexpr std::chrono::milliseconds PATIENCE{5};

// A device that arrives after its meeting has failed gets the same error, if not more meetings than this failed since.
constexpr std::ptrdiff_t MAX_FAILED = 64;

struct Settings { // of the process; see `handlers`
    const InstructionSet *isa = nullptr;
    int threads = 1;
    Py_ssize_t streaming_nbytes = 0, threaded_nbytes = 0; // see kernels/__init__.py
    std::chrono::duration<double> limit{40};
} settings;

// A custom call of an executable.
struct CallSite {
    std::string axes; // for messages
    Op op;
    DType accumulator;
    double divisor;
    int64_t positions;
    std::unique_ptr<Kernel> kernel; // compiled in the first run, for the sizes of its operands
};

struct Meeting;

struct Arrival { // of a device
    bool here = false;
    std::vector<char *> sources, results;
    const Api *api = nullptr;
    std::mutex lock; // of the members below
    std::condition_variable changed;
    bool done = false;                 // the results are written, or the meeting has a fault
    bool leave = false;                // the device makes a future instead of waiting
    XLA_FFI_Future *future = nullptr; // null: the device waits in its call
    std::shared_ptr<Meeting> meeting;  // keeps it while a thread is about to complete the future
    std::list<Arrival *> self{this};   // becomes an element of `completions`, so that none must be allocated then
};

struct Meeting {
    CallSite *site;
    int64_t run, group;
    Clock::time_point deadline;
    int64_t arrived = 0;
    std::atomic<bool> full{false};
    bool asynchronous = false; // all devices but the last one make futures
    std::string fault; // the error that each device gets, and its code
    ErrorCode code = DEADLINE_EXCEEDED;
    std::vector<Arrival> arrivals;
    Meeting(CallSite &at, int64_t of, int64_t number)
        : site(&at), run(of), group(number),
          deadline(Clock::now() + std::chrono::duration_cast<Clock::duration>(settings.limit)),
          arrivals(static_cast<size_t>(at.positions)) {}
};

// These objects are never destroyed: threads may use them while the process exits. `lock` is the lock of the objects and
// of all meetings in the list. A thread that has it may lock an arrival, but not the other way round.
std::mutex &lock = *new std::mutex;
std::condition_variable &meeting_added = *new std::condition_variable;
std::list<std::shared_ptr<Meeting>> &meetings = *new std::list<std::shared_ptr<Meeting>>; // not full, or failed
std::list<Arrival *> &completions = *new std::list<Arrival *>; // whose futures are about to be completed
bool watchdog_started = false;
Clock::time_point watched_until = Clock::time_point::min(); // when the watchdog wakes up by itself
XLA_FFI_TypeId site_type{0};

// Let a device that waits in its call return. Return whether it has a future instead, which must then be completed.
bool wake(Arrival &arrival) {
    std::unique_lock<std::mutex> locked(arrival.lock);
    arrival.done = true;
    if (arrival.future != nullptr) return true;
    locked.unlock(); // first, so that the device does not wake up only to wait for the lock
    arrival.changed.notify_one();
    return false;
}

void fail(const Arrival &arrival, const Meeting &meeting) {
    XLA_FFI_Future_SetError_Args failed = {sizeof(XLA_FFI_Future_SetError_Args), nullptr, arrival.future,
                                  error_of(arrival.api, meeting.code, meeting.fault)};
    arrival.api->XLA_FFI_Future_SetError(&failed);
}

// Complete the future of a device, and continue with the device's program in this thread. Returns null.
void *complete_one(void *) {
#if defined(__x86_64__)
    _mm_setcsr(_mm_getcsr() | 0x8040); // flush subnormal numbers, like the threads in which XLA runs programs
#endif
    std::unique_lock<std::mutex> locked(lock);
    Arrival &arrival = *completions.front();
    completions.pop_front();
    locked.unlock();
    const std::shared_ptr<Meeting> meeting = std::move(arrival.meeting);
    XLA_FFI_Future_SetAvailable_Args done = {sizeof(XLA_FFI_Future_SetAvailable_Args), nullptr, arrival.future};
    arrival.api->XLA_FFI_Future_SetAvailable(&done);
    return nullptr;
}

// ---- the bounded wait ----------------------------------------------------------------------------------------------

std::string missing_positions(const Meeting &meeting) {
    std::string here, missing;
    for (size_t k = 0; k < meeting.arrivals.size(); k++) {
        std::string &list = meeting.arrivals[k].here ? here : missing;
        list += (list.empty() ? "" : ", ") + std::to_string(k);
    }
    std::string limit = std::to_string(settings.limit.count());
    limit.erase(limit.find_last_not_of('0') + 1);
    if (limit.back() == '.') limit.pop_back();
    return "all_reduce over " + meeting.site->axes + ": position " + missing + " did not arrive within " + limit +
           " s.\n  given: position " + here + " arrived, of " + std::to_string(meeting.arrivals.size()) +
           "\n  try:   call all_reduce on every device, not in a branch that only some of them take; a device that is "
           "only late needs a larger CROSSREDUCE_JAX_TIMEOUT";
}

// Remove the oldest meetings that have failed, whose missing devices may never arrive. The caller has the lock.
void forget_failed() {
    const auto is_failed = [](const auto &meeting) { return !meeting->fault.empty(); };
    auto failed = std::count_if(meetings.begin(), meetings.end(), is_failed);
    for (; failed > MAX_FAILED; failed--) meetings.erase(std::find_if(meetings.begin(), meetings.end(), is_failed));
}

// Fails meetings that are not full in time. While no meeting is open, it sleeps.
void *watch(void *) {
    std::unique_lock<std::mutex> locked(lock);
    for (;;) {
        std::shared_ptr<Meeting> late;
        auto first = Clock::time_point::max();
        for (const auto &meeting : meetings) {
            if (!meeting->fault.empty()) continue;
            if (meeting->deadline <= Clock::now()) late = meeting;
            first = std::min(first, meeting->deadline);
        }
        if (late != nullptr) {
            try {
                late->fault = missing_positions(*late);
            } catch (const std::exception &) { // bad_alloc; this text needs no memory
                late->fault = NO_MEMORY;
            }
            forget_failed();
            for (Arrival &arrival : late->arrivals) wake(arrival);
            locked.unlock();
            for (const Arrival &arrival : late->arrivals)
                if (arrival.future != nullptr) fail(arrival, *late);
            locked.lock();
            continue;
        }
        watched_until = first;
        if (first == Clock::time_point::max()) meeting_added.wait(locked);
        else meeting_added.wait_until(locked, first);
    }
}

// ---- one run of the kernel -----------------------------------------------------------------------------------------

int dtype_of(XLA_FFI_DataType dtype) { // -1: not supported
    switch (dtype) {
    case XLA_FFI_DataType_PRED: return BOOL;
    case XLA_FFI_DataType_S8: return I8;
    case XLA_FFI_DataType_S16: return I16;
    case XLA_FFI_DataType_S32: return I32;
    case XLA_FFI_DataType_S64: return I64;
    case XLA_FFI_DataType_U8: return U8;
    case XLA_FFI_DataType_U16: return U16;
    case XLA_FFI_DataType_U32: return U32;
    case XLA_FFI_DataType_U64: return U64;
    case XLA_FFI_DataType_F16: return F16;
    case XLA_FFI_DataType_BF16: return BF16;
    case XLA_FFI_DataType_F32: return F32;
    case XLA_FFI_DataType_F64: return F64;
    case XLA_FFI_DataType_C64: return C64;
    case XLA_FFI_DataType_C128: return C128;
    default: return -1;
    }
}

// Compile the kernel of a call site. Returns null, or a description of the fault.
const char *compile(CallSite &site, const CallFrame &frame) {
    auto kernel = std::make_unique<Kernel>();
    const auto *first = static_cast<XLA_FFI_Buffer *>(frame.args.args[0]);
    const int from = dtype_of(first->dtype), to = dtype_of(static_cast<XLA_FFI_Buffer *>(frame.rets.rets[0])->dtype);
    if (from < 0 || to < 0) return "the dtype is not supported";
    kernel->op = site.op;
    kernel->dtype = static_cast<DType>(from);
    kernel->accumulator = site.accumulator;
    kernel->result = static_cast<DType>(to);
    kernel->divisor = site.divisor;
    kernel->isa = settings.isa;
    kernel->sources = kernel->results = static_cast<int>(site.positions);
    Fold fold = {0, {}};
    for (int k = 0; k < kernel->sources; k++) fold.operands.push_back(k);
    kernel->programs.push_back({1, {fold}, std::vector<int>(fold.operands.size(), ~0)});
    for (int64_t k = 0; k < frame.rets.size; k++) {
        const auto *operand = static_cast<XLA_FFI_Buffer *>(frame.args.args[k]);
        int64_t size = 1;
        for (int64_t axis = 0; axis < operand->rank; axis++) size *= operand->dims[axis];
        kernel->sizes.push_back(size);
        if (size > 0) kernel->segments.push_back({k, 0, size, 0});
    }
    if (const char *fault = validate(*kernel)) return fault;
    site.kernel = std::move(kernel);
    return nullptr;
}

// Reduce the arrays of all devices. Returns null, or a description of the fault.
const char *reduce(const Meeting &meeting) try {
    const Kernel &kernel = *meeting.site->kernel;
    const size_t tensors = kernel.sizes.size(), devices = meeting.arrivals.size();
    std::vector<Source> sources(tensors * devices);
    std::vector<char *> results(tensors * devices);
    for (size_t k = 0; k < tensors; k++)
        for (size_t device = 0; device < devices; device++) {
            sources[k * devices + device] = {meeting.arrivals[device].sources[k], nullptr};
            results[k * devices + device] = meeting.arrivals[device].results[k];
            if (sources[k * devices + device].data != results[k * devices + device])
                advise(results[k * devices + device], static_cast<size_t>(kernel.sizes[k]) * ITEMSIZES[kernel.result]);
        }
    const auto written = kernel.elements * static_cast<int64_t>(ITEMSIZES[kernel.result] * devices);
    const int threads = traffic_nbytes(kernel) >= settings.threaded_nbytes ? settings.threads : 1;
    if (kernel.elements == 0) return nullptr;
    return run_kernel(kernel, sources, results, threads, written >= settings.streaming_nbytes) ? nullptr : NO_MEMORY;
} catch (const std::exception &) { // bad_alloc
    return NO_MEMORY;
}

// ---- the handlers --------------------------------------------------------------------------------------------------

std::string text_of(const CallFrame &frame, const char *name) {
    const auto *text = static_cast<const XLA_FFI_ByteSpan *>(attribute(frame, name, XLA_FFI_AttrType_STRING));
    return text == nullptr ? "" : std::string(text->ptr, text->len);
}

void destroy_site(void *site) { delete static_cast<CallSite *>(site); }

// Make the state of a call site.
Error *make_site(CallFrame &frame) {
    auto site = std::make_unique<CallSite>();
    const auto *numbers = static_cast<const XLA_FFI_Array *>(attribute(frame, "numbers", XLA_FFI_AttrType_ARRAY));
    const int op = op_named(text_of(frame, "op").c_str());
    const int accumulator = dtype_named(text_of(frame, "accumulator").c_str());
    const bool has_numbers = numbers != nullptr && numbers->dtype == XLA_FFI_DataType_S64 && numbers->size == 2;
    if (!has_numbers || op < 0 || accumulator < 0)
        return error_of(frame.api, INVALID_ARGUMENT, "the attributes of crossreduce's call are invalid");
    site->positions = static_cast<const int64_t *>(numbers->data)[0];
    site->divisor = static_cast<double>(static_cast<const int64_t *>(numbers->data)[1]);
    site->axes = text_of(frame, "axes");
    site->op = static_cast<Op>(op);
    site->accumulator = static_cast<DType>(accumulator);
    XLA_FFI_State_Set_Args state = {sizeof state, nullptr, frame.ctx, INSTANTIATE, &site_type, site.get()};
    Error *error = frame.api->XLA_FFI_State_Set(&state);
    if (error == nullptr) site.release(); // NOLINT: XLA owns it now
    return error;
}

Error *instantiate(CallFrame *frame) {
    static const XLA_FFI_TypeInfo info = {sizeof(XLA_FFI_TypeInfo), nullptr, destroy_site};
    if (Error *error = register_state(frame->api, "crossreduce_call_site", info, site_type)) return error;
    return is_metadata_call(*frame, 0, site_type) ? nullptr : guarded(*frame, make_site);
}

// Return the open meeting of a device. Add one unless it exists. The caller has the lock.
std::shared_ptr<Meeting> find_meeting(CallSite &site, int64_t run, int64_t group) {
    for (const auto &one : meetings)
        if (one->site == &site && one->run == run && one->group == group) return one;
    if (!watchdog_started) watchdog_started = start_thread(watch);
    meetings.push_back(std::make_shared<Meeting>(site, run, group));
    if (meetings.back()->deadline < watched_until) meeting_added.notify_one();
    return meetings.back();
}

// Make all devices that wait leave.
void dismiss(Meeting &meeting) {
    std::lock_guard<std::mutex> locked(lock);
    meeting.asynchronous = true;
    for (Arrival &arrival : meeting.arrivals) {
        if (!arrival.here) continue;
        std::lock_guard<std::mutex> its(arrival.lock);
        arrival.leave = true;
        arrival.changed.notify_one();
    }
}

// Wait for the other devices. If they do not arrive soon, make a future of this device. Only the first device has a
// timer: timers of all devices would cost as much as the waiting itself.
Error *wait(Meeting &meeting, Arrival &own, CallFrame &frame, bool is_first) {
    std::unique_lock<std::mutex> locked(own.lock);
    if (is_first && !own.changed.wait_for(locked, PATIENCE, [&] { return own.done; }) && !meeting.full) {
        locked.unlock();
        dismiss(meeting);
        locked.lock();
    }
    own.changed.wait(locked, [&] { return own.done || own.leave; });
    if (own.done) return nullptr;
    XLA_FFI_Future_Create_Args made = {sizeof(XLA_FFI_Future_Create_Args), nullptr, nullptr};
    Error *error = own.api->XLA_FFI_Future_Create(&made);
    if (error == nullptr) frame.future = own.future = made.future;
    return error;
}

// Reduce the arrays of a full meeting and tell its devices. Each device that has a future continues in a new thread. In
// this thread, or in XLA's pool, a collective of XLA that follows could block all threads that there are, while devices
// that it waits for have not been told.
void finish(const std::shared_ptr<Meeting> &meeting) {
    if (const char *fault = reduce(*meeting)) meeting->fault = fault, meeting->code = RESOURCE_EXHAUSTED;
    for (Arrival &other : meeting->arrivals) {
        if (!wake(other)) continue;
        if (meeting->fault.empty()) {
            other.meeting = meeting;
            std::unique_lock<std::mutex> locked(lock);
            completions.splice(completions.end(), other.self);
            locked.unlock();
            if (!start_thread(complete_one)) complete_one(nullptr);
        } else fail(other, *meeting);
    }
}

Error *arrive(CallFrame &frame) {
    const Api *api = frame.api;
    void *state;
    int64_t run;
    if (Error *error = read_call(frame, site_type, state, run)) return error;
    CallSite &site = *static_cast<CallSite *>(state);
    const int64_t tensors = frame.rets.size;
    const auto data_of = [](void *buffer) { return static_cast<char *>(static_cast<XLA_FFI_Buffer *>(buffer)->data); };
    std::vector<char *> sources, results;
    for (int64_t k = 0; k < tensors; k++) {
        sources.push_back(data_of(frame.args.args[k]));
        results.push_back(data_of(frame.rets.rets[k]));
    }
    // The last operand is the number of the device: the positions of a group are consecutive.
    const int64_t number = *reinterpret_cast<const int32_t *>(data_of(frame.args.args[tensors]));

    std::unique_lock<std::mutex> locked(lock);
    if (site.kernel == nullptr)
        if (const char *fault = compile(site, frame)) return error_of(api, INTERNAL, fault);
    const std::shared_ptr<Meeting> meeting = find_meeting(site, run, number / site.positions);
    Arrival &own = meeting->arrivals[static_cast<size_t>(number % site.positions)];
    if (own.here) return error_of(api, INTERNAL, "a position arrived twice at one all_reduce");
    own.here = true;
    own.leave = meeting->asynchronous;
    own.sources = std::move(sources);
    own.results = std::move(results);
    own.api = api;
    const bool is_late = !meeting->fault.empty();
    const bool is_last = ++meeting->arrived == site.positions;
    const bool is_first = meeting->arrived == 1;
    meeting->full = is_last;
    if (is_last) meetings.remove(meeting);
    locked.unlock();

    if (!is_late && is_last) finish(meeting);
    else if (!is_late)
        if (Error *error = wait(*meeting, own, frame, is_first)) return error;
    if (frame.future != nullptr || meeting->fault.empty()) return nullptr;
    return error_of(api, meeting->code, meeting->fault);
}

// Called once per device and run of a custom call.
Error *execute(CallFrame *frame) {
    return is_metadata_call(*frame, 0, {0}) ? nullptr : guarded(*frame, arrive);
}

PyObject *handlers(PyObject *, PyObject *args) {
    const char *isa;
    double limit_s;
    if (!PyArg_ParseTuple(args, "sinnd", &isa, &settings.threads, &settings.streaming_nbytes, &settings.threaded_nbytes,
                          &limit_s))
        return nullptr;
    {
        std::lock_guard<std::mutex> locked(lock);
        settings.limit = std::chrono::duration<double>(limit_s);
    }
    settings.isa = instruction_set(isa);
    if (settings.isa == nullptr) return PyErr_Format(PyExc_ValueError, "unknown instruction set %s", isa);
    return handlers_of(instantiate, execute);
}

PyMethodDef functions[] = {
    {"xla_handlers", handlers, METH_VARARGS,
     "xla_handlers(instruction_set, threads, streaming_nbytes, threaded_nbytes, limit_s): configure the custom call; "
     "return its handlers by stage."},
    {nullptr, nullptr, 0, nullptr}};

} // namespace

int add_xla_call(PyObject *module) { return PyModule_AddFunctions(module, functions); }
