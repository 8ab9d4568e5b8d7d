#include "kernel.hpp"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <unistd.h>
#include <utility>

#include "exact.hpp"
#include "format.hpp"
#include "thread_pool.hpp"

namespace {

// Arrays often have the same offset within their pages, so all arrays that a pass accesses compete for the same ways of
// the first-level cache. If there are more arrays than ways, results that stay in the cache are therefore computed in a
// tile, which is then copied to one array after the other. Measured, as the time with copies / without: with 8 ways about
// 0.75 for 16 arrays, 0.4 for 40. With 12 ways 1.3 for 16 arrays of 4 KiB to 1 MiB, 0.9 for 72. So with that many ways,
// only many arrays are copied.
constexpr size_t MANY_WAYS = 12, MANY_ARRAYS = 24;
// With at least this many lines, a pass starts at a line boundary of the first result.
constexpr size_t MIN_LINES_TO_ALIGN = 16;
// The bytes of a replica that a thread takes at a time. The start of a share costs cache and TLB misses (1 MiB is 5 to
// 20 % faster than 128 KiB), but every thread needs work until the end.
constexpr int64_t MAX_SHARE = 1 << 20, MIN_SHARE = 1 << 14, SHARES_PER_THREAD = 8;

// Allocates from a thread's working memory. Copies of an allocator start at the same position.
struct Scratch {
    char *next;
    template <class T> T *take(size_t count) {
        char *at = next;
        next += (count * sizeof(T) + LINE - 1) / LINE * LINE;
        return reinterpret_cast<T *>(at);
    }
};

struct Run { // one run of a kernel
    const Kernel &kernel;
    const std::vector<Source> &sources;
    const std::vector<char *> &results;
    bool streaming, by_line, copies_tiles;
    Format format;
    int64_t tile, share;           // their sizes in elements
    std::vector<long> first_share; // the first share of each segment, and the total

