#include "available_memory.hpp"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <sstream>
#include <string>

namespace {

using Bytes = unsigned long long;

// Return the text of a file; empty if it cannot be read.
std::string text_of(const std::string &path) {
    std::string text;
    if (std::FILE *file = std::fopen(path.c_str(), "re")) {
        char part[4096];
        for (size_t got; (got = std::fread(part, 1, sizeof part, file)) > 0;) text.append(part, got);
        std::fclose(file);
    }
    return text;
}

// Read the number that starts a text, after `key` at the start of one of its lines. Return whether there is one.
bool read_number(const std::string &text, const std::string &key, Bytes &number) {
    size_t at = ("\n" + text).find("\n" + key);
    if (at == std::string::npos) return false;
    at += key.size();
    while (at < text.size() && text[at] == ' ') at++;
    if (at >= text.size() || !std::isdigit(static_cast<unsigned char>(text[at]))) return false;
    number = std::strtoull(text.c_str() + at, nullptr, 10);
    return true;
}

// Return what the limits of a group and of its parents leave. A parent may have the limit; in a container, the top
// folder may be the group.
Bytes left_in_groups(const std::string &top, std::string group, const char *limit, const char *usage,
                     const char *cache) {
    Bytes least = 1ull << 62, most, used, cached;
    for (;;) {
        while (!group.empty() && group.back() == '/') group.pop_back();
        const std::string place = top + group + "/";
        // Without a limit the file is missing or contains "max".
        if (read_number(text_of(place + limit), "", most) && read_number(text_of(place + usage), "", used) &&
            read_number(text_of(place + "memory.stat"), cache, cached))
            least = std::min(least, most + cached > used ? most + cached - used : 0);
        if (group.empty()) return least;
        group.erase(std::min(group.rfind('/'), group.size()));
        if (group.find('/') == std::string::npos) group.clear();
    }
}

Bytes available(const char *meminfo, const char *group, const char *groups) {
    Bytes least = 1ull << 62, found;
    if (read_number(text_of(meminfo), "MemAvailable:", found)) least = std::min(least, found << 10);
    std::istringstream lines(text_of(group));
    for (std::string line; std::getline(lines, line);) { // number:controllers:group
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) continue;
        const std::string kind = "," + line.substr(first + 1, second - first - 1) + ",", own = line.substr(second + 1);
        if (kind == ",,")
            found = left_in_groups(groups, own, "memory.max", "memory.current", "inactive_file ");
        else if (kind.find(",memory,") != std::string::npos)
            found = left_in_groups(std::string(groups) + "/memory", own, "memory.limit_in_bytes",
                                   "memory.usage_in_bytes", "total_inactive_file ");
        else
            continue;
        least = std::min(least, found);
    }
    return least;
}

} // namespace

size_t available_memory(const char *meminfo, const char *group, const char *groups) noexcept {
    try {
        return available(meminfo, group, groups);
    } catch (const std::bad_alloc &) {
        return 0;
    }
}
