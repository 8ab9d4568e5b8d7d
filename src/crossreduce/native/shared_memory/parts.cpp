// All-to-alls of parts of any sizes in one op: the sizes travel with the data. See RankProgram.
//
// A rank's slot has its row of the table, whether its data follow, and the data. So after one barrier each rank knows all
// sizes, and copies its parts. Only if it reads some of them from the memory of other processes, a second barrier follows.
#include "shared_memory.hpp"

#include <algorithm>
#include <cstring>

namespace {

constexpr int64_t LINE_NBYTES = 64;

int64_t header_nbytes(int ranks) {
    return (static_cast<int64_t>(sizeof(int64_t)) * (2 + 2 * ranks) + LINE_NBYTES - 1) / LINE_NBYTES * LINE_NBYTES;
}

} // namespace

// The bytes that this rank sends to all ranks.
int64_t SharedMemory::sent_nbytes() const {
    const int64_t *row = row_of_parts(rank);
    int64_t units = 0;
    for (int to = 0; to < ranks; to++) units += row[1 + to];
    return units * row[0];
}

int64_t SharedMemory::slot_nbytes_of_parts() const {
    const int64_t *row = row_of_parts(rank), header = header_nbytes(ranks), all = header + sent_nbytes();
    return all <= room() && *std::max_element(row + 1, row + 1 + ranks) * row[0] <= program->most_part ? all : header;
}

void SharedMemory::put_parts() {
    const int64_t *row = row_of_parts(rank);
    const int64_t nbytes = sent_nbytes(), header = header_nbytes(ranks), words = 1 + 2 * ranks;
    const bool inside = slot_nbytes_of_parts() == header + nbytes;
    auto *to = reinterpret_cast<int64_t *>(memory(rank));
    std::copy(row, row + words, to);
    to[words] = inside;
    if (inside && nbytes > 0) std::memcpy(memory(rank) + header, buffers[1], static_cast<size_t>(nbytes));
    calls.trace(Phase::copy_in, next);
}

Outcome SharedMemory::take_parts() {
    const int64_t header = header_nbytes(ranks), words = 1 + 2 * ranks;
    bool all_inside = true, fits = true;
    std::vector<bool> inside(static_cast<size_t>(ranks));
    for (int of = 0; of < ranks; of++) {
        const auto *from = reinterpret_cast<const int64_t *>(memory(of));
        std::copy(from, from + words, row_of_parts(of));
        inside[static_cast<size_t>(of)] = from[words] != 0;
        all_inside = all_inside && from[words] != 0;
    }
    for (int from = 0; from < ranks; from++)
        for (int to = 0; to < ranks; to++)
            fits = fits && row_of_parts(from)[0] == row_of_parts(rank)[0] && row_of_parts(from)[1 + to] == row_of_parts(to)[1 + ranks + from];
    const bool moves = fits && (all_inside || program->reads_parts);
    const int64_t unit = row_of_parts(rank)[0];
    std::vector<int64_t> places(static_cast<size_t>(ranks)); // of each rank's part in the result
    for (int of = 1; of < ranks; of++) places[static_cast<size_t>(of)] = places[static_cast<size_t>(of) - 1] + row_of_parts(rank)[ranks + of] * unit;
    for (int k = 0; moves && k < ranks; k++) { // ranks begin with different ones, to read in parallel
        const int of = (rank + k) % ranks;
        const int64_t *sent = row_of_parts(of) + 1;
        int64_t offset = 0;
        for (int to = 0; to < rank; to++) offset += sent[to] * unit;
        const int64_t nbytes = sent[rank] * unit;
        char *to = buffers[2] + places[static_cast<size_t>(of)];
        if (nbytes == 0) continue;
        if (of == rank) {
            std::memcpy(to, buffers[1] + offset, static_cast<size_t>(nbytes));
        } else if (inside[static_cast<size_t>(of)]) {
            std::memcpy(to, memory(of) + header + offset, static_cast<size_t>(nbytes));
        } else if (!read_peer(of, 1, offset, to, nbytes)) {
            return is_aborted() ? Outcome::aborted : Outcome::unreadable;
        }
    }
    *reinterpret_cast<int64_t *>(buffers[0]) = moves ? MOVED : NOT_MOVED;
    calls.trace(Phase::copy_out, next);
    if (!moves || all_inside) next = program->stages.size() - 1; // nobody reads another rank's memory: no further barrier
    return Outcome::done;
}
