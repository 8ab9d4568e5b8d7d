#include "partial_sums.hpp"

#include <algorithm>

#include "exact.hpp"

namespace {

constexpr size_t TILE = 2048; // elements whose second doubles and numbers stay in the first-level cache

void sort(std::vector<FurtherTerm> &further) {
    std::sort(further.begin(), further.end(),
              [](const FurtherTerm &a, const FurtherTerm &b) { return a.element < b.element; });
}

// Return the sum of an element's terms. `next` is its first further term, and is moved behind its last one.
ExactAccumulator total_of(const Terms &terms, int64_t element, std::vector<FurtherTerm>::const_iterator &next) {
    ExactAccumulator total;
    const size_t offset = static_cast<size_t>(element) * ITEMSIZES[terms.dtype];
    for (const char *source : terms.sources) total.add(read_term(terms.dtype, source + offset));
    for (; next != terms.further.end() && next->element == element; ++next) total.add(next->term);
    return total;
}

} // namespace

std::vector<FurtherTerm> split_partial_sums(const InstructionSet &isa, Terms &terms, double *high, double *low, size_t size,
                                          int64_t first) {
    const DefaultArithmetic arithmetic;
    sort(terms.further);
    std::vector<FurtherTerm> left;
    std::vector<const char *> sources(terms.sources.size());
    double second[TILE];
    uint32_t listed[TILE];
    auto next = terms.further.cbegin();
    for (size_t start = 0; start < size; start += TILE) {
        const size_t count = std::min(TILE, size - start);
        for (size_t k = 0; k < sources.size(); k++) sources[k] = terms.sources[k] + start * ITEMSIZES[terms.dtype];
        const ExactSum sum = {sources.data(), sources.size(), 1, nullptr};
        double *const seconds = low == nullptr ? second : low + start;
        const size_t found = isa.partial[terms.dtype](sum, low != nullptr, high + start, seconds, listed, count);
        const auto store = [&](size_t k) {
            const int64_t element = static_cast<int64_t>(start + k);
            const std::vector<double> components = total_of(terms, element, next).components();
            high[start + k] = components[0];
            if (low != nullptr) low[start + k] = components.size() > 1 ? components[1] : -0.0;
            for (size_t c = low == nullptr ? 1 : 2; c < components.size(); c++)
                left.push_back({first + element, components[c]});
        };
        const auto has_further = [&](size_t stop) {
            return next != terms.further.cend() && next->element < static_cast<int64_t>(stop);
        };
        for (size_t j = 0; j < found; j++) {
            const size_t k = listed[j];
            while (has_further(start + k)) store(static_cast<size_t>(next->element) - start);
            if (seconds[k] != seconds[k] || has_further(start + k + 1)) store(k);
            else left.push_back({first + static_cast<int64_t>(start + k), seconds[k]});
        }
        while (has_further(start + count)) store(static_cast<size_t>(next->element) - start);
    }
    return left;
}

void round_partial_sums(const InstructionSet &isa, Terms &terms, uint32_t divisor, DType result, char *to, size_t size) {
    const DefaultArithmetic arithmetic;
    sort(terms.further);
    std::vector<char> padding(terms.sources.size() * EXACT_PADDING);
    Target target = {to, false};
    Output output{};
    output.targets = &target;
    output.count = 1;
    isa.exact[terms.dtype][result]({terms.sources.data(), terms.sources.size(), divisor, padding.data()}, output, size);
    for (auto next = terms.further.cbegin(); next != terms.further.cend();) {
        const int64_t element = next->element;
        total_of(terms, element, next).store(result, divisor, to + static_cast<size_t>(element) * ITEMSIZES[result]);
    }
}
