// Ranks as threads that share one memory: random rank programs, mismatched calls, a reader of the flight recorder, and
// an abort. A thread sanitizer can check threads, but not processes. It runs without Python, like kernel_cases.cpp.
//
//   shared_memory_cases [ops] [seed] [ranks]
//
// Compile it together with shared_memory.cpp, call_log.cpp, kernel.cpp, thread_pool.cpp and isa_*.cpp, with -ffp-contract=off.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>

#include "shared_memory.hpp"

namespace {

using Random = std::mt19937_64;
constexpr int64_t SLOT = 1 << 15;
constexpr int64_t CHUNK = 256; // elements of eight bytes

int64_t below(Random &random, int64_t most) { return static_cast<int64_t>(random() % static_cast<uint64_t>(most)); }

Kernel sum_kernel(int sources, int results, int64_t size) {
    Kernel made{};
    made.op = SUM;
    made.dtype = made.accumulator = made.result = I64;
    made.divisor = 1;
    made.sources = sources;
    made.results = results;
    made.sizes = {size};
    FusedProgram program{sources > 1, {}, {}};
    if (sources > 1) {
        program.folds.push_back({0, {}});
        for (int s = 0; s < sources; s++) program.folds[0].operands.push_back(s);
    }
    for (int r = 0; r < results; r++) program.results.push_back(sources > 1 ? ~0 : 0);
    made.programs = {program};
    made.segments = {{0, 0, size, 0}};
    made.isa = &isa_baseline;
    if (const char *fault = validate(made)) {
        std::printf("%s\n", fault);
        std::exit(2);
    }
    return made;
}

struct Call { // one rank's part of an all-reduce: copy in, reduce a share, copy out; three chunks in the pipeline
    std::vector<std::unique_ptr<Kernel>> kernels;
    RankProgram program{{}, 0, 0, 2, SLOT / 2};

    Instruction instruction(int64_t size, std::vector<BufferRef> sources, std::vector<BufferRef> results) {
        kernels.push_back(std::make_unique<Kernel>(
            sum_kernel(static_cast<int>(sources.size()), static_cast<int>(results.size()), size)));
        Instruction made{kernels.back().get(), std::move(sources), std::move(results), false};
        made.phase = phase_of(made);
        return made;
    }

