#include "exact.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace {

// The format of a float: its bits with the leading one, the exponent of its smallest unit, and its bytes.
struct FloatFormat {
    int precision, unit, nbytes;
};

FloatFormat format_of(DType dtype) {
    switch (dtype) {
    case F16: return {11, -24, 2};
    case BF16: return {8, -133, 2};
    case F32: return {24, -149, 4};
    default: return {53, -1074, 8};
    }
}

// Store the lowest bytes of an integer.
void store_bits(uint64_t bits, int nbytes, char *to) {
    const auto word = static_cast<uint32_t>(bits);
    const auto half = static_cast<uint16_t>(bits);
    if (nbytes == 2) std::memcpy(to, &half, 2);
    else if (nbytes == 4) std::memcpy(to, &word, 4);
    else std::memcpy(to, &bits, 8);
}

} // namespace

double read_term(DType dtype, const char *at) {
    if (dtype == F64) {
        double x;
        std::memcpy(&x, at, 8);
        return x;
    }
    float x;
    if (dtype == F32) {
        std::memcpy(&x, at, 4);
        return x;
    }
    uint16_t half;
    std::memcpy(&half, at, 2);
    const uint32_t sign = half >> 15, rest = half & 0x7fff;
    if (dtype == BF16) {
        const uint32_t bits = static_cast<uint32_t>(half) << 16;
        std::memcpy(&x, &bits, 4);
        return x;
    }
    if (rest >= 0x7c00) {
        const uint32_t bits = 0x7f800000 | (rest & 0x3ff) << 13 | sign << 31;
        std::memcpy(&x, &bits, 4);
        return x;
    }
    // The bits of a normal number, read as those of a float, are smaller by a factor of 2^112; so are a subnormal's.
    const uint32_t bits = rest << 13 | sign << 31;
    std::memcpy(&x, &bits, 4);
    return static_cast<double>(x) * 0x1p112;
}

void ExactAccumulator::add(double term, uint32_t times) {
    uint64_t bits;
    std::memcpy(&bits, &term, 8);
    const bool negative = bits >> 63 != 0;
    const auto exponent = static_cast<int>(bits >> 52 & 0x7ff);
    uint64_t mantissa = bits & 0xfffffffffffff;
    all_negative_zero = all_negative_zero && negative && exponent == 0 && mantissa == 0;
    if (exponent == 0x7ff) {
        if (mantissa != 0) any_nan = true;
        else infinite[negative] = true;
        return;
    }
    if (exponent != 0) mantissa |= uint64_t{1} << 52;
    if (mantissa == 0) return;
    const int position = std::max(exponent, 1) - 1 + 32; // of the mantissa's last bit, counted from BOTTOM
    const int limb = position / 32, shift = position % 32;
    const uint64_t low = mantissa << shift;
    const uint64_t high = shift == 0 ? 0 : mantissa >> (64 - shift);
    const int64_t parts[3] = {static_cast<int64_t>(low & 0xffffffff), static_cast<int64_t>(low >> 32),
                              static_cast<int64_t>(high)};
    const int64_t factor = negative ? -static_cast<int64_t>(times) : static_cast<int64_t>(times);
    for (int k = 0; k < 3; k++) limbs[limb + k] += factor * parts[k];
    lowest = std::min(lowest, limb);
    highest = std::max(highest, limb + 2);
}

