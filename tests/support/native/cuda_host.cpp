// The body of the CUDA kernels on the host: a loop over blocks and threads, for tests. Each kernel of a device has a
// function of the same name here: name(parameters, blocks). name_traits() has its facts for the fake CUDA driver: the
// bytes of a unit of sources, values and results; the units of a thread; the sources (0: any number); the step; whether it
// is mixed; the bytes of its parameters.
#include <cstdint>

static thread_local int64_t reads[65]; // how often so many bytes of a source were read at once
#define HAS_READ(nbytes) reads[nbytes]++
#include "reduce.cuh"

using namespace cuda_reduce;

extern "C" const int64_t *all_reads() { return reads; }
extern "C" uint32_t tile_of(const SmallLaunch *launch, uint32_t turn, uint32_t together) {
    return launch->tile(turn, together);
}
extern "C" uint32_t streams(uint32_t devices, uint32_t parts) { return streams_of(devices, parts); }

#define COMMA ,
#define ENTRY(name, launch, sources, step, mixed, ...)                                                                 \
    extern "C" void name(const launch *parameters, uint32_t blocks) {                                                  \
        for (uint32_t block = 0; block < blocks; block++)                                                              \
            for (uint32_t thread = 0; thread < THREADS; thread++)                                                      \
                Kernel<__VA_ARGS__, launch, mixed>::template run<sources, step>(*parameters, block, blocks, thread);   \
    }                                                                                                                  \
    extern "C" const int32_t *name##_traits() {                                                                        \
        using K = Kernel<__VA_ARGS__, launch, mixed>;                                                                  \
        static const int32_t traits[] = {sizeof(K::Unit), sizeof(K::Wide),  sizeof(K::Out), K::COUNT,                  \
                                         sources,         step,             mixed,          sizeof(launch)};           \
        return traits;                                                                                                 \
    }
#define KERNEL(name, source, result, op, step, kinds) kinds(name, step, source, result, op)
#include "kernels.inc"
