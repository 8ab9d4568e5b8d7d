// All-reduce as a custom call of XLA on the CPU: the devices of one process meet here.
//
// XLA calls `execute` once per device. The device that arrives last reduces the arrays of all, with one run of a kernel
// in the order of the positions; until then no thread waits. Each earlier device returned a future from its call, and
// XLA goes on with that device when the future is complete. So the devices may arrive in any order, on any threads, also
// if XLA's own collectives block the threads of the devices that are behind.
//
// Devices meet by the call site (a state that XLA makes once per custom call of an executable, also if two calls come
// from one line of the program), the run of the executable, and the group of positions. A call site runs again, in a
// loop, only after its earlier call is complete on that device, so there is at most one open meeting for each key.
#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <list>
#include <memory>
#include <pthread.h>

#include "module.hpp"
#include "thread_pool.hpp"
#include "xla_ffi.hpp"

namespace {

using xla_ffi::CallFrame;

int MODE = 1;
const char *const NO_MEMORY = "no memory is left";
constexpr int64_t STREAMING_NBYTES = 1 << 22, THREADED_NBYTES = 1 << 20; // as in kernels/__init__.py

struct Settings { // of the process; see `configure`
    const InstructionSet *isa = nullptr;
    int threads = 1;
    double limit_s = 40;
};

// A custom call of an executable.
struct CallSite {
    std::string axes; // for messages
    Op op;
    DType accumulator;
    double divisor;
    int64_t positions;
    std::unique_ptr<Kernel> kernel; // compiled in the first run, for the sizes of its operands
};

struct Arrival { // of a device
    bool here = false;
    std::vector<char *> sources, results;
    const xla_ffi::Api *api = nullptr;
    xla_ffi::Future *future = nullptr; // null for the last device
};

struct Meeting {
    CallSite *site;
    int64_t run, group;
    int64_t arrived = 0;
    double deadline;  // seconds of the monotonic clock
    std::string fault; // not empty: the devices that arrived got this error, later ones get it at once
    std::vector<Arrival> arrivals;
};

// These objects are never destroyed: threads may use them while the process exits.
pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t meeting_added;
bool watchdog_started = false, watchdog_idle = false;
std::list<Meeting> &meetings = *new std::list<Meeting>; // incomplete ones, the oldest first
Settings settings;
xla_ffi::TypeId site_type{0};

struct Locked {
    Locked() { pthread_mutex_lock(&lock); }
    ~Locked() { pthread_mutex_unlock(&lock); }
    Locked(const Locked &) = delete;
    Locked &operator=(const Locked &) = delete;
};

double now_s() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

xla_ffi::Error *error_of(const xla_ffi::Api *api, xla_ffi::ErrorCode code, const std::string &message) {
    xla_ffi::CreateError made = {xla_ffi::head_of<xla_ffi::CreateError>(), message.c_str(), code};
    return api->create_error(&made);
}

// Complete the future of a device, with an error if `fault` is not empty.
void complete(const Arrival &arrival, xla_ffi::ErrorCode code, const std::string &fault) {
    if (arrival.future == nullptr) return;
    if (fault.empty()) {
        xla_ffi::CompleteFuture done = {xla_ffi::head_of<xla_ffi::CompleteFuture>(), arrival.future};
        arrival.api->complete_future(&done);
    } else {
        xla_ffi::FailFuture failed = {xla_ffi::head_of<xla_ffi::FailFuture>(), arrival.future,
                                      error_of(arrival.api, code, fault)};
        arrival.api->fail_future(&failed);
    }
}

void complete_task(void *data) {
    std::unique_ptr<Arrival> arrival(static_cast<Arrival *>(data));
    complete(*arrival, xla_ffi::INTERNAL, "");
}

// ---- the bounded wait ----------------------------------------------------------------------------------------------

std::string missing_positions(const Meeting &meeting) {
    std::string here, missing;
    for (size_t k = 0; k < meeting.arrivals.size(); k++) {
        std::string &list = meeting.arrivals[k].here ? here : missing;
        list += (list.empty() ? "" : ", ") + std::to_string(k);
    }
    std::string limit = std::to_string(settings.limit_s);
    limit.erase(limit.find_last_not_of('0') + 1);
    if (limit.back() == '.') limit.pop_back();
    return "all_reduce over " + meeting.site->axes + ": position " + missing + " did not arrive within " + limit +
           " s.\n  given: position " + here + " arrived, of " + std::to_string(meeting.arrivals.size()) +
           "\n  try:   call all_reduce on every device, not in a branch that only some of them take; a device that is "
           "only late needs a larger CROSSREDUCE_JAX_TIMEOUT";
}

// Fails meetings that are not complete in time. While no meeting is open, it sleeps.
void *watch(void *) {
    pthread_mutex_lock(&lock);
    for (;;) {
        double first = 0;
        std::vector<std::pair<Arrival, std::string>> late;
        for (Meeting &meeting : meetings) {
            if (!meeting.fault.empty()) continue;
            if (meeting.deadline > now_s()) {
                first = first == 0 ? meeting.deadline : std::min(first, meeting.deadline);
                continue;
            }
            meeting.fault = missing_positions(meeting);
            for (const Arrival &arrival : meeting.arrivals)
                if (arrival.here) late.emplace_back(arrival, meeting.fault);
        }
        if (!late.empty()) {
            pthread_mutex_unlock(&lock);
            for (const auto &[arrival, fault] : late) complete(arrival, xla_ffi::DEADLINE_EXCEEDED, fault);
            pthread_mutex_lock(&lock);
        } else if (first == 0) {
            watchdog_idle = true;
            pthread_cond_wait(&meeting_added, &lock);
            watchdog_idle = false;
        } else {
            timespec until;
            until.tv_sec = static_cast<time_t>(first);
            until.tv_nsec = static_cast<long>((first - static_cast<double>(until.tv_sec)) * 1e9);
            pthread_cond_timedwait(&meeting_added, &lock, &until);
        }
    }
}

void start_watchdog() {
    if (watchdog_started) return;
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&meeting_added, &attributes);
    pthread_condattr_destroy(&attributes);
    watchdog_started = start_thread(watch);
}

