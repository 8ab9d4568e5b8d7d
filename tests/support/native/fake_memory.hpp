// The fake CUDA driver: memory with owners, vector clocks, and the accesses that are not ordered.
//
// Memory of a device is host memory in a reserved range of addresses. Addresses are not used twice before a reset, and
// freed memory stays mapped, so that an operation that still reads it is reported and does not crash.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace fake {

constexpr int HOST = -1; // the "device" of the host
constexpr uint64_t PER_DEVICE = uint64_t{8} << 30, GAP = 4096;

// ---- clocks

// Component k counts the operations of chain k that are known to be complete. Chain 0 is the host; each stream is one,
// and so are the operations that an executable graph has from one captured stream.
using Clock = std::vector<uint32_t>;

inline void join(Clock &into, const Clock &other) {
    if (into.size() < other.size()) into.resize(other.size());
    for (size_t k = 0; k < other.size(); k++) into[k] = std::max(into[k], other[k]);
}

struct Operation;
struct Epoch { // an operation's place in its chain
    size_t chain = 0;
    uint32_t count = 0;
    bool precedes(const Clock &clock) const { return chain < clock.size() && clock[chain] >= count; }
};

// ---- allocations

enum Kind { PLAIN, POOL, MAPPED, MANAGED, FOREIGN_CONTEXT }; // cuMemAlloc, cuMemAllocAsync, cuMemMap, ...

struct Allocation {
    uint64_t begin, nbytes;
    int device; // or HOST: pinned memory
    uint64_t context;
    bool is_foreign; // of the framework or the test: not a leak
    bool is_live;
    int kind;
    bool is_peer_readable() const { return device == HOST || kind == PLAIN || kind == MANAGED; }
};

inline std::string range_text(uint64_t begin, uint64_t nbytes) {
    char text[80];
    snprintf(text, sizeof text, "[%#llx, +%llu)", static_cast<unsigned long long>(begin),
             static_cast<unsigned long long>(nbytes));
    return text;
}

class Memory {
  public:
    explicit Memory(int devices) : used_(devices + 1, GAP) {
        nbytes_ = PER_DEVICE * used_.size();
        void *at = mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (at == MAP_FAILED) throw std::bad_alloc();
        base_ = reinterpret_cast<uint64_t>(at);
    }
    Memory(const Memory &) = delete;
    ~Memory() { munmap(reinterpret_cast<void *>(base_), nbytes_); }

    // Return the address of new memory; 0: there is not enough.
    uint64_t allocate(uint64_t nbytes, int device, uint64_t context, bool is_foreign, int kind = PLAIN) {
        const size_t slot = device == HOST ? used_.size() - 1 : static_cast<size_t>(device);
        uint64_t &used = used_[slot];
        if (nbytes > PER_DEVICE - 2 * GAP || used > PER_DEVICE - 2 * GAP - nbytes) return 0;
        const uint64_t begin = base_ + slot * PER_DEVICE + used;
        used += (nbytes + 511) / 512 * 512 + GAP;
        std::memset(reinterpret_cast<void *>(begin), 0xA5, nbytes);
        own(begin, nbytes, device, context, is_foreign, kind);
        return begin;
    }
    // Take memory of the caller as a device's.
    void own(uint64_t begin, uint64_t nbytes, int device, uint64_t context, bool is_foreign, int kind) {
        allocations_[begin] = {begin, nbytes, device, context, is_foreign, true, kind};
    }
    // Return the allocation that begins at an address or contains it, or null.
    Allocation *find(uint64_t address) {
        auto it = allocations_.upper_bound(address);
        if (it == allocations_.begin()) return nullptr;
        Allocation &found = (--it)->second;
        return address < found.begin + std::max<uint64_t>(found.nbytes, 1) ? &found : nullptr;
    }
    // Return whether a range has no byte of the memory that the driver allocates.
    bool is_pageable(uint64_t begin, uint64_t nbytes) const { return begin >= base_ + nbytes_ || begin + nbytes <= base_; }
    std::map<uint64_t, Allocation> &all() { return allocations_; }

  private:
    std::vector<uint64_t> used_; // of each device, then of pinned memory
    uint64_t base_, nbytes_;
    std::map<uint64_t, Allocation> allocations_;
};

// ---- accesses

struct Access {
    uint64_t begin, nbytes;
    bool writes;
};

// The accesses to each byte that a later one may conflict with.
class Shadow {
  public:
    struct Conflict {
        std::shared_ptr<Operation> earlier;
        bool earlier_writes, writes;
        uint64_t begin, end;
    };

    // Note an operation's access; return the earlier operations that it conflicts with and is not ordered after.
    void access(const std::shared_ptr<Operation> &operation, Epoch epoch, const Clock &clock, const Access &access,
                std::vector<Conflict> &conflicts) {
        const uint64_t end = access.begin + access.nbytes;
        if (access.nbytes == 0) return;
        split(access.begin);
        split(end);
        uint64_t at = access.begin;
        for (auto it = segments_.lower_bound(at); at < end; at = it->second.end, ++it) {
            if (it == segments_.end() || it->first != at) { // no access so far
                const uint64_t next = it == segments_.end() ? end : std::min(end, it->first);
                it = segments_.emplace(at, Segment{next, {}}).first;
            }
            auto &entries = it->second.entries;
            for (const Entry &each : entries)
                if (each.operation != operation && (each.writes || access.writes) && !each.epoch.precedes(clock))
                    note(conflicts, {each.operation, each.writes, access.writes, at, it->second.end});
            // An access ordered before this one cannot conflict with a later one unless this access does, too.
            entries.erase(std::remove_if(entries.begin(), entries.end(),
                                         [&](const Entry &each) {
                                             return each.operation != operation && (access.writes || !each.writes) &&
                                                    each.epoch.precedes(clock);
                                         }),
                          entries.end());
            entries.push_back({operation, epoch, access.writes});
        }
    }
    // Forget a range, which is memory of its own from now on.
    void forget(uint64_t begin, uint64_t nbytes) {
        split(begin);
        split(begin + nbytes);
        segments_.erase(segments_.lower_bound(begin), segments_.lower_bound(begin + nbytes));
    }

  private:
    struct Entry {
        std::shared_ptr<Operation> operation;
        Epoch epoch;
        bool writes;
    };
    struct Segment {
        uint64_t end;
        std::vector<Entry> entries;
    };
    void split(uint64_t at) {
        auto it = segments_.upper_bound(at);
        if (it == segments_.begin()) return;
        --it;
        if (it->first == at || it->second.end <= at) return;
        segments_.emplace(at, it->second);
        it->second.end = at;
    }
    static void note(std::vector<Conflict> &conflicts, const Conflict &found) { // once for each earlier operation
        for (Conflict &each : conflicts)
            if (each.earlier == found.earlier) return void(each.end = std::max(each.end, found.end));
        conflicts.push_back(found);
    }
    std::map<uint64_t, Segment> segments_;
};

} // namespace fake
