// The guard of planned addresses: which bytes of a region are in use, whatever any plan says.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "device.hpp"

namespace overspill::live {

// The region is cut at every edge of any planned block, one bit a part. A block is placed only over parts that are free,
// so that a plan that does not hold costs a place and never an overlap.
class Guard {
  public:
    using Parts = std::pair<std::uint32_t, std::uint32_t>;  // from, to

    // Cut anew, with all parts free.
    void cut(std::vector<Bytes> edges) {
        std::sort(edges.begin(), edges.end());
        edges.erase(std::unique(edges.begin(), edges.end()), edges.end());
        edges_ = std::move(edges);
        words_.assign(edges_.size() / 64 + 1, 0);
    }

    // All parts are free.
    void clear() { std::fill(words_.begin(), words_.end(), 0); }

    // The parts that a range touches.
    Parts parts(Bytes start, Bytes end) const {
        const auto above = std::upper_bound(edges_.begin(), edges_.end(), start);
        const auto from = above == edges_.begin() ? above : above - 1;
        return {static_cast<std::uint32_t>(from - edges_.begin()),
                static_cast<std::uint32_t>(std::lower_bound(from, edges_.end(), end) - edges_.begin())};
    }

    // Take the parts if all of them are free.
    bool take(Parts parts) {
        bool free = true;
        each(parts, [&](std::uint64_t& word, std::uint64_t mask) { free = free && (word & mask) == 0; });
        if (free) set(parts);
        return free;
    }
    void set(Parts parts) {
        each(parts, [](std::uint64_t& word, std::uint64_t mask) { word |= mask; });
    }
    void give(Parts parts) {
        each(parts, [](std::uint64_t& word, std::uint64_t mask) { word &= ~mask; });
    }

  private:
    template <typename Do>
    void each(Parts parts, const Do& what) {
        for (std::uint32_t at = parts.first; at < parts.second;) {
            const std::uint32_t bit = at % 64;
            const std::uint32_t count = std::min(64 - bit, parts.second - at);
            const std::uint64_t ones = count == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1;
            what(words_[at / 64], ones << bit);
            at += count;
        }
    }

    std::vector<Bytes> edges_;
    std::vector<std::uint64_t> words_;
};

}  // namespace overspill::live