// ---- one run of the kernel -----------------------------------------------------------------------------------------

int dtype_of(xla_ffi::DataType dtype) { // -1: not supported
    switch (dtype) {
    case xla_ffi::PRED: return BOOL;
    case xla_ffi::S8: return I8;
    case xla_ffi::S16: return I16;
    case xla_ffi::S32: return I32;
    case xla_ffi::S64: return I64;
    case xla_ffi::U8: return U8;
    case xla_ffi::U16: return U16;
    case xla_ffi::U32: return U32;
    case xla_ffi::U64: return U64;
    case xla_ffi::F16: return F16;
    case xla_ffi::BF16: return BF16;
    case xla_ffi::F32: return F32;
    case xla_ffi::F64: return F64;
    case xla_ffi::C64: return C64;
    case xla_ffi::C128: return C128;
    }
    return -1;
}

// Compile the kernel of a call site. Returns null, or a description of the fault.
const char *compile(CallSite &site, const CallFrame &frame) {
    auto kernel = std::make_unique<Kernel>();
    const auto *first = static_cast<xla_ffi::Buffer *>(frame.operands.items[0]);
    const int from = dtype_of(first->dtype), to = dtype_of(static_cast<xla_ffi::Buffer *>(frame.results.items[0])->dtype);
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
    for (int64_t k = 0; k < frame.results.size; k++) {
        const auto *operand = static_cast<xla_ffi::Buffer *>(frame.operands.items[k]);
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
        }
    const auto written = kernel.elements * static_cast<int64_t>(ITEMSIZES[kernel.result] * devices);
    const int threads = traffic_nbytes(kernel) >= THREADED_NBYTES ? settings.threads : 1;
    if (kernel.elements == 0) return nullptr;
    return run_kernel(kernel, sources, results, threads, written >= STREAMING_NBYTES) ? nullptr : NO_MEMORY;
} catch (const std::exception &) { // bad_alloc
    return NO_MEMORY;
}

// ---- the handlers --------------------------------------------------------------------------------------------------

// Answer XLA's question for the version of the interface. Returns whether it was that question.
bool is_metadata_call(CallFrame &frame, bool has_state) {
    for (xla_ffi::Extension *one = frame.head.extensions; one != nullptr; one = one->next) {
        if (one->kind != xla_ffi::METADATA) continue;
        xla_ffi::Metadata &metadata = *reinterpret_cast<xla_ffi::MetadataExtension *>(one)->metadata;
        metadata.version.major = xla_ffi::VERSION_MAJOR;
        metadata.version.minor = xla_ffi::VERSION_MINOR;
        metadata.traits = 0;
        metadata.state = has_state ? site_type : xla_ffi::TypeId{0};
        return true;
    }
    return false;
}

