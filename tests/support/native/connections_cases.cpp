// Runs Connections without Python, under sanitizers: ranks as threads, joined by 1 to 3 pairs of sockets. Each rank has two
// threads, which use tags of their own; messages have random sizes, and are sent and expected in random turns, and
// half of them have a head. In the second half of the turns one rank aborts or closes in the middle, and all waits must end.
#include "connections.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <random>
#include <sys/socket.h>
#include <thread>

namespace {

constexpr int64_t SILENT_NS = 120000000000; // longer than these cases take
constexpr int RANKS = 3, MESSAGES = 30;
constexpr int64_t SIZES[] = {0, 1, 16, 1000, 65520, 65536, 100000, 3 << 20};

int64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return int64_t{1000000000} * time.tv_sec + time.tv_nsec;
}

char byte_of(int from, uint64_t tag, int number, int64_t at) {
    return static_cast<char>(from * 31 + static_cast<int>(tag) * 7 + number * 13 + at * 17 % 251);
}

int64_t size_of(int from, uint64_t tag, int number) {
    return SIZES[static_cast<size_t>(from * 5 + static_cast<int>(tag) * 3 + number * 11) % std::size(SIZES)];
}

void require(bool holds, const char *what) {
    if (holds) return;
    std::fprintf(stderr, "wrong: %s\n", what);
    std::abort();
}

// Exchange messages of one tag with all other ranks. Return whether all of them were completed.
bool exchange(Connections &connections, int rank, uint64_t tag, unsigned seed) {
    std::mt19937 draw(seed);
    struct Pending {
        std::shared_ptr<Message> message;
        std::vector<char> data;
        std::string head; // the first bytes of the data, which are sent from here
        int from, number;
    };
    std::vector<std::unique_ptr<Pending>> pending;
    const auto settle = [&](size_t keep) {
        bool all = true;
        while (pending.size() > keep) {
            Pending &one = *pending.front();
            while (connections.wait(*one.message, now_ns() + 1000000) == Message::State::pending) {}
            all = all && one.message->state == Message::State::done;
            const int64_t size = static_cast<int64_t>(one.data.size());
            if (one.message->state == Message::State::done && one.from != rank)
                for (int64_t at = 0; at < size; at += 997)
                    require(one.data[static_cast<size_t>(at)] == byte_of(one.from, tag, one.number, at), "a byte");
            pending.erase(pending.begin());
        }
        return all;
    };
    bool all = true;
    for (int number = 0; number < MESSAGES; number++) {
        const bool sends_first = draw() % 2 == 0;
        for (int step = 0; step < 2 * RANKS; step++) {
            const int other = step % RANKS;
            if (other == rank) continue;
            const bool sending = (step < RANKS) == sends_first;
            auto one = std::make_unique<Pending>();
            one->from = sending ? rank : other;
            one->number = number;
            const int64_t size = size_of(one->from, tag, number);
            one->data.resize(static_cast<size_t>(size));
            if (sending)
                for (int64_t at = 0; at < size; at++) one->data[static_cast<size_t>(at)] = byte_of(rank, tag, number, at);
            const int peer = connections.index_of(other);
            const auto head = std::min<int64_t>(size, sending ? number % 2 * 16 : 0);
            one->head.assign(one->data.data(), static_cast<size_t>(head));
            one->message = sending ? connections.send(peer, tag, one->data.data() + head, size - head, one->head)
                                   : connections.receive(peer, tag, one->data.data(), size);
            pending.push_back(std::move(one));
        }
        if (draw() % 3 == 0) (void)connections.progress();
        all = settle(4 * RANKS + draw() % 8) && all; // a rank expects messages before it waits for its own sends
    }
    return settle(0) && all;
}

} // namespace

int main(int count, char **arguments) {
    const int turns = count > 1 ? std::atoi(arguments[1]) : 20;
    for (int turn = 0; turn < turns; turn++) {
        std::vector<std::vector<int>> ranks(RANKS), sockets(RANKS);
        for (int a = 0; a < RANKS; a++)
            for (int b = a + 1; b < RANKS; b++) {
                ranks[static_cast<size_t>(a)].push_back(b), ranks[static_cast<size_t>(b)].push_back(a);
                for (int lane = 0; lane <= turn % 3; lane++) {
                    int pair[2];
                    require(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "a pair of sockets");
                    sockets[static_cast<size_t>(a)].push_back(pair[0]), sockets[static_cast<size_t>(b)].push_back(pair[1]);
                }
            }
        std::vector<std::unique_ptr<Connections>> all;
        for (size_t k = 0; k < RANKS; k++) all.push_back(std::make_unique<Connections>(ranks[k], sockets[k], SILENT_NS));
        const bool ends = turn >= turns / 2;
        std::vector<std::thread> threads;
        std::vector<char> completed(2 * RANKS, 0);
        for (int rank = 0; rank < RANKS; rank++)
            for (uint64_t tag = 0; tag < 2; tag++)
                threads.emplace_back([&, rank, tag] {
                    const auto seed = static_cast<unsigned>(turn * 100 + rank * 10 + static_cast<int>(tag));
                    completed[static_cast<size_t>(2 * rank) + tag] =
                        exchange(*all[static_cast<size_t>(rank)], rank, tag, seed);
                });
        if (ends) {
            const timespec pause = {0, (turn % 7) * 3000000};
            nanosleep(&pause, nullptr);
            if (turn % 2 == 0) all[1]->abort();
            else all[1]->close();
        }
        for (std::thread &thread : threads) thread.join();
        for (const char each : completed) require(ends || each != 0, "a message was not completed");
    }
    std::printf("%d turns of connections\n", turns);
}
