// What the two custom calls of XLA on the CPU share: the state of their call sites, errors, and what Python registers.
#pragma once

#include "module.hpp"
#include "xla.hpp"

namespace xla {

constexpr const char *NO_MEMORY = "out of memory";

// Register the type of the states of call sites, unless `type` is registered already. Return an error or null.
inline Error *register_state(const Api *api, const char *name, const XLA_FFI_TypeInfo &info, XLA_FFI_TypeId &type) {
    if (api->struct_size < offsetof(XLA_FFI_Api, XLA_FFI_DeviceOrdinal_Get))
        return error_of(api, INTERNAL, "this version of XLA lacks functions that crossreduce calls");
    if (type.type_id != 0) return nullptr;
    XLA_FFI_Type_Register_Args args = {sizeof args, nullptr, {name, std::strlen(name)}, &type, &info};
    return api->XLA_FFI_Type_Register(&args);
}

// Read the state of a call site, and the number of the executable's run. Return an error or null.
inline Error *read_call(const CallFrame &frame, XLA_FFI_TypeId &type, void *&state, int64_t &run) {
    XLA_FFI_State_Get_Args of_site = {sizeof of_site, nullptr, frame.ctx, INSTANTIATE, &type, nullptr};
    if (Error *error = frame.api->XLA_FFI_State_Get(&of_site)) return error;
    XLA_FFI_RunId_Get_Args of_run = {sizeof of_run, nullptr, frame.ctx, 0};
    Error *error = frame.api->XLA_FFI_RunId_Get(&of_run);
    state = of_site.state, run = of_run.run_id;
    return error;
}

// Run a part of a handler. An exception of C++, which means a lack of memory, becomes an error of XLA.
inline Error *guarded(CallFrame &frame, Error *(*part)(CallFrame &)) {
    try {
        return part(frame);
    } catch (const std::exception &) {
        return error_of(frame.api, RESOURCE_EXHAUSTED, NO_MEMORY);
    }
}

// Return the handlers as a dict of capsules, as jax.ffi registers them.
inline PyObject *handlers_of(XLA_FFI_Handler *instantiate, XLA_FFI_Handler *execute) {
    const Ref first(PyCapsule_New(reinterpret_cast<void *>(instantiate), nullptr, nullptr));
    const Ref second(PyCapsule_New(reinterpret_cast<void *>(execute), nullptr, nullptr));
    if (!first || !second) return nullptr;
    return Py_BuildValue("{s:O,s:O}", "instantiate", first.object, "execute", second.object);
}

} // namespace xla