const void *attribute(const CallFrame &frame, const char *name, xla_ffi::AttributeKind kind) {
    for (int64_t k = 0; k < frame.attributes.size; k++) {
        const xla_ffi::Text &found = *frame.attributes.names[k];
        if (found.size == std::strlen(name) && std::memcmp(found.data, name, found.size) == 0)
            return frame.attributes.kinds[k] == kind ? frame.attributes.items[k] : nullptr;
    }
    return nullptr;
}

std::string text_of(const CallFrame &frame, const char *name) {
    const auto *text = static_cast<const xla_ffi::Text *>(attribute(frame, name, xla_ffi::STRING));
    return text == nullptr ? "" : std::string(text->data, text->size);
}

void destroy_site(void *site) { delete static_cast<CallSite *>(site); }

// Make the state of a call site.
xla_ffi::Error *instantiate(CallFrame *frame) {
    static const xla_ffi::TypeInfo info = {xla_ffi::head_of<xla_ffi::TypeInfo>(), destroy_site};
    if (site_type.id == 0) {
        static const char name[] = "crossreduce_call_site";
        xla_ffi::RegisterType type = {xla_ffi::head_of<xla_ffi::RegisterType>(), {name, sizeof name - 1}, &site_type, &info};
        if (xla_ffi::Error *error = frame->api->register_type(&type)) return error;
    }
    if (is_metadata_call(*frame, true)) return nullptr;
    try {
        auto site = std::make_unique<CallSite>();
        const auto *numbers = static_cast<const xla_ffi::Array *>(attribute(*frame, "numbers", xla_ffi::ARRAY));
        const int op = op_named(text_of(*frame, "op").c_str());
        const int accumulator = dtype_named(text_of(*frame, "accumulator").c_str());
        if (numbers == nullptr || numbers->dtype != xla_ffi::S64 || numbers->size != 2 || op < 0 || accumulator < 0)
            return error_of(frame->api, xla_ffi::INVALID_ARGUMENT, "the attributes of crossreduce's call are invalid");
        site->positions = static_cast<const int64_t *>(numbers->data)[0];
        site->divisor = static_cast<double>(static_cast<const int64_t *>(numbers->data)[1]);
        site->axes = text_of(*frame, "axes");
        site->op = static_cast<Op>(op);
        site->accumulator = static_cast<DType>(accumulator);
        xla_ffi::State state = {xla_ffi::head_of<xla_ffi::State>(), frame->context, xla_ffi::INSTANTIATE, &site_type,
                                site.get()};
        xla_ffi::Error *error = frame->api->set_state(&state);
        if (error == nullptr) site.release(); // NOLINT: XLA owns it now
        return error;
    } catch (const std::exception &) { // bad_alloc
        return error_of(frame->api, xla_ffi::RESOURCE_EXHAUSTED, "no memory is left");
    }
}

// Return the open meeting of a device. Add one if there is none. The caller holds the lock.
std::list<Meeting>::iterator find_meeting(CallSite &site, int64_t run, int64_t group) {
    const auto is_wanted = [&](const Meeting &m) { return m.site == &site && m.run == run && m.group == group; };
    const auto found = std::find_if(meetings.begin(), meetings.end(), is_wanted);
    if (found != meetings.end()) return found;
    start_watchdog();
    meetings.push_back({&site, run, group, 0, now_s() + settings.limit_s, "", {}});
    meetings.back().arrivals.resize(static_cast<size_t>(site.positions));
    if (watchdog_idle) pthread_cond_signal(&meeting_added);
    return std::prev(meetings.end());
}

// Give the results of a complete meeting to its devices; the last device gets them by the return of its call. The
// others go on in threads of XLA, not one after another in this one, which they could block: XLA's own collectives do.
void release(Meeting &meeting, const char *fault, const CallFrame &frame) {
    for (Arrival &other : meeting.arrivals) {
        if (other.future == nullptr) continue;
        if (fault != nullptr) complete(other, xla_ffi::RESOURCE_EXHAUSTED, fault);
        else if (MODE == 0) complete(other, xla_ffi::INTERNAL, "");
        else {
            xla_ffi::Schedule task = {xla_ffi::head_of<xla_ffi::Schedule>(), frame.context, complete_task,
                                      new Arrival(std::move(other))};
            frame.api->schedule(&task);
        }
    }
}

