// For every machine: 16-byte vectors. x86-64 (SSE2) and arm64 (NEON) have them; elsewhere the compiler emulates them.
#define WIDTH 16
#include "isa.inc"

const InstructionSet isa_baseline = make_instruction_set("baseline");
