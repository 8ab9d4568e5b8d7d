// The memory that this process may still allocate, as far as the system reports it.
#pragma once

#include <cstddef>

// Return the least of these: the bytes that the machine has available (`meminfo`), and those that the limits of this
// process's control group and of its parents leave. `group` names the group, and `groups` is the folder of all groups;
// both versions of control groups are supported. Without any such file the result is 2^62.
size_t available_memory(const char *meminfo = "/proc/meminfo", const char *group = "/proc/self/cgroup",
                        const char *groups = "/sys/fs/cgroup") noexcept;
