#include "driver.hpp"

#include <atomic>
#include <mutex>

#if !defined(_WIN32)
#include <dlfcn.h>
#endif

namespace {

Driver functions;
std::string missing; // empty: the driver works
bool is_opened = false;
std::atomic<bool> works{false};
std::mutex lock;

std::string open_driver() {
#if defined(_WIN32)
    return "on Windows it is not opened";
#else
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) {
        const char *text = dlerror();
        return text == nullptr ? "libcuda.so.1 cannot be opened" : text;
    }
#define FIND(member, name, parameters)                                                                                 \
    functions.member = reinterpret_cast<CUresult(*) parameters>(dlsym(library, name));                                 \
    if (functions.member == nullptr) return std::string("it is too old: it lacks ") + name;
    DRIVER_FUNCTIONS(FIND)
#undef FIND
    if (const CUresult code = functions.init(0); code != CUDA_SUCCESS) {
        const char *name = nullptr;
        functions.get_error_name(code, &name);
        return std::string("cuInit failed: ") + (name == nullptr ? "unknown error" : name);
    }
    return "";
#endif
}

} // namespace

const Driver *driver(std::string &why) {
    if (works) return &functions;
    std::lock_guard<std::mutex> locked(lock);
    if (!is_opened) {
        missing = open_driver();
        works = missing.empty();
        is_opened = true;
    }
    why = missing;
    return missing.empty() ? &functions : nullptr;
}

const Driver &opened() {
    std::string why;
    const Driver *found = driver(why);
    if (found == nullptr) throw DriverFault{"cuInit", -1, 3}; // CUDA_ERROR_NOT_INITIALIZED
    return *found;
}

FaultText text_of(const DriverFault &fault) {
    std::string why;
    const char *name = nullptr, *text = nullptr;
    if (const Driver *call = driver(why)) {
        call->get_error_name(fault.code, &name);
        call->get_error_string(fault.code, &text);
    }
    return {name ? name : "unknown error", text ? text : why};
}
