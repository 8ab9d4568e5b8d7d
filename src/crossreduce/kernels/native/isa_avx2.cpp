// For x86-64 with AVX2 and F16C; null if the compiler does not support them.
#if defined(__AVX2__) && defined(__F16C__)
#define ISA_NAME "avx2"
#define WIDTH 32
#include "isa.inc"
namespace {
constexpr InstructionSet TABLE = make_instruction_set();
}
extern const InstructionSet *const isa_avx2 = &TABLE;
#else
#include "isa.hpp"
extern const InstructionSet *const isa_avx2 = nullptr;
#endif
