// Ranks as threads over one memory: random courses, calls that differ, a reader of what all are doing, a group given up.
// A thread sanitizer sees all of it, which it cannot where ranks are processes. No Python is needed, as in cases.cpp.
//
//   ranks [ops] [seed] [ranks]
//
// Compile it together with arena.cpp, engine.cpp, pool.cpp and the tiles, with -ffp-contract=off.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>

#include "arena.hpp"

namespace {

using Random = std::mt19937_64;
constexpr int64_t SLOT = 1 << 15;
constexpr int64_t PIECE = 256; // elements of eight bytes

int64_t below(Random &random, int64_t most) { return static_cast<int64_t>(random() % static_cast<uint64_t>(most)); }

Plan plan(int sources, int results, int64_t size) {
    Plan made{};
    made.op = SUM;
    made.dtype = made.accumulator = made.result = I64;
    made.divisor = 1;
    made.sources = sources;
    made.results = results;
    made.sizes = {size};
    Program program{sources > 1, {}, {}};
    if (sources > 1) {
        program.folds.push_back({0, {}});
        for (int s = 0; s < sources; s++) program.folds[0].operands.push_back(s);
    }
    for (int r = 0; r < results; r++) program.results.push_back(sources > 1 ? ~0 : 0);
    made.programs = {program};
    made.segments = {{0, 0, size, 0}};
    made.tiles = &tiles_baseline;
    if (const char *problem = check(made)) {
        std::printf("%s\n", problem);
        std::exit(2);
    }
    return made;
}

struct Call { // an all-reduce, as one rank does it: copied in, reduced in shares, copied out, three pieces at a time
    std::vector<std::unique_ptr<Plan>> plans;
    Course course{{}, 0, 2, SLOT / 2};

    Work work(int64_t size, std::vector<Spot> sources, std::vector<Spot> results) {
        plans.push_back(std::make_unique<Plan>(
            plan(static_cast<int>(sources.size()), static_cast<int>(results.size()), size)));
        return {plans.back().get(), std::move(sources), std::move(results), false};
    }

