// The kernels of the CUDA engine: combine n sources elementwise, in a fixed order, and write m results, in one pass.
//
// NVRTC compiles this file for devices (scripts/build_cuda_kernels), and a C++ compiler for the host, where a loop over
// the threads runs the same body (tests/native/cuda_host.cpp): a thread depends on no other, and there is no shared
// memory. Its results have the bits of `kernels/native/isa.inc`, except that NaNs may differ in their payload.
//
// A launch processes a batch: parts of tensors, each with its own pointers. A part is cut into tiles; block b processes
// the tiles b, b + grid, ... Each thread has one vector of VECTOR_NBYTES of each source of a tile. The sources of a part
// are listed in the order in which they are combined.
#pragma once

#include "numbers.cuh"

namespace cuda_reduce {

constexpr int VECTOR_NBYTES = 16; // the most bytes of a source that a thread reads at once
constexpr int THREADS = 256;       // of a block
constexpr int MAX_FIXED = 8;       // kernels for up to so many sources have all reads in flight before the first use
constexpr int SMALL_NBYTES = 4096 - 64;     // the parameters of a launch, as large as every driver accepts
constexpr int LARGE_NBYTES = 32760;         // and those that drivers since 530 accept
constexpr int MAX_STEPS = 64;      // sources of a part that has an order of its own

// How the values of a part are combined: source k is combined into the uppermost value of a stack of at most three, or,
// if bit k of `push` is set, becomes the uppermost value itself; then, if bit k of `fold` is set, the two uppermost values
// are combined (if bit k of `fold_twice` is set, twice). All zeros: in the order of the sources. If bit k of `wide` is set,
// source k has the accumulator's dtype; only kernels named `_mixed` read this.
struct Order {
    uint64_t push, fold, fold_twice, wide;
};

// The dtype of the results of kernels named `_mixed`. The last three are of means of integers.
enum ResultKind : uint32_t { OWN, ACCUMULATOR, FLOAT, HALF, BFLOAT };

struct Part { // elements of one tensor, which all have the same order
    int64_t size;       // in units (elements, or real and imaginary parts)
    uint32_t tile;      // the number of its first tile in the launch
    uint16_t order;     // its number
    uint8_t head;       // how many units precede the first one at which all pointers are multiples of VECTOR_NBYTES;
    uint8_t is_aligned; // 0: there is none, so that each unit is read for itself
    // The addresses of the sources and results follow in the table.
};

template <int NBYTES> struct LaunchOf { // the parameters of a kernel, by value
    double divisor;             // 1: no division. Integers are not divided: the values of their means are doubles
    uint32_t parts, tiles;      // their numbers
    uint16_t sources, results;  // of each part
    uint16_t orders;            // their number
    uint16_t stack;             // the most values of a stack in these orders; 1: all are in the order of the sources
    uint32_t kind, reserved;    // a ResultKind
    // The orders; the parts; for each part the addresses of its sources, then of its results.
    alignas(8) unsigned char table[NBYTES - 32];

    DEVICE const Order &order(int k) const { return reinterpret_cast<const Order *>(table)[k]; }
    DEVICE const Part &part(int k) const {
        return reinterpret_cast<const Part *>(table + orders * sizeof(Order))[k];
    }
    DEVICE const uint64_t *addresses(int k) const {
        const unsigned char *at = table + orders * sizeof(Order) + parts * sizeof(Part);
        return reinterpret_cast<const uint64_t *>(at) + static_cast<int64_t>(k) * (sources + results);
    }
};
using SmallLaunch = LaunchOf<SMALL_NBYTES>;
using LargeLaunch = LaunchOf<LARGE_NBYTES>;

// ---- memory

// Read or write so many words of 4 bytes at once. A result may be a source, so reads are never those for memory that does
// not change (ld.global.nc).
#if defined(__CUDACC__)
DEVICE void read_words(uint64_t from, uint32_t (&to)[4]) {
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "l"(from) : "memory");
}
DEVICE void read_words(uint64_t from, uint32_t (&to)[2]) {
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from) : "memory");
}
DEVICE void read_words(uint64_t from, uint32_t (&to)[1]) {
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(to[0]) : "l"(from) : "memory");
}
DEVICE void write_words(uint64_t to, const uint32_t (&from)[4]) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 : : "l"(to), "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3]) : "memory");
}
DEVICE void write_words(uint64_t to, const uint32_t (&from)[2]) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" : : "l"(to), "r"(from[0]), "r"(from[1]) : "memory");
}
DEVICE void write_words(uint64_t to, const uint32_t (&from)[1]) {
    asm volatile("st.global.u32 [%0], %1;" : : "l"(to), "r"(from[0]) : "memory");
}
#else
template <int COUNT> struct alignas(4 * COUNT) Words { uint32_t word[COUNT]; };
template <int COUNT> void read_words(uint64_t from, uint32_t (&to)[COUNT]) {
    const Words<COUNT> words = *reinterpret_cast<const Words<COUNT> *>(from);
    std::memcpy(to, &words, sizeof words);
}
template <int COUNT> void write_words(uint64_t to, const uint32_t (&from)[COUNT]) {
    Words<COUNT> words;
    std::memcpy(&words, from, sizeof words);
    *reinterpret_cast<Words<COUNT> *>(to) = words;
}
#endif

