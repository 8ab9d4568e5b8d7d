// Run random kernels on random bytes, and compare the results with those of the baseline instruction set on one thread
// and contiguous arrays. It runs without Python, for example under an emulator, or under a sanitizer that detects leaks.
// tests/runtime/engines/test_kernels.py proves that the numbers are right.
//
//   kernel_cases [count] [seed] [callers]
//
// Compile it together with kernel.cpp, exact.cpp, thread_pool.cpp and isa_*.cpp, with -ffp-contract=off.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>

#include "kernel.hpp"

namespace {

using Random = std::mt19937_64;
int64_t below(Random &random, int64_t most) { return static_cast<int64_t>(random() % static_cast<uint64_t>(most)); }
int index_below(Random &random, int most) { return static_cast<int>(below(random, most)); }

constexpr char POISON = 0x5a;

struct Block { // allocated with its exact size, so that a sanitizer reports an access to the byte after it
    std::unique_ptr<char[]> memory;
    size_t offset, size;
    char *at() const { return memory.get() + offset; }

    Block(Random &random, size_t nbytes)
        : memory(), offset(static_cast<size_t>(below(random, 65))), size(nbytes) {
        memory.reset(new char[offset + size]);
        std::memset(memory.get(), POISON, offset + size);
    }
};

// Bytes of at most 0x3f are finite positive numbers of every dtype, whose results are not NaNs with payloads.
void fill(Random &random, Block &block, DType dtype) {
    for (size_t i = 0; i < block.size; i++) block.at()[i] = static_cast<char>(random() & (dtype == BOOL ? 1 : 0x3f));
}

FusedProgram random_program(Random &random, const Kernel &kernel) {
    FusedProgram made{index_below(random, 4), {}, {}};
    if (kernel.op == EXACT_SUM) made.slots = 1;
    std::vector<int> known;
    for (int s = 0; s < kernel.sources; s++) known.push_back(s);
    auto any = [&] { return known[static_cast<size_t>(below(random, static_cast<int64_t>(known.size())))]; };
    for (int64_t f = kernel.op == EXACT_SUM ? 1 : made.slots > 0 ? below(random, 5) : 0; f > 0; f--) {
        Fold fold{index_below(random, made.slots), {any()}};
        for (int64_t k = below(random, random() & 1 ? 4 : 25); k > 0; k--) {
            const int operand = any();
            if (operand != ~fold.slot) fold.operands.push_back(operand);
        }
        if (std::count(known.begin(), known.end(), ~fold.slot) == 0) known.push_back(~fold.slot);
        made.folds.push_back(fold);
    }
    for (int r = 0; r < kernel.results; r++) made.results.push_back(kernel.op == EXACT_SUM ? ~0 : any());
    return made;
}

// Return a kernel that `validate` accepts, but that it has not completed.
Kernel random_kernel(Random &random) {
    for (;;) {
        Kernel kernel{};
        kernel.isa = &isa_baseline;
        kernel.op = static_cast<Op>(below(random, OPS));
        kernel.dtype = kernel.accumulator = kernel.result = static_cast<DType>(below(random, DTYPES));
        if (random() % 4) kernel.accumulator = static_cast<DType>(below(random, DTYPES));
        if (random() % 4) kernel.result = static_cast<DType>(below(random, DTYPES));
        kernel.divisor = kernel.op == SUM || kernel.op == EXACT_SUM ? 1 + static_cast<double>(below(random, 24)) : 1;
        kernel.sources = 1 + index_below(random, random() & 1 ? 4 : 24);
        kernel.results = 1 + index_below(random, 3);
        for (int64_t k = 1 + below(random, 2); k > 0; k--) kernel.programs.push_back(random_program(random, kernel));
        for (int64_t t = 1 + below(random, 2); t > 0; t--) {
            const int64_t size = below(random, random() % 8 ? 300 : 30000), stop = below(random, size + 1);
            const auto tensor = static_cast<int64_t>(kernel.sizes.size());
            const int programs = static_cast<int>(kernel.programs.size());
            kernel.sizes.push_back(size);
            kernel.segments.push_back({tensor, below(random, stop + 1), stop, index_below(random, programs)});
            kernel.segments.push_back({tensor, stop, size, index_below(random, programs)});
        }
        Kernel checked = kernel;
        if (validate(checked) == nullptr) return kernel;
    }
}

// Return new blocks for the results; run the kernel into them.
std::vector<Block> run(Random &random, Kernel kernel, const InstructionSet *isa, const std::vector<Source> &sources,
                       int threads, bool streaming) {
    std::vector<Block> blocks;
    std::vector<char *> results;
    for (const int64_t size : kernel.sizes)
        for (int r = 0; r < kernel.results; r++) {
            blocks.emplace_back(random, static_cast<size_t>(size) * ITEMSIZES[kernel.result]);
            results.push_back(blocks.back().at());
        }
    kernel.isa = isa;
    if (validate(kernel) != nullptr || !run_kernel(kernel, sources, results, threads, streaming)) blocks.clear();
    return blocks;
}

bool one_case(Random &random, const std::vector<const InstructionSet *> &sets) {
    const Kernel kernel = random_kernel(random);
    const auto item = static_cast<int64_t>(ITEMSIZES[kernel.dtype]);
    std::vector<Block> memory, copies;
    std::vector<std::unique_ptr<Strided>> shapes;
    std::vector<Source> sources, plain; // with their own strides, and in C order
    for (const int64_t size : kernel.sizes)
        for (int s = 0; s < kernel.sources; s++) {
            const auto nbytes = static_cast<size_t>(size * item);
            memory.emplace_back(random, nbytes);
            copies.emplace_back(random, nbytes);
            fill(random, memory.back(), kernel.dtype);
            char *data = memory.back().at();
            plain.push_back({copies.back().at(), nullptr});
            sources.push_back({data, nullptr});
            if (size == 0) continue;
            const int64_t rows = size % 3 == 0 ? 3 : 1, columns = size / rows;
            const bool strided = random() % 6 == 0, reversed = random() & 1;
            if (strided) { // transposed or reversed
                shapes.push_back(std::make_unique<Strided>());
                *shapes.back() = {2, {columns, rows}, {item, columns * item}};
                if (reversed) *shapes.back() = {1, {size}, {-item}};
                sources.back() = {reversed ? data + (size - 1) * item : data, shapes.back().get()};
            }
            for (int64_t i = 0; i < size; i++) {
                const int64_t from = !strided ? i : reversed ? size - 1 - i : i / rows + i % rows * columns;
                std::memcpy(copies.back().at() + i * item, data + from * item, static_cast<size_t>(item));
            }
        }
    const std::vector<Block> wanted = run(random, kernel, &isa_baseline, plain, 1, false);
    for (const InstructionSet *isa : sets) {
        const auto got = run(random, kernel, isa, sources, 1 + index_below(random, 3), random() & 1);
        const char *fault = wanted.empty() || got.size() != wanted.size() ? "refused, or out of memory" : nullptr;
        for (size_t k = 0; k < wanted.size() && fault == nullptr; k++) {
            if (std::memcmp(got[k].at(), wanted[k].at(), wanted[k].size) != 0) fault = "wrong value";
            if (std::count(got[k].memory.get(), got[k].at(), POISON) != static_cast<std::ptrdiff_t>(got[k].offset))
                fault = "written before the result";
        }
        if (fault == nullptr) continue;
        std::fprintf(stderr, "%s: op %d, dtypes %d %d %d, divisor %g, %d sources: %s\n", isa->name, kernel.op,
                     kernel.dtype, kernel.accumulator, kernel.result, kernel.divisor, kernel.sources, fault);
        return false;
    }
    return true;
}

std::vector<const InstructionSet *> supported() {
    std::vector<const InstructionSet *> found = {&isa_baseline};
#if defined(__x86_64__)
    if (isa_avx2 != nullptr && __builtin_cpu_supports("avx2")) // which implies F16C
        found.push_back(isa_avx2);
    if (isa_avx512 != nullptr && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        found.push_back(isa_avx512);
#endif
    return found;
}

} // namespace

int main(int count, char **given) {
    const long cases = count > 1 ? std::atol(given[1]) : 2000, seed = count > 2 ? std::atol(given[2]) : 0;
    const long callers = count > 3 ? std::atol(given[3]) : 1;
    const auto sets = supported();
    std::vector<long> wrong(static_cast<size_t>(callers));
    auto work = [&](size_t caller) {
        Random random(static_cast<uint64_t>(seed) * 1000 + caller);
        for (long k = 0; k < cases && wrong[caller] < 5; k++) wrong[caller] += !one_case(random, sets);
    };
    std::vector<std::thread> threads;
    for (size_t caller = 1; caller < wrong.size(); caller++) threads.emplace_back(work, caller);
    work(0);
    for (std::thread &one : threads) one.join();
    const bool right = std::count(wrong.begin(), wrong.end(), 0) == callers;
    for (const InstructionSet *isa : sets) std::printf("%s ", isa->name);
    std::printf("x %ld cases x %ld callers: %s\n", cases, callers, right ? "OK" : "WRONG");
    return !right;
}
