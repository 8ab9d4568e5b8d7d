// For x86-64 with AVX2 and F16C; an empty choice where it is not compiled for them.
#if defined(__AVX2__) && defined(__F16C__)
#define ISA "avx2"
#define WIDTH 32
#include "tiles.inc"
namespace {
constexpr Tiles TILES = made();
}
extern const Tiles *const tiles_avx2 = &TILES;
#else
#include "tiles.hpp"
extern const Tiles *const tiles_avx2 = nullptr;
#endif