    const FusedProgram &program_of(const Segment &s) const { return kernel.programs[static_cast<size_t>(s.program)]; }
    const Source *sources_of(const Segment &s) const { return &sources[static_cast<size_t>(s.tensor * kernel.sources)]; }
    char *const *results_of(const Segment &s) const { return &results[static_cast<size_t>(s.tensor * kernel.results)]; }
};

// Copy elements start..stop, counted in C order, of a strided array.
void gather(char *to, const Source &from, int64_t start, int64_t stop, size_t itemsize) {
    const Strided &s = *from.strided;
    int64_t index[MAX_AXES], rest = start;
    const char *at = from.data;
    for (int axis = s.axes - 1; axis >= 0; axis--) {
        index[axis] = rest % s.shape[axis];
        rest /= s.shape[axis];
        at += index[axis] * s.strides[axis];
    }
    const int last = s.axes - 1;
    while (start < stop) {
        const int64_t count = std::min(stop - start, s.shape[last] - index[last]), stride = s.strides[last];
        auto copy_each = [&](auto size) {
            for (int64_t i = 0; i < count; i++)
                std::memcpy(to + static_cast<size_t>(i) * size, at + i * stride, size);
        };
        if (stride == static_cast<int64_t>(itemsize)) std::memcpy(to, at, static_cast<size_t>(count) * itemsize);
        else if (itemsize == 1) copy_each(std::integral_constant<size_t, 1>{}); // constant sizes become single moves
        else if (itemsize == 2) copy_each(std::integral_constant<size_t, 2>{});
        else if (itemsize == 4) copy_each(std::integral_constant<size_t, 4>{});
        else if (itemsize == 8) copy_each(std::integral_constant<size_t, 8>{});
        else copy_each(std::integral_constant<size_t, 16>{});
        to += static_cast<size_t>(count) * itemsize;
        start += count;
        at += count * stride;
        index[last] += count;
        for (int axis = last; axis > 0 && index[axis] == s.shape[axis]; axis--) {
            at += s.strides[axis - 1] - s.strides[axis] * s.shape[axis];
            index[axis] = 0;
            index[axis - 1]++;
        }
    }
}

// Run a pass on less than a line, on copies of the operands that are padded to a line.
void run_partial_line(const Pass &pass, const Format &f, size_t start, size_t count, Scratch scratch) {
    PassFold *folds = scratch.take<PassFold>(pass.fold_count);
    Output *outputs = scratch.take<Output>(pass.output_count);
    const size_t stored = f.permuted ? f.line : count; // of an accumulator
    auto padded = [&](const Location &from) {
        if (from.stride == 0) return from;
        const size_t used = from.is_accumulator ? stored : count;
        char *copy = scratch.take<char>(2 * LINE);
        std::memcpy(copy, from.base + start * from.stride, used * from.stride);
        std::memset(copy + used * from.stride, 0, (f.line - used) * from.stride);
        return Location{copy, from.stride, from.is_accumulator};
    };
    for (size_t k = 0; k < pass.fold_count; k++) {
        const PassFold &fold = pass.folds[k];
        Location *operands = scratch.take<Location>(fold.count);
        for (size_t j = 0; j < fold.count; j++) operands[j] = padded(fold.operands[j]);
        char *out = fold.out_stride != 0 ? scratch.take<char>(2 * LINE) : fold.out;
        folds[k] = {operands, fold.count, out, fold.out_stride};
    }
    Target *lines = scratch.take<Target>(pass.output_count);
    for (size_t v = 0; v < pass.output_count; v++) {
        lines[v] = {scratch.take<char>(LINE), false};
        outputs[v] = {padded(pass.outputs[v].from), pass.outputs[v].is_last_fold, &lines[v], 1};
    }
    f.function({folds, pass.fold_count, outputs, pass.output_count, pass.divisor}, 0, f.line);
    for (size_t k = 0; k < pass.fold_count; k++) {
        const PassFold &fold = pass.folds[k];
        if (fold.out_stride != 0)
            std::memcpy(fold.out + start * fold.out_stride, folds[k].out, stored * fold.out_stride);
    }
    for (size_t v = 0; v < pass.output_count; v++)
        for (size_t r = 0; r < pass.outputs[v].count; r++)
            std::memcpy(pass.outputs[v].targets[r].data + start * f.out, lines[v].data, count * f.out);
}

// Return how many bytes follow an address before the next line boundary.
size_t bytes_to_boundary(const char *at) { return -reinterpret_cast<uintptr_t>(at) % LINE; }

// Run a pass on any number of units: up to a line boundary of the first result, then whole lines, then the remainder.
void run_pass(const Pass &pass, const Format &f, size_t count, bool streaming, Scratch scratch) {
    size_t head = 0;
    if (pass.output_count > 0 && count >= MIN_LINES_TO_ALIGN * f.line) {
        const size_t off = bytes_to_boundary(pass.outputs[0].targets[0].data);
        if (off % (f.out * f.units) == 0 && !f.permuted) head = off / f.out; // whole elements
        for (size_t v = 0; streaming && v < pass.output_count; v++)
            for (size_t r = 0; r < pass.outputs[v].count; r++) {
                Target &target = pass.outputs[v].targets[r];
                target.streaming = bytes_to_boundary(target.data + head * f.out) == 0;
            }
    }
    if (head > 0) run_partial_line(pass, f, 0, head, scratch);
    const size_t tail = head + (count - head) / f.line * f.line;
    if (tail > head) f.function(pass, head, tail);
    if (count > tail) run_partial_line(pass, f, tail, count - tail, scratch);
}

// Return one output per distinct value, with all results that it is written to, and the number of outputs.
template <class Locate>
std::pair<Output *, size_t> collect_outputs(const Run &run, const Segment &segment, int64_t start, Scratch &scratch,
                                            Locate &&locate) {
    const std::vector<int> &values = run.program_of(segment).results;
    const bool last = ends_in_fold(run.program_of(segment));
    const size_t offset = static_cast<size_t>(start) * ITEMSIZES[run.kernel.result];
    Output *outputs = scratch.take<Output>(values.size());
    Target *targets = scratch.take<Target>(values.size());
    size_t count = 0;
    for (size_t r = 0; r < values.size(); r++) {
        if (std::find(&values[0], &values[r], values[r]) != &values[r]) continue; // an earlier output includes it
        Output &output = outputs[count++] = {locate(values[r]), last, targets, 0};
        for (size_t other = r; other < values.size(); other++)
            if (values[other] == values[r])
                targets[output.count++] = {run.results_of(segment)[other] + offset, false};
        targets += output.count;
    }
    return {outputs, count};
}

// Whether results are written with streaming stores. If a result's memory is a source's, its lines are in the cache
// already, and normal stores are faster.
bool is_streaming(const Run &run, const Segment &segment) {
    for (int r = 0; run.streaming && r < run.kernel.results; r++)
        for (int s = 0; s < run.kernel.sources; s++)
            if (run.sources_of(segment)[s].data == run.results_of(segment)[r]) return false;
    return run.streaming;
}

// Run the program line by line. Intermediate values are a few lines long and never leave the first-level cache.
void run_lines(const Run &run, const Segment &segment, int64_t start, int64_t stop, Scratch scratch) {
    const Format &f = run.format;
    const FusedProgram &program = run.program_of(segment);
    const Source *sources = run.sources_of(segment);
    const size_t offset = static_cast<size_t>(start) * f.units;
    const size_t slot_nbytes = MAX_LINES * f.line * f.acc;
    char *slots = scratch.take<char>(static_cast<size_t>(program.slots) * slot_nbytes);
    auto locate = [&](int operand) {
        if (operand >= 0) return Location{sources[operand].data + offset * f.in, f.in, false};
        return Location{slots + static_cast<size_t>(~operand) * slot_nbytes, 0, true};
    };
    PassFold *folds = scratch.take<PassFold>(program.folds.size());
    for (size_t k = 0; k < program.folds.size(); k++) {
        const Fold &fold = program.folds[k];
        Location *operands = scratch.take<Location>(fold.operands.size());
        for (size_t j = 0; j < fold.operands.size(); j++) operands[j] = locate(fold.operands[j]);
        const bool last = ends_in_fold(program) && k + 1 == program.folds.size();
        char *out = last ? nullptr : const_cast<char *>(locate(~fold.slot).base);
        folds[k] = {operands, fold.operands.size(), out, 0};
    }
    const auto [outputs, count] = collect_outputs(run, segment, start, scratch, locate);
    const Pass pass = {folds, program.folds.size(), outputs, count, run.kernel.divisor};
    run_pass(pass, f, static_cast<size_t>(stop - start) * f.units, is_streaming(run, segment), scratch);
}

// Compute exact sums: of any number of elements, or of at most a tile if a source is strided.
void run_exact_sums(const Run &run, const Segment &segment, int64_t start, int64_t stop, Scratch scratch) {
    const Kernel &kernel = run.kernel;
    const size_t itemsize = ITEMSIZES[kernel.dtype], units = run.format.units;
    const std::vector<int> &operands = run.program_of(segment).folds[0].operands;
    const char **terms = scratch.take<const char *>(operands.size());
    for (size_t k = 0; k < operands.size(); k++) {
        const Source &source = run.sources_of(segment)[operands[k]];
        terms[k] = source.data + static_cast<size_t>(start) * itemsize;
        if (source.strided == nullptr) continue;
        char *gathered = scratch.take<char>(static_cast<size_t>(run.tile) * itemsize);
        gather(gathered, source, start, stop, itemsize);
        terms[k] = gathered;
    }
    const ExactSum sum = {terms, operands.size(), static_cast<uint32_t>(kernel.divisor),
                          scratch.take<char>(operands.size() * EXACT_PADDING)};
    const ExactFunction function = kernel.isa->exact[part_of(kernel.dtype)][part_of(kernel.result)];
    const auto no_operand = [](int) { return Location{}; }; // every result is the fold's value
    const Output *output = collect_outputs(run, segment, start, scratch, no_operand).first;
    const size_t size = static_cast<size_t>(stop - start) * units, in = itemsize / units, out = run.format.out;
    if (!kernel.weights.empty()) {
        sum_weighted_exactly(sum, kernel.weights, part_of(kernel.dtype), part_of(kernel.result), *output, size);
        return;
    }
    size_t head = 0; // elements before a line boundary of the first result
    if (is_streaming(run, segment)) {
        const size_t off = bytes_to_boundary(output->targets[0].data);
        if (off % out == 0) head = std::min(size, off / out);
        if (head > 0) function(sum, *output, head);
        for (size_t k = 0; k < operands.size(); k++) terms[k] += head * in;
        for (size_t r = 0; r < output->count; r++) {
            Target &target = output->targets[r];
            target.data += head * out;
            target.streaming = bytes_to_boundary(target.data) == 0;
        }
    }
    function(sum, *output, size - head);
}

// Run the program on one tile, for sources that are many, strided or of another dtype. An intermediate value is a tile.
void run_tile(const Run &run, const Segment &segment, int64_t start, int64_t stop, Scratch scratch) {
    const Kernel &kernel = run.kernel;
    const Format &f = run.format;
    const InstructionSet &isa = *kernel.isa;
    const FusedProgram &program = run.program_of(segment);
    const size_t size = static_cast<size_t>(stop - start), count = size * f.units;
    const size_t tile = static_cast<size_t>(run.tile) * f.units, itemsize = ITEMSIZES[kernel.dtype];
    char *slots = scratch.take<char>(static_cast<size_t>(program.slots) * tile * f.acc);
    char *divided_tile = scratch.take<char>(tile * f.acc);
    char *tiles[MAX_PASS_SOURCES], *gathered = scratch.take<char>(static_cast<size_t>(run.tile) * itemsize);
    for (char *&one : tiles) one = scratch.take<char>(tile * std::max(f.acc, f.in));
    auto slot_at = [&](int slot) { return slots + static_cast<size_t>(slot) * tile * f.acc; };
    auto locate = [&](int operand, size_t k) { // a source that is gathered or converted is copied to tiles[k]
        if (operand < 0) return Location{slot_at(~operand), f.acc, true};
        const Source &source = run.sources_of(segment)[operand];
        const char *data = source.data + static_cast<size_t>(start) * itemsize;
        if (source.strided != nullptr) {
            gather(f.convert_sources ? gathered : tiles[k], source, start, stop, itemsize);
            data = f.convert_sources ? gathered : tiles[k];
        }
        if (f.convert_sources) {
            isa.convert[kernel.dtype][kernel.accumulator](tiles[k], data, size);
            data = tiles[k];
        }
        return Location{data, f.in, false};
    };
    auto locate_value = [&](int value) { return locate(value, 0); };
    const bool streaming = is_streaming(run, segment);
    const Format bytes = {isa.same[SUM][U8], LINE, 1, 1, 1, 1, false, false};
    // Copy finished elements from a tile to all targets of an output.
    auto deliver = [&](const char *from, const Output &output) {
        const size_t nbytes = size * ITEMSIZES[kernel.result];
        for (size_t r = 0; run.copies_tiles && r < output.count; r++) std::memcpy(output.targets[r].data, from, nbytes);
        const Output all = {{from, 1, false}, false, output.targets, output.count};
        if (!run.copies_tiles) run_pass({nullptr, 0, &all, 1, 1}, bytes, nbytes, streaming, scratch);
    };
    Target finished_target = {divided_tile, false};
    Location operands[MAX_PASS_SOURCES + 1];
    for (size_t i = 0; i < program.folds.size(); i++) {
        const Fold &fold = program.folds[i];
        size_t k = 0;
        while (k < fold.operands.size()) {
            size_t taken = 0;
            if (k > 0) operands[taken++] = Location{slot_at(fold.slot), f.acc, true};
            for (size_t j = 0; j < MAX_PASS_SOURCES && k < fold.operands.size(); j++, k++)
                operands[taken++] = locate(fold.operands[k], j);
            const bool last = i + 1 == program.folds.size() && k == fold.operands.size();
            if (!f.convert_results && last && ends_in_fold(program)) {
                const PassFold last_fold = {operands, taken, nullptr, 0};
                const Output *output = collect_outputs(run, segment, start, scratch, locate_value).first;
                if (!run.copies_tiles)
                    return run_pass({&last_fold, 1, output, 1, kernel.divisor}, f, count, streaming, scratch);
                const Output finished = {{}, true, &finished_target, 1};
                run_pass({&last_fold, 1, &finished, 1, kernel.divisor}, f, count, false, scratch);
                return deliver(divided_tile, *output);
            }
            const PassFold partial = {operands, taken, slot_at(fold.slot), f.acc};
            run_pass({&partial, 1, nullptr, 0, 1}, f, count, false, scratch);
        }
    }
    const auto [outputs, distinct] = collect_outputs(run, segment, start, scratch, locate_value);
    for (size_t v = 0; v < distinct; v++) {
        outputs[v].is_last_fold = false;
        if (!f.convert_results) {
            run_pass({nullptr, 0, &outputs[v], 1, kernel.divisor}, f, count, streaming, scratch);
            continue;
        }
        const Output divided = {outputs[v].from, false, &finished_target, 1};
        run_pass({nullptr, 0, &divided, 1, kernel.divisor}, f, count, false, scratch);
        char *converted = f.divide != nullptr ? divided_tile : tiles[0];
        if (f.divide != nullptr) f.divide(divided_tile, size, kernel.divisor);
        else isa.convert[kernel.accumulator][kernel.result](converted, divided_tile, size);
        deliver(converted, outputs[v]);
    }
}

void run_share(void *argument, long number, char *memory) {
    const Run &run = *static_cast<Run *>(argument);
    const auto &first = run.first_share;
    const auto at = std::upper_bound(first.begin(), first.end(), number) - first.begin() - 1;
    const Segment &segment = run.kernel.segments[static_cast<size_t>(at)];
    const int64_t start = segment.start + (number - first[static_cast<size_t>(at)]) * run.share;
    const int64_t stop = std::min(segment.stop, start + run.share);
    const bool is_exact = run.kernel.op == EXACT_SUM;
    const auto run_tiles = is_exact ? run_exact_sums : run_tile;
    if (run.by_line) return (is_exact ? run_exact_sums : run_lines)(run, segment, start, stop, {memory});
    // Tiles start at line boundaries of the first result.
    const size_t itemsize = ITEMSIZES[run.kernel.result];
    const char *to = run.results_of(segment)[0] + static_cast<size_t>(start) * itemsize;
    int64_t size = run.tile - static_cast<int64_t>((reinterpret_cast<uintptr_t>(to) & (LINE - 1)) / itemsize);
    for (int64_t begin = start; begin < stop;) {
        run_tiles(run, segment, begin, std::min(stop, begin + size), {memory});
        begin += size;
        size = run.tile;
    }
}

// Return the ways of the first-level cache, as far as the system reports them.
size_t ways() {
#if defined(_SC_LEVEL1_DCACHE_ASSOC)
    static const long found = sysconf(_SC_LEVEL1_DCACHE_ASSOC);
    return found > 0 ? static_cast<size_t>(found) : 8;
#else
    return 8;
#endif
}

} // namespace

