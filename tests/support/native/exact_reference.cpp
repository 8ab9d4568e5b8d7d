// Exact sums in fixed point, for comparison with the kernels on more elements than Python can add; and random terms.
// It shares no code with the kernels: tests/support/runtime/exact_reference.py compiles it, and tests compare it with fractions.
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

struct Format {
    int exponent_bits, stored; // of the exponent, and of the mantissa without its leading one
    int bias() const { return (1 << (exponent_bits - 1)) - 1; }
    int unit() const { return 1 - bias() - stored; } // the exponent of the smallest number
    int nbytes() const { return (1 + exponent_bits + stored) / 8; }
    uint64_t infinity() const { return ((uint64_t{1} << exponent_bits) - 1) << stored; }
    uint64_t sign() const { return uint64_t{1} << (exponent_bits + stored); }
};
constexpr Format FORMATS[] = {{5, 10}, {8, 7}, {8, 23}, {11, 52}};

uint64_t read(const char *at, int nbytes) {
    uint64_t bits = 0;
    std::memcpy(&bits, at, static_cast<size_t>(nbytes)); // little-endian
    return bits;
}

// An integer of 64 * W bits in two's complement, in units of the terms' smallest number.
template <int W> struct Integer {
    uint64_t limbs[W] = {};

    void add(uint64_t mantissa, int position, bool negative) {
        const int limb = position / 64, shift = position % 64;
        uint64_t parts[2] = {mantissa << shift, shift == 0 ? 0 : mantissa >> (64 - shift)};
        unsigned carry = 0;
        for (int i = limb; i < W; i++) {
            const uint64_t part = i - limb < 2 ? parts[i - limb] : 0;
            if (part == 0 && carry == 0 && i - limb >= 2) return;
            const auto wide = negative ? static_cast<unsigned __int128>(limbs[i]) - part - carry
                                       : static_cast<unsigned __int128>(limbs[i]) + part + carry;
            limbs[i] = static_cast<uint64_t>(wide);
            carry = (wide >> 64) != 0;
        }
    }
    bool is_negative() const { return limbs[W - 1] >> 63 != 0; }
    void negate() {
        bool carry = true;
        for (uint64_t &limb : limbs) {
            limb = ~limb + carry;
            carry = carry && limb == 0;
        }
    }
    uint64_t divide(uint64_t divisor) { // returns the remainder
        uint64_t rest = 0;
        for (int i = W - 1; i >= 0; i--) {
            const auto wide = static_cast<unsigned __int128>(rest) << 64 | limbs[i];
            limbs[i] = static_cast<uint64_t>(wide / divisor);
            rest = static_cast<uint64_t>(wide % divisor);
        }
        return rest;
    }
    int bit_length() const {
        for (int i = W - 1; i >= 0; i--)
            if (limbs[i] != 0) return 64 * i + 64 - __builtin_clzll(limbs[i]);
        return 0;
    }
    uint64_t from(int position) const { // the bits from a position on, which are at most 64
        const int limb = position / 64, shift = position % 64;
        uint64_t bits = limb < W ? limbs[limb] >> shift : 0;
        if (shift != 0 && limb + 1 < W) bits |= limbs[limb + 1] << (64 - shift);
        return bits;
    }
    bool any_below(int position) const {
        for (int i = 0; i < position / 64; i++)
            if (limbs[i] != 0) return true;
        return position % 64 != 0 && (limbs[position / 64] & ((uint64_t{1} << (position % 64)) - 1)) != 0;
    }
};

