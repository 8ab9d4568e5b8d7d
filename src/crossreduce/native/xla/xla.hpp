// What crossreduce's custom calls of XLA share, beside the declarations of XLA's C interface (third_party/README.md).
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "xla/ffi/api/c_api.h"

namespace xla {

using Api = XLA_FFI_Api;
using CallFrame = XLA_FFI_CallFrame;
using Error = XLA_FFI_Error;
using ErrorCode = XLA_FFI_Error_Code;
constexpr ErrorCode INVALID_ARGUMENT = XLA_FFI_Error_Code_INVALID_ARGUMENT, INTERNAL = XLA_FFI_Error_Code_INTERNAL,
                    DEADLINE_EXCEEDED = XLA_FFI_Error_Code_DEADLINE_EXCEEDED,
                    RESOURCE_EXHAUSTED = XLA_FFI_Error_Code_RESOURCE_EXHAUSTED;
constexpr XLA_FFI_ExecutionStage INSTANTIATE = XLA_FFI_ExecutionStage_INSTANTIATE;

inline Error *error_of(const Api *api, ErrorCode code, const std::string &message) {
    XLA_FFI_Error_Create_Args args = {sizeof args, nullptr, message.c_str(), code};
    return api->XLA_FFI_Error_Create(&args);
}

// Answer XLA's question for the version of the interface. Returns whether it was that question. `state`: 0, or the type
// of the state that this handler makes.
inline bool is_metadata_call(const CallFrame &frame, XLA_FFI_Handler_Traits traits, XLA_FFI_TypeId state) {
    for (auto *one = frame.extension_start; one != nullptr; one = one->next) {
        if (one->type != XLA_FFI_Extension_Metadata) continue;
        XLA_FFI_Metadata &metadata = *reinterpret_cast<XLA_FFI_Metadata_Extension *>(one)->metadata;
        metadata.api_version.major_version = XLA_FFI_API_MAJOR;
        metadata.api_version.minor_version = XLA_FFI_API_MINOR;
        metadata.traits = traits;
        metadata.state_type_id = state;
        return true;
    }
    return false;
}

// Return an attribute; null: it does not exist, or is of another kind.
inline const void *attribute(const CallFrame &frame, const char *name, XLA_FFI_AttrType kind) {
    const XLA_FFI_Attrs &attributes = frame.attrs;
    for (int64_t k = 0; k < attributes.size; k++) {
        const XLA_FFI_ByteSpan &found = *attributes.names[k];
        if (found.len == std::strlen(name) && std::memcmp(found.ptr, name, found.len) == 0)
            return attributes.types[k] == kind ? attributes.attrs[k] : nullptr;
    }
    return nullptr;
}

// Request huge pages for the memory of a large result. XLA may have allocated it for this run: page faults would take
// longer than the reduction.
inline void advise([[maybe_unused]] char *result, [[maybe_unused]] size_t nbytes) {
#ifdef MADV_HUGEPAGE
    constexpr size_t HUGE_PAGE = 2 << 20;
    const auto start = reinterpret_cast<uintptr_t>(result);
    const uintptr_t first = (start + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1), end = (start + nbytes) & ~(HUGE_PAGE - 1);
    if (first < end) madvise(reinterpret_cast<void *>(first), end - first, MADV_HUGEPAGE);
#endif
}

} // namespace xla
