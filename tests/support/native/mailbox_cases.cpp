// Ranks as threads that exchange random messages through mailboxes in one memory: sizes, tags, any source, several
// threads per rank, messages without a waiting thread, and receives that are withdrawn. A thread sanitizer can check
// threads, but not processes. It runs without Python, like kernel_cases.cpp. The ranks are on one host, or each on a host
// of its own, with connections between them.
//
//   mailbox_cases [messages] [seed] [ranks]
//
// Compile it together with mailboxes/*.cpp and connections.cpp.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <thread>
#include <sys/socket.h>

#include "mailboxes.hpp"

static std::atomic<bool> refuses{false}; // whether nothing can be allocated

void *operator new(std::size_t nbytes) {
    void *memory = refuses ? nullptr : std::malloc(nbytes == 0 ? 1 : nbytes);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}
void operator delete(void *memory) noexcept { std::free(memory); }
void operator delete(void *memory, std::size_t) noexcept { std::free(memory); }

namespace {

using Random = std::mt19937_64;
constexpr int TAGS = 3;

uint64_t below(Random &random, uint64_t most) { return random() % most; }

// The size of a message, which both ranks compute: most are small, some are offers of several pieces or parts.
uint64_t size_of(uint64_t seed, int src, int dst, uint64_t number) {
    Random random(seed * 1000003 + static_cast<uint64_t>(src * 64 + dst) * 7919 + number);
    const uint64_t kind = below(random, 20);
    if (kind < 2) return 0;
    if (kind < 14) return below(random, 200);
    if (kind < 19) return below(random, 40000);
    return below(random, 400000);
}

unsigned char byte_of(int src, uint64_t number, uint64_t at) {
    return static_cast<unsigned char>(static_cast<uint64_t>(src) * 31 + number * 7 + at * 13 + (at >> 8));
}

void fail(const char *what, int rank, uint64_t number) {
    std::fprintf(stderr, "%s: rank %d, message %llu\n", what, rank, static_cast<unsigned long long>(number));
    std::_Exit(1);
}

struct Sent {
    std::vector<char> memory;
    uint64_t id;
};

// The mailboxes of one of `ranks` ranks, which have the same numbers in all of them.
struct View {
    Mailboxes &boxes;
    int rank, ranks;
    bool is_alone = false; // on its host: it has number 0 there, and the others follow

