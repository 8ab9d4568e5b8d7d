// For x86-64 with AVX-512 F, BW, DQ and VL; null if the compiler does not support them.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define ISA_NAME "avx512"
#define WIDTH 64
#include "isa.inc"
namespace {
constexpr InstructionSet TABLE = make_instruction_set();
}
extern const InstructionSet *const isa_avx512 = &TABLE;
#else
#include "isa.hpp"
extern const InstructionSet *const isa_avx512 = nullptr;
#endif
