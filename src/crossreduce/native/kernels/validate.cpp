// Whether a kernel can run, and in which formats.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>

#include "exact.hpp"
#include "format.hpp"

namespace {

// Divide integers, truncating towards zero, as NCCL's ncclAvg does (FuncSumPostDiv in src/device/reduce_kernel.h).
// Quotients of integers below 2^32 are divided as doubles, which is faster; they are never rounded up to an integer.
template <class T> void divide_each(char *data, size_t size, double divisor) {
    using Wide = std::conditional_t<sizeof(T) == 8, T, double>;
    const Wide by = static_cast<Wide>(divisor);
    for (size_t i = 0; i < size; i++) {
        T x;
        std::memcpy(&x, data + i * sizeof x, sizeof x);
        x = static_cast<T>(static_cast<Wide>(x) / by);
        std::memcpy(data + i * sizeof x, &x, sizeof x);
    }
}

Divide divide_of(DType dtype) { // null: not an integer
    switch (dtype) {
    case I8: return divide_each<int8_t>;
    case I16: return divide_each<int16_t>;
    case I32: return divide_each<int32_t>;
    case I64: return divide_each<int64_t>;
    case U8: return divide_each<uint8_t>;
    case U16: return divide_each<uint16_t>;
    case U32: return divide_each<uint32_t>;
    case U64: return divide_each<uint64_t>;
    default: return nullptr;
    }
}

constexpr int64_t MAX_ELEMENTS = int64_t{1} << 48; // keeps all byte counts within 64 bits

bool in_range(int operand, int sources, int slots) { return operand < sources && operand >= -slots; }

// Return a dtype of the same size whose sum is defined, for copies.
DType copy_dtype(DType dtype) {
    const size_t size = ITEMSIZES[dtype];
    return size == 1 ? U8 : size == 2 ? U16 : size == 4 ? U32 : size == 8 ? U64 : C128;
}

// Copy each source that is a result to a slot, if there are several values. A result that is written in place may be in
// the memory of a source that is another result.
void read_before_write(FusedProgram &program) {
    if (has_one_value(program)) return;
    const std::vector<int> results = program.results;
    for (size_t r = 0; r < results.size(); r++) {
        if (program.results[r] < 0) continue;
        program.folds.push_back({program.slots, {results[r]}});
        std::replace(program.results.begin(), program.results.end(), results[r], ~program.slots++);
    }
}

// Return the working memory of a thread: descriptions of a pass and of its padded copy, slots, and tiles of sources.
size_t scratch_size(const Kernel &kernel, size_t tile) {
    const size_t results = static_cast<size_t>(kernel.results), slots = static_cast<size_t>(kernel.slots);
    const size_t descriptions =
        2 * results * (sizeof(Output) + sizeof(Target) + 4 * LINE) + (4 * MAX_PASS_SOURCES + 16) * 4 * LINE;
    const auto sources = static_cast<size_t>(kernel.sources);
    const size_t terms = kernel.op == EXACT_SUM ? sources * (tile + EXACT_PADDING + 2 * LINE) : 0;
    const size_t tiles = (MAX_PASS_SOURCES + 2) * 2 * tile + terms; // an upper bound
    return descriptions + slots * std::max(tile, 2 * MAX_LINES * LINE) + tiles + 64 * LINE;
}

const char *validate_program(const FusedProgram &program, const Kernel &kernel) {
    if (program.slots < 0 || program.slots > 10000) return "a program has too many slots";
    std::vector<bool> written(static_cast<size_t>(program.slots));
    for (const Fold &fold : program.folds) {
        if (fold.slot < 0 || fold.slot >= program.slots || fold.operands.empty()) return "a fold is malformed";
        for (size_t k = 0; k < fold.operands.size(); k++) {
            const int operand = fold.operands[k];
            if (!in_range(operand, kernel.sources, program.slots)) return "an operand is out of range";
            if (operand < 0 && !written[static_cast<size_t>(~operand)]) return "a slot is read before it is written";
            if (k > 0 && operand == ~fold.slot) return "a fold overwrites an operand before reading it";
        }
        written[static_cast<size_t>(fold.slot)] = true;
    }
    const auto results = static_cast<size_t>(kernel.results);
    if (program.results.size() != results) return "a program has the wrong number of results";
    for (int value : program.results) {
        if (!in_range(value, kernel.sources, program.slots)) return "a result is out of range";
        if (value < 0 && !written[static_cast<size_t>(~value)]) return "a result is a slot that is never written";
    }
    return nullptr;
}

// Return the fault of an exact sum, or null: its programs must be single folds of sources, whose value is every result.
const char *validate_exact_sum(const Kernel &kernel) {
    if (kernel.isa->exact[part_of(kernel.dtype)][part_of(kernel.result)] == nullptr ||
        is_complex(kernel.dtype) != is_complex(kernel.result))
        return "exact sums are not defined for the dtypes";
    if (!(kernel.divisor >= 1 && kernel.divisor <= MAX_EXACT_COUNT && kernel.divisor == std::floor(kernel.divisor)))
        return "an exact sum can be divided only by an integer from 1 to 2^24";
    const uint64_t total = std::accumulate(kernel.weights.begin(), kernel.weights.end(), uint64_t{0});
    if (total > MAX_EXACT_COUNT || std::count(kernel.weights.begin(), kernel.weights.end(), 0u) != 0)
        return "the weights of an exact sum must be at least 1, and their sum at most 2^24";
    for (const FusedProgram &program : kernel.programs) {
        if (program.folds.size() != 1 || !ends_in_fold(program)) return "an exact sum must be one fold";
        const std::vector<int> &operands = program.folds[0].operands;
        if (*std::min_element(operands.begin(), operands.end()) < 0) return "an exact sum must be a fold of sources";
        if (operands.size() > MAX_EXACT_COUNT) return "an exact sum has too many sources";
        if (!kernel.weights.empty() && kernel.weights.size() != operands.size())
            return "an exact sum must have one weight for each source";
    }
    return nullptr;
}

} // namespace

