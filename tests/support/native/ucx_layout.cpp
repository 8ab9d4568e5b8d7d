// Compares ucx_api.hpp with UCX's own headers. It is only compiled.
#include "ucx_api.hpp"

#include <type_traits>
#include <ucp/api/ucp.h>

#define SAME(ours, theirs) static_assert(static_cast<long>(ours) == static_cast<long>(theirs), #ours " is not " #theirs)
#define SAME_PLACE(ours, member, theirs, other) SAME(offsetof(ours, member), offsetof(theirs, other))

using namespace ucx;
SAME(sizeof(Status), sizeof(ucs_status_t));
SAME(OK, UCS_OK);
SAME(IN_PROGRESS, UCS_INPROGRESS);
SAME(TRUNCATED, UCS_ERR_MESSAGE_TRUNCATED);
SAME(BUSY, UCS_ERR_BUSY);

SAME(Parameters::FEATURES, UCP_PARAM_FIELD_FEATURES);
SAME(Parameters::TAG, UCP_FEATURE_TAG);
SAME(Parameters::WAKEUP, UCP_FEATURE_WAKEUP);
SAME_PLACE(Parameters, features, ucp_params_t, features);
static_assert(sizeof(Parameters) >= sizeof(ucp_params_t));

SAME(WorkerParameters::THREAD_MODE, UCP_WORKER_PARAM_FIELD_THREAD_MODE);
SAME(WorkerParameters::SERIALIZED, UCS_THREAD_MODE_SERIALIZED);
SAME_PLACE(WorkerParameters, thread_mode, ucp_worker_params_t, thread_mode);
static_assert(sizeof(WorkerParameters) >= sizeof(ucp_worker_params_t));

SAME(EndpointParameters::REMOTE_ADDRESS, UCP_EP_PARAM_FIELD_REMOTE_ADDRESS);
SAME(EndpointParameters::ERROR_MODE, UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE);
SAME(EndpointParameters::ERROR_HANDLER, UCP_EP_PARAM_FIELD_ERR_HANDLER);
SAME(EndpointParameters::BY_PEER, UCP_ERR_HANDLING_MODE_PEER);
SAME_PLACE(EndpointParameters, address, ucp_ep_params_t, address);
SAME_PLACE(EndpointParameters, error_mode, ucp_ep_params_t, err_mode);
SAME_PLACE(EndpointParameters, handler, ucp_ep_params_t, err_handler.cb);
SAME_PLACE(EndpointParameters, argument, ucp_ep_params_t, err_handler.arg);
static_assert(sizeof(EndpointParameters) >= sizeof(ucp_ep_params_t));

SAME(RequestParameters::FLAGS, UCP_OP_ATTR_FIELD_FLAGS);
SAME(RequestParameters::FORCE, UCP_EP_CLOSE_FLAG_FORCE);
SAME_PLACE(RequestParameters, mask, ucp_request_param_t, op_attr_mask);
SAME_PLACE(RequestParameters, flags, ucp_request_param_t, flags);
static_assert(sizeof(RequestParameters) >= sizeof(ucp_request_param_t));

// Each function has the parameters and the result that ucx_api.hpp says, except that our types stand for theirs.
template <class Ours, class Theirs> struct Same;
template <class R, class... A, class S, class... B> struct Same<R (*)(A...), S (*)(B...)> {
    static constexpr bool value = sizeof...(A) == sizeof...(B) && ((sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B>) && ...) &&
                                  std::is_void_v<R> == std::is_void_v<S> && std::is_pointer_v<R> == std::is_pointer_v<S>;
};
#define CHECK(ours, theirs) static_assert(Same<decltype(Library::ours), decltype(&theirs)>::value, #theirs)
CHECK(get_version, ucp_get_version);
CHECK(init, ucp_init_version);
CHECK(cleanup, ucp_cleanup);
CHECK(create_worker, ucp_worker_create);
CHECK(destroy_worker, ucp_worker_destroy);
CHECK(progress, ucp_worker_progress);
CHECK(get_descriptor, ucp_worker_get_efd);
CHECK(arm, ucp_worker_arm);
CHECK(get_address, ucp_worker_get_address);
CHECK(release_address, ucp_worker_release_address);
CHECK(create_endpoint, ucp_ep_create);
CHECK(close_endpoint, ucp_ep_close_nbx);
CHECK(flush, ucp_ep_flush_nbx);
CHECK(send, ucp_tag_send_nbx);
CHECK(receive, ucp_tag_recv_nbx);
CHECK(cancel, ucp_request_cancel);
CHECK(check, ucp_request_check_status);
CHECK(free_request, ucp_request_free);
CHECK(text_of, ucs_status_string);
