// For x86-64 with AVX-512 F, BW, DQ and VL; an empty choice where it is not compiled for them.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define ISA "avx512"
#define WIDTH 64
#include "tiles.inc"
namespace {
constexpr Tiles TILES = made();
}
extern const Tiles *const tiles_avx512 = &TILES;
#else
#include "tiles.hpp"
extern const Tiles *const tiles_avx512 = nullptr;
#endif
