// Compare kernels with scalar C++, one element at a time, on random programs and random bytes. It runs without Python,
// for example under an emulator, or under a sanitizer that detects leaks.
//
//   kernel_cases [count] [seed] [callers]
//
// Compile it together with kernel.cpp, thread_pool.cpp and isa_*.cpp, with -ffp-contract=off.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <thread>

#include "kernel.hpp"

namespace {

// Scalar arithmetic, written for clarity

struct Bool {
    bool value;
};
struct Half {
    uint16_t bits;
};
struct BFloat16 {
    uint16_t bits;
};
template <class T> struct Complex {
    T re, im;
};

double widened(uint16_t bits, int mantissa, int least) {
    const int rest = bits & 0x7fff, exponent = rest >> mantissa, fraction = rest & ((1 << mantissa) - 1);
    const double size = exponent == 0 ? std::ldexp(fraction, least - mantissa)
                                      : std::ldexp(fraction + (1 << mantissa), exponent - 1 + least - mantissa);
    return bits & 0x8000 ? -size : size;
}
uint16_t narrowed(double x, int mantissa, int least) {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    const double size = std::fabs(x);
    const int infinite = 0x7fff >> mantissa << mantissa;
    if (std::isinf(x)) return static_cast<uint16_t>(sign | infinite);
    if (size == 0) return sign;
    int exponent = std::max(std::ilogb(size), least);
    double steps = std::nearbyint(std::ldexp(size, mantissa - exponent)); // ties to even; the scaling is exact
    if (steps == std::ldexp(1, mantissa + 1)) steps /= 2, exponent++;
    const int bits = steps < std::ldexp(1, mantissa) ? static_cast<int>(steps)
                                                     : ((exponent - least) << mantissa) + static_cast<int>(steps);
    return static_cast<uint16_t>(sign | std::min(bits, infinite));
}
template <class To, class From> To to(From x) { return static_cast<To>(x); }
template <> float to(Half x) {
    uint32_t bits = static_cast<uint32_t>(x.bits & 0x8000) << 16 | 0x7fc00000u;
    bits |= static_cast<uint32_t>(x.bits & 0x1ff) << 13;
    float quiet;
    std::memcpy(&quiet, &bits, 4);
    if ((x.bits & 0x7fff) > 0x7c00) return quiet;
    if ((x.bits & 0x7fff) == 0x7c00) return x.bits & 0x8000 ? -INFINITY : INFINITY;
    return static_cast<float>(widened(x.bits, 10, -14));
}
template <> float to(BFloat16 x) {
    uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}
template <> Half to(double x) {
    if (x != x) return {static_cast<uint16_t>(std::signbit(x) ? 0xfe00 : 0x7e00)};
    return {narrowed(x, 10, -14)};
}
template <> Half to(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return {static_cast<uint16_t>((bits >> 16 & 0x8000) | 0x7e00 | (bits >> 13 & 0x1ff))};
    return {narrowed(x, 10, -14)};
}
template <> BFloat16 to(double x) {
    if (x != x) return {static_cast<uint16_t>(std::signbit(x) ? 0xffc0 : 0x7fc0)};
    return {narrowed(x, 7, -126)};
}
template <> BFloat16 to(float x) { return to<BFloat16>(static_cast<double>(x)); }

template <class T> T combine(Op op, T a, T b) {
    if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>) {
        const float x = to<float>(a), y = to<float>(b);
        return (op == MIN ? x <= y : x >= y) || x != x ? a : b;
    } else if constexpr (std::is_same_v<T, Bool>) {
        return {op == MAX ? a.value || b.value : a.value && b.value};
    } else if constexpr (std::is_integral_v<T>) {
        const uint64_t x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
        if (op == SUM) return static_cast<T>(x + y);
        if (op == PRODUCT) return static_cast<T>(x * y);
        return (op == MIN ? a <= b : a >= b) ? a : b;
    } else {
        if (op == SUM) return a + b;
        if (op == PRODUCT) return a * b;
        return (op == MIN ? a <= b : a >= b) || a != a ? a : b;
    }
}
template <class T> Complex<T> combine(Op op, Complex<T> a, Complex<T> b) {
    if (op == SUM) return {a.re + b.re, a.im + b.im};
    const T p = a.re * b.re, q = a.im * b.im, r = a.im * b.re, s = a.re * b.im;
    return {p - q, r + s};
}
template <class T> T divide(T x, double by) {
    if constexpr (std::is_floating_point_v<T>) return by == 1 ? x : x / static_cast<T>(by);
    else return x;
}
template <class T> Complex<T> divide(Complex<T> x, double by) { return {divide(x.re, by), divide(x.im, by)}; }

