// The instruction set for x86-64 with AVX-512 F, BW, DQ and VL; null if the compiler does not support them.
#include "isa.hpp"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define WIDTH 64
#include "isa.inc"
static constexpr InstructionSet TABLE = make_instruction_set("avx512");
const InstructionSet *const isa_avx512 = &TABLE;
#else
const InstructionSet *const isa_avx512 = nullptr;
#endif