// How many bytes of COUNT units are read or written at once.
template <class Unit, int COUNT> constexpr int AT_ONCE = static_cast<int>(sizeof(Unit)) * COUNT < VECTOR_NBYTES
                                                             ? static_cast<int>(sizeof(Unit)) * COUNT
                                                             : VECTOR_NBYTES;

// The pointer to an address in the memory of a device: read by ld.global rather than ld.
template <class T> DEVICE T *global(uint64_t address) {
#if defined(__CUDACC__)
    return static_cast<T *>(const_cast<void *>(static_cast<const void *>(__cvta_global_to_generic(address))));
#else
    return reinterpret_cast<T *>(address);
#endif
}

DEVICE void copy_bytes(void *to, const void *from, int count) {
#if defined(__CUDACC__)
    memcpy(to, from, count);
#else
    std::memcpy(to, from, static_cast<size_t>(count));
#endif
}

// Read or write COUNT units, whose address is a multiple of VECTOR_NBYTES or of their size.
template <class Unit, int COUNT> DEVICE void read_vector(uint64_t from, Unit (&to)[COUNT]) {
    constexpr int NBYTES = AT_ONCE<Unit, COUNT>, TIMES = static_cast<int>(sizeof to) / NBYTES;
    uint32_t words[TIMES][NBYTES / 4];
    UNROLL
    for (int k = 0; k < TIMES; k++) read_words(from + static_cast<uint64_t>(k * NBYTES), words[k]);
    copy_bytes(to, words, sizeof to);
}
template <class Unit, int COUNT> DEVICE void write_vector(uint64_t to, const Unit (&from)[COUNT]) {
    constexpr int NBYTES = AT_ONCE<Unit, COUNT>, TIMES = static_cast<int>(sizeof from) / NBYTES;
    uint32_t words[TIMES][NBYTES / 4];
    copy_bytes(words, from, sizeof from);
    UNROLL
    for (int k = 0; k < TIMES; k++) write_words(to + static_cast<uint64_t>(k * NBYTES), words[k]);
}

// ---- the computation of COUNT consecutive units