xla_ffi::Error *arrive(CallFrame &frame) {
    const xla_ffi::Api *api = frame.api;
    xla_ffi::State state = {xla_ffi::head_of<xla_ffi::State>(), frame.context, xla_ffi::INSTANTIATE, &site_type, nullptr};
    if (xla_ffi::Error *error = api->get_state(&state)) return error;
    xla_ffi::RunId run = {xla_ffi::head_of<xla_ffi::RunId>(), frame.context, 0};
    if (xla_ffi::Error *error = api->get_run_id(&run)) return error;
    CallSite &site = *static_cast<CallSite *>(state.state);
    const int64_t tensors = frame.results.size;
    const auto data_of = [](void *buffer) { return static_cast<char *>(static_cast<xla_ffi::Buffer *>(buffer)->data); };
    // The last operand is the number of the device: the positions of a group are consecutive.
    const int64_t number = *reinterpret_cast<const int32_t *>(data_of(frame.operands.items[tensors]));
    Arrival arrival = {true, {}, {}, api, nullptr};
    for (int64_t k = 0; k < tensors; k++) {
        arrival.sources.push_back(data_of(frame.operands.items[k]));
        arrival.results.push_back(data_of(frame.results.items[k]));
    }
    std::list<Meeting> full;
    {
        Locked locked;
        if (site.kernel == nullptr)
            if (const char *fault = compile(site, frame)) return error_of(api, xla_ffi::INTERNAL, fault);
        const auto meeting = find_meeting(site, run.run_id, number / site.positions);
        Arrival &own = meeting->arrivals[static_cast<size_t>(number % site.positions)];
        if (own.here) return error_of(api, xla_ffi::INTERNAL, "a position arrived twice at one all_reduce");
        const bool is_last = meeting->arrived + 1 == site.positions;
        xla_ffi::Error *error = nullptr;
        if (!meeting->fault.empty()) {
            error = error_of(api, xla_ffi::DEADLINE_EXCEEDED, meeting->fault);
        } else if (!is_last) {
            xla_ffi::CreateFuture made = {xla_ffi::head_of<xla_ffi::CreateFuture>(), nullptr};
            if ((error = api->create_future(&made)) != nullptr) return error;
            frame.future = arrival.future = made.future;
        }
        own = std::move(arrival);
        meeting->arrived++;
        if (is_last) full.splice(full.begin(), meetings, meeting);
        if (error != nullptr || !is_last) return error;
    }
    const char *fault = reduce(full.front());
    release(full.front(), fault, frame);
    return fault == nullptr ? nullptr : error_of(api, xla_ffi::RESOURCE_EXHAUSTED, fault);
}

// Called once per device and run of a custom call.
xla_ffi::Error *execute(CallFrame *frame) {
    if (is_metadata_call(*frame, false)) return nullptr;
    try {
        return arrive(*frame);
    } catch (const std::exception &) { // bad_alloc
        return error_of(frame->api, xla_ffi::RESOURCE_EXHAUSTED, NO_MEMORY);
    }
}

PyObject *handlers(PyObject *, PyObject *args) {
    const char *isa;
    if (!PyArg_ParseTuple(args, "sid", &isa, &settings.threads, &settings.limit_s)) return nullptr;
    settings.isa = instruction_set(isa);
    if (settings.isa == nullptr) return PyErr_Format(PyExc_ValueError, "unknown instruction set %s", isa);
    if (const char*m=getenv("XMODE")) MODE=atoi(m);
    Ref first(PyCapsule_New(reinterpret_cast<void *>(instantiate), nullptr, nullptr));
    Ref second(PyCapsule_New(reinterpret_cast<void *>(execute), nullptr, nullptr));
    if (!first || !second) return nullptr;
    return Py_BuildValue("{s:O,s:O}", "instantiate", first.object, "execute", second.object);
}

PyMethodDef functions[] = {
    {"xla_handlers", handlers, METH_VARARGS,
     "xla_handlers(instruction_set, threads, limit_s): configure the custom call; return its handlers by stage."},
    {nullptr, nullptr, 0, nullptr}};

} // namespace

int add_xla_call(PyObject *module) { return PyModule_AddFunctions(module, functions); }