// Whether two results are equal: the same bits, or both NaN. NaNs with different payloads are counted.
template <class T> bool is_nan(T x) {
    if constexpr (std::is_floating_point_v<T>) return x != x;
    else if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>) return std::isnan(to<float>(x));
    else return false;
}
template <class T> bool equal(T a, T b, long &payloads) {
    if (std::memcmp(&a, &b, sizeof a) == 0) return true;
    if (!is_nan(a) || !is_nan(b)) return false;
    payloads++;
    return true;
}
template <class T> bool equal(Complex<T> a, Complex<T> b, long &payloads) {
    return equal(a.re, b.re, payloads) && equal(a.im, b.im, payloads);
}

// Random cases

using Random = std::mt19937_64;
int64_t below(Random &random, int64_t most) { return static_cast<int64_t>(random() % static_cast<uint64_t>(most)); }

struct Block { // allocated with its exact size, so that a sanitizer reports an access to the byte after it
    std::unique_ptr<char[]> memory;
    size_t offset, size;
    char *at() const { return memory.get() + offset; }
};
Block random_block(Random &random, size_t size) {
    const size_t offset = static_cast<size_t>(below(random, 65));
    Block made{std::unique_ptr<char[]>(new char[offset + size]), offset, size};
    std::memset(made.memory.get(), 0x5a, offset + size);
    return made;
}

template <class T> T special(Random &random);
template <class T> void fill(Random &random, char *to, int64_t count) {
    const bool specials = random() & 1;
    for (int64_t i = 0; i < count; i++) {
        const uint64_t bits[2] = {random(), random()};
        T x;
        if constexpr (std::is_same_v<T, Bool>) x = {(bits[0] & 1) == 1};
        else std::memcpy(&x, bits, sizeof x);
        if (specials) x = special<T>(random);
        std::memcpy(to + static_cast<size_t>(i) * sizeof x, &x, sizeof x);
    }
}
template <class T> T special(Random &random) {
    if constexpr (std::is_floating_point_v<T>) {
        const T few[] = {0, -T(0), 1, -1, T(1) / 3, T(INFINITY), -T(INFINITY), T(NAN), std::numeric_limits<T>::max(),
                         std::numeric_limits<T>::min(), std::numeric_limits<T>::denorm_min(), T(65519.99), T(1e-7)};
        return few[below(random, sizeof few / sizeof *few)];
    } else if constexpr (std::is_integral_v<T>) {
        const T few[] = {0, 1, static_cast<T>(-1), std::numeric_limits<T>::max(), std::numeric_limits<T>::min(), 3};
        return few[below(random, sizeof few / sizeof *few)];
    } else if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>) {
        const uint16_t few[] = {0,      0x8000, 1,      0x8001, 0x3ff,  0x400,  0x3c00,
                                0x3f80, 0x7bff, 0x7c00, 0xfc00, 0x7e01, 0x7f80, 0xff80};
        return {few[below(random, sizeof few / sizeof *few)]};
    } else if constexpr (std::is_same_v<T, Bool>) {
        return {(random() & 1) == 1};
    } else {
        return {special<decltype(T::re)>(random), special<decltype(T::re)>(random)};
    }
}

