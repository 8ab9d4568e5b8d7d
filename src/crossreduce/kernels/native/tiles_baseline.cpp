// For every machine: 16-byte vectors, which x86-64 (SSE2) and arm64 (NEON) have, and others are given by the compiler.
#define ISA "baseline"
#define WIDTH 16
#include "tiles.inc"

extern const Tiles tiles_baseline = made();