template <int W>
uint64_t sum_of(const Format &from, const Format &to, const char *const *terms, size_t n, size_t at, uint64_t divisor) {
    Integer<W> total;
    bool nan = false, plus = false, minus = false, all_minus_zero = true, any = false;
    for (size_t k = 0; k < n; k++) {
        const uint64_t bits = read(terms[k] + at * static_cast<size_t>(from.nbytes()), from.nbytes());
        const bool negative = (bits & from.sign()) != 0;
        const uint64_t rest = bits & (from.sign() - 1), fraction = rest & ((uint64_t{1} << from.stored) - 1);
        all_minus_zero = all_minus_zero && bits == from.sign();
        if (rest >= from.infinity()) {
            (rest > from.infinity() ? nan : negative ? minus : plus) = true;
            continue;
        }
        const auto exponent = static_cast<int>(rest >> from.stored);
        if (rest != 0)
            total.add(exponent == 0 ? fraction : fraction | uint64_t{1} << from.stored, exponent < 2 ? 0 : exponent - 1,
                      negative);
        any = any || rest != 0;
    }
    if (nan || (plus && minus)) return to.infinity() | uint64_t{1} << (to.stored - 1);
    if (plus || minus) return to.infinity() | (minus ? to.sign() : 0);
    const bool negative = total.is_negative();
    if (negative) total.negate();
    if (!any || total.bit_length() == 0) return all_minus_zero ? to.sign() : 0;
    const uint64_t rest = total.divide(divisor);
    const int finest = to.unit() - from.unit(), excess = total.bit_length() - (to.stored + 1);
    const int cut = excess > finest ? excess : finest;
    uint64_t bits = (static_cast<uint64_t>(cut - finest) << to.stored) + total.from(cut);
    bool up; // more than half of the last bit is cut off, or half and the last bit is odd
    if (cut == 0) up = 2 * rest > divisor || (2 * rest == divisor && (bits & 1));
    else {
        const bool half = total.from(cut - 1) & 1, below = rest != 0 || total.any_below(cut - 1);
        up = half && (below || (bits & 1));
    }
    bits += up;
    if (bits > to.infinity()) bits = to.infinity();
    return bits | (negative ? to.sign() : 0);
}

struct Random { // xorshift64* (Marsaglia; Vigna)
    uint64_t state;
    uint64_t next() {
        state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
        return state * 0x2545f4914f6cdd1d;
    }
};

} // namespace

extern "C" {

// The exact sums of `size` elements, divided by an integer. Formats: 0 float16, 1 bfloat16, 2 float32, 3 float64.
void reference_sums(int from, int to, const char *const *terms, size_t n, size_t size, uint64_t divisor, char *out) {
    for (size_t i = 0; i < size; i++) {
        const uint64_t bits = from == 3 ? sum_of<36>(FORMATS[from], FORMATS[to], terms, n, i, divisor)
                                        : sum_of<6>(FORMATS[from], FORMATS[to], terms, n, i, divisor);
        const auto nbytes = static_cast<size_t>(FORMATS[to].nbytes());
        std::memcpy(out + i * nbytes, &bits, nbytes);
    }
}

// Fill n arrays with terms. Kinds: 0 random (the exponents of a uniform number), 1 wide exponents, 2 cancelling pairs,
// of which some differ in the last bit, 3 ties (mantissas of few bits), 4 subnormal, 5 any bits.
void random_terms(int format, int kind, uint64_t seed, char *const *terms, size_t n, size_t size) {
    const Format &f = FORMATS[format];
    const auto nbytes = static_cast<size_t>(f.nbytes());
    const uint64_t top = (uint64_t{1} << f.exponent_bits) - 1, fractions = (uint64_t{1} << f.stored) - 1;
    Random random{seed * 2 + 1};
    for (int k = 0; k < 20; k++) random.next();
    for (size_t i = 0; i < size; i++)
        for (size_t k = 0; k < n; k++) {
            const uint64_t a = random.next(), b = random.next();
            uint64_t exponent = 0, fraction = a & fractions;
            const auto spread = static_cast<uint64_t>(__builtin_clzll(b | 1)) % (static_cast<uint64_t>(f.bias()) - 1);
            if (kind == 0) exponent = static_cast<uint64_t>(f.bias()) - 1 - spread;
            else if (kind == 1) exponent = (b >> 20) % top;
            else if (kind == 2 || kind == 3) {
                const uint64_t width = top < 64 ? top - 2 : 60;
                exponent = static_cast<uint64_t>(f.bias()) - width / 2 + (b >> 20) % width;
            } else if (kind == 4) exponent = (b >> 20) % 3;
            else exponent = (b >> 20) % (top + 1);
            if (kind == 3) fraction &= random.next() & random.next();
            uint64_t bits = exponent << f.stored | fraction | (a >> 63 ? f.sign() : 0);
            if (kind == 2 && k % 2 == 1) {
                const uint64_t last = (b >> 10) % 8 == 0;
                bits = read(terms[k - 1] + i * nbytes, f.nbytes()) ^ f.sign() ^ last;
            }
            std::memcpy(terms[k] + i * nbytes, &bits, nbytes);
        }
}
}
