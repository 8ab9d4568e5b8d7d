// The kernels for a device. Each is named after its row in kernels.inc and its kind: the number of sources, "any" of them,
// or "mixed"; and "large" if its table is.
#include "reduce.cuh"

using namespace cuda_reduce;

#define COMMA ,
#define ENTRY(name, launch, sources, step, mixed, ...)                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS, 4) name(const __grid_constant__ launch parameters) {         \
        Kernel<__VA_ARGS__, launch, mixed>::template run<sources, step>(parameters, blockIdx.x, gridDim.x, threadIdx.x); \
    }
#define KERNEL(name, source, result, op, step, kinds) kinds(name, step, source, result, op)
#include "kernels.inc"