void ExactAccumulator::store(DType dtype, uint32_t divisor, char *to) const {
    const FloatFormat format = format_of(dtype);
    const uint64_t sign_bit = uint64_t{1} << (8 * format.nbytes - 1);
    const uint64_t infinity = sign_bit - (uint64_t{1} << (format.precision - 1));
    if (any_nan || (infinite[0] && infinite[1]))
        return store_bits(infinity | uint64_t{1} << (format.precision - 2), format.nbytes, to);
    if (infinite[0] || infinite[1]) return store_bits(infinity | (infinite[1] ? sign_bit : 0), format.nbytes, to);

    // Propagate the carries; if the number is negative, do so for its magnitude.
    uint64_t digits[LIMBS + 2] = {}; // below 2^32; zeros at the end, for a window that starts in the highest limb
    bool negative = false;
    int top = -1;
    for (int pass = 0; pass < 2; pass++) {
        int64_t carry = 0;
        top = std::min(highest + 2, LIMBS - 1);
        for (int i = lowest; i <= top; i++) {
            carry += negative ? -limbs[i] : limbs[i];
            digits[i] = static_cast<uint64_t>(carry) & 0xffffffff;
            carry >>= 32;
        }
        if (carry >= 0) break;
        negative = true;
    }
    while (top >= 0 && digits[top] == 0) top--;
    if (top < 0) return store_bits(all_negative_zero ? sign_bit : 0, format.nbytes, to);

    // Divide, down to a few limbs below the leading one; the remainder only breaks ties.
    int bottom = lowest; // the lowest limb that may not be zero
    bool rest = false;
    if (divisor != 1) {
        bottom = std::max(0, std::min(lowest, top - 4));
        uint64_t remainder = 0;
        for (int i = top; i >= bottom; i--) {
            const uint64_t dividend = remainder << 32 | digits[i];
            digits[i] = dividend / divisor;
            remainder = dividend % divisor;
        }
        rest = remainder != 0;
        while (top > 0 && digits[top] == 0) top--;
    }

    // Round: keep `precision` bits, but none below the format's smallest unit.
    int leading = 32 * top;
    for (uint64_t digit = digits[top]; digit > 1; digit >>= 1) leading++;
    const int smallest = format.unit - BOTTOM, cut = std::max(leading - format.precision + 1, smallest);
    const int limb = (cut - 1) / 32, shift = (cut - 1) % 32; // of the first bit that is cut off
    uint64_t kept = digits[limb] >> shift | digits[limb + 1] << (32 - shift);
    if (shift != 0) kept |= digits[limb + 2] << (64 - shift); // a mantissa and one more bit
    rest = rest || (digits[limb] & ((uint64_t{1} << shift) - 1)) != 0;
    for (int i = bottom; i < limb && !rest; i++) rest = digits[i] != 0;
    uint64_t bits = (kept >> 1) + (static_cast<uint64_t>(cut - smallest) << (format.precision - 1));
    bits += (kept & 1) && (rest || (bits & 1));
    store_bits(std::min(bits, infinity) | (negative ? sign_bit : 0), format.nbytes, to);
}

std::vector<double> ExactAccumulator::components() const {
    ExactAccumulator rest = *this;
    std::vector<double> found;
    while (true) {
        double x;
        rest.store(F64, 1, reinterpret_cast<char *>(&x));
        if (x == 0 && !found.empty()) return found;
        if (x != x || infinite[0] || infinite[1]) return {x};
        if (std::isinf(x)) x = std::copysign(std::numeric_limits<double>::max(), x); // the sum of finite terms
        found.push_back(x);
        if (x == 0) return found;
        rest.add(-x);
    }
}

void sum_weighted_exactly(const ExactSum &sum, const std::vector<uint32_t> &weights, DType source, DType result,
                          const Output &output, size_t size) {
    const DefaultArithmetic arithmetic;
    const auto in = static_cast<size_t>(format_of(source).nbytes), out = static_cast<size_t>(format_of(result).nbytes);
    for (size_t i = 0; i < size; i++) {
        ExactAccumulator total;
        for (size_t k = 0; k < sum.count; k++) total.add(read_term(source, sum.sources[k] + i * in), weights[k]);
        char element[8];
        total.store(result, sum.divisor, element);
        for (size_t r = 0; r < output.count; r++) std::memcpy(output.targets[r].data + i * out, element, out);
    }
}

void sum_one_exactly(const ExactSum &sum, DType source, DType result, size_t offset, char *to) {
    ExactAccumulator total;
    for (size_t k = 0; k < sum.count; k++) total.add(read_term(source, sum.sources[k] + offset));
    total.store(result, sum.divisor, to);
}
