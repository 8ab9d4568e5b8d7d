// The part of UCX's public interface (ucp/api/ucp.h of UCX 1.22, unchanged since 1.10) that this library calls. UCX need
// not be installed: its library is opened at run time. tests/support/native/ucx_layout.cpp compares this with UCX's headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace ucx {

using Status = int8_t; // enum ucs_status_t, which is packed
constexpr Status OK = 0, IN_PROGRESS = 1, TRUNCATED = -9, BUSY = -15;

using ErrorCallback = void (*)(void *argument, void *endpoint, Status status);

// Structures begin with a mask of the fields that are set. UCX reads no other ones, and later versions only append fields.
struct Parameters { // ucp_params_t
    static constexpr uint64_t FEATURES = 1 << 0;
    static constexpr uint64_t TAG = 1 << 0, WAKEUP = 1 << 4; // features
    uint64_t field_mask, features;
    char later[256];
};
struct WorkerParameters { // ucp_worker_params_t
    static constexpr uint64_t THREAD_MODE = 1 << 0;
    static constexpr int SERIALIZED = 1;
    uint64_t field_mask;
    int thread_mode;
    char later[512];
};
struct EndpointParameters { // ucp_ep_params_t
    static constexpr uint64_t REMOTE_ADDRESS = 1 << 0, ERROR_MODE = 1 << 1, ERROR_HANDLER = 1 << 2;
    static constexpr int BY_PEER = 1; // errors are reported for the endpoint of a peer
    uint64_t field_mask;
    const void *address;
    int error_mode;
    ErrorCallback handler;
    void *argument;
    char later[256];
};
struct RequestParameters { // ucp_request_param_t
    static constexpr uint32_t FLAGS = 1 << 4;
    static constexpr uint32_t FORCE = 1 << 0; // of `close_endpoint`: do not wait for the peer
    uint32_t mask, flags;
    char later[256];
};

// member, name, result, parameters
#define UCX_FUNCTIONS(F)                                                                                               \
    F(get_version, "ucp_get_version", void, (unsigned *major, unsigned *minor, unsigned *release))                     \
    F(init, "ucp_init_version", Status, (unsigned major, unsigned minor, const Parameters *, const void *, void **))   \
    F(cleanup, "ucp_cleanup", void, (void *context))                                                                   \
    F(create_worker, "ucp_worker_create", Status, (void *context, const WorkerParameters *, void **))                  \
    F(destroy_worker, "ucp_worker_destroy", void, (void *worker))                                                      \
    F(progress, "ucp_worker_progress", unsigned, (void *worker))                                                       \
    F(get_descriptor, "ucp_worker_get_efd", Status, (void *worker, int *))                                             \
    F(arm, "ucp_worker_arm", Status, (void *worker))                                                                   \
    F(get_address, "ucp_worker_get_address", Status, (void *worker, void **, size_t *))                                \
    F(release_address, "ucp_worker_release_address", void, (void *worker, void *))                                     \
    F(create_endpoint, "ucp_ep_create", Status, (void *worker, const EndpointParameters *, void **))                   \
    F(close_endpoint, "ucp_ep_close_nbx", void *, (void *endpoint, const RequestParameters *))                         \
    F(flush, "ucp_ep_flush_nbx", void *, (void *endpoint, const RequestParameters *))                                  \
    F(send, "ucp_tag_send_nbx", void *, (void *endpoint, const void *, size_t, uint64_t, const RequestParameters *))   \
    F(receive, "ucp_tag_recv_nbx", void *, (void *worker, void *, size_t, uint64_t, uint64_t, const RequestParameters *)) \
    F(cancel, "ucp_request_cancel", void, (void *worker, void *request))                                               \
    F(check, "ucp_request_check_status", Status, (void *request))                                                      \
    F(free_request, "ucp_request_free", void, (void *request))                                                         \
    F(text_of, "ucs_status_string", const char *, (Status))

struct Library {
#define MEMBER(member, name, result, parameters) result(*member) parameters = nullptr;
    UCX_FUNCTIONS(MEMBER)
#undef MEMBER
    unsigned major = 0, minor = 0, release = 0;
};

// Open UCX's library at `path`, and keep it open. Return null with `why` set if it cannot be used.
const Library *open_library(const std::string &path, std::string &why);

// Return the status that UCX's functions return in place of a request, IN_PROGRESS if it is a request.
inline Status status_of(const void *request) {
    const auto value = reinterpret_cast<uintptr_t>(request);
    const bool is_error = value >= static_cast<uintptr_t>(-100);
    return request == nullptr ? OK : is_error ? static_cast<Status>(static_cast<intptr_t>(value)) : IN_PROGRESS;
}

} // namespace ucx
