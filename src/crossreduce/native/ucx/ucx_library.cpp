#include "ucx_api.hpp"

#include <cstdlib>
#include <map>
#include <mutex>

#if defined(__linux__)
#include <dlfcn.h>

namespace ucx {

namespace {

constexpr unsigned OLDEST_MAJOR = 1, OLDEST_MINOR = 15; // 1.13 ends the process (an assertion) if an endpoint is closed while it connects

struct Opened {
    Library library;
    std::string missing; // empty: the library works
};

// While UCX's library is opened, a variable that the user has not set has another default.
class Default {
  public:
    Default(const char *name, const char *value) : name(name), is_set(getenv(name) == nullptr && setenv(name, value, 0) == 0) {}
    Default(const Default &) = delete;
    Default &operator=(const Default &) = delete;
    ~Default() {
        if (is_set) unsetenv(name);
    }

  private:
    const char *name;
    const bool is_set;
};

std::string open_at(const std::string &path, Library &to) {
    const Default no_handlers("UCX_HANDLE_ERRORS", "none"); // by default it handles SIGSEGV, SIGBUS, ... of the process
    const Default quiet("UCX_LOG_LEVEL", "fatal");          // errors are raised; UCX would print them, too
    void *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        const char *text = dlerror();
        return text == nullptr ? path + " cannot be opened" : text;
    }
#define FIND(member, name, result, parameters)                                                                         \
    to.member = reinterpret_cast<result(*) parameters>(dlsym(library, name));                                          \
    if (to.member == nullptr) return path + " is too old: it lacks " + name;
    UCX_FUNCTIONS(FIND)
#undef FIND
    to.get_version(&to.major, &to.minor, &to.release);
    if (to.major != OLDEST_MAJOR || to.minor < OLDEST_MINOR)
        return path + " has version " + std::to_string(to.major) + "." + std::to_string(to.minor) + "; versions from " +
               std::to_string(OLDEST_MAJOR) + "." + std::to_string(OLDEST_MINOR) + " to below 2.0 are supported";
    return "";
}

} // namespace

const Library *open_library(const std::string &path, std::string &why) {
    static std::mutex lock;
    static std::map<std::string, Opened> opened; // never changed: workers refer to its elements
    const std::lock_guard<std::mutex> held(lock);
    const auto found = opened.emplace(path, Opened());
    if (found.second) found.first->second.missing = open_at(path, found.first->second.library);
    why = found.first->second.missing;
    return why.empty() ? &found.first->second.library : nullptr;
}

} // namespace ucx

#endif
