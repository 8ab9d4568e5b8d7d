// A plan of one device as a custom call of XLA, on the stream that XLA gives.
//
// The operands are the sources of all tensors, the results those of all tensors and, if the plan needs it, temporary
// memory. The attribute `number` selects the plan: it depends on nothing but what the plan does, so a program that XLA
// has compiled in another process (JAX's compilation cache) runs the same operations or none. Plans stay in memory as
// long as the process: XLA does not report when a program is freed.
//
// The handler runs in any thread of XLA, without the interpreter's lock. It only launches kernels, always the same ones,
// on one stream, so XLA may capture it in a graph.
#include "xla_cuda.hpp"

#include <atomic>
#include <cstddef>
#include <map>
#include <mutex>
#include <string>

#include "module.hpp"
#include "plan.hpp"
#include "xla.hpp"

namespace {

using namespace xla;

struct Entry {
    Plan *plan;
    int64_t operands, results;
};

// Never destroyed: threads of XLA may use them while the process exits.
std::mutex &lock = *new std::mutex;
std::map<std::pair<int64_t, int>, Entry> &entries = *new std::map<std::pair<int64_t, int>, Entry>; // number, device

// For tests: XLA's CPU devices all have number 0 and no stream, and the driver must be told that their memory is a
// device's.
int given_device = 0;
uint64_t given_stream = 0;
PyObject *hook = nullptr;

std::atomic<uint64_t> custom_calls{0}; // that queued their plan

// Return the text of a failed call of the driver; driver.py has the same as an error.
std::string message_of(const DriverFault &fault) {
    const FaultText text = text_of(fault);
    return std::string("crossreduce: the CUDA driver failed in ") + fault.call +
           (fault.device < 0 ? "" : " on cuda:" + std::to_string(fault.device)) +
           ".\n  given: " + text.name + " (" + std::to_string(fault.code) + "): " + text.text +
           "\n  try:   the error may come from an earlier operation of this process: run with CUDA_LAUNCH_BLOCKING=1";
}

// Return the attribute `number`, or null.
const int64_t *number_of(const CallFrame &frame) {
    const auto *scalar = static_cast<const XLA_FFI_Scalar *>(attribute(frame, "number", XLA_FFI_AttrType_SCALAR));
    if (scalar == nullptr || scalar->dtype != XLA_FFI_DataType_S64) return nullptr;
    return static_cast<const int64_t *>(scalar->value);
}

// Call a function with each operand and each result.
template <class Function> void for_each_buffer(const CallFrame &frame, Function function) {
    for (int64_t k = 0; k < frame.args.size; k++) function(*static_cast<const XLA_FFI_Buffer *>(frame.args.args[k]));
    for (int64_t k = 0; k < frame.rets.size; k++) function(*static_cast<const XLA_FFI_Buffer *>(frame.rets.rets[k]));
}

// Call the hook of a test with a list of (address, dtype, elements) and whether the run is about to begin. Returns
// whether that succeeded.
bool call_hook(const CallFrame &frame, bool begins) {
    const PyGILState_STATE state = PyGILState_Ensure();
    bool done = false;
    {
        Ref list(PyList_New(0));
        for_each_buffer(frame, [&](const XLA_FFI_Buffer &buffer) {
            long long size = 1;
            for (int64_t axis = 0; axis < buffer.rank; axis++) size *= buffer.dims[axis];
            const auto address = static_cast<unsigned long long>(reinterpret_cast<uint64_t>(buffer.data));
            Ref one(list ? Py_BuildValue("KiL", address, static_cast<int>(buffer.dtype), size) : nullptr);
            if (one) PyList_Append(list.object, one.object);
        });
        Ref called(list ? PyObject_CallFunction(hook, "Oi", list.object, static_cast<int>(begins)) : nullptr);
        done = static_cast<bool>(called);
        if (!done) PyErr_Print();
    }
    PyGILState_Release(state);
    return done;
}

Error *run(const CallFrame &frame) {
    const Api *api = frame.api;
    if (api->struct_size < XLA_FFI_STRUCT_SIZE(XLA_FFI_Api, XLA_FFI_DeviceOrdinal_Get))
        return error_of(api, INTERNAL, "this version of XLA lacks functions that crossreduce calls");
    const int64_t *number = number_of(frame);
    if (number == nullptr) return error_of(api, INVALID_ARGUMENT, "crossreduce's call has no number");
    XLA_FFI_DeviceOrdinal_Get_Args device = {sizeof(XLA_FFI_DeviceOrdinal_Get_Args), nullptr, frame.ctx, 0};
    if (Error *error = api->XLA_FFI_DeviceOrdinal_Get(&device)) return error;
    if (hook != nullptr) device.device_ordinal = given_device;
    Entry entry{};
    {
        std::lock_guard<std::mutex> locked(lock);
        const auto found = entries.find({*number, device.device_ordinal});
        if (found != entries.end()) entry = found->second;
    }
    if (entry.plan == nullptr)
        return error_of(api, INVALID_ARGUMENT,
                        "crossreduce: this process has no plan " + std::to_string(*number) + " for cuda:" +
                            std::to_string(device.device_ordinal) +
                            ".\n  try:   trace and compile the program in this process, or export it with jax.export");
    if (frame.args.size != entry.operands || frame.rets.size != entry.results)
        return error_of(api, INTERNAL, "crossreduce's call has another number of arrays than its plan");
    XLA_FFI_Stream_Get_Args stream = {sizeof(XLA_FFI_Stream_Get_Args), nullptr, frame.ctx, nullptr};
    if (hook != nullptr) stream.stream = reinterpret_cast<void *>(given_stream);
    else if (Error *error = api->XLA_FFI_Stream_Get(&stream)) return error;
    std::vector<uint64_t> addresses;
    for_each_buffer(frame, [&](const XLA_FFI_Buffer &buffer) {
        addresses.push_back(reinterpret_cast<uint64_t>(buffer.data));
    });
    if (hook != nullptr && !call_hook(frame, true)) return error_of(api, INTERNAL, "the hook failed");
    std::string fault;
    try {
        entry.plan->run(addresses, {reinterpret_cast<CUstream>(stream.stream)});
        custom_calls.fetch_add(1, std::memory_order_relaxed);
    } catch (const DriverFault &caught) {
        fault = message_of(caught);
    }
    if (hook != nullptr && !call_hook(frame, false)) return error_of(api, INTERNAL, "the hook failed");
    return fault.empty() ? nullptr : error_of(api, INTERNAL, fault);
}

// Called once per run of a custom call.
Error *execute(CallFrame *frame) {
    if (is_metadata_call(*frame, XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE, {0})) return nullptr;
    try {
        return run(*frame);
    } catch (const std::exception &) { // bad_alloc
        return error_of(frame->api, RESOURCE_EXHAUSTED, "out of memory");
    }
}

// A call that does not write its results. XLA refuses to capture a call that queues nothing.
Error *leave_empty(CallFrame *frame) {
    is_metadata_call(*frame, 0, {0});
    return nullptr;
}

PyObject *empty_handler(PyObject *, PyObject *) {
    return PyCapsule_New(reinterpret_cast<void *>(leave_empty), nullptr, nullptr);
}

PyObject *handler(PyObject *, PyObject *) { return PyCapsule_New(reinterpret_cast<void *>(execute), nullptr, nullptr); }

PyObject *counts(PyObject *, PyObject *) {
    return Py_BuildValue("KK", static_cast<unsigned long long>(launched), static_cast<unsigned long long>(custom_calls));
}

PyObject *keep(PyObject *, PyObject *args) {
    long long number, operands, results;
    PyObject *object;
    if (!PyArg_ParseTuple(args, "LOLL", &number, &object, &operands, &results)) return nullptr;
    Plan *plan = plan_in(object);
    // Work of several streams would need events, which a graph of XLA may not contain.
    if (plan == nullptr || plan->devices.size() != 1 || plan->streams.size() != 1 || !plan->copies.empty())
        return value_error("a plan of one device without copies is needed"), nullptr;
    try {
        std::lock_guard<std::mutex> locked(lock);
        if (entries.insert({{number, plan->numbers[0]}, {plan, operands, results}}).second) Py_INCREF(object);
    } catch (const std::exception &) { // bad_alloc
        return PyErr_NoMemory();
    }
    Py_RETURN_NONE;
}

PyObject *use_stream(PyObject *, PyObject *args) {
    int device;
    unsigned long long stream;
    PyObject *function;
    if (!PyArg_ParseTuple(args, "iKO", &device, &stream, &function)) return nullptr;
    given_device = device;
    given_stream = stream;
    Py_XDECREF(hook);
    hook = function == Py_None ? nullptr : function;
    Py_XINCREF(hook);
    Py_RETURN_NONE;
}

} // namespace

PyMethodDef xla_cuda_functions[] = {
    {"xla_handler", handler, METH_NOARGS, "Return the handler of the custom call."},
    {"xla_empty_handler", empty_handler, METH_NOARGS, "Return the handler of a custom call that does nothing."},
    {"counts", counts, METH_NOARGS,
     "Return how many kernels this process has launched, and how many custom calls have queued their plan."},
    {"keep", keep, METH_VARARGS,
     "keep(number, plan, operands, results): let custom calls with a number run a plan on its device, for the life of the "
     "process."},
    {"use_stream", use_stream, METH_VARARGS,
     "use_stream(device, stream, hook): only for tests. Use these instead of XLA's; call hook(buffers, begins) before and after "
     "each run. None: use XLA's again."},
    {nullptr, nullptr, 0, nullptr}};