    Call(int rank, int ranks, int64_t size, bool small) {
        const int64_t pieces = std::max<int64_t>(1, (size + PIECE - 1) / PIECE);
        course.regions = ranks;
        course.ticks.resize(static_cast<size_t>(pieces + (small ? 1 : 2)));
        for (int64_t p = 0; p < pieces; p++) {
            const int64_t start = p * PIECE, stop = std::min(size, start + PIECE), in = p % 2 * PIECE * 8,
                          out = (2 + p % 2) * PIECE * 8;
            const auto tick = [&](int64_t at) -> std::vector<Work> & { return course.ticks[static_cast<size_t>(at)]; };
            if (stop <= start) continue;
            tick(p).push_back(work(stop - start, {{~0, start * 8}}, {{rank, in}}));
            if (small) {
                std::vector<Spot> sources;
                for (int of = 0; of < ranks; of++) sources.push_back({of, in});
                tick(p + 1).push_back(work(stop - start, sources, {{~1, start * 8}}));
                continue;
            }
            for (int owner = 0; owner < ranks; owner++) {
                const int64_t a = (stop - start) * owner / ranks, b = (stop - start) * (owner + 1) / ranks;
                if (a == b) continue;
                if (owner == rank) {
                    std::vector<Spot> sources;
                    for (int of = 0; of < ranks; of++)
                        sources.push_back(of == rank ? Spot{~0, (start + a) * 8} : Spot{of, in + a * 8});
                    tick(p + 1).push_back(work(b - a, sources, {{~1, (start + a) * 8}, {rank, out + a * 8}}));
                } else {
                    tick(p + 2).push_back(work(b - a, {{owner, out + a * 8}}, {{~1, (start + a) * 8}}));
                }
            }
        }
    }
};

Outcome walk(SharedMemory &memory, const Call &call, std::vector<int64_t> &in, std::vector<int64_t> &out,
             const std::string &text, int64_t slice_ns) {
    memory.begin(call.course, {reinterpret_cast<char *>(in.data()), reinterpret_cast<char *>(out.data())}, text);
    Outcome outcome = Outcome::waiting;
    while (outcome == Outcome::waiting) outcome = memory.advance(call.course.ticks.size(), slice_ns);
    return outcome;
}

// What an op is described by: long enough to be torn.
std::string words(uint64_t op) {
    std::string made;
    for (int k = 0; k < 12; k++) made += "op " + std::to_string(op) + " ";
    return made;
}

bool wrong(const char *what, int rank, long op) {
    std::printf("%s: rank %d, op %ld\n", what, rank, op);
    return false;
}

bool live(SharedMemory &memory, long ops, uint64_t seed) {
    const int rank = memory.rank, ranks = memory.ranks;
    Random common(seed), own(seed * 1000 + static_cast<uint64_t>(rank) + 1);
    for (long op = 0; op < ops; op++) {
        const bool small = common() & 1;
        const int64_t size = below(common, 4) == 0 ? below(common, 2000) : below(common, 40);
        const int odd = static_cast<int>(below(common, 12)); // the rank that calls something else, if there is one
        const int64_t first = below(common, 1 << 20);
        std::vector<int64_t> in(static_cast<size_t>(size)), out(in.size(), -1);
        for (size_t k = 0; k < in.size(); k++) in[k] = (first + static_cast<int64_t>(k)) * (rank + 1);
        if (below(own, 8) == 0) std::this_thread::sleep_for(std::chrono::microseconds(below(own, 300)));
        const bool differs = odd < ranks && ranks > 1;
        // Another text of the same length, of another one, or the same; and another number of ticks.
        const std::string text = words(static_cast<uint64_t>(op)) + (odd == rank ? (op & 1 ? " b" : " longer") : " a");
        const Call call(rank, ranks, odd == rank && differs ? size + 700 : size, small);
        if (odd == rank && differs) in.resize(in.size() + 700), out.resize(in.size(), -1);
        const int64_t slice = below(own, 3) == 0 ? below(own, 2000) : 50000000;
        const Outcome outcome = walk(memory, call, in, out, text, slice);
        if (outcome != (differs ? Outcome::mismatch : Outcome::done)) return wrong("another outcome", rank, op);
        for (size_t k = 0; k < out.size(); k++) {
            const int64_t due = differs ? -1 : (first + static_cast<int64_t>(k)) * ranks * (ranks + 1) / 2;
            if (out[k] != due) return wrong("another result", rank, op);
        }
    }
    // In the end the last rank gives up in the middle of an op, and its next call must not disturb the others'.
    const Call call(rank, ranks, 1000, false);
    std::vector<int64_t> in(1000, 1), out(1000, -1);
    if (rank == ranks - 1 && ranks > 1) {
        memory.begin(call.course, {reinterpret_cast<char *>(in.data()), reinterpret_cast<char *>(out.data())}, "last");
        memory.advance(1, 0);
        memory.give_up("rank " + std::to_string(rank));
        memory.abandon();
    }
    for (int again = 0; again < 2 && ranks > 1; again++) {
        if (walk(memory, call, in, out, "last", 1000000) != Outcome::broken) return wrong("not broken", rank, ops);
        memory.abandon();
        if (memory.cause() != "rank " + std::to_string(ranks - 1)) return wrong("another cause", rank, ops);
        if (std::count(out.begin(), out.end(), -1) != 1000) return wrong("a broken result", rank, ops);
    }
    return true;
}

// Read what all ranks are doing until they are through: texts are whole, and of the op that they claim to be of.
bool watch(SharedMemory &memory, const std::atomic<bool> &over) {
    while (!over.load()) {
        for (int rank = 0; rank < memory.ranks; rank++) {
            const Seat &seat = memory.seat(rank);
            const uint64_t number = seat.number.load(std::memory_order_acquire);
            // The latest, and the one whose place the next will take.
            for (const uint64_t of : {number, number - KEPT_OPS + 1}) {
                std::string text;
                int64_t started, ended;
                if (of == 0 || of > number || !seat.entries[of % KEPT_OPS].read(of, text, started, ended)) continue;
                const std::string due = words(of - 1);
                if (text != "last" && text.compare(0, due.size(), due) != 0)
                    return wrong("a torn text", rank, static_cast<long>(of));
            }
        }
        memory.cause();
        std::this_thread::yield();
    }
    return true;
}

} // namespace

int main(int count, char **given) {
    const long ops = count > 1 ? std::atol(given[1]) : 2000, seed = count > 2 ? std::atol(given[2]) : 0;
    const int most = count > 3 ? std::atoi(given[3]) : 4;
    std::atomic<bool> good{true};
    for (int ranks = 1; ranks <= most; ranks++) {
        const auto bytes = static_cast<size_t>(SharedMemory::bytes(ranks, SLOT));
        std::unique_ptr<char, decltype(&std::free)> shared(static_cast<char *>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096)), std::free);
        std::memset(shared.get(), 0, bytes);
        std::vector<std::unique_ptr<SharedMemory>> memories;
        // Half of the groups spin before they sleep.
        for (int rank = 0; rank < ranks; rank++)
            memories.emplace_back(SharedMemory::over(shared.get(), rank, ranks, SLOT, ranks % 2 * 50000, 1));
        std::atomic<bool> over{false};
        std::vector<std::thread> threads;
        for (int rank = 0; rank < ranks; rank++)
            threads.emplace_back([&, rank] {
                if (!live(*memories[static_cast<size_t>(rank)], ops, static_cast<uint64_t>(seed + ranks))) {
                    good = false;
                    std::_Exit(1); // the others would wait for ever
                }
            });
        std::unique_ptr<SharedMemory> reader(SharedMemory::over(shared.get(), 0, ranks, SLOT, 0, 1));
        std::thread watcher([&] { if (!watch(*reader, over)) good = false; });
        for (std::thread &one : threads) one.join();
        over = true;
        watcher.join();
    }
    std::printf("1 to %d ranks x %ld ops: %s\n", most, ops, good ? "OK" : "WRONG");
    return !good;
}