FusedProgram random_program(Random &random, int sources, int results) {
    FusedProgram made{static_cast<int>(below(random, 4)), {}, {}};
    std::vector<int> known;
    for (int s = 0; s < sources; s++) known.push_back(s);
    auto any = [&] { return known[static_cast<size_t>(below(random, static_cast<int64_t>(known.size())))]; };
    for (int64_t f = made.slots > 0 ? below(random, 5) : 0; f > 0; f--) {
        Fold fold{static_cast<int>(below(random, made.slots)), {any()}};
        for (int64_t k = below(random, random() & 1 ? 4 : 25); k > 0; k--) {
            const int operand = any();
            if (operand != ~fold.slot) fold.operands.push_back(operand);
        }
        if (std::count(known.begin(), known.end(), ~fold.slot) == 0) known.push_back(~fold.slot);
        made.folds.push_back(fold);
    }
    for (int r = 0; r < results; r++) made.results.push_back(any());
    return made;
}

// Compute one element of a result.
template <class From, class Acc, class To>
To element(const FusedProgram &program, const Kernel &kernel, bool copies, const std::vector<From> &column,
           int result) {
    const int wanted = program.results[static_cast<size_t>(result)];
    if constexpr (std::is_same_v<From, To>)
        if (copies) return column[static_cast<size_t>(wanted)];
    std::vector<Acc> slots(static_cast<size_t>(program.slots));
    auto read = [&](int operand) {
        return operand < 0 ? slots[static_cast<size_t>(~operand)] : to<Acc>(column[static_cast<size_t>(operand)]);
    };
    for (const Fold &fold : program.folds) {
        Acc value = read(fold.operands[0]);
        for (size_t k = 1; k < fold.operands.size(); k++) value = combine(kernel.op, value, read(fold.operands[k]));
        slots[static_cast<size_t>(fold.slot)] = value;
    }
    return to<To>(divide(read(wanted), kernel.divisor));
}

bool failed(const char *isa, const Kernel &kernel, const char *what, int64_t at) {
    std::fprintf(stderr, "%s: op %d, dtypes %d %d %d, divisor %g, %d sources: %s at %lld\n", isa, kernel.op,
                 kernel.dtype, kernel.accumulator, kernel.result, kernel.divisor, kernel.sources, what,
                 static_cast<long long>(at));
    return false;
}

