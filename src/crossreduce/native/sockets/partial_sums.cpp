#include "partial_sums.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

#include "exact.hpp"

namespace {

constexpr size_t TILE = 2048; // elements whose second doubles and numbers stay in the first-level cache
// Sums of more terms, or of terms that are not below this, are computed by an ExactAccumulator. Measured: for 4 terms of
// any exponents, the expansion takes a tenth of the time.
constexpr size_t BATCH = 64; // elements whose components are rounded together
constexpr size_t MOST_EXPANDED = 32;
constexpr double LARGE = 0x1p1000;

// Sort by elements. The lists of each host are sorted already.
void sort(std::vector<OverflowTerm> &overflow) {
    const auto before = [](const OverflowTerm &a, const OverflowTerm &b) { return a.element < b.element; };
    for (auto middle = std::is_sorted_until(overflow.begin(), overflow.end(), before); middle != overflow.end();) {
        const auto stop = std::is_sorted_until(middle, overflow.end(), before);
        std::inplace_merge(overflow.begin(), middle, stop, before);
        middle = stop;
    }
}

// The terms of an element, in `found`. `next` is its first overflow term, and is moved behind its last one.
void read_element(const Terms &terms, int64_t element, std::vector<OverflowTerm>::const_iterator &next,
                  std::vector<double> &found) {
    found.clear();
    const size_t offset = static_cast<size_t>(element) * ITEMSIZES[terms.dtype];
    for (const char *source : terms.sources) found.push_back(read_term(terms.dtype, source + offset));
    for (; next != terms.overflow.end() && next->element == element; ++next) found.push_back(next->term);
}

ExactAccumulator total_of(const std::vector<double> &terms) {
    ExactAccumulator total;
    for (double x : terms) total.add(x);
    return total;
}

// Replace terms by doubles with the same sum, in descending order, of which none is zero unless the sum is.
void reduce_terms(std::vector<double> &terms) {
    const bool few = terms.size() <= MOST_EXPANDED;
    if (!few || !std::all_of(terms.begin(), terms.end(), [](double x) { return std::fabs(x) < LARGE; })) {
        terms = total_of(terms).components();
        return;
    }
    // The components of the sum of the first terms, smallest first; they do not overlap (Shewchuk, Adaptive precision
    // floating-point arithmetic and fast robust geometric predicates, 1997: Grow-Expansion with zero elimination).
    double components[MOST_EXPANDED], zero = -0.0;
    size_t count = 0;
    for (double x : terms) {
        size_t kept = 0;
        zero += x == 0 ? x : 0.0; // -0 only if all terms are -0
        for (size_t k = 0; k < count; k++) {
            const double sum = x + components[k], part = sum - x;
            const double error = (x - (sum - part)) + (components[k] - part);
            if (error != 0) components[kept++] = error;
            x = sum;
        }
        if (x != 0) components[kept++] = x;
        count = kept;
    }
    terms.assign(std::reverse_iterator<double *>(components + count), std::reverse_iterator<double *>(components));
    if (count == 0) terms.push_back(zero);
}

} // namespace

std::vector<OverflowTerm> split_partial_sums(const InstructionSet &isa, Terms &terms, double *high, double *low, size_t size,
                                           int64_t first) {
    const DefaultArithmetic arithmetic;
    sort(terms.overflow);
    std::vector<OverflowTerm> left;
    std::vector<const char *> sources(terms.sources.size());
    std::vector<double> components;
    double second[TILE];
    uint32_t listed[TILE];
    auto next = terms.overflow.cbegin();
    for (size_t start = 0; start < size; start += TILE) {
        const size_t count = std::min(TILE, size - start);
        for (size_t k = 0; k < sources.size(); k++) sources[k] = terms.sources[k] + start * ITEMSIZES[terms.dtype];
        const ExactSum sum = {sources.data(), sources.size(), 1, nullptr};
        double *const seconds = low == nullptr ? second : low + start;
        const size_t found = isa.partial[terms.dtype](sum, low != nullptr, high + start, seconds, listed, count);
        const auto store = [&](size_t k) {
            const int64_t element = static_cast<int64_t>(start + k);
            read_element(terms, element, next, components);
            reduce_terms(components);
            high[start + k] = components[0];
            if (low != nullptr) low[start + k] = components.size() > 1 ? components[1] : -0.0;
            for (size_t c = low == nullptr ? 1 : 2; c < components.size(); c++)
                left.push_back({first + element, components[c]});
        };
        const auto has_overflow = [&](size_t stop) {
            return next != terms.overflow.cend() && next->element < static_cast<int64_t>(stop);
        };
        for (size_t j = 0; j < found; j++) {
            const size_t k = listed[j];
            while (has_overflow(start + k)) store(static_cast<size_t>(next->element) - start);
            if (seconds[k] != seconds[k] || has_overflow(start + k + 1)) store(k);
            else left.push_back({first + static_cast<int64_t>(start + k), seconds[k]});
        }
        while (has_overflow(start + count)) store(static_cast<size_t>(next->element) - start);
    }
    return left;
}

void round_partial_sums(const InstructionSet &isa, Terms &terms, uint32_t divisor, DType result, char *to, size_t size) {
    const DefaultArithmetic arithmetic;
    sort(terms.overflow);
    const ExactFunction function = isa.exact[F64][result];
    std::vector<char> padding;
    // Compute exact sums of `count` elements, which begin at the given addresses.
    const auto compute = [&](const std::vector<const char *> &sources, char *at, size_t count) {
        padding.resize(std::max(padding.size(), sources.size() * EXACT_PADDING));
        Target target = {at, false};
        Output output{};
        output.targets = &target;
        output.count = 1;
        function({sources.data(), sources.size(), divisor, padding.data()}, output, count);
    };
    compute(terms.sources, to, size);
    // The elements with overflow terms, some at a time, as arrays of their components.
    std::vector<double> columns, components;
    std::vector<const char *> sources;
    int64_t elements[BATCH];
    char results[BATCH * sizeof(double)];
    for (auto next = terms.overflow.cbegin(); next != terms.overflow.cend();) {
        size_t count = 0;
        columns.clear();
        for (; count < BATCH && next != terms.overflow.cend(); count++) {
            elements[count] = next->element;
            read_element(terms, elements[count], next, components);
            reduce_terms(components);
            if (columns.size() < components.size() * BATCH) columns.resize(components.size() * BATCH, -0.0);
            for (size_t c = 0; c < components.size(); c++) columns[c * BATCH + count] = components[c];
        }
        sources.clear();
        for (size_t at = 0; at < columns.size(); at += BATCH) sources.push_back(reinterpret_cast<char *>(&columns[at]));
        compute(sources, results, count);
        const size_t itemsize = ITEMSIZES[result];
        for (size_t k = 0; k < count; k++)
            std::memcpy(to + static_cast<size_t>(elements[k]) * itemsize, results + k * itemsize, itemsize);
    }
}
