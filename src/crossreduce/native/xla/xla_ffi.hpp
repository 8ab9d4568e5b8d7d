// The part of XLA's C interface for custom calls (FFI) that `xla_call.cpp` and the CUDA engine's `xla_cuda.cpp` use.
//
// These are declarations of a binary interface, written for this library so that its build does not need jaxlib: names
// are ours, the layout is XLA's. Source: xla/ffi/api/c_api.h of OpenXLA, version 0.3, which jaxlib contains.
// tests/frameworks/test_jax_in_process.py compares the layout with the header of the installed jaxlib. Every struct starts with its
// own size, which its creator sets; a newer version may append members, but does not move the ones that exist.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

namespace xla_ffi {

constexpr int VERSION_MAJOR = 0, VERSION_MINOR = 3;

struct Error; // opaque objects of XLA
struct Context;
struct Future;

enum ErrorCode { INVALID_ARGUMENT = 3, DEADLINE_EXCEEDED = 4, RESOURCE_EXHAUSTED = 8, INTERNAL = 13 };
enum Stage { INSTANTIATE = 0, PREPARE = 1, INITIALIZE = 2, EXECUTE = 3 };
enum AttributeKind { ARRAY = 1, DICTIONARY = 2, SCALAR = 3, STRING = 4 };
enum ExtensionKind { METADATA = 1 };
enum Traits { GRAPH_COMPATIBLE = 1 }; // always queues the same operations, which may be captured in a CUDA graph
enum DataType { // xla::PrimitiveType
    PRED = 1, S8 = 2, S16 = 3, S32 = 4, S64 = 5, U8 = 6, U16 = 7, U32 = 8, U64 = 9, F16 = 10, F32 = 11, F64 = 12,
    C64 = 15, BF16 = 16, C128 = 18
};

struct Extension {
    size_t size;
    ExtensionKind kind;
    Extension *next;
};
struct Head { // the first members of most structs
    size_t size;
    Extension *extensions;
};
struct Version {
    Head head;
    int major, minor;
};
struct Text {
    const char *data;
    size_t size;
};
struct Scalar {
    DataType dtype;
    void *value;
};
struct Array {
    DataType dtype;
    size_t size;
    void *data;
};
struct Buffer {
    Head head;
    DataType dtype;
    void *data;
    int64_t rank;
    int64_t *dims;
};
struct Buffers { // the operands or the results of a call
    Head head;
    int64_t size;
    int *kinds; // 1: a buffer, the only kind
    void **items;
};
struct Attributes { // sorted by name
    Head head;
    int64_t size;
    AttributeKind *kinds;
    Text **names;
    void **items;
};
struct TypeId {
    int64_t id;
};
struct TypeInfo {
    Head head;
    void (*destroy)(void *object);
};
struct Metadata {
    size_t size;
    Version version;
    uint32_t traits;
    TypeId state;
};
struct MetadataExtension {
    Extension base;
    Metadata *metadata;
};

struct CreateError {
    Head head;
    const char *message;
    ErrorCode code;
};
struct CreateFuture {
    Head head;
    Future *future; // out
};
struct CompleteFuture {
    Head head;
    Future *future;
};
struct FailFuture {
    Head head;
    Future *future;
    Error *error; // XLA takes ownership
};
struct RegisterType {
    Head head;
    Text name;
    TypeId *id; // in: 0; out: the new type's id
    const TypeInfo *info;
};
struct State { // sets the state of a call site, or gets it
    Head head;
    Context *context;
    Stage stage;
    TypeId *id;
    void *state;
};
struct RunId {
    Head head;
    Context *context;
    int64_t run_id; // out
};
struct Stream {
    Head head;
    Context *context;
    void *stream; // out; on CUDA a CUstream
};
struct DeviceOrdinal {
    Head head;
    Context *context;
    int32_t ordinal; // out
};

template <class Arguments> using Function = Error *(*)(Arguments *);
using Unused = void (*)();

struct Api {
    Head head;
    Version version;
    const void *internal;
    Function<CreateError> create_error;
    Unused get_message, destroy_error, register_handler;
    Function<Stream> get_stream;
    Function<RegisterType> register_type;
    Unused get_context;
    Function<State> set_state, get_state;
    Unused allocate, free, schedule, thread_count;
    Function<CreateFuture> create_future;
    Function<CompleteFuture> complete_future;
    Function<FailFuture> fail_future;
    Function<RunId> get_run_id;
    Function<DeviceOrdinal> get_device_ordinal; // only the CUDA engine calls it
};

struct CallFrame {
    Head head;
    const Api *api;
    Context *context;
    Stage stage;
    Buffers operands, results;
    Attributes attributes;
    Future *future; // out; null: the call is complete
};

template <class Struct> Head head_of() { return {sizeof(Struct), nullptr}; }

inline Error *error_of(const Api *api, ErrorCode code, const std::string &message) {
    CreateError made = {head_of<CreateError>(), message.c_str(), code};
    return api->create_error(&made);
}

// Answer XLA's question for the version of the interface. Returns whether it was that question. `state`: 0, or the type
// of the state that this handler makes.
inline bool is_metadata_call(CallFrame &frame, uint32_t traits, TypeId state) {
    for (Extension *one = frame.head.extensions; one != nullptr; one = one->next) {
        if (one->kind != METADATA) continue;
        Metadata &metadata = *reinterpret_cast<MetadataExtension *>(one)->metadata;
        metadata.version.major = VERSION_MAJOR;
        metadata.version.minor = VERSION_MINOR;
        metadata.traits = traits;
        metadata.state = state;
        return true;
    }
    return false;
}

// Return an attribute; null: it does not exist, or is of another kind.
inline const void *attribute(const CallFrame &frame, const char *name, AttributeKind kind) {
    for (int64_t k = 0; k < frame.attributes.size; k++) {
        const Text &found = *frame.attributes.names[k];
        if (found.size == std::strlen(name) && std::memcmp(found.data, name, found.size) == 0)
            return frame.attributes.kinds[k] == kind ? frame.attributes.items[k] : nullptr;
    }
    return nullptr;
}

} // namespace xla_ffi
