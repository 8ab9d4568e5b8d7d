// For every machine: 16-byte vectors, which x86-64 (SSE2) and arm64 (NEON) support and other compilers emulate.
#define ISA_NAME "baseline"
#define WIDTH 16
#include "isa.inc"

extern const InstructionSet isa_baseline = make_instruction_set();