Format format_of(const Kernel &kernel) {
    const InstructionSet &isa = *kernel.isa;
    const bool is_exact = kernel.op == EXACT_SUM; // whose accumulator is not used
    const size_t units = is_complex(is_exact ? kernel.dtype : kernel.accumulator) ? 2 : 1, acc = ITEMSIZES[kernel.accumulator] / units;
    if (is_exact) {
        const size_t in = ITEMSIZES[kernel.dtype] / units, out = ITEMSIZES[kernel.result] / units;
        return {nullptr, LINE / out, units, in, in, out, false, false};
    }
    if (is_half(kernel.dtype) && kernel.accumulator == F32 && kernel.result == kernel.dtype)
        return {isa.half[kernel.op][kernel.dtype == BF16], LINE / 2, 1, 2, 4, 2, false, false};
    const bool before = kernel.dtype != kernel.accumulator, after = kernel.accumulator != kernel.result;
    const Divide divide = kernel.divisor != 1 && !after ? divide_of(kernel.accumulator) : nullptr;
    const PassFunction function = isa.same[kernel.op][kernel.accumulator];
    return {function, LINE / acc, units, acc, acc, acc, before, after || divide != nullptr, divide};
}

const char *validate(Kernel &kernel) {
    const InstructionSet &isa = *kernel.isa;
    kernel.slots = 0;
    kernel.by_line = true;
    kernel.only_copies = kernel.divisor == 1 && kernel.dtype == kernel.result;
    if (kernel.sources < 1 || kernel.results < 1) return "a kernel needs at least one source and one result";
    for (int64_t size : kernel.sizes)
        if (size < 0 || size > MAX_ELEMENTS) return "the size of a tensor is out of range";
    for (FusedProgram &program : kernel.programs) {
        if (const char *fault = validate_program(program, kernel)) return fault;
        kernel.only_copies = kernel.only_copies && program.folds.empty();
        read_before_write(program);
        size_t operands = 0, sources = 0;
        for (const Fold &fold : program.folds)
            for (int operand : fold.operands) {
                operands++;
                sources += operand >= 0;
            }
        kernel.slots = std::max(kernel.slots, program.slots);
        kernel.by_line = kernel.by_line && sources <= MAX_PASS_SOURCES && operands <= MAX_LINE_OPERANDS;
    }
    kernel.elements = 0;
    for (const Segment &segment : kernel.segments) {
        const bool known = segment.tensor >= 0 && segment.tensor < static_cast<int64_t>(kernel.sizes.size()) &&
                           segment.program >= 0 && segment.program < static_cast<int>(kernel.programs.size());
        if (!known || segment.start < 0 || segment.stop < segment.start ||
            segment.stop > kernel.sizes[static_cast<size_t>(segment.tensor)])
            return "a segment is out of range";
        kernel.elements += segment.stop - segment.start;
    }
    kernel.tile_nbytes = TILE_NBYTES;
    while (kernel.tile_nbytes > 8 * LINE && scratch_size(kernel, kernel.tile_nbytes) > MAX_SCRATCH)
        kernel.tile_nbytes /= 2;
    kernel.scratch_nbytes = scratch_size(kernel, kernel.tile_nbytes);
    if (kernel.only_copies) {
        kernel.op = SUM;
        kernel.dtype = kernel.accumulator = kernel.result = copy_dtype(kernel.dtype);
        return nullptr;
    }
    if (kernel.op == EXACT_SUM) return validate_exact_sum(kernel);
    if (!kernel.weights.empty()) return "only exact sums have weights";
    const Format f = format_of(kernel);
    if (f.function == nullptr) return "the op is not defined for the dtype";
    if ((f.convert_sources && isa.convert[kernel.dtype][kernel.accumulator] == nullptr) ||
        (f.convert_results && f.divide == nullptr && isa.convert[kernel.accumulator][kernel.result] == nullptr))
        return "the conversion between the dtypes is not defined";
    if (f.divide != nullptr && !(kernel.divisor >= 1 && kernel.divisor <= std::numeric_limits<int>::max() &&
                                 kernel.divisor == static_cast<int>(kernel.divisor)))
        return "integers can be divided only by a positive integer";
    const bool divisible = kernel.accumulator == F32 || kernel.accumulator == F64 || is_complex(kernel.accumulator);
    if (kernel.divisor != 1 && !divisible && f.divide == nullptr) return "the accumulator's dtype cannot be divided";
    return nullptr;
}

int64_t traffic_nbytes(const Kernel &kernel) {
    return kernel.elements * (kernel.sources * static_cast<int64_t>(ITEMSIZES[kernel.dtype]) +
                              kernel.results * static_cast<int64_t>(ITEMSIZES[kernel.result]));
}