template <class From, class Acc, class To>
bool one_case(Random &random, const InstructionSet *isa, Kernel kernel, long &payloads) {
    kernel.sources = 1 + static_cast<int>(below(random, random() & 1 ? 4 : 24));
    kernel.results = 1 + static_cast<int>(below(random, 3));
    kernel.isa = isa;
    if (kernel.divisor != 1) kernel.divisor = 1 + static_cast<double>(below(random, 24));
    for (int64_t k = 1 + below(random, 2); k > 0; k--)
        kernel.programs.push_back(random_program(random, kernel.sources, kernel.results));
    for (int64_t t = 1 + below(random, 2); t > 0; t--) {
        const int64_t size = below(random, random() % 8 ? 300 : 30000), stop = below(random, size + 1);
        const auto tensor = static_cast<int64_t>(kernel.sizes.size());
        kernel.sizes.push_back(size);
        const auto programs = static_cast<int64_t>(kernel.programs.size());
        kernel.segments.push_back({tensor, below(random, stop + 1), stop, static_cast<int>(below(random, programs))});
        kernel.segments.push_back({tensor, stop, size, static_cast<int>(below(random, programs))});
    }
    const Kernel original = kernel;
    bool copies = kernel.divisor == 1 && kernel.dtype == kernel.result;
    for (const FusedProgram &one : kernel.programs) copies = copies && one.folds.empty();
    if (const char *fault = validate(kernel)) return failed(isa->name, original, fault, -1);

    std::vector<Block> memory;
    std::vector<std::vector<From>> plain; // each source in C order
    std::vector<std::unique_ptr<Strided>> shapes;
    std::vector<Source> sources;
    std::vector<char *> results;
    std::vector<Block> outs;
    for (const int64_t size : kernel.sizes) {
        for (int s = 0; s < kernel.sources; s++) {
            const size_t nbytes = static_cast<size_t>(size) * sizeof(From);
            memory.push_back(random_block(random, nbytes));
            char *data = memory.back().at();
            fill<From>(random, data, size);
            std::vector<From> &flat = plain.emplace_back(static_cast<size_t>(size));
            const int64_t rows = size % 3 == 0 ? 3 : 1, columns = size / rows, item = sizeof(From);
            if (size > 0 && random() % 6 == 0) { // transposed or reversed
                shapes.push_back(std::make_unique<Strided>());
                *shapes.back() = {2, {columns, rows}, {item, columns * item}};
                if (random() & 1) *shapes.back() = {1, {size}, {-item}};
                const Strided &shape = *shapes.back();
                if (shape.axes == 1) data += (size - 1) * item;
                for (int64_t i = 0; i < size; i++) {
                    const int64_t far = shape.axes == 1 ? -i : i / rows + i % rows * columns;
                    std::memcpy(&flat[static_cast<size_t>(i)], data + far * item, sizeof(From));
                }
                sources.push_back({data, &shape});
            } else {
                if (nbytes > 0) std::memcpy(flat.data(), data, nbytes);
                sources.push_back({data, nullptr});
            }
        }
        for (int r = 0; r < kernel.results; r++) {
            outs.push_back(random_block(random, static_cast<size_t>(size) * sizeof(To)));
            results.push_back(outs.back().at());
        }
    }
    if (!run_kernel(kernel, sources, results, 1 + static_cast<int>(below(random, 3)), random() & 1))
        return failed(isa->name, original, "out of memory", -1);

    std::vector<From> column(static_cast<size_t>(kernel.sources));
    std::vector<std::vector<bool>> written;
    for (const int64_t size : kernel.sizes) written.emplace_back(static_cast<size_t>(size));
    for (const Segment &segment : original.segments)
        for (int64_t i = segment.start; i < segment.stop; i++) {
            written[static_cast<size_t>(segment.tensor)][static_cast<size_t>(i)] = true;
            for (size_t s = 0; s < column.size(); s++)
                column[s] = plain[static_cast<size_t>(segment.tensor) * column.size() + s][static_cast<size_t>(i)];
            for (int r = 0; r < kernel.results; r++) {
                const FusedProgram &used = original.programs[static_cast<size_t>(segment.program)];
                const To due = element<From, Acc, To>(used, original, copies, column, r);
                To got;
                const Block &out = outs[static_cast<size_t>(segment.tensor * kernel.results + r)];
                std::memcpy(&got, out.at() + static_cast<size_t>(i) * sizeof got, sizeof got);
                if (!equal(got, due, payloads)) return failed(isa->name, original, "wrong value", i);
            }
        }
    for (size_t k = 0; k < outs.size(); k++) {
        const auto &covered = written[k / static_cast<size_t>(kernel.results)];
        for (size_t b = 0; b < outs[k].offset; b++)
            if (outs[k].memory[b] != 0x5a)
                return failed(isa->name, original, "written before the result", static_cast<int64_t>(b));
        for (size_t b = 0; b < outs[k].size; b++)
            if (!covered[b / sizeof(To)] && outs[k].at()[b] != 0x5a)
                return failed(isa->name, original, "written outside the segments", static_cast<int64_t>(b));
    }
    return true;
}

template <class From, class Acc, class To>
bool any_case(Random &random, const InstructionSet *isa, DType from, DType acc, DType out, long &payloads) {
    constexpr bool fractions = std::is_floating_point_v<Acc>;
    constexpr bool parts = std::is_same_v<Acc, Complex<float>> || std::is_same_v<Acc, Complex<double>>;
    constexpr bool ordered = !parts && !(fractions && !std::is_same_v<From, Acc>);
    std::vector<Op> ops;
    constexpr bool half = std::is_same_v<Acc, Half> || std::is_same_v<Acc, BFloat16>;
    if constexpr (!std::is_same_v<Acc, Bool> && !half) ops.push_back(SUM);
    if (ordered) ops.push_back(MIN), ops.push_back(MAX);
    if constexpr (!half) ops.push_back(PRODUCT);
    Kernel kernel{};
    kernel.op = ops[static_cast<size_t>(below(random, static_cast<int64_t>(ops.size())))];
    kernel.dtype = from, kernel.accumulator = acc, kernel.result = out;
    kernel.divisor = (fractions || parts) && kernel.op == SUM && random() & 1 ? 2 : 1;
    return one_case<From, Acc, To>(random, isa, kernel, payloads);
}

