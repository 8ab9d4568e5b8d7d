// The numbers of the CUDA kernels: conversions of sources and results, and the ops. See reduce.cuh.
#pragma once

#if defined(__CUDACC__)
#define DEVICE __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
#define UNROLL_4 _Pragma("unroll 4")
#else
#define DEVICE inline
#define UNROLL
#define ROLLED
#define UNROLL_4
#include <cmath>
#include <cstdint>
#include <cstring>
#endif
#if !defined(HAS_READ)
#define HAS_READ(nbytes) // a test counts the reads of sources
#endif

namespace cuda_reduce {

#if defined(__CUDACC_RTC__) // without a standard library
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
#endif

DEVICE float float_of(uint32_t bits) {
#if defined(__CUDACC__)
    return __uint_as_float(bits);
#else
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
#endif
}
DEVICE uint32_t bits_of(float value) {
#if defined(__CUDACC__)
    return __float_as_uint(value);
#else
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
#endif
}

// The word that begins `bits` bits (less than 32) after the beginning of `low`.
DEVICE uint32_t shifted_word(uint32_t low, uint32_t high, uint32_t bits) {
#if defined(__CUDACC__)
    return __funnelshift_r(low, high, bits);
#else
    return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> bits);
#endif
}

struct BFloat16 {
    using Bits = uint16_t;
    static DEVICE float widen(uint16_t x) { return float_of(static_cast<uint32_t>(x) << 16); }
    // Round to nearest even, in the upper 16 bits; a NaN becomes the quiet NaN of its sign.
    static DEVICE uint16_t narrow(float x) {
        const uint32_t bits = bits_of(x);
        if (x != x) return static_cast<uint16_t>((bits >> 16 & 0x8000) | 0x7fc0);
        return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    static constexpr uint16_t INFINITE = 0x7f80;
};

struct Float16 {
    using Bits = uint16_t;
#if defined(__CUDACC__)
    static DEVICE float widen(uint16_t x) {
        float y;
        asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
        return y;
    }
    static DEVICE uint16_t narrow(float x) {
        uint16_t y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
        return y;
    }
#else
    static DEVICE float widen(uint16_t h) {
        const uint32_t sign = (h & 0x8000u) << 16, rest = h & 0x7fffu;
        if (rest > 0x7c00) return float_of(sign | 0x7fc00000 | (rest & 0x1ff) << 13);
        if (rest == 0x7c00) return float_of(sign | 0x7f800000);
        if (rest >= 0x0400) return float_of(sign | ((rest << 13) + 0x38000000));
        return float_of(sign | bits_of(static_cast<float>(rest) * 0x1p-24f)); // zero or subnormal: exact
    }
    // Adding 0.5 aligns the last place of a subnormal with that of the float (Giesen, float->half variants, 2012).
    static DEVICE uint16_t narrow(float x) {
        const uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
        if (rest > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00 | (rest >> 13 & 0x1ff));
        if (rest >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00); // rounds to more than 65504
        if (rest < 0x38800000) return static_cast<uint16_t>(sign | (bits_of(float_of(rest) + 0.5f) - 0x3f000000));
        return static_cast<uint16_t>(sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
    }
#endif
    static constexpr uint16_t INFINITE = 0x7c00;
};

// Round to a half dtype once: the conversion to float rounds to odd (Boldo & Melquiond, Emulation of FMA and correctly
// rounded sums, IEEE TC 57(4), 2008), so that its last bit records whether anything was cut off.
template <class Half> DEVICE uint16_t narrow_double(double x) {
    const float y = static_cast<float>(x);
    uint32_t bits = bits_of(y);
    const double back = static_cast<double>(y);
    if (back != x && x == x && !(bits & 1)) // also infinity, which becomes the largest float
        bits += (back < 0 ? -back : back) > (x < 0 ? -x : x) ? ~0u : 1u;
    return Half::narrow(float_of(bits));
}

// Sources: the unit in memory, the value that is combined, how one becomes the other, and the dtype of stored values.
template <class T> struct Native {
    using Unit = T;
    using Value = T;
    using Wide = T;
    static DEVICE T read(T x) { return x; }
};
template <class Half> struct Widened {
    using Unit = uint16_t;
    using Value = float;
    using Wide = float;
    static DEVICE float read(uint16_t x) { return Half::widen(x); }
};
template <class T> struct AsDouble { // integers, whose mean is computed in float64
    using Unit = T;
    using Value = double;
    using Wide = double;
    static DEVICE double read(T x) { return static_cast<double>(x); }
};
// Integers of 8 and 16 bits, whose mean is that of float64 values, too: the sums of MAX_ADDRESSES of them, and of the
// stored sums of others, are exact in 32 bits.
template <class T> struct AsInteger {
    using Unit = T;
    using Value = int32_t;
    using Wide = double;
    static DEVICE int32_t read(T x) { return x; }
};

// Results.
template <class T> struct Same {
    using Unit = T;
    static DEVICE T write(T x) { return x; }
};
template <class Half> struct Narrowed {
    using Unit = uint16_t;
    static DEVICE uint16_t write(float x) { return Half::narrow(x); }
};

// Combine two vectors of COUNT values, a before b.
struct Add {
    template <class V, int COUNT> static DEVICE void combine(V (&a)[COUNT], const V (&b)[COUNT]) {
    UNROLL
        for (int k = 0; k < COUNT; k++) a[k] = static_cast<V>(a[k] + b[k]);
    }
};
template <class Op> constexpr bool is_add = false;
template <> constexpr bool is_add<Add> = true;
struct Multiply {
    template <class V, int COUNT> static DEVICE void combine(V (&a)[COUNT], const V (&b)[COUNT]) {
    UNROLL
        for (int k = 0; k < COUNT; k++) a[k] = product(a[k], b[k]);
    }
    template <class V> static DEVICE V product(V a, V b) { return static_cast<V>(a * b); }
    // uint16_t is promoted to int, whose overflow is undefined.
    static DEVICE uint16_t product(uint16_t a, uint16_t b) { return static_cast<uint16_t>(1u * a * b); }
};
// (a + bi)(c + di) from four rounded products; real and imaginary parts alternate.
struct MultiplyComplex {
    template <class V, int COUNT> static DEVICE void combine(V (&a)[COUNT], const V (&b)[COUNT]) {
    UNROLL
        for (int k = 0; k + 1 < COUNT; k += 2) {
            const V p = a[k] * b[k], q = a[k + 1] * b[k + 1], r = a[k + 1] * b[k], s = a[k] * b[k + 1];
            a[k] = p - q;
            a[k + 1] = r + s;
        }
    }
};
template <bool MAXIMUM> struct MinMax { // `a != a` propagates NaN
    template <class V, int COUNT> static DEVICE void combine(V (&a)[COUNT], const V (&b)[COUNT]) {
    UNROLL
        for (int k = 0; k < COUNT; k++)
            if (!((MAXIMUM ? a[k] >= b[k] : a[k] <= b[k]) | (a[k] != a[k]))) a[k] = b[k];
    }
};
template <class Half, bool MAXIMUM> struct HalfMinMax { // compares bits: a sign and a magnitude
    static DEVICE int key(uint16_t x) { return x & 0x8000 ? -(x & 0x7fff) : x & 0x7fff; }
    static DEVICE bool nan(uint16_t x) { return (x & 0x7fff) > Half::INFINITE; }
    template <int COUNT> static DEVICE void combine(uint16_t (&a)[COUNT], const uint16_t (&b)[COUNT]) {
    UNROLL
        for (int k = 0; k < COUNT; k++) {
            const bool first = MAXIMUM ? key(a[k]) >= key(b[k]) : key(a[k]) <= key(b[k]);
            if (!(nan(a[k]) | (first & !nan(b[k])))) a[k] = b[k];
        }
    }
};
template <bool OR> struct Logical { // of bools: a byte other than 0 is true; true is written as 1
    template <int COUNT> static DEVICE void combine(uint8_t (&a)[COUNT], const uint8_t (&b)[COUNT]) {
    UNROLL
        for (int k = 0; k < COUNT; k++) a[k] = OR ? (a[k] | b[k]) != 0 : (a[k] != 0) & (b[k] != 0);
    }
};

} // namespace cuda_reduce
