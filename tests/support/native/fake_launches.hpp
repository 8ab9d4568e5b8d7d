// The fake CUDA driver: what a launch of a kernel of reduce.cu accesses, and whether its table is valid.
#pragma once

#include "fake_queues.hpp"
#include "reduce.cuh"

namespace fake {

struct Traits { // name_traits() of cuda_host.cpp
    int32_t unit, value, out, count, sources, step, is_mixed, nbytes;
};

inline void check_table(bool is_right, const std::string &what) {
    if (!is_right) refuse(INVALID_VALUE, "the table of the launch: " + what);
}

// An access of one part: threads read and write the same units only if all else than `writes` is equal.
struct PartAccess {
    uint64_t begin, end;
    int32_t unit;
    uint32_t part;
    bool writes;
};

// No thread may write what another one reads or writes.
inline void check_threads(std::vector<PartAccess> all) {
    std::sort(all.begin(), all.end(), [](const PartAccess &a, const PartAccess &b) { return a.begin < b.begin; });
    for (size_t i = 0; i < all.size(); i++)
        for (size_t k = i + 1; k < all.size() && all[k].begin < all[i].end; k++) {
            const PartAccess &a = all[i], &b = all[k];
            const bool in_place = a.part == b.part && a.begin == b.begin && a.unit == b.unit && a.writes != b.writes;
            check_table(!(a.writes || b.writes) || in_place,
                        "its threads conflict in " + range_text(b.begin, a.end - b.begin) + ", of the parts " +
                            std::to_string(a.part) + " and " + std::to_string(b.part));
        }
}

template <class Launch> std::vector<Access> accesses_of(const Launch &launch, const Traits &traits) {
    const uint64_t each = uint64_t{launch.sources} + launch.results;
    check_table(launch.orders * sizeof(cuda_reduce::Order) + launch.parts * (sizeof(cuda_reduce::Part) + 8 * each) <=
                    sizeof launch.table,
                "it is too large");
    check_table(traits.sources == 0 || traits.sources == launch.sources, "the kernel has another number of sources");
    check_table(launch.stack >= 1 && launch.stack <= cuda_reduce::MAX_DEPTH, "the stack has an invalid size");
    check_table(launch.kind <= cuda_reduce::BFLOAT && (traits.is_mixed || launch.kind == cuda_reduce::OWN),
                "the kind is invalid");
    int32_t out = traits.out;
    if (traits.is_mixed && launch.kind == cuda_reduce::ACCUMULATOR) out = traits.value;
    if (traits.is_mixed && traits.value == 8 && launch.kind >= cuda_reduce::FLOAT)
        out = launch.kind == cuda_reduce::FLOAT ? 4 : 2;

    std::vector<PartAccess> parts;
    uint32_t tile = 0;
    for (uint32_t p = 0; p < launch.parts; p++) {
        const cuda_reduce::Part &part = launch.part(static_cast<int>(p));
        const uint64_t *at = launch.addresses(static_cast<int>(p));
        check_table(part.size > 0 && part.size % traits.step == 0,
                    "part " + std::to_string(p) + " has an invalid size");
        check_table(part.tile == tile,
                    "part " + std::to_string(p) + " does not begin at the end of the part before it");
        check_table(part.order < launch.orders && part.head % traits.step == 0,
                    "part " + std::to_string(p) + " has an invalid order or head");
        const int64_t units = int64_t{traits.count} * cuda_reduce::THREADS;
        tile += static_cast<uint32_t>(std::max<int64_t>(1, (part.size - part.head + units - 1) / units));
        for (uint64_t k = 0; k < each; k++) {
            const bool writes = k >= launch.sources;
            const bool is_wide =
                !writes && traits.is_mixed && launch.order(part.order).wide >> k % cuda_reduce::MAX_STEPS & 1;
            const int32_t unit = writes ? out : is_wide ? traits.value : traits.unit;
            const int32_t vector = std::min(traits.count * unit, int32_t{cuda_reduce::VECTOR_NBYTES});
            const uint64_t past_vector = (at[k] + part.head * static_cast<uint64_t>(unit)) % static_cast<uint64_t>(vector);
            if (at[k] % static_cast<uint64_t>(unit) || (part.is_aligned && past_vector))
                refuse(MISALIGNED_ADDRESS, "an address of part " + std::to_string(p) + " is misaligned");
            check_table(writes || past_vector <= part.head * static_cast<uint64_t>(unit),
                        "part " + std::to_string(p) + " has a vector that begins before a source");
            parts.push_back({at[k], at[k] + static_cast<uint64_t>(part.size * unit), unit, p, writes});
        }
    }
    check_table(launch.tiles == tile, "the number of tiles is wrong");
    check_table(launch.streams > 0 && launch.length % 2 == 0 && uint64_t{launch.streams} * launch.length >= tile &&
                    launch.length < tile / launch.streams + 3,
                "the streams do not have all tiles, or too many");
    check_threads(parts);
    std::vector<Access> made;
    for (const PartAccess &part : parts) made.push_back({part.begin, part.end - part.begin, part.writes});
    return made;
}

// The work of a launch of a kernel; parameters are copied.
inline Work launch_work(const Function &function, const Context &context, const void *parameters, uint32_t blocks) {
    Traits traits;
    std::memcpy(&traits, function.traits, sizeof traits);
    const size_t nbytes = static_cast<size_t>(traits.nbytes);
    std::shared_ptr<uint64_t> copy(new uint64_t[(nbytes + 7) / 8], std::default_delete<uint64_t[]>());
    std::memcpy(copy.get(), parameters, nbytes);
    const auto &small = *reinterpret_cast<const cuda_reduce::SmallLaunch *>(copy.get());
    const auto &large = *reinterpret_cast<const cuda_reduce::LargeLaunch *>(copy.get());
    const bool is_small = nbytes == sizeof small;
    Work work{function.name, context.handle, context.device, "",
              is_small ? accesses_of(small, traits) : accesses_of(large, traits), {}, true};
    blocks = std::min(blocks, is_small ? small.tiles : large.tiles);
    work.body = [copy, blocks, body = function.body] { body(copy.get(), blocks); };
    return work;
}

} // namespace fake