// MIXED: sources may have the accumulator's dtype, and results another one (see Order::wide and ResultKind).
template <class Source, class Result, class Op, class Launch, bool MIXED = false> struct Kernel {
    using Unit = typename Source::Unit;
    using Value = typename Source::Value;
    using Out = typename Result::Unit;
    // The units of a thread: a vector of each source, or so many that the values of three need no more than 64 registers
    // together with all else. Of complex numbers a vector has whole numbers.
    static constexpr int VECTOR = VECTOR_NBYTES / static_cast<int>(sizeof(Unit));
    static constexpr int MOST = 32 / static_cast<int>(sizeof(Value)) < 8 ? 32 / static_cast<int>(sizeof(Value)) : 8;
    static constexpr int COUNT = VECTOR < MOST ? VECTOR : MOST;
    static constexpr bool IS_FLOAT = static_cast<Value>(0.5) != 0;
    static constexpr int64_t TILE = static_cast<int64_t>(COUNT) * THREADS;

    template <int N> static DEVICE void widen(const Unit (&from)[N], Value (&to)[N]) {
    UNROLL
        for (int k = 0; k < N; k++) to[k] = Source::read(from[k]);
    }
    template <class T, int N> static DEVICE void copy(T (&to)[N], const T (&from)[N]) {
    UNROLL
        for (int k = 0; k < N; k++) to[k] = from[k];
    }

    template <int N> struct Stack { // top, and the values under it
        Value top[N], second[N], third[N];

        DEVICE void fold() {
            Op::combine(second, top);
            copy(top, second);
            copy(second, third);
        }
        DEVICE void take(const Value (&x)[N], bool first, int stack, uint64_t bit, const Order &order) {
            if (first) return copy(top, x);
            if (stack == 1) return Op::combine(top, x);
            if (order.push & bit) {
                copy(third, second);
                copy(second, top);
                copy(top, x);
            } else {
                Op::combine(top, x);
            }
            if (order.fold & bit) fold();
            if (order.fold_twice & bit) fold();
        }
    };

    template <class Unit, int N>
    static DEVICE void write_units(const Launch &launch, const uint64_t *results, int64_t unit, const Unit (&out)[N], bool whole) {
    ROLLED
        for (int r = 0; r < launch.results; r++) {
            const uint64_t at = results[r] + static_cast<uint64_t>(unit) * sizeof(Unit);
            if (whole) {
                if constexpr (N == COUNT) write_vector(at, out);
            } else {
    UNROLL
                for (int k = 0; k < N; k++) global<Unit>(at)[k] = out[k];
            }
        }
    }

    // Write the value of N units to the results.
    template <int N>
    static DEVICE void write(const Launch &launch, const uint64_t *results, int64_t unit, Value (&value)[N], bool whole) {
        if constexpr (IS_FLOAT)
            if (launch.divisor != 1) {
                const Value divisor = static_cast<Value>(launch.divisor);
    UNROLL
                for (int k = 0; k < N; k++) value[k] = value[k] / divisor;
            }
        if constexpr (MIXED) {
            if (launch.kind == ACCUMULATOR || (sizeof(Value) == 8 && launch.kind == OWN))
                return write_units(launch, results, unit, value, whole);
            if constexpr (sizeof(Value) == 8) { // a mean of integers
                if (launch.kind == FLOAT) {
                    float out[N];
    UNROLL
                    for (int k = 0; k < N; k++) out[k] = static_cast<float>(value[k]);
                    return write_units(launch, results, unit, out, whole);
                }
                uint16_t out[N];
    UNROLL
                for (int k = 0; k < N; k++)
                    out[k] = launch.kind == HALF ? narrow_double<Float16>(value[k]) : narrow_double<BFloat16>(value[k]);
                return write_units(launch, results, unit, out, whole);
            }
        }
        if constexpr (!MIXED || sizeof(Value) < 8) {
            Out out[N];
    UNROLL
            for (int k = 0; k < N; k++) out[k] = Result::write(value[k]);
            write_units(launch, results, unit, out, whole);
        }
    }

    // Read the values of COUNT units, whose address is aligned as read_vector requires.
    static DEVICE void read_values(const Launch &launch, const Part &part, uint64_t at, int64_t unit, int s, Value (&x)[COUNT]) {
        if constexpr (MIXED)
            if (launch.order(part.order).wide >> (s % MAX_STEPS) & 1)
                return read_vector(at + static_cast<uint64_t>(unit) * sizeof(Value), x);
        Unit units[COUNT];
        read_vector(at + static_cast<uint64_t>(unit) * sizeof(Unit), units);
        widen(units, x);
    }

    // Process the units from `unit` on: a whole vector.
    template <int SOURCES>
    static DEVICE void run_vector(const Launch &launch, const Part &part, const uint64_t *at, int64_t unit) {
        const int sources = SOURCES ? SOURCES : launch.sources;
        Stack<COUNT> stack{};
        Value x[COUNT];
        if constexpr (SOURCES > 0) {
            const uint64_t offset = static_cast<uint64_t>(unit) * sizeof(Unit);
            Unit units[SOURCES ? SOURCES : 1][COUNT];
    UNROLL
            for (int s = 0; s < SOURCES; s++) read_vector(at[s] + offset, units[s]);
    UNROLL
            for (int s = 0; s < SOURCES; s++) {
                widen(units[s], x);
                stack.take(x, s == 0, launch.stack, uint64_t{1} << s, launch.order(part.order));
            }
        } else if constexpr (!MIXED) { // a source is read before the preceding one is combined
            const uint64_t offset = static_cast<uint64_t>(unit) * sizeof(Unit);
            Unit units[COUNT], next[COUNT];
            read_vector(at[0] + offset, next);
            for (int s = 0; s < sources; s++) {
                copy(units, next);
                if (s + 1 < sources) read_vector(at[s + 1] + offset, next);
                widen(units, x);
                stack.take(x, s == 0, launch.stack, uint64_t{1} << (s % MAX_STEPS), launch.order(part.order));
            }
        } else {
            for (int s = 0; s < sources; s++) {
                read_values(launch, part, at[s], unit, s, x);
                stack.take(x, s == 0, launch.stack, uint64_t{1} << (s % MAX_STEPS), launch.order(part.order));
            }
        }
        write(launch, at + sources, unit, stack.top, true);
    }

    // Process STEP units, one number, of any alignment.
    template <int STEP> static DEVICE void run_number(const Launch &launch, const Part &part, const uint64_t *at, int64_t unit) {
        Stack<STEP> stack{};
    UNROLL_4
        for (int s = 0; s < launch.sources; s++) {
            Value x[STEP];
            if (MIXED && (launch.order(part.order).wide >> (s % MAX_STEPS) & 1)) {
    UNROLL
                for (int k = 0; k < STEP; k++) x[k] = global<const Value>(at[s])[unit + k];
            } else {
    UNROLL
                for (int k = 0; k < STEP; k++) x[k] = Source::read(global<const Unit>(at[s])[unit + k]);
            }
            stack.take(x, s == 0, launch.stack, uint64_t{1} << (s % MAX_STEPS), launch.order(part.order));
        }
        write(launch, at + launch.sources, unit, stack.top, false);
    }

    // The part of a tile: the last one that begins at it or before.
    static DEVICE int part_of(const Launch &launch, uint32_t tile) {
        int low = 0, high = static_cast<int>(launch.parts) - 1;
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (launch.part(middle).tile <= tile) low = middle;
            else high = middle - 1;
        }
        return low;
    }

    // One thread of a launch. STEP: the units of a number, 2 for products of complex numbers.
    template <int SOURCES, int STEP>
    static DEVICE void run(const Launch &launch, uint32_t block, uint32_t blocks, uint32_t thread) {
        for (uint32_t tile = block; tile < launch.tiles; tile += blocks) {
            const int number = part_of(launch, tile);
            const Part &part = launch.part(number);
            const uint64_t *at = launch.addresses(number);
            const int64_t first = (tile - part.tile) * TILE, start = first + static_cast<int64_t>(thread) * COUNT;
            const int64_t unit = part.head + start;
            const bool whole = part.is_aligned && unit + COUNT <= part.size;
            if (whole) run_vector<SOURCES>(launch, part, at, unit);
            // Single numbers, at `from`, `from + step`, ...
    ROLLED
            for (int range = 0; range < 2; range++) {
                int64_t from, end, step = STEP;
                if (!part.is_aligned) { // neighbouring threads process neighbouring numbers
                    from = first + static_cast<int64_t>(thread) * STEP;
                    end = range ? from : first + TILE;
                    step = static_cast<int64_t>(THREADS) * STEP;
                } else if (range) { // the threads of the first tile, from the first one on, process the head, too
                    from = start;
                    end = start + COUNT < part.head ? start + COUNT : part.head;
                } else {
                    from = unit;
                    end = whole ? unit : unit + COUNT;
                }
    ROLLED
                for (int64_t k = from; k < end && k < part.size; k += step) run_number<STEP>(launch, part, at, k);
            }
        }
    }
};

} // namespace cuda_reduce
