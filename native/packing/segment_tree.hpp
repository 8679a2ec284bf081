// A number for each section: add to a range, the largest of a range, the nearest section above a limit.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "block_tree.hpp"

namespace overspill::packing {

// Nodes lie in one array, the children of node v at 2v and 2v + 1, the leaves last.
class SegmentTree {
  public:
    void fill(std::span<const Bytes> values) {
        while (leaves_ < values.size()) leaves_ *= 2;
        added_.assign(leaves_, 0);
        highest_.assign(2 * leaves_, kLowest);
        std::copy(values.begin(), values.end(), highest_.begin() + static_cast<std::ptrdiff_t>(leaves_));
        for (std::size_t v = leaves_ - 1; v >= 1; --v) highest_[v] = std::max(highest_[2 * v], highest_[2 * v + 1]);
    }

    Bytes at(Section t) const {
        Size v = leaves_ + static_cast<Size>(t);
        Bytes value = highest_[v];
        while (v /= 2) value += added_[v];
        return value;
    }

    // Of the sections [low, high), as in all that follow.
    void add(Section low, Section high, Bytes change) {
        if (low < high) add(1, 0, leaves_, low, high, change);
    }

    Bytes highest(Section low, Section high) const { return highest(1, 0, leaves_, low, high); }

    // The first section with more than `limit`; -1 if there is none.
    Section first_above(Section low, Section high, Bytes limit) const {
        return low < high ? first_above(1, 0, leaves_, low, high, limit) : -1;
    }

    // The last section with more than `limit`; -1 if there is none.
    Section last_above(Section low, Section high, Bytes limit) const {
        return low < high ? last_above(1, 0, leaves_, low, high, limit) : -1;
    }

  private:
    using Size = std::size_t;
    static constexpr Bytes kLowest = std::numeric_limits<Bytes>::min() / 2;

    void add(Size v, Size left, Size right, Size low, Size high, Bytes change) {
        if (high <= left || right <= low) return;
        if (low <= left && right <= high) {
            highest_[v] += change;
            if (v < leaves_) added_[v] += change;
            return;
        }
        const Size middle = (left + right) / 2;
        add(2 * v, left, middle, low, high, change);
        add(2 * v + 1, middle, right, low, high, change);
        highest_[v] = std::max(highest_[2 * v], highest_[2 * v + 1]) + added_[v];
    }

    Bytes highest(Size v, Size left, Size right, Size low, Size high) const {
        if (high <= left || right <= low) return kLowest;
        if (low <= left && right <= high) return highest_[v];
        const Size middle = (left + right) / 2;
        return added_[v] +
               std::max(highest(2 * v, left, middle, low, high), highest(2 * v + 1, middle, right, low, high));
    }

    Section first_above(Size v, Size left, Size right, Size low, Size high, Bytes limit) const {
        if (high <= left || right <= low || highest_[v] <= limit) return -1;
        if (v >= leaves_) return static_cast<Section>(left);
        const Size middle = (left + right) / 2;
        const Section found = first_above(2 * v, left, middle, low, high, limit - added_[v]);
        return found >= 0 ? found : first_above(2 * v + 1, middle, right, low, high, limit - added_[v]);
    }

    Section last_above(Size v, Size left, Size right, Size low, Size high, Bytes limit) const {
        if (high <= left || right <= low || highest_[v] <= limit) return -1;
        if (v >= leaves_) return static_cast<Section>(left);
        const Size middle = (left + right) / 2;
        const Section found = last_above(2 * v + 1, middle, right, low, high, limit - added_[v]);
        return found >= 0 ? found : last_above(2 * v, left, middle, low, high, limit - added_[v]);
    }

    Size leaves_ = 1;
    std::vector<Bytes> highest_;  // of each node, with what was added to it but not to those above it
    std::vector<Bytes> added_;
};

}  // namespace overspill::packing
