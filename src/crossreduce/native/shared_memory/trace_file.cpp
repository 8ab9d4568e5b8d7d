#include "trace_file.hpp"

#include <algorithm>
#include <cstring>

#include "futex.hpp"

namespace {
constexpr int64_t PAGE = 4096, FIRST_NBYTES = 3 << 16;
// The room for texts is this part of the file, within these limits; it is reserved in pieces.
constexpr int64_t TEXTS_PART = 16, LEAST_TEXTS_NBYTES = 1 << 16, MOST_TEXTS_NBYTES = 1 << 20, TEXTS_PIECE = 1 << 17;
constexpr uint8_t RUNNING = 255;
} // namespace

#if defined(__linux__)
#include <fcntl.h>
#include <sys/mman.h>

// The monotonic and the calendar clock at the same time, and by how much they may differ from it: half the time between
// two readings of one clock around one of the other, of the best of some tries.
static void read_clocks(int64_t (&clocks)[3]) {
    clocks[2] = INT64_MAX;
    for (int k = 0; k < 8; k++) {
        const int64_t before = now_ns(CLOCK_MONOTONIC), calendar = now_ns(CLOCK_REALTIME), after = now_ns(CLOCK_MONOTONIC);
        const int64_t error = (after - before + 1) / 2;
        if (error < clocks[2]) clocks[0] = before + error, clocks[1] = calendar, clocks[2] = error;
    }
}

std::shared_ptr<TraceFile> TraceFile::open(int fd, const std::string &json, int64_t limit) {
    std::shared_ptr<TraceFile> made(new TraceFile());
    const auto before = static_cast<int64_t>(sizeof(TraceHeader) + json.size());
    const int64_t texts_at = (before + PAGE - 1) / PAGE * PAGE;
    const int64_t room = std::clamp(limit / TEXTS_PART / PAGE * PAGE, LEAST_TEXTS_NBYTES, MOST_TEXTS_NBYTES);
    const int64_t records_at = texts_at + room, least = records_at + 16 * PAGE;
    made->limit = std::max(limit, least);
    made->process = getpid();
    if ((made->fd = fcntl(fd, F_DUPFD_CLOEXEC, 0)) < 0) return nullptr;
    // Pages behind the end of the file are not used before `reserve` has allocated them: a full disk would end the process.
    void *at = mmap(nullptr, static_cast<size_t>(made->limit), PROT_READ | PROT_WRITE, MAP_SHARED, made->fd, 0);
    if (at == MAP_FAILED) return nullptr;
    made->memory = static_cast<char *>(at);
    madvise(at, static_cast<size_t>(made->limit), MADV_DONTFORK); // a forked child is not a rank
    made->nbytes = std::min(made->limit, records_at + FIRST_NBYTES);
    if (!made->reserve(0, texts_at + LEAST_TEXTS_NBYTES) || !made->reserve(records_at, made->nbytes)) return nullptr;
    made->texts_room = static_cast<uint64_t>(room);
    made->texts_reserved = static_cast<uint64_t>(LEAST_TEXTS_NBYTES);
    auto *header = new (at) TraceHeader();
    header->json_nbytes = json.size();
    header->texts_at = static_cast<uint64_t>(texts_at);
    header->records_at = static_cast<uint64_t>(records_at);
    std::memcpy(made->memory + sizeof(TraceHeader), json.data(), json.size());
    read_clocks(header->clocks[0]);
    read_clocks(header->clocks[1]);
    made->records = reinterpret_cast<TraceRecord *>(made->memory + header->records_at);
    made->header = header;
    made->capacity = (static_cast<uint64_t>(made->nbytes) - header->records_at) / sizeof(TraceRecord);
    header->capacity.store(made->capacity, std::memory_order_relaxed);
    uint64_t magic;
    std::memcpy(&magic, "CRTRACE1", 8);
    header->magic.store(magic, std::memory_order_release); // last: a reader rejects a file without it
    return made;
}

TraceFile::~TraceFile() {
    if (memory != nullptr && getpid() == process) { // a forked child may have mapped something else at this address
        int64_t used = 0;
        if (header != nullptr) {
            read_clocks(header->clocks[1]);
            used = static_cast<int64_t>(header->records_at + std::min(count, capacity) * sizeof(TraceRecord));
        }
        munmap(memory, static_cast<size_t>(limit));
        // What follows is empty, so it does not matter if it stays.
        [[maybe_unused]] const bool cut = used > 0 && ftruncate(fd, used) == 0;
    }
    if (fd >= 0) close(fd);
}

// Allocate a part of the file on the disk. Return false and set errno if that fails.
bool TraceFile::reserve(int64_t from, int64_t until) {
    int error;
    do error = posix_fallocate(fd, from, until - from);
    while (error == EINTR);
    if (error != 0) errno = error;
    return error == 0;
}

void TraceFile::renew() {
    const int64_t wanted = std::min(limit, 2 * nbytes);
    if (!full && nbytes < limit && reserve(nbytes, wanted)) {
        nbytes = wanted;
        capacity = (static_cast<uint64_t>(nbytes) - header->records_at) / sizeof(TraceRecord);
        header->capacity.store(capacity, std::memory_order_release);
        read_clocks(header->clocks[1]);
        return;
    }
    if (!full && nbytes < limit) header->problem.store(errno, std::memory_order_relaxed);
    full = true;
    place = 0;
}

#else

std::shared_ptr<TraceFile> TraceFile::open(int, const std::string &, int64_t) {
    errno = ENOSYS;
    return nullptr;
}
TraceFile::~TraceFile() = default;
bool TraceFile::reserve(int64_t, int64_t) { return false; }
void TraceFile::renew() { place = 0; }

#endif

// Return the number of a text, or 0 if the file lacks room for it. A new text is appended: its length, then its bytes.
uint32_t TraceFile::text_number(const std::string &name) {
    const auto found = texts.find(name);
    if (found != texts.end()) return found->second;
    const uint64_t used = header->texts_nbytes.load(std::memory_order_relaxed);
    const uint64_t wanted = used + 2 + name.size();
    if (name.size() > UINT16_MAX || wanted > texts_room) return 0;
    if (wanted > texts_reserved) {
        const uint64_t until = std::min(texts_room, texts_reserved + TEXTS_PIECE);
        const auto at = static_cast<int64_t>(header->texts_at);
        if (!reserve(at + static_cast<int64_t>(texts_reserved), at + static_cast<int64_t>(until))) return 0;
        texts_reserved = until;
    }
    const auto length = static_cast<uint16_t>(name.size());
    char *at = memory + header->texts_at + used;
    std::memcpy(at, &length, 2);
    std::memcpy(at + 2, name.data(), name.size());
    header->texts_nbytes.store(wanted, std::memory_order_release);
    return texts[name] = static_cast<uint32_t>(texts.size() + 1);
}

void TraceFile::begin(uint64_t new_number, const std::string &name, int64_t now, int64_t queued_ns) {
    number = new_number;
    text = text_number(name);
    if (queued_ns > 0) write({Phase::queue, 0, 0, 0, queued_ns, now, number});
    call = count;
    mark = began = now;
    running = true;
    open_wait = false;
    write({Phase::call, RUNNING, 0, text, now, 0, number});
}

void TraceFile::end(int64_t now, int outcome) {
    if (!running) return;
    running = false;
    const TraceRecord ended = {Phase::call, static_cast<uint8_t>(outcome), 0, text, began, now, number};
    if (count - call <= capacity) { // it was not replaced
        TraceRecord &own = records[call % capacity];
        own.end_ns = now;
        own.outcome = ended.outcome;
    } else {
        write(ended);
    }
}