    Call(int rank, int ranks, int64_t size, bool small) {
        const int64_t chunks = std::max<int64_t>(1, (size + CHUNK - 1) / CHUNK);
        program.slots = ranks;
        program.stages.resize(static_cast<size_t>(chunks + (small ? 1 : 2)));
        for (int64_t p = 0; p < chunks; p++) {
            const int64_t start = p * CHUNK, stop = std::min(size, start + CHUNK), in = p % 2 * CHUNK * 8,
                          out = (2 + p % 2) * CHUNK * 8;
            const auto stage = [&](int64_t at) -> std::vector<Instruction> & {
                return program.stages[static_cast<size_t>(at)];
            };
            if (stop <= start) continue;
            stage(p).push_back(instruction(stop - start, {{~0, start * 8}}, {{rank, in}}));
            if (small) {
                std::vector<BufferRef> sources;
                for (int of = 0; of < ranks; of++) sources.push_back({of, in});
                stage(p + 1).push_back(instruction(stop - start, sources, {{~1, start * 8}}));
                continue;
            }
            for (int owner = 0; owner < ranks; owner++) {
                const int64_t a = (stop - start) * owner / ranks, b = (stop - start) * (owner + 1) / ranks;
                if (a == b) continue;
                if (owner == rank) {
                    std::vector<BufferRef> sources;
                    for (int of = 0; of < ranks; of++)
                        sources.push_back(of == rank ? BufferRef{~0, (start + a) * 8} : BufferRef{of, in + a * 8});
                    stage(p + 1).push_back(instruction(b - a, sources, {{~1, (start + a) * 8}, {rank, out + a * 8}}));
                } else {
                    stage(p + 2).push_back(instruction(b - a, {{owner, out + a * 8}}, {{~1, (start + a) * 8}}));
                }
            }
        }
    }
};

Outcome run(SharedMemory &memory, const Call &call, std::vector<int64_t> &in, std::vector<int64_t> &out,
            const std::string &signature, int64_t slice_ns) {
    memory.begin(call.program, {reinterpret_cast<char *>(in.data()), reinterpret_cast<char *>(out.data())}, signature);
    Outcome outcome = Outcome::waiting;
    while (outcome == Outcome::waiting) outcome = memory.advance(call.program.stages.size(), slice_ns);
    return outcome;
}

// Return the signature of an op, long enough that a reader could see a part of two signatures.
std::string signature_of(uint64_t op) {
    std::string made;
    for (int k = 0; k < 12; k++) made += "op " + std::to_string(op) + " ";
    return made;
}

bool failed(const char *what, int rank, long op) {
    std::fprintf(stderr, "%s: rank %d, op %ld\n", what, rank, op); // stdout would be lost in _Exit
    return false;
}

bool run_rank(SharedMemory &memory, long ops, uint64_t seed) {
    const int rank = memory.rank, ranks = memory.ranks;
    Random common(seed), own(seed * 1000 + static_cast<uint64_t>(rank) + 1);
    for (long op = 0; op < ops; op++) {
        const bool small = common() & 1;
        const int64_t size = below(common, 4) == 0 ? below(common, 2000) : below(common, 40);
        const int odd = static_cast<int>(below(common, 12)); // the rank with a different call; none if out of range
        const int64_t first = below(common, 1 << 20);
        std::vector<int64_t> in(static_cast<size_t>(size)), out(in.size(), -1);
        for (size_t k = 0; k < in.size(); k++) in[k] = (first + static_cast<int64_t>(k)) * (rank + 1);
        if (below(own, 8) == 0) std::this_thread::sleep_for(std::chrono::microseconds(below(own, 300)));
        const bool differs = odd < ranks && ranks > 1;
        // A signature of the same length, of another length, or the same one; and another number of stages.
        const char *ending = odd != rank ? " a" : op & 1 ? " b" : " longer";
        const std::string signature = signature_of(static_cast<uint64_t>(op)) + ending;
        const Call call(rank, ranks, odd == rank && differs ? size + 700 : size, small);
        if (odd == rank && differs) in.resize(in.size() + 700), out.resize(in.size(), -1);
        const int64_t slice = below(own, 3) == 0 ? below(own, 2000) : 50000000;
        const Outcome outcome = run(memory, call, in, out, signature, slice);
        if (outcome != (differs ? Outcome::mismatch : Outcome::done)) return failed("wrong outcome", rank, op);
        for (size_t k = 0; k < out.size(); k++) {
            const int64_t due = differs ? -1 : (first + static_cast<int64_t>(k)) * ranks * (ranks + 1) / 2;
            if (out[k] != due) return failed("wrong result", rank, op);
        }
    }
    // At last the last rank aborts in the middle of an op. Its next call must not disturb the other ranks.
    const Call call(rank, ranks, 1000, false);
    std::vector<int64_t> in(1000, 1), out(1000, -1);
    if (rank == ranks - 1 && ranks > 1) {
        memory.begin(call.program, {reinterpret_cast<char *>(in.data()), reinterpret_cast<char *>(out.data())}, "last");
        memory.advance(1, 0);
        memory.abort("rank " + std::to_string(rank));
        memory.end_op();
    }
    for (int again = 0; again < 2 && ranks > 1; again++) {
        if (run(memory, call, in, out, "last", 1000000) != Outcome::aborted) return failed("not aborted", rank, ops);
        memory.end_op();
        if (memory.cause() != "rank " + std::to_string(ranks - 1)) return failed("wrong cause", rank, ops);
        if (std::count(out.begin(), out.end(), -1) != 1000) return failed("a result of an aborted op", rank, ops);
    }
    return true;
}

// Read the flight recorder of all ranks until they end: each signature is complete and belongs to its op's number.
bool watch(SharedMemory &memory, const std::atomic<bool> &over) {
    while (!over.load()) {
        for (int rank = 0; rank < memory.ranks; rank++) {
            const RankState &state = memory.state(rank);
            const uint64_t number = state.number.load(std::memory_order_acquire);
            // The latest op, and the one whose record the next op overwrites.
            for (const uint64_t of : {number, number - RECORDED_CALLS + 1}) {
                std::string signature;
                int64_t started, ended;
                if (of == 0 || of > number) continue;
                if (!state.calls.records[of % RECORDED_CALLS].read(of, signature, started, ended)) continue;
                const std::string due = signature_of(of - 1);
                if (signature != "last" && signature.compare(0, due.size(), due) != 0)
                    return failed("a torn signature", rank, static_cast<long>(of));
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
        const auto bytes = static_cast<size_t>(SharedMemory::nbytes(ranks, SLOT));
        void *block = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
        std::unique_ptr<char, decltype(&std::free)> shared(static_cast<char *>(block), std::free);
        std::memset(shared.get(), 0, bytes);
        std::vector<std::unique_ptr<SharedMemory>> memories;
        // Half of the groups spin before they sleep.
        for (int rank = 0; rank < ranks; rank++)
            memories.emplace_back(SharedMemory::over(shared.get(), rank, ranks, SLOT, ranks % 2 * 50000, 1));
        // Half of them are traced, in small files, so that old records are replaced.
        for (int rank = 0; rank < ranks && ranks % 2 == 0; rank++) {
            std::unique_ptr<FILE, decltype(&std::fclose)> file(std::tmpfile(), &std::fclose);
            const auto trace = file ? TraceFile::open(fileno(file.get()), "{}", 1 << 18) : nullptr;
            if (!trace) return failed("no trace", rank, 0), 1;
            memories[static_cast<size_t>(rank)]->calls.trace_to(trace);
        }
        std::atomic<bool> over{false};
        std::vector<std::thread> threads;
        for (int rank = 0; rank < ranks; rank++)
            threads.emplace_back([&, rank] {
                if (!run_rank(*memories[static_cast<size_t>(rank)], ops, static_cast<uint64_t>(seed + ranks))) {
                    good = false;
                    std::_Exit(1); // the other ranks would wait forever
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