template <class Int> bool mean_case(Random &random, const InstructionSet *isa, DType from, long &payloads) {
    switch (below(random, 8)) {
    case 0: return any_case<Int, double, double>(random, isa, from, F64, F64, payloads);
    case 1: return any_case<Int, double, float>(random, isa, from, F64, F32, payloads);
    case 2: return any_case<Int, double, Half>(random, isa, from, F64, F16, payloads);
    case 3: return any_case<Int, double, BFloat16>(random, isa, from, F64, BF16, payloads);
    case 4: return any_case<Int, float, float>(random, isa, from, F32, F32, payloads);
    case 5: return any_case<Int, float, Half>(random, isa, from, F32, F16, payloads);
    default: return any_case<Int, Int, Int>(random, isa, from, from, from, payloads);
    }
}

bool random_case(Random &random, const InstructionSet *isa, long &payloads) {
    switch (below(random, DTYPES)) {
    case BOOL: return any_case<Bool, Bool, Bool>(random, isa, BOOL, BOOL, BOOL, payloads);
    case I8: return mean_case<int8_t>(random, isa, I8, payloads);
    case I16: return mean_case<int16_t>(random, isa, I16, payloads);
    case I32: return mean_case<int32_t>(random, isa, I32, payloads);
    case I64: return mean_case<int64_t>(random, isa, I64, payloads);
    case U8: return mean_case<uint8_t>(random, isa, U8, payloads);
    case U16: return mean_case<uint16_t>(random, isa, U16, payloads);
    case U32: return mean_case<uint32_t>(random, isa, U32, payloads);
    case U64: return mean_case<uint64_t>(random, isa, U64, payloads);
    case F16:
        if (random() & 1) return any_case<Half, Half, Half>(random, isa, F16, F16, F16, payloads);
        return any_case<Half, float, Half>(random, isa, F16, F32, F16, payloads);
    case BF16:
        if (random() & 1) return any_case<BFloat16, BFloat16, BFloat16>(random, isa, BF16, BF16, BF16, payloads);
        return any_case<BFloat16, float, BFloat16>(random, isa, BF16, F32, BF16, payloads);
    case F32: return any_case<float, float, float>(random, isa, F32, F32, F32, payloads);
    case F64: return any_case<double, double, double>(random, isa, F64, F64, F64, payloads);
    case C64: return any_case<Complex<float>, Complex<float>, Complex<float>>(random, isa, C64, C64, C64, payloads);
    default:
        return any_case<Complex<double>, Complex<double>, Complex<double>>(random, isa, C128, C128, C128, payloads);
    }
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
    std::vector<long> wrong(static_cast<size_t>(callers)), payloads(wrong.size());
    auto work = [&](size_t caller) {
        for (const InstructionSet *isa : supported()) {
            Random random(static_cast<uint64_t>(seed) * 1000 + caller);
            for (long k = 0; k < cases && wrong[caller] < 5; k++)
                wrong[caller] += !random_case(random, isa, payloads[caller]);
        }
    };
    std::vector<std::thread> threads;
    for (size_t caller = 1; caller < wrong.size(); caller++) threads.emplace_back(work, caller);
    work(0);
    for (std::thread &one : threads) one.join();
    long bad = 0, different = 0;
    for (size_t caller = 0; caller < wrong.size(); caller++) bad += wrong[caller], different += payloads[caller];
    for (const InstructionSet *isa : supported()) std::printf("%s ", isa->name);
    std::printf("x %ld cases x %ld callers: %s (%ld NaN payloads differ)\n", cases, callers, bad == 0 ? "OK" : "WRONG",
                different);
    return bad != 0;
}
