// The kernels of the CUDA engine: combine n sources elementwise, in a fixed order, and write m results, in one pass.
//
// NVRTC compiles this file for devices (scripts/build_cuda_kernels), and a C++ compiler for the host, where a loop over
// the threads runs the same body (tests/native/cuda_host.cpp): a thread depends on no other, and there is no shared
// memory. Its results have the bits of `kernels/native/isa.inc`, except that NaNs may differ in their payload.
//
// A launch processes a batch: parts of tensors, each with its own pointers. A part is cut into tiles; block b processes
// the turns b, b + grid, ... of them. Each thread has one vector of VECTOR_NBYTES of each source of a tile. The sources of
// a part are listed in the order in which they are combined.
#pragma once

#include "numbers.cuh"

namespace cuda_reduce {

#include "layout.inc"

constexpr int THREADS = 256; // of a block

// How the values of a part are combined: source k is combined into the uppermost value of a stack of at most three, or,
// if bit k of `push` is set, becomes the uppermost value itself; then, if bit k of `fold` is set, the two uppermost values
// are combined (if bit k of `fold_twice` is set, twice). All zeros: in the order of the sources. If bit k of `wide` is set,
// source k has the accumulator's dtype; only kernels named `_mixed` read this.
struct Order {
    uint64_t push, fold, fold_twice, wide;
};

struct Part { // elements of one tensor, which all have the same order
    int64_t size;       // in units (elements, or real and imaginary parts)
    uint32_t tile;      // the number of its first tile in the launch
    uint16_t order;     // its number
    uint8_t head;       // how many units precede the first vector
    uint8_t is_aligned; // whether all vectors of all sources and results are aligned
    // The addresses of the sources and results follow in the table.
};

template <int NBYTES> struct LaunchOf { // the parameters of a kernel, by value
    double divisor;             // 1: no division. Integers are not divided: the values of their means are doubles
    uint32_t parts, tiles;      // their numbers
    uint16_t sources, results;  // of each part
    uint16_t orders;            // their number
    uint16_t stack;             // the most values of a stack in these orders; 1: all are in the order of the sources
    uint16_t kind;              // OWN, ACCUMULATOR, FLOAT, HALF or BFLOAT
    uint16_t streams;           // so many streams of `length` tiles (an even number) are processed in turn; the tiles
    uint32_t length;            // from `tiles` on do not exist
    // The orders; the parts; for each part the addresses of its sources, then of its results.
    alignas(8) unsigned char table[NBYTES - HEADER_NBYTES];

    DEVICE const Order &order(int k) const { return reinterpret_cast<const Order *>(table)[k]; }
    DEVICE const Part &part(int k) const {
        return reinterpret_cast<const Part *>(table + orders * sizeof(Order))[k];
    }
    DEVICE const uint64_t *addresses(int k) const {
        const unsigned char *at = table + orders * sizeof(Order) + parts * sizeof(Part);
        return reinterpret_cast<const uint64_t *>(at) + static_cast<int64_t>(k) * (sources + results);
    }
    // The first of the `together` tiles of a turn.
    DEVICE uint32_t tile(uint32_t turn, uint32_t together) const {
        return streams > 1 ? turn % streams * length + turn / streams * together : turn * together;
    }
};
using SmallLaunch = LaunchOf<SMALL_NBYTES>;
using LargeLaunch = LaunchOf<LARGE_NBYTES>;
static_assert(sizeof(Order) == ORDER_NBYTES && sizeof(Part) == PART_NBYTES, "kernels.py has other sizes");
static_assert(sizeof(SmallLaunch) == SMALL_NBYTES && sizeof(LargeLaunch) == LARGE_NBYTES, "kernels.py has other sizes");

// How many tiles at equal distances are processed in turn, so that at any time all parts are. Otherwise, where parts are in
// the memory of different devices, all devices would read from the first one of these first, and then from the second.
constexpr uint16_t streams_of(uint32_t devices, uint32_t parts) {
    return static_cast<uint16_t>(devices > 1 && parts > 1 ? 2 * (devices - 1) : 1);
}

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
    HAS_READ(sizeof to);
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

// Complete the read of COUNT units at an address, a multiple of a unit. `units` are those from the last aligned address
// before it on. The words that are missing are read, too: the next thread has read them, so they are in a cache.
template <class Unit, int COUNT> DEVICE void shift_vector(uint64_t from, Unit (&units)[COUNT]) {
    constexpr int NBYTES = AT_ONCE<Unit, COUNT>, NEEDED = static_cast<int>(sizeof units) / 4, WORDS = NEEDED + NBYTES / 4;
    const uint32_t shift = static_cast<uint32_t>(from % NBYTES);
    uint32_t last[NBYTES / 4] = {}, words[WORDS];
    if (shift) read_words(from - shift + sizeof units, last);
    copy_bytes(words, units, sizeof units);
    copy_bytes(words + NEEDED, last, sizeof last);
    if (NBYTES >= 16 && shift & 8) {
    UNROLL
        for (int k = 0; k + 2 < WORDS; k++) words[k] = words[k + 2];
    }
    if (NBYTES >= 8 && sizeof(Unit) < 8 && shift & 4) {
    UNROLL
        for (int k = 0; k + 1 < WORDS; k++) words[k] = words[k + 1];
    }
    if (sizeof(Unit) < 4) {
    UNROLL
        for (int k = 0; k < NEEDED; k++) words[k] = shifted_word(words[k], words[k + 1], shift % 4 * 8);
    }
    copy_bytes(units, words, sizeof units);
}

// ---- the computation of COUNT consecutive units

// MIXED: sources may have the accumulator's dtype, and results another one (see Order::wide and LaunchOf::kind).
template <class Source, class Result, class Op, class Launch, bool MIXED = false> struct Kernel {
    using Unit = typename Source::Unit;
    using Value = typename Source::Value;
    using Wide = typename Source::Wide; // the accumulator's dtype in memory
    using Out = typename Result::Unit;
    // Sums of integers are the same in any order, and so is what two sources give. These need no stack.
    static constexpr bool needs_stack(int sources) {
        return sources != 2 && !(is_add<Op> && static_cast<Value>(0.5) == 0);
    }
    // Whether `run_aligned` has no stack: there are too few registers for that of half types besides so many sources.
    static constexpr bool is_large(int sources) { return sizeof(Unit) == 2 && sources >= 7; }
    // The units of a thread: a vector of each source, or so many that the values of three need no more than 64 registers
    // together with all else. Of complex numbers a vector has whole numbers.
    static constexpr int VECTOR = VECTOR_NBYTES / static_cast<int>(sizeof(Unit));
    static constexpr int MOST = 32 / static_cast<int>(sizeof(Value)) < 8 ? 32 / static_cast<int>(sizeof(Value)) : 8;
    static constexpr int COUNT = VECTOR < MOST ? VECTOR : MOST;
    static constexpr bool IS_FLOAT = static_cast<Wide>(0.5) != 0;
    static constexpr int64_t TILE = static_cast<int64_t>(COUNT) * THREADS;

    template <int N> static DEVICE void widen(const Unit (&from)[N], Value (&to)[N]) {
    UNROLL
        for (int k = 0; k < N; k++) to[k] = Source::read(from[k]);
    }
    template <class T, int N> static DEVICE void copy(T (&to)[N], const T (&from)[N]) {
    UNROLL
        for (int k = 0; k < N; k++) to[k] = from[k];
    }

    // The top, and the values under it. IN_ORDER: there are none.
    template <int N, bool IN_ORDER> struct Stack {
        static_assert(MAX_DEPTH == 3, "the values of a stack");
        Value top[N], second[N], third[N];

        DEVICE void fold() {
            Op::combine(second, top);
            copy(top, second);
            copy(second, third);
        }
        DEVICE void take(const Value (&x)[N], bool first, int stack, uint64_t bit, const Order &order) {
            if (first) return copy(top, x);
            if (IN_ORDER || stack == 1) return Op::combine(top, x);
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

    // Write units to the results. ALIGNED: as a vector; otherwise a vector only where a result is aligned.
    template <bool ALIGNED, class Unit, int N>
    static DEVICE void write_units(const Launch &launch, const uint64_t *results, int64_t unit, const Unit (&out)[N]) {
    ROLLED
        for (int r = 0; r < launch.results; r++) {
            const uint64_t at = results[r] + static_cast<uint64_t>(unit) * sizeof(Unit);
            if constexpr (N == COUNT)
                if (ALIGNED || at % AT_ONCE<Unit, COUNT> == 0) {
                    write_vector(at, out);
                    continue;
                }
            if constexpr (!ALIGNED) {
    UNROLL
                for (int k = 0; k < N; k++) global<Unit>(at)[k] = out[k];
            }
        }
    }

    // Write the value of N units to the results.
    template <bool ALIGNED, int N>
    static DEVICE void write(const Launch &launch, const uint64_t *results, int64_t unit, const Value (&from)[N]) {
        Wide value[N];
    UNROLL
        for (int k = 0; k < N; k++) value[k] = static_cast<Wide>(from[k]);
        if constexpr (IS_FLOAT)
            if (launch.divisor != 1) {
                const Wide divisor = static_cast<Wide>(launch.divisor);
    UNROLL
                for (int k = 0; k < N; k++) value[k] = value[k] / divisor;
            }
        if constexpr (MIXED) {
            if (launch.kind == ACCUMULATOR || (sizeof(Wide) == 8 && launch.kind == OWN))
                return write_units<ALIGNED>(launch, results, unit, value);
            if constexpr (sizeof(Wide) == 8) { // a mean of integers
                if (launch.kind == FLOAT) {
                    float out[N];
    UNROLL
                    for (int k = 0; k < N; k++) out[k] = static_cast<float>(value[k]);
                    return write_units<ALIGNED>(launch, results, unit, out);
                }
                uint16_t out[N];
    UNROLL
                for (int k = 0; k < N; k++)
                    out[k] = launch.kind == HALF ? narrow_double<Float16>(value[k]) : narrow_double<BFloat16>(value[k]);
                return write_units<ALIGNED>(launch, results, unit, out);
            }
        }
        if constexpr (!MIXED || sizeof(Wide) < 8) {
            Out out[N];
    UNROLL
            for (int k = 0; k < N; k++) out[k] = Result::write(value[k]);
            write_units<ALIGNED>(launch, results, unit, out);
        }
    }

    template <class T> static DEVICE uint64_t aligned(uint64_t address) { return address - address % AT_ONCE<T, COUNT>; }
    static DEVICE bool is_wide(const Launch &launch, const Part &part, int s) {
        return MIXED && (launch.order(part.order).wide >> (s % MAX_STEPS) & 1);
    }
    template <int N, bool IN_ORDER>
    static DEVICE void take(Stack<N, IN_ORDER> &stack, const Value (&x)[N], const Launch &launch, const Part &part, int s) {
        stack.take(x, s == 0, launch.stack, uint64_t{1} << (s % MAX_STEPS), launch.order(part.order));
    }

    // Process the aligned vector at the unit `unit` of each source, or VECTORS of them, each a tile after the one before.
    template <int SOURCES, int VECTORS>
    static DEVICE void run_aligned(const Launch &launch, const Part &part, const uint64_t *at, int64_t unit) {
        const uint64_t offset = static_cast<uint64_t>(unit) * sizeof(Unit);
        Value x[COUNT];
        Unit units[VECTORS][SOURCES][COUNT];
    UNROLL
        for (int v = 0; v < VECTORS; v++) {
    UNROLL
            for (int s = 0; s < SOURCES; s++) read_vector(at[s] + offset + v * TILE * sizeof(Unit), units[v][s]);
        }
    UNROLL
        for (int v = 0; v < VECTORS; v++) {
            Stack<COUNT, !needs_stack(SOURCES) || is_large(SOURCES)> stack{};
    UNROLL
            for (int s = 0; s < SOURCES; s++) {
                widen(units[v][s], x);
                take(stack, x, launch, part, s);
            }
            write<true>(launch, at + SOURCES, unit + v * TILE, stack.top);
        }
    }

    // Process the vector at the unit `unit` of each source, of any number of sources and any alignment.
    template <int SOURCES>
    static DEVICE void run_vector(const Launch &launch, const Part &part, const uint64_t *at, int64_t unit) {
        const uint64_t offset = static_cast<uint64_t>(unit) * sizeof(Unit);
        Stack<COUNT, !needs_stack(SOURCES)> stack{};
        Unit units[COUNT], next[COUNT];
        Value x[COUNT];
        if constexpr (!MIXED) read_vector(aligned<Unit>(at[0] + offset), next);
    ROLLED
        for (int s = 0; s < launch.sources; s++) {
            if (is_wide(launch, part, s)) {
                const uint64_t from = at[s] + static_cast<uint64_t>(unit) * sizeof(Wide);
                Wide wide[COUNT];
                if (from == aligned<Wide>(from)) {
                    read_vector(from, wide);
                } else {
    UNROLL
                    for (int k = 0; k < COUNT; k++) wide[k] = global<const Wide>(from)[k];
                }
    UNROLL
                for (int k = 0; k < COUNT; k++) x[k] = static_cast<Value>(wide[k]);
            } else {
                if constexpr (MIXED) {
                    read_vector(aligned<Unit>(at[s] + offset), units);
                } else { // a source is read before the preceding one is combined
                    copy(units, next);
                    if (s + 1 < launch.sources) read_vector(aligned<Unit>(at[s + 1] + offset), next);
                }
                shift_vector(at[s] + offset, units);
                widen(units, x);
            }
            take(stack, x, launch, part, s);
        }
        write<false>(launch, at + launch.sources, unit, stack.top);
    }

    // Process STEP units, one number, of any alignment.
    template <int SOURCES, int STEP>
    static DEVICE void run_number(const Launch &launch, const Part &part, const uint64_t *at, int64_t unit) {
        Stack<STEP, !needs_stack(SOURCES)> stack{};
    UNROLL_4
        for (int s = 0; s < launch.sources; s++) {
            Value x[STEP];
            if (is_wide(launch, part, s)) {
    UNROLL
                for (int k = 0; k < STEP; k++) x[k] = static_cast<Value>(global<const Wide>(at[s])[unit + k]);
                HAS_READ(sizeof(Wide));
            } else {
    UNROLL
                for (int k = 0; k < STEP; k++) x[k] = Source::read(global<const Unit>(at[s])[unit + k]);
                HAS_READ(sizeof(Unit));
            }
            take(stack, x, launch, part, s);
        }
        write<false>(launch, at + launch.sources, unit, stack.top);
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

    // The vectors of a part end before this unit. The aligned words around a vector that is not aligned are in its source.
    static DEVICE int64_t end_of(const Part &part) {
        const int64_t units = part.size - part.head - (part.is_aligned ? 0 : COUNT);
        return part.head + (units > 0 ? units / COUNT * COUNT : 0);
    }

    // Process the units of a part before its first vector and after its last one.
    template <int SOURCES, int STEP> static DEVICE void run_edges(const Launch &launch, int number, uint32_t thread) {
        const Part &part = launch.part(number);
        const int64_t k = static_cast<int64_t>(thread) * STEP, unit = k < part.head ? k : end_of(part) + k - part.head;
        if (unit < part.size) run_number<SOURCES, STEP>(launch, part, launch.addresses(number), unit);
    }

    // One thread of a launch. STEP: the units of a number, 2 for products of complex numbers. A thread of one or two sources
    // reads two vectors of each at once, so that enough memory is on its way. (Those of float64 need too many registers.)
    template <int SOURCES, int STEP>
    static DEVICE void run(const Launch &launch, uint32_t block, uint32_t blocks, uint32_t thread) {
        constexpr uint32_t TOGETHER = (SOURCES == 1 || SOURCES == 2) && sizeof(Value) < 8 ? 2 : 1;
        for (uint32_t turn = block; turn < launch.length / TOGETHER * launch.streams; turn += blocks) {
            const uint32_t first_tile = launch.tile(turn, TOGETHER), end_tile = first_tile + TOGETHER;
    ROLLED
            for (uint32_t tile = first_tile; tile < end_tile && tile < launch.tiles; tile++) {
                const int number = part_of(launch, tile);
                const Part &part = launch.part(number);
                const uint64_t *at = launch.addresses(number);
                const int64_t first = (tile - part.tile) * TILE;
                const int64_t unit = part.head + first + static_cast<int64_t>(thread) * COUNT;
                if (unit < end_of(part)) {
                    if (SOURCES == 0 || !part.is_aligned || (is_large(SOURCES) && launch.stack > 1)) {
                        run_vector<SOURCES>(launch, part, at, unit);
                    } else if constexpr (SOURCES > 0) {
                        if (TOGETHER == 2 && tile + 1 < end_tile && unit + TILE < end_of(part)) { // all of this part
                            run_aligned<SOURCES, TOGETHER>(launch, part, at, unit);
                            tile++;
                        } else {
                            run_aligned<SOURCES, 1>(launch, part, at, unit);
                        }
                    }
                }
                if (first == 0) run_edges<SOURCES, STEP>(launch, part_of(launch, tile), thread);
            }
        }
    }
};

} // namespace cuda_reduce
