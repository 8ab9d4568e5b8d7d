#include "engine.hpp"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "pool.hpp"

namespace {

// So many sources are read side by side; what has more is added up tile by tile, so many at a time.
constexpr size_t SIDE_BY_SIDE = 8;
// Programs of more operands than this, slots included, go tile by tile too.
constexpr size_t MOST_OPERANDS = 32;
// From so many lines on it pays to begin where a line of the first result does.
constexpr size_t MANY_LINES = 16;
// The bytes of accumulator in a tile.
constexpr size_t TILE = 4096;
// The bytes of a replica that a thread takes at a time: many, since where a share begins memory must be found anew
// (1 MiB is 5 to 20 % quicker than 128 KiB), but so few that all threads have work to the end.
constexpr int64_t MOST_SHARE = 1 << 20, LEAST_SHARE = 1 << 14, SHARES_PER_THREAD = 8;
// Tiles get smaller, where there are many slots, to keep a thread's working memory below this.
constexpr size_t MOST_SCRATCH = 512 * 1024;

bool is_complex(Type type) { return type == C64 || type == C128; }
bool is_half(Type type) { return type == F16 || type == BF16; }

// A thread's working memory, handed out piece by piece.
struct Arena {
    char *next;
    template <class T> T *take(size_t count) {
        char *at = next;
        next += (count * sizeof(T) + LINE - 1) / LINE * LINE;
        return reinterpret_cast<T *>(at);
    }
};

// How the plan's numbers are walked.
struct Numbers {
    Walker walker;
    size_t line;          // units in a line of results
    size_t units;         // of an element: 2 of a complex one
    size_t in, acc, out;  // bytes of a unit, as the walker sees them
    bool before, after;   // sources, results are converted tile by tile
};

struct Run {
    const Plan &plan;
    const std::vector<Operand> &sources;
    const std::vector<char *> &results;
    bool streaming, by_line;
    Numbers numbers;
    int64_t tile, share;     // elements
    std::vector<long> first; // the first share of each segment, and their number
};

Numbers numbers_of(const Plan &plan) {
    const Tiles &tiles = *plan.tiles;
    const size_t units = is_complex(plan.accumulator) ? 2 : 1, acc = SIZES[plan.accumulator] / units;
    if (is_half(plan.dtype) && plan.accumulator == F32 && plan.result == plan.dtype)
        return {tiles.half[plan.op][plan.dtype == BF16], LINE / 2, 1, 2, 4, 2, false, false};
    return {tiles.same[plan.op][plan.accumulator], LINE / acc, units, acc, acc, acc, plan.dtype != plan.accumulator,
            plan.accumulator != plan.result};
}

// Read elements start..stop, counted in C order, of a strided array.
void gather(char *to, const Operand &from, int64_t start, int64_t stop, size_t itemsize) {
    const Strided &s = *from.strided;
    int64_t index[MOST_AXES], rest = start;
    const char *at = from.data;
    for (int axis = s.axes - 1; axis >= 0; axis--) {
        index[axis] = rest % s.shape[axis];
        rest /= s.shape[axis];
        at += index[axis] * s.strides[axis];
    }
    const int last = s.axes - 1;
    while (start < stop) {
        const int64_t count = std::min(stop - start, s.shape[last] - index[last]), stride = s.strides[last];
        auto each = [&](auto size) {
            for (int64_t i = 0; i < count; i++)
                std::memcpy(to + static_cast<size_t>(i) * size, at + i * stride, size);
        };
        if (stride == static_cast<int64_t>(itemsize)) std::memcpy(to, at, static_cast<size_t>(count) * itemsize);
        else if (itemsize == 1) each(std::integral_constant<size_t, 1>{}); // known sizes become single moves
        else if (itemsize == 2) each(std::integral_constant<size_t, 2>{});
        else if (itemsize == 4) each(std::integral_constant<size_t, 4>{});
        else if (itemsize == 8) each(std::integral_constant<size_t, 8>{});
        else each(std::integral_constant<size_t, 16>{});
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

// Walk less than a line: through copies that are padded to one.
void walk_part(const Walk &walk, const Numbers &n, size_t start, size_t count, Arena arena) {
    Fold *folds = arena.take<Fold>(walk.folds);
    Value *values = arena.take<Value>(walk.values);
    auto padded = [&](const Place &place) {
        if (place.advance == 0) return place;
        char *copy = arena.take<char>(2 * LINE);
        std::memcpy(copy, place.base + start * place.advance, count * place.advance);
        std::memset(copy + count * place.advance, 0, (n.line - count) * place.advance);
        return Place{copy, place.advance, place.wide};
    };
    for (size_t f = 0; f < walk.folds; f++) {
        const Fold &fold = walk.fold[f];
        Place *operands = arena.take<Place>(fold.count);
        for (size_t k = 0; k < fold.count; k++) operands[k] = padded(fold.operands[k]);
        const bool kept = fold.keep != nullptr && fold.keep_advance != 0;
        folds[f] = {operands, fold.count, kept ? arena.take<char>(2 * LINE) : fold.keep, fold.keep_advance};
    }
    Target *lines = arena.take<Target>(walk.values);
    for (size_t v = 0; v < walk.values; v++) {
        lines[v] = {arena.take<char>(LINE), false};
        values[v] = {padded(walk.value[v].from), walk.value[v].last, &lines[v], 1};
    }
    n.walker({folds, walk.folds, values, walk.values, walk.divisor}, 0, n.line);
    for (size_t f = 0; f < walk.folds; f++) {
        const Fold &fold = walk.fold[f];
        if (fold.keep != nullptr && fold.keep_advance != 0)
            std::memcpy(fold.keep + start * fold.keep_advance, folds[f].keep, count * fold.keep_advance);
    }
    for (size_t v = 0; v < walk.values; v++)
        for (size_t r = 0; r < walk.value[v].count; r++)
            std::memcpy(walk.value[v].to[r].data + start * n.out, lines[v].data, count * n.out);
}

// Walk any number of units: to where lines of the first result begin, through whole lines, and what is left.
void walk_all(const Walk &walk, const Numbers &n, size_t count, bool streaming, Target *targets, size_t results,
              Arena arena) {
    size_t head = 0;
    if (results > 0 && count >= MANY_LINES * n.line) {
        const size_t off = (LINE - (reinterpret_cast<uintptr_t>(targets[0].data) & (LINE - 1))) & (LINE - 1);
        if (off % (n.out * n.units) == 0) head = off / n.out; // whole elements
        for (size_t r = 0; r < results; r++)
            targets[r].past =
                streaming && (reinterpret_cast<uintptr_t>(targets[r].data + head * n.out) & (LINE - 1)) == 0;
    }
    if (head > 0) walk_part(walk, n, 0, head, arena);
    const size_t whole = head + (count - head) / n.line * n.line;
    if (whole > head) n.walker(walk, head, whole);
    if (count > whole) walk_part(walk, n, whole, count - whole, arena);
}

// Whether all results are one and the same value.
bool one_value(const Program &program) {
    const auto &results = program.results;
    return std::equal(results.begin() + 1, results.end(), results.begin());
}

// Whether all results are the last fold's value, which then goes to them from the registers.
bool straight(const Program &program) {
    return one_value(program) && !program.folds.empty() && program.results[0] == ~program.folds.back().out;
}

// Fill `values` and `targets` with what goes where: each value once, with all results that are it.
template <class From>
size_t route(const Plan &plan, const Program &program, char *const *results, size_t offset, Value *values,
             Target *targets, From &&from) {
    const bool last = straight(program);
    size_t count = 0, placed = 0;
    for (int r = 0; r < plan.results; r++) {
        const int value = program.results[static_cast<size_t>(r)];
        const auto begin = program.results.begin();
        if (std::find(begin, begin + r, value) != begin + r) continue; // went with the first result that is it
        Target *to = targets + placed;
        for (int other = r; other < plan.results; other++)
            if (program.results[static_cast<size_t>(other)] == value)
                targets[placed++] = {results[other] + offset, false};
        values[count++] = {from(value), last, to, static_cast<size_t>(targets + placed - to)};
    }
    return count;
}

// Whether a result of the tensor lies where a source does. Its lines are in the cache then, and best written there.
bool in_place(const Run &run, int64_t tensor) {
    const Plan &plan = run.plan;
    const Operand *sources = &run.sources[static_cast<size_t>(tensor * plan.sources)];
    char *const *results = &run.results[static_cast<size_t>(tensor * plan.results)];
    for (int r = 0; r < plan.results; r++)
        for (int s = 0; s < plan.sources; s++)
            if (sources[s].data == results[r]) return true;
    return false;
}

// Line by line through the whole program: intermediate values are a line each and never leave the first-level cache.
void run_lines(const Run &run, const Segment &segment, int64_t start, int64_t stop, Arena arena) {
    const Plan &plan = run.plan;
    const Numbers &n = run.numbers;
    const Program &program = plan.programs[static_cast<size_t>(segment.program)];
    const Operand *sources = &run.sources[static_cast<size_t>(segment.tensor * plan.sources)];
    char *const *results = &run.results[static_cast<size_t>(segment.tensor * plan.results)];
    const size_t offset = static_cast<size_t>(start) * n.units;
    const size_t step = MOST_LINES * n.line * n.acc;
    char *slots = arena.take<char>(static_cast<size_t>(program.slots) * step);
    auto place = [&](int operand) {
        if (operand >= 0) return Place{sources[operand].data + offset * n.in, n.in, false};
        return Place{slots + static_cast<size_t>(~operand) * step, 0, true};
    };
    Fold *folds = arena.take<Fold>(program.folds.size());
    for (size_t f = 0; f < program.folds.size(); f++) {
        const Combination &fold = program.folds[f];
        Place *operands = arena.take<Place>(fold.operands.size());
        for (size_t k = 0; k < fold.operands.size(); k++) operands[k] = place(fold.operands[k]);
        const bool last = straight(program) && f + 1 == program.folds.size();
        folds[f] = {operands, fold.operands.size(), last ? nullptr : const_cast<char *>(place(~fold.out).base), 0};
    }
    Value *values = arena.take<Value>(static_cast<size_t>(plan.results));
    Target *targets = arena.take<Target>(static_cast<size_t>(plan.results));
    const size_t count = route(plan, program, results, offset * n.out, values, targets,
                               [&](int value) { return place(value); });
    walk_all({folds, program.folds.size(), values, count, plan.divisor}, n, static_cast<size_t>(stop - start) * n.units,
             run.streaming && !in_place(run, segment.tensor), targets, static_cast<size_t>(plan.results), arena);
}

// Tile by tile: sources that are many, strided or to be converted; intermediate values are a tile each.
void run_tile(const Run &run, const Segment &segment, int64_t start, int64_t stop, Arena arena) {
    const Plan &plan = run.plan;
    const Numbers &n = run.numbers;
    const Tiles &tiles = *plan.tiles;
    const Program &program = plan.programs[static_cast<size_t>(segment.program)];
    const Operand *sources = &run.sources[static_cast<size_t>(segment.tensor * plan.sources)];
    char *const *results = &run.results[static_cast<size_t>(segment.tensor * plan.results)];
    const size_t size = static_cast<size_t>(stop - start), count = size * n.units;
    const size_t tile = static_cast<size_t>(run.tile) * n.units, in = SIZES[plan.dtype];
    char *slots = arena.take<char>(static_cast<size_t>(program.slots) * tile * n.acc);
    char *finished = arena.take<char>(tile * n.acc);
    char *read[SIDE_BY_SIDE], *gathered = arena.take<char>(static_cast<size_t>(run.tile) * in);
    for (char *&one : read) one = arena.take<char>(tile * std::max(n.acc, n.in));
    auto slot = [&](int operand) { return slots + static_cast<size_t>(~operand) * tile * n.acc; };
    auto place = [&](int operand, size_t k) {
        if (operand < 0) return Place{slot(operand), n.acc, true};
        const Operand &source = sources[operand];
        const char *data = source.data + static_cast<size_t>(start) * in;
        if (source.strided != nullptr) {
            gather(n.before ? gathered : read[k], source, start, stop, in);
            data = n.before ? gathered : read[k];
        }
        if (n.before) {
            tiles.convert[plan.dtype][plan.accumulator](read[k], data, size);
            data = read[k];
        }
        return Place{data, n.in, false};
    };
    const bool streaming = run.streaming && !in_place(run, segment.tensor);
    Place operands[SIDE_BY_SIDE + 1];
    for (size_t f = 0; f < program.folds.size(); f++) {
        const Combination &one = program.folds[f];
        size_t k = 0;
        while (k < one.operands.size()) {
            size_t taken = 0;
            if (k > 0) operands[taken++] = Place{slot(~one.out), n.acc, true};
            for (size_t j = 0; j < SIDE_BY_SIDE && k < one.operands.size(); j++, k++)
                operands[taken++] = place(one.operands[k], j);
            if (!n.after && straight(program) && f + 1 == program.folds.size() && k == one.operands.size()) {
                Target *targets = arena.take<Target>(static_cast<size_t>(plan.results));
                for (int r = 0; r < plan.results; r++)
                    targets[r] = {results[r] + static_cast<size_t>(start) * SIZES[plan.result], false};
                const Fold fold = {operands, taken, nullptr, 0};
                const Value value = {{nullptr, 0, false}, true, targets, static_cast<size_t>(plan.results)};
                walk_all({&fold, 1, &value, 1, plan.divisor}, n, count, streaming, targets, value.count, arena);
                return;
            }
            const Fold fold = {operands, taken, slot(~one.out), n.acc};
            walk_all({&fold, 1, nullptr, 0, 1}, n, count, false, nullptr, 0, arena);
        }
    }
    Value *values = arena.take<Value>(static_cast<size_t>(plan.results));
    Target *targets = arena.take<Target>(static_cast<size_t>(plan.results));
    const size_t out = SIZES[plan.result];
    const size_t found = route(plan, program, results, static_cast<size_t>(start) * out, values, targets,
                               [&](int value) { return place(value, 0); });
    for (size_t v = 0; v < found; v++) {
        values[v].last = false;
        Target *to = const_cast<Target *>(values[v].to);
        if (!n.after) {
            walk_all({nullptr, 0, &values[v], 1, plan.divisor}, n, count, streaming, to, values[v].count, arena);
            continue;
        }
        Target whole = {finished, false};
        const Value divided = {values[v].from, false, &whole, 1};
        walk_all({nullptr, 0, &divided, 1, plan.divisor}, n, count, false, &whole, 1, arena);
        char *converted = read[0];
        tiles.convert[plan.accumulator][plan.result](converted, finished, size);
        const Value bytes = {{converted, 1, false}, false, to, values[v].count};
        const Numbers raw = {tiles.same[SUM][U8], LINE, 1, 1, 1, 1, false, false};
        walk_all({nullptr, 0, &bytes, 1, 1}, raw, size * out, streaming, to, values[v].count, arena);
    }
}

void run_share(void *given, long number, char *scratch) {
    const Run &run = *static_cast<Run *>(given);
    const auto at = std::upper_bound(run.first.begin(), run.first.end(), number) - run.first.begin() - 1;
    const Segment &segment = run.plan.segments[static_cast<size_t>(at)];
    const int64_t start = segment.start + (number - run.first[static_cast<size_t>(at)]) * run.share;
    const int64_t stop = std::min(segment.stop, start + run.share);
    if (run.by_line) return run_lines(run, segment, start, stop, {scratch});
    // Tiles begin where lines of the first result do.
    const size_t out = SIZES[run.plan.result];
    const char *to = run.results[static_cast<size_t>(segment.tensor * run.plan.results)] + static_cast<size_t>(start) * out;
    int64_t size = run.tile - static_cast<int64_t>((reinterpret_cast<uintptr_t>(to) & (LINE - 1)) / out);
    for (int64_t begin = start; begin < stop;) {
        run_tile(run, segment, begin, std::min(stop, begin + size), {scratch});
        begin += size;
        size = run.tile;
    }
}

constexpr int64_t MOST_ELEMENTS = int64_t{1} << 48; // numbers of bytes made of it stay within 64 bits

bool in_range(int operand, int sources, int slots) { return operand < sources && operand >= -slots; }

// The type whose sum is defined for elements of the same size, to copy them with.
Type copied_as(Type type) {
    const size_t size = SIZES[type];
    return size == 1 ? U8 : size == 2 ? U16 : size == 4 ? U32 : size == 8 ? U64 : C128;
}

// Where results are several values, read the sources among them before any is written: in place, one may lie in another.
void keep_sources(Program &program) {
    if (one_value(program)) return;
    const std::vector<int> results = program.results;
    for (size_t r = 0; r < results.size(); r++) {
        if (program.results[r] < 0) continue;
        program.folds.push_back({program.slots, {results[r]}});
        std::replace(program.results.begin(), program.results.end(), results[r], ~program.slots++);
    }
}

// The working memory of a thread: what describes a walk and its padded copy, slots, and tiles that are read.
size_t scratch_of(const Plan &plan, size_t tile) {
    const size_t results = static_cast<size_t>(plan.results), slots = static_cast<size_t>(plan.slots);
    const size_t described = 2 * results * (sizeof(Value) + sizeof(Target) + 4 * LINE) + (4 * SIDE_BY_SIDE + 16) * 4 * LINE;
    const size_t widened = 2 * tile; // float32 to 16 bits, say: a tile of sources is never larger than this
    return described + slots * std::max(tile, 2 * MOST_LINES * LINE) + (SIDE_BY_SIDE + 2) * widened + 64 * LINE;
}

} // namespace

const char *check(Plan &plan) {
    const Numbers n = numbers_of(plan);
    const Tiles &tiles = *plan.tiles;
    plan.slots = 0;
    plan.by_line = true;
    bool folds = false;
    if (plan.sources < 1 || plan.results < 1) return "there must be sources and results";
    for (int64_t size : plan.sizes)
        if (size < 0 || size > MOST_ELEMENTS) return "a tensor has a size that no memory has";
    for (Program &program : plan.programs) {
        size_t operands = 0;
        if (program.slots < 0 || program.slots > 10000) return "a program has too many slots";
        folds = folds || !program.folds.empty();
        std::vector<bool> written(static_cast<size_t>(program.slots));
        for (const Combination &fold : program.folds) {
            if (fold.out < 0 || fold.out >= program.slots || fold.operands.empty()) return "a fold is malformed";
            for (size_t k = 0; k < fold.operands.size(); k++) {
                const int operand = fold.operands[k];
                if (operand < 0 && in_range(operand, 0, program.slots) && !written[static_cast<size_t>(~operand)])
                    return "a slot is read before anything is in it";
                if (!in_range(operand, plan.sources, program.slots)) return "an operand is out of range";
                if (k > 0 && operand == ~fold.out) return "a fold overwrites an operand it still has to read";
            }
            written[static_cast<size_t>(fold.out)] = true;
        }
        if (program.results.size() != static_cast<size_t>(plan.results)) return "a program has too few results";
        for (int value : program.results)
            if (!in_range(value, plan.sources, program.slots)) return "a result is out of range";
            else if (value < 0 && !written[static_cast<size_t>(~value)]) return "a result is a slot that nothing is in";
        keep_sources(program);
        size_t raw = 0;
        for (const Combination &fold : program.folds)
            for (int operand : fold.operands) {
                operands++;
                raw += operand >= 0;
            }
        plan.slots = std::max(plan.slots, program.slots);
        plan.by_line = plan.by_line && raw <= SIDE_BY_SIDE && operands <= MOST_OPERANDS;
    }
    plan.elements = 0;
    for (const Segment &segment : plan.segments) {
        const bool known = segment.tensor >= 0 && segment.tensor < static_cast<int64_t>(plan.sizes.size()) &&
                           segment.program >= 0 && segment.program < static_cast<int>(plan.programs.size());
        if (!known || segment.start < 0 || segment.stop < segment.start ||
            segment.stop > plan.sizes[static_cast<size_t>(segment.tensor)])
            return "a segment is out of range";
        plan.elements += segment.stop - segment.start;
    }
    plan.tile_bytes = TILE;
    while (plan.tile_bytes > 8 * LINE && scratch_of(plan, plan.tile_bytes) > MOST_SCRATCH) plan.tile_bytes /= 2;
    plan.scratch = scratch_of(plan, plan.tile_bytes);
    if (!folds && plan.divisor == 1 && plan.dtype == plan.result) { // copies bytes
        plan.op = SUM;
        plan.dtype = plan.accumulator = plan.result = copied_as(plan.dtype);
        return nullptr;
    }
    if (n.walker == nullptr) return "the op is not defined for the dtype";
    if (n.before && tiles.convert[plan.dtype][plan.accumulator] == nullptr) return "there is no such conversion";
    if (n.after && tiles.convert[plan.accumulator][plan.result] == nullptr) return "there is no such conversion";
    const bool divisible = plan.accumulator == F32 || plan.accumulator == F64 || is_complex(plan.accumulator);
    if (plan.divisor != 1 && !divisible) return "the dtype cannot be divided";
    return nullptr;
}

int64_t traffic(const Plan &plan) {
    return plan.elements * (plan.sources * static_cast<int64_t>(SIZES[plan.dtype]) +
                       plan.results * static_cast<int64_t>(SIZES[plan.result]));
}

bool run(const Plan &plan, const std::vector<Operand> &sources, const std::vector<char *> &results, int threads,
         bool streaming) {
    Numbers n = numbers_of(plan);
    bool by_line = !n.before && !n.after && plan.by_line;
    for (const Operand &source : sources) by_line = by_line && source.strided == nullptr;
    if (by_line && plan.dtype == BF16 && plan.accumulator == F32) n.walker = plan.tiles->pairs[plan.op];
    Run run{plan, sources, results, streaming, by_line, n, 0, 0, {}};
    const size_t widest = std::max({SIZES[plan.dtype], SIZES[plan.accumulator], SIZES[plan.result]});
    run.tile = static_cast<int64_t>(plan.tile_bytes / widest);
    const auto size = static_cast<int64_t>(SIZES[plan.dtype]);
    const int64_t bytes = std::clamp(plan.elements * size / (threads * SHARES_PER_THREAD), LEAST_SHARE, MOST_SHARE);
    run.share = std::max<int64_t>(bytes / size / run.tile, 1) * run.tile;
    run.first.reserve(plan.segments.size() + 1);
    long shares = 0;
    for (const Segment &segment : plan.segments) {
        run.first.push_back(shares);
        shares += static_cast<long>((segment.stop - segment.start + run.share - 1) / run.share);
    }
    run.first.push_back(shares);
    Job job{run_share, &run, shares, threads - 1, plan.scratch};
    return run_job(job);
}
