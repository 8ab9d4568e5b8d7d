// The instruction set for x86-64 with AVX2 and F16C; null if the compiler does not support them.
#include "isa.hpp"

#if defined(__AVX2__) && defined(__F16C__)
#define WIDTH 32
#include "isa.inc"
static constexpr InstructionSet TABLE = make_instruction_set("avx2");
const InstructionSet *const isa_avx2 = &TABLE;
#else
const InstructionSet *const isa_avx2 = nullptr;
#endif
