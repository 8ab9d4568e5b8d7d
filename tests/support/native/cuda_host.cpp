// The body of the CUDA kernels on the host: a loop over blocks and threads, for tests. Each kernel of a device has a
// function of the same name here: name(parameters, blocks). name_traits() has its facts for the fake CUDA driver: the
// bytes of a unit of sources, values and results; the units of a thread; the sources (0: any number); the step; whether it
// is mixed; the bytes of its parameters.
#include <cstdint>

#include "reduce.cuh"

using namespace cuda_reduce;

extern "C" int64_t small_nbytes() { return sizeof(SmallLaunch); }
extern "C" int64_t large_nbytes() { return sizeof(LargeLaunch); }

#define COMMA ,
#define ENTRY(name, launch, sources, step, mixed, ...)                                                                 \
    extern "C" void name(const launch *parameters, uint32_t blocks) {                                                  \
        for (uint32_t block = 0; block < blocks; block++)                                                              \
            for (uint32_t thread = 0; thread < THREADS; thread++)                                                      \
                Kernel<__VA_ARGS__, launch, mixed>::template run<sources, step>(*parameters, block, blocks, thread);   \
    }                                                                                                                  \
    extern "C" const int32_t *name##_traits() {                                                                        \
        using K = Kernel<__VA_ARGS__, launch, mixed>;                                                                  \
        static const int32_t traits[] = {sizeof(K::Unit), sizeof(K::Value), sizeof(K::Out), K::COUNT,                  \
                                         sources,         step,             mixed,          sizeof(launch)};           \
        return traits;                                                                                                 \
    }
#include "kernel_kinds.inc"
#define KERNEL(name, source, result, op, step, kinds)                                                                  \
    extern "C" int64_t name##_tile() { return Kernel<source, result, op, SmallLaunch>::TILE; }                         \
    kinds(name, step, source, result, op)
#include "kernels.inc"