// Copy the source of each segment to its only result.
void copy_segments(const Kernel &kernel, const std::vector<Source> &sources, const std::vector<char *> &results) {
    for (const Segment &segment : kernel.segments) {
        const auto tensor = static_cast<size_t>(segment.tensor);
        const auto source = tensor * static_cast<size_t>(kernel.sources) +
                            static_cast<size_t>(kernel.programs[static_cast<size_t>(segment.program)].results[0]);
        const size_t itemsize = ITEMSIZES[kernel.result], offset = static_cast<size_t>(segment.start) * itemsize;
        const size_t nbytes = static_cast<size_t>(segment.stop - segment.start) * itemsize;
        if (results[tensor] != sources[source].data)
            std::memcpy(results[tensor] + offset, sources[source].data + offset, nbytes);
    }
}

bool run_kernel(const Kernel &kernel, const std::vector<Source> &sources, const std::vector<char *> &results,
                int threads, bool streaming) {
    const auto is_contiguous = [](const Source &source) { return source.strided == nullptr; };
    const bool contiguous = std::all_of(sources.begin(), sources.end(), is_contiguous);
    // glibc copies with an instruction that does not read the lines that it overwrites, which other cores may have.
    if (kernel.only_copies && kernel.results == 1 && threads == 1 && !streaming && contiguous) {
        copy_segments(kernel, sources, results);
        return true;
    }
    Format format = format_of(kernel);
    const bool fits_lines = kernel.op == EXACT_SUM || kernel.by_line; // exact sums read any number of sources
    bool by_line = !format.convert_sources && !format.convert_results && fits_lines && contiguous;
    const size_t arrays = std::min(static_cast<size_t>(kernel.sources), MAX_PASS_SOURCES) + static_cast<size_t>(kernel.results);
    const bool too_many = arrays > (ways() < MANY_WAYS ? ways() : MANY_ARRAYS);
    const bool copies_tiles = !streaming && kernel.results > 1 && too_many && kernel.op != EXACT_SUM;
    by_line = by_line && !copies_tiles;
    if (kernel.dtype == BF16 && kernel.accumulator == F32 && kernel.result == BF16 && kernel.isa->pairs[kernel.op]) {
        format.function = kernel.isa->pairs[kernel.op];
        format.permuted = !by_line;
    }
    Run run{kernel, sources, results, streaming, by_line, copies_tiles, format, 0, 0, {}};
    const size_t in = ITEMSIZES[kernel.dtype], acc = ITEMSIZES[kernel.accumulator], out = ITEMSIZES[kernel.result];
    run.tile = static_cast<int64_t>(kernel.tile_nbytes / std::max({in, acc, out}));
    const auto itemsize = static_cast<int64_t>(in);
    const int64_t nbytes = std::clamp(kernel.elements * itemsize / (threads * SHARES_PER_THREAD), MIN_SHARE, MAX_SHARE);
    run.share = std::max<int64_t>(nbytes / itemsize / run.tile, 1) * run.tile;
    run.first_share.reserve(kernel.segments.size() + 1);
    long shares = 0;
    for (const Segment &segment : kernel.segments) {
        run.first_share.push_back(shares);
        shares += static_cast<long>((segment.stop - segment.start + run.share - 1) / run.share);
    }
    run.first_share.push_back(shares);
    ParallelTask task{run_share, &run, shares, threads - 1, kernel.scratch_nbytes};
    return run_parallel(task);
}