    int number(int of) const { return !is_alone || of == ANY_RANK ? of : of == rank ? 0 : of < rank ? of + 1 : of; }
    uint64_t send(int dst, int64_t tag, char *memory, uint64_t nbytes) { return boxes.send(number(dst), tag, memory, nbytes); }
    uint64_t receive(int src, int64_t tag, char *memory, uint64_t nbytes) { return boxes.receive(number(src), tag, memory, nbytes); }
    MessageStatus wait(uint64_t id, int64_t slice_ns, int &source, uint64_t &nbytes) {
        const MessageStatus status = boxes.wait(id, slice_ns, source, nbytes);
        if (is_alone && (status == MessageStatus::done || status == MessageStatus::mismatch)) source -= source <= rank ? 1 : 0;
        return status;
    }
    bool withdraw(uint64_t id) { return boxes.withdraw(id); }
    bool is_pending(uint64_t id) { return boxes.is_pending(id); }
    void forget(uint64_t id) { boxes.forget(id); }
};

MessageStatus finish(View &boxes, uint64_t id, Random &random, int &source) {
    uint64_t nbytes = 0;
    MessageStatus status;
    do {
        status = boxes.wait(id, below(random, 4) == 0 ? 0 : static_cast<int64_t>(below(random, 3000000)), source, nbytes);
    } while (status == MessageStatus::waiting);
    boxes.forget(id);
    return status;
}

// Message k from src to dst has tag k % TAGS. The last tag is only received from any source, with the size 8.
void send_all(View &boxes, int dst, uint64_t count, uint64_t seed) {
    Random random(seed + 17 * static_cast<uint64_t>(boxes.rank * 64 + dst));
    std::deque<Sent> sent;
    for (uint64_t k = 0; k < count; k++) {
        const bool any = k % TAGS == TAGS - 1;
        std::vector<char> memory(any ? 8 : size_of(seed, boxes.rank, dst, k));
        for (uint64_t at = 0; at < memory.size(); at++) memory[at] = static_cast<char>(byte_of(boxes.rank, k, at));
        sent.push_back({std::move(memory), 0});
        Sent &last = sent.back();
        last.id = boxes.send(dst, static_cast<int64_t>(k % TAGS), last.memory.data(), last.memory.size());
        while (sent.size() > below(random, 40)) {
            int source;
            if (sent.front().id != 0 && finish(boxes, sent.front().id, random, source) != MessageStatus::done)
                fail("a send failed", boxes.rank, k);
            sent.pop_front();
        }
    }
    for (Sent &one : sent) {
        int source;
        if (one.id != 0 && finish(boxes, one.id, random, source) != MessageStatus::done) fail("a send failed", boxes.rank, count);
    }
}

// Receive the messages of a tag from a rank, several at a time.
void receive_all(View &boxes, int src, uint64_t tag, uint64_t count, uint64_t seed) {
    Random random(seed + 29 * static_cast<uint64_t>(boxes.rank * 64 + src) + tag);
    std::vector<uint64_t> numbers;
    for (uint64_t k = tag; k < count; k += TAGS) numbers.push_back(k);
    for (size_t begin = 0; begin < numbers.size();) {
        const size_t end = std::min(numbers.size(), begin + 1 + below(random, 8));
        std::vector<std::vector<char>> memories;
        std::vector<uint64_t> ids;
        for (size_t k = begin; k < end; k++) {
            const uint64_t nbytes = size_of(seed, src, boxes.rank, numbers[k]);
            const bool wrong = numbers[k] % 50 == 7;
            memories.emplace_back(nbytes + (wrong ? 3 : 0), static_cast<char>(0x5b));
            ids.push_back(boxes.receive(src, static_cast<int64_t>(tag), memories.back().data(), memories.back().size()));
        }
        if (below(random, 3) == 0) std::this_thread::sleep_for(std::chrono::microseconds(below(random, 2000)));
        for (size_t k = end; k-- > begin;) {
            int source = ANY_RANK;
            const bool wrong = numbers[k] % 50 == 7;
            const std::vector<char> &memory = memories[k - begin];
            if (finish(boxes, ids[k - begin], random, source) != (wrong ? MessageStatus::mismatch : MessageStatus::done))
                fail("wrong status", boxes.rank, numbers[k]);
            if (source != src) fail("wrong source", boxes.rank, numbers[k]);
            for (uint64_t at = 0; at < memory.size(); at++)
                if (memory[at] != static_cast<char>(wrong ? 0x5b : byte_of(src, numbers[k], at)))
                    fail("wrong byte", boxes.rank, numbers[k]);
        }
        begin = end;
    }
}

// Receive all messages of the last tag from any source: those of one rank come in their order.
void receive_any(View &boxes, uint64_t count, uint64_t seed) {
    Random random(seed + 31 * static_cast<uint64_t>(boxes.rank));
    std::vector<uint64_t> next(static_cast<size_t>(boxes.ranks), TAGS - 1);
    const uint64_t total = static_cast<uint64_t>(boxes.ranks - 1) * (count / TAGS);
    for (uint64_t k = 0; k < total; k++) {
        char memory[8];
        int source = ANY_RANK;
        if (below(random, 5) == 0) { // a receive that is withdrawn writes nothing, unless it has received a message
            const uint64_t id = boxes.receive(ANY_RANK, 100, memory, 8);
            if (!boxes.withdraw(id) || boxes.is_pending(id)) fail("not withdrawn", boxes.rank, k);
        }
        if (finish(boxes, boxes.receive(ANY_RANK, TAGS - 1, memory, 8), random, source) != MessageStatus::done)
            fail("wrong status", boxes.rank, k);
        uint64_t &number = next[static_cast<size_t>(source)];
        for (uint64_t at = 0; at < 8; at++)
            if (memory[at] != static_cast<char>(byte_of(source, number, at))) fail("wrong order", boxes.rank, number);
        number += TAGS;
    }
}

void run_rank(View &boxes, uint64_t count, uint64_t seed) {
    std::vector<std::thread> threads;
    for (int of = 0; of < boxes.ranks; of++) {
        if (of == boxes.rank) continue;
        threads.emplace_back([&, of] { send_all(boxes, of, count, seed); });
        for (uint64_t tag = 0; tag < TAGS - 1; tag++)
            threads.emplace_back([&, of, tag] { receive_all(boxes, of, tag, count, seed); });
    }
    threads.emplace_back([&] { receive_any(boxes, count, seed); });
    for (std::thread &one : threads) one.join();
}

// Rank 0 waits for nothing, and sleeps: its helper completes its sends and receives, since rank 1 waits for them.
void run_helped(View &boxes, std::atomic<bool> &over) {
    constexpr uint64_t NBYTES = 300000;
    std::vector<char> out(NBYTES, static_cast<char>(boxes.rank + 1)), in(NBYTES);
    const int other = 1 - boxes.rank;
    const uint64_t ids[] = {boxes.receive(other, 0, in.data(), NBYTES), boxes.send(other, 0, out.data(), NBYTES)};
    Random random(0);
    int source;
    if (boxes.rank == 0) {
        while (!over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    } else {
        for (const uint64_t id : ids) finish(boxes, id, random, source);
        over = true;
    }
    for (const uint64_t id : ids)
        if (boxes.rank == 0) finish(boxes, id, random, source);
    if (std::count(in.begin(), in.end(), static_cast<char>(other + 1)) != NBYTES) fail("wrong bytes", boxes.rank, 0);
}

// Rank 1, whose ring to rank 0 is full, withdraws a receive in two threads while a third waits for it: its message is
// received as a whole or not to its end, nothing is written afterwards, and the send completes.
void run_withdrawn(View &boxes, std::atomic<int> &sent) {
    constexpr uint64_t NBYTES = 700000;
    Random random(static_cast<uint64_t>(boxes.rank));
    for (int round = 0; round < 10; round++) {
        std::vector<char> memory(NBYTES, static_cast<char>(1 - boxes.rank));
        int source;
        if (boxes.rank == 0) {
            const uint64_t id = boxes.send(1, 200 + round, memory.data(), NBYTES);
            if (finish(boxes, id, random, source) != MessageStatus::done) fail("a send failed", 0, id);
            sent = round + 1;
            continue;
        }
        char small[4000];
        std::memset(small, 0, sizeof small);
        for (int k = 0; k < 16; k++) // one of them may wait for room
            if (const uint64_t id = boxes.send(0, 300, small, sizeof small)) boxes.withdraw(id);
        const uint64_t id = boxes.receive(0, 200 + round, memory.data(), NBYTES);
        std::vector<std::thread> threads;
        threads.emplace_back([&] { // its status may be unknown, when it was withdrawn
            uint64_t nbytes;
            while (boxes.wait(id, 100000, source, nbytes) == MessageStatus::waiting) continue;
        });
        const auto nap = std::chrono::microseconds(below(random, 1000));
        for (int k = 0; k < 2; k++)
            threads.emplace_back([&] {
                std::this_thread::sleep_for(nap);
                if (!boxes.withdraw(id)) fail("not withdrawn", 1, id);
                boxes.forget(id);
            });
        for (std::thread &one : threads) one.join();
        const std::vector<char> before = memory;
        // The parts of a pulled message, and an offer that was not read, are for this rank's next wait.
        const uint64_t next = boxes.receive(0, 400, small, sizeof small), again = boxes.receive(0, 200 + round, small, 0);
        uint64_t nbytes;
        int from;
        while (sent <= round) boxes.wait(next, 100000, from, nbytes);
        for (const uint64_t one : {next, again}) {
            boxes.withdraw(one);
            boxes.forget(one);
        }
        if (memory != before) fail("written after it was withdrawn", 1, id);
    }
}

std::unique_ptr<char, decltype(&std::free)> memory_of(int ranks) {
    const auto bytes = (static_cast<size_t>(Mailboxes::nbytes(ranks)) + 4095) / 4096 * 4096;
    void *block = std::aligned_alloc(4096, bytes);
    std::memset(block, 0, bytes);
    return {static_cast<char *>(block), std::free};
}

// A rank that cannot allocate what a message needs ends all its calls with an error, now and later.
void run_without_memory() {
    const auto shared = memory_of(2);
    const std::unique_ptr<Mailboxes> first(Mailboxes::over(shared.get(), 0, 2, 0, true)),
        second(Mailboxes::over(shared.get(), 1, 2, 0, true));
    char data[100] = {};
    int source;
    uint64_t nbytes, thrown = 0;
    const uint64_t id = second->receive(0, 1, data, sizeof data);
    first->send(1, 2, data, sizeof data);
    refuses = true;
    const MessageStatus status = second->wait(id, 1000000, source, nbytes);
    refuses = false;
    if (status != MessageStatus::no_memory) fail("waited without memory", 1, 0);
    if (second->wait(id, 1000000, source, nbytes) != MessageStatus::no_memory) fail("waited after an error", 1, 1);
    try {
        second->send(0, 1, data, sizeof data);
    } catch (const std::bad_alloc &) {
        thrown = 1;
    }
    if (thrown == 0) fail("sent after an error", 1, 2);
}

} // namespace

int main(int argc, char **given) {
    const uint64_t messages = argc > 1 ? std::strtoull(given[1], nullptr, 10) : 600;
    const uint64_t seed = argc > 2 ? std::strtoull(given[2], nullptr, 10) : 0;
    const int most = argc > 3 ? std::atoi(given[3]) : 3;
    run_without_memory();
    for (int ranks = 2; ranks <= most; ranks++) {
        for (const int kind : {0, 1, 2}) { // ranks may read each other's memory; they may not; each is on its own host
            const bool may_read = kind == 0, is_alone = kind == 2;
            const auto shared = memory_of(ranks);
            std::vector<std::unique_ptr<char, decltype(&std::free)>> own_memories;
            std::vector<std::unique_ptr<Mailboxes>> boxes;
            std::vector<std::vector<int>> peers(static_cast<size_t>(ranks)), sockets(static_cast<size_t>(ranks));
            for (int rank = 0; rank < ranks; rank++) {
                own_memories.push_back(memory_of(1));
                boxes.emplace_back(is_alone ? Mailboxes::over(own_memories.back().get(), 0, 1, 50000, true)
                                            : Mailboxes::over(shared.get(), rank, ranks, ranks % 2 * 50000, may_read));
                for (int other = 0; is_alone && other < rank; other++) {
                    int ends[2];
                    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) fail("no sockets", rank, 0);
                    for (const auto &[from, to, end] : {std::tuple(rank, other, ends[0]), std::tuple(other, rank, ends[1])}) {
                        peers[static_cast<size_t>(from)].push_back(to);
                        sockets[static_cast<size_t>(from)].push_back(end);
                    }
                }
            }
            for (size_t rank = 0; is_alone && rank < boxes.size(); rank++) {
                std::vector<int> indices(peers[rank].size());
                for (size_t k = 0; k < indices.size(); k++) indices[k] = static_cast<int>(k);
                boxes[rank]->reach(std::make_shared<Connections>(peers[rank], sockets[rank], int64_t{1000000000}), indices);
            }
            std::atomic<bool> over{false};
            std::atomic<int> sent{0};
            std::vector<std::thread> threads;
            for (int rank = 0; rank < ranks; rank++)
                threads.emplace_back([&, rank] {
                    View own = {*boxes[static_cast<size_t>(rank)], rank, ranks, is_alone};
                    if (!own.boxes.enter()) fail("closed", rank, 0);
                    run_rank(own, messages / TAGS * TAGS, seed + static_cast<uint64_t>(ranks));
                    if (rank < 2) run_helped(own, over);
                    if (rank < 2 && !is_alone) run_withdrawn(own, sent);
                    own.boxes.leave();
                });
            for (std::thread &one : threads) one.join();
        }
    }
    std::printf("2 to %d ranks x %llu messages: OK\n", most, static_cast<unsigned long long>(messages));
    return 0;
}
