// First fit and best fit in a given order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "skyline.hpp"

namespace overspill::packing {

struct Extent {
    Bytes low;
    Bytes high;
    friend auto operator<=>(const Extent&, const Extent&) = default;
};

// Which bytes are taken when: a segment tree over sections, children of node v at 2v and 2v + 1. A node knows the bytes
// that are taken somewhere in its sections, and those that one block takes in all of them, unless a node above knows it
// as well. Touching extents are one, so that high stacks of long-lived blocks stay few extents.
class TakenBytes {
    using Size = std::size_t;

  public:
    explicit TakenBytes(std::size_t sections) {
        while (leaves_ < sections) leaves_ *= 2;
        somewhere_.resize(2 * leaves_);
        throughout_.resize(2 * leaves_);
    }

    void take(Section start, Section end, Extent extent) {
        if (start < end) take(1, 0, leaves_, static_cast<Size>(start), static_cast<Size>(end), extent);
    }

    // Append the extents that are taken somewhere in [start, end); they may overlap.
    void collect(Section start, Section end, std::vector<Extent>& found) const {
        if (start < end) collect(1, 0, leaves_, static_cast<Size>(start), static_cast<Size>(end), found);
    }

  private:
    using Extents = std::vector<Extent>;  // in order and apart

    static void add(Extents& extents, Extent added) {
        const auto first = std::partition_point(extents.begin(), extents.end(),
                                                [added](const Extent& e) { return e.high < added.low; });
        auto last = first;
        for (; last != extents.end() && last->low <= added.high; ++last)
            added = {std::min(added.low, last->low), std::max(added.high, last->high)};
        if (first == last) {
            extents.insert(first, added);
        } else {
            *first = added;
            extents.erase(first + 1, last);
        }
    }

    void take(Size v, Size left, Size right, Size start, Size end, Extent extent) {
        if (end <= left || right <= start) return;
        add(somewhere_[v], extent);
        if (start <= left && right <= end) {
            add(throughout_[v], extent);
            return;
        }
        const Size middle = (left + right) / 2;
        take(2 * v, left, middle, start, end, extent);
        take(2 * v + 1, middle, right, start, end, extent);
    }

    void collect(Size v, Size left, Size right, Size start, Size end, std::vector<Extent>& found) const {
        if (end <= left || right <= start) return;
        const bool inside = start <= left && right <= end;
        const Extents& taken = inside ? somewhere_[v] : throughout_[v];
        found.insert(found.end(), taken.begin(), taken.end());
        if (inside) return;
        const Size middle = (left + right) / 2;
        collect(2 * v, left, middle, start, end, found);
        collect(2 * v + 1, middle, right, start, end, found);
    }

    Size leaves_ = 1;
    std::vector<Extents> somewhere_;
    std::vector<Extents> throughout_;
};

// The lowest place for `nbytes` among `occupied`, whose order is lost: a heap gives no more of them than are looked at.
inline Bytes first_fit(std::vector<Extent>& occupied, Bytes nbytes, Bytes alignment) {
    std::make_heap(occupied.begin(), occupied.end(), std::greater<>());
    Bytes top = 0;
    while (!occupied.empty() && align_up(top, alignment) + nbytes > occupied.front().low) {
        std::pop_heap(occupied.begin(), occupied.end(), std::greater<>());
        top = std::max(top, occupied.back().high);
        occupied.pop_back();
    }
    return align_up(top, alignment);
}

// The place in the smallest hole among `occupied` that has room, the lowest of equal ones; above all of them otherwise.
inline Bytes best_fit(std::vector<Extent>& occupied, Bytes nbytes, Bytes alignment) {
    std::sort(occupied.begin(), occupied.end());
    Bytes top = 0;
    Bytes smallest = std::numeric_limits<Bytes>::max();
    Bytes best = -1;
    for (const Extent& extent : occupied) {
        const Bytes offset = align_up(top, alignment);
        if (offset + nbytes <= extent.low && extent.low - top < smallest) {
            smallest = extent.low - top;
            best = offset;
        }
        top = std::max(top, extent.high);
    }
    return best >= 0 ? best : align_up(top, alignment);
}

struct GreedyProblem {
    std::span<const Bytes> nbytes;
    std::span<const Bytes> alignment;
    std::span<const Bytes> pinned;  // negative: anywhere
    // Block i is live in the pieces piece_first[i] to piece_first[i + 1].
    std::span<const std::int64_t> piece_first;
    std::span<const Section> piece_start;
    std::span<const Section> piece_end;
};

// The offsets of all blocks: the pinned ones lie where they must, the others come in `order`.
inline std::vector<Bytes> place_greedily(const GreedyProblem& problem, std::span<const std::int64_t> order,
                                         bool best) {
    const auto last = std::max_element(problem.piece_end.begin(), problem.piece_end.end());
    TakenBytes taken(last == problem.piece_end.end() ? 0 : static_cast<std::size_t>(*last));
    std::vector<Bytes> offsets(problem.nbytes.size());
    const auto put = [&](std::size_t block, Bytes offset) {
        offsets[block] = offset;
        for (auto piece = problem.piece_first[block]; piece < problem.piece_first[block + 1]; ++piece)
            taken.take(problem.piece_start[piece], problem.piece_end[piece], {offset, offset + problem.nbytes[block]});
    };
    for (std::size_t block = 0; block < offsets.size(); ++block)
        if (problem.pinned[block] >= 0) put(block, problem.pinned[block]);
    std::vector<Extent> occupied;
    for (const std::int64_t chosen : order) {
        const auto block = static_cast<std::size_t>(chosen);
        if (problem.pinned[block] >= 0) continue;
        occupied.clear();
        for (auto piece = problem.piece_first[block]; piece < problem.piece_first[block + 1]; ++piece)
            taken.collect(problem.piece_start[piece], problem.piece_end[piece], occupied);
        put(block, best ? best_fit(occupied, problem.nbytes[block], problem.alignment[block])
                        : first_fit(occupied, problem.nbytes[block], problem.alignment[block]));
    }
    return offsets;
}

}  // namespace overspill::packing
