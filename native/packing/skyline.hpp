// The best-fit skyline heuristic, plain and guarded. The rules stand in
// src/overspill/placement/packing/solvers/skyline.py.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <queue>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "block_tree.hpp"
#include "segment_tree.hpp"

namespace overspill::packing {

inline Bytes align_up(Bytes offset, Bytes alignment) {
    return alignment == 1 ? offset : (offset + alignment - 1) / alignment * alignment;
}

// Packs the same blocks many times, by other keys. A line is a range of sections up to which all is filled to one
// height; it is known by its first section.
class SkylinePacker {
  public:
    static constexpr int kCandidates = 32;  // that the guard looks at for one place
    static constexpr Bytes kUnlimited = std::numeric_limits<Bytes>::max();

    // All lies above `ground`, a height for each section; empty: on 0.
    SkylinePacker(std::vector<Section> start, std::vector<Section> end, std::vector<Bytes> nbytes,
                  std::vector<Bytes> alignment, std::vector<Bytes> ground = {})
        : start_(std::move(start)),
          end_(std::move(end)),
          nbytes_(std::move(nbytes)),
          alignment_(std::move(alignment)),
          ground_(std::move(ground)),
          tree_(start_, end_),
          order_(start_.size()),
          rank_(start_.size()) {
        const Section sections = end_.empty() ? 0 : *std::max_element(end_.begin(), end_.end());
        load_.assign(static_cast<std::size_t>(sections) + 1, 0);
        ground_.resize(static_cast<std::size_t>(sections), 0);
        for (std::size_t i = 0; i < start_.size(); ++i) {
            load_[start_[i]] += nbytes_[i];
            load_[end_[i]] -= nbytes_[i];
        }
        std::partial_sum(load_.begin(), load_.end(), load_.begin());
        load_.pop_back();
        height_.resize(load_.size());
        next_.resize(load_.size());
        previous_.resize(load_.size());
    }

    std::size_t size() const { return start_.size(); }

    // The offsets of all blocks, those of larger key first, ties by index; nothing once it is known that a block will
    // end above `limit`. With a capacity, guarded by it.
    std::optional<std::vector<Bytes>> pack(std::span<const double> key, std::optional<Bytes> capacity, Bytes limit) {
        if (start_.empty()) return std::vector<Bytes>{};
        begin(key, capacity);
        std::vector<Bytes> offsets(start_.size());
        for (std::size_t left = start_.size(); left > 0;) {
            const Section line = lowest_line();
            const Index block = choose(line);
            if (block == BlockTree::kNone) {
                lift(line);
                continue;
            }
            const Bytes top = top_on(line, block);
            if (std::max(top, needed_) > limit) return std::nullopt;
            offsets[block] = top - nbytes_[block];
            tree_.remove(block);
            if (guarded_) remaining_.add(start_[block], end_[block], -nbytes_[block]);
            place(line, block, top);
            --left;
        }
        return offsets;
    }

  private:
    static constexpr Section kNoLine = -1;

    void begin(std::span<const double> key, std::optional<Bytes> capacity) {
        std::iota(order_.begin(), order_.end(), 0);
        std::sort(order_.begin(), order_.end(),
                  [key](Index a, Index b) { return key[a] != key[b] ? key[a] > key[b] : a < b; });
        for (std::size_t k = 0; k < order_.size(); ++k) rank_[order_[k]] = static_cast<Index>(k);
        tree_.fill(order_, rank_);
        guarded_ = capacity.has_value();
        needed_ = 0;
        if (guarded_) {
            capacity_ = *capacity;
            for (std::size_t t = 0; t < load_.size(); ++t) capacity_ = std::max(capacity_, ground_[t] + load_[t]);
            remaining_.fill(load_);
            heights_.fill(ground_);
        }
        std::fill(height_.begin(), height_.end(), -1);
        lines_ = {};
        next_[0] = static_cast<Section>(load_.size());
        previous_[0] = kNoLine;
        raise(0, ground_[0]);
        Section line = 0;
        for (Section t = 1; static_cast<std::size_t>(t) < load_.size(); ++t) {
            if (ground_[t] == ground_[line]) continue;
            insert_after(line, t);
            raise(line = t, ground_[t]);
        }
    }

    void raise(Section line, Bytes height) {
        height_[line] = height;
        lines_.emplace(height, line);
    }

    Section lowest_line() {
        while (height_[lines_.top().second] != lines_.top().first) lines_.pop();
        return lines_.top().second;
    }

    Bytes height_before(Section line) const {
        return previous_[line] == kNoLine ? kUnlimited : height_[previous_[line]];
    }

    Bytes height_after(Section line) const {
        return static_cast<std::size_t>(next_[line]) == load_.size() ? kUnlimited : height_[next_[line]];
    }

    Bytes top_on(Section line, Index block) const {
        return align_up(height_[line], alignment_[block]) + nbytes_[block];
    }

    // The block to place on the line; kNone to lift it. The heights hold a block that the guard has let through.
    Index choose(Section line) {
        const Index first = tree_.first_within(line, next_[line]);
        if (first == BlockTree::kNone) return BlockTree::kNone;
        if (!guarded_) return order_[first];
        Index rank = first;
        for (int tried = 0; tried < kCandidates && rank != BlockTree::kNone; ++tried) {
            const Index block = order_[rank];
            raise_heights(line, block, 1);
            if (stranded_beside(block, top_on(line, block)) < 0) return block;
            raise_heights(line, block, -1);
            rank = tree_.first_within(line, next_[line], rank);
        }
        const Bytes wall = std::min(height_before(line), height_after(line));
        if (wall != kUnlimited && remaining_.first_above(line, next_[line], capacity_ - wall) < 0)
            return BlockTree::kNone;
        const Index block = order_[first];
        raise_heights(line, block, 1);
        for (Section t; (t = stranded_beside(block, top_on(line, block))) >= 0;)
            needed_ = capacity_ = floor(t) + remaining_.at(t);
        return block;
    }

    void raise_heights(Section line, Index block, Bytes sign) {
        heights_.add(start_[block], end_[block], sign * (top_on(line, block) - height_[line]));
    }

    // A section between this block and the next walls as high as its top that no longer fits into the capacity: every
    // block left for it spans a line that is too high. -1 if there is none.
    Section stranded_beside(Index block, Bytes top) const {
        const auto sections = static_cast<Section>(load_.size());
        const Section low = heights_.last_above(0, start_[block], top - 1) + 1;
        const Section high = heights_.first_above(end_[block], sections, top - 1);
        const Section left = stranded(low, start_[block], top);
        return left >= 0 ? left : stranded(end_[block], high < 0 ? sections : high, top);
    }

    // The first section of [low, high) that has no room above `top` and no block that could still be placed low enough.
    Section stranded(Section low, Section high, Bytes top) const {
        Section t = remaining_.first_above(low, high, room_above(top));
        while (t >= 0) {
            const Index block = cover_up_to(t, capacity_ - remaining_.at(t));
            if (block == BlockTree::kNone) return t;
            // It serves as well for the sections of its life that need it no lower.
            const Bytes offset = std::min(heights_.highest(start_[block], end_[block]), top);
            const Section end = std::min(end_[block], high);
            const Section next = remaining_.first_above(t + 1, end, room_above(offset));
            t = next >= 0 ? next : remaining_.first_above(end, high, room_above(top));
        }
        return -1;
    }

    Bytes room_above(Bytes height) const { return std::max<Bytes>(capacity_ - height, 0); }

    // A block that holds section t and spans no line higher than `height`.
    Index cover_up_to(Section t, Bytes height) const {
        const auto sections = static_cast<Section>(load_.size());
        const Section low = heights_.last_above(0, t + 1, height) + 1;
        if (low > t) return BlockTree::kNone;
        const Section high = heights_.first_above(t, sections, height);
        return tree_.cover(low, high < 0 ? sections : high, t);
    }

    // The lowest offset that the lines leave to any unplaced block of section t.
    Bytes floor(Section t) const {
        const auto sections = static_cast<Section>(load_.size());
        for (Bytes height = heights_.at(t);;) {
            const Section low = heights_.last_above(0, t, height) + 1;
            const Section after = heights_.first_above(t, sections, height);
            const Section high = after < 0 ? sections : after;
            if (tree_.cover(low, high, t) != BlockTree::kNone) return height;
            height = std::min(low > 0 ? heights_.at(low - 1) : kUnlimited, after < 0 ? kUnlimited : heights_.at(after));
        }
    }

    void place(Section line, Index block, Bytes top) {
        const Bytes height = height_[line];
        const Section start = start_[block];
        const Section end = end_[block];
        if (end < next_[line]) {
            insert_after(line, end);
            raise(end, height);
        }
        if (start > line) {
            insert_after(line, start);
            raise(start, top);
            join_next(start);
        } else {
            raise(line, top);
            join_next(line);
            if (height_before(line) == top) join_next(previous_[line]);
        }
    }

    // Lift a line on which no block fits to the lower of its neighbours, or both where they are equal.
    void lift(Section line) {
        const Bytes before = height_before(line);
        const Bytes height = std::min(before, height_after(line));
        if (guarded_) heights_.add(line, next_[line], height - height_[line]);
        raise(line, height);
        join_next(line);
        if (before == height_[line]) join_next(previous_[line]);
    }

    void insert_after(Section line, Section added) {
        next_[added] = next_[line];
        previous_[added] = line;
        if (static_cast<std::size_t>(next_[line]) < load_.size()) previous_[next_[line]] = added;
        next_[line] = added;
    }

    void join_next(Section line) {
        if (height_after(line) != height_[line]) return;
        const Section gone = next_[line];
        height_[gone] = -1;
        next_[line] = next_[gone];
        if (static_cast<std::size_t>(next_[line]) < load_.size()) previous_[next_[line]] = line;
    }

    std::vector<Section> start_;
    std::vector<Section> end_;
    std::vector<Bytes> nbytes_;
    std::vector<Bytes> alignment_;
    std::vector<Bytes> ground_;
    std::vector<Bytes> load_;
    BlockTree tree_;
    std::vector<Index> order_;
    std::vector<Index> rank_;
    SegmentTree remaining_;  // the bytes of unplaced blocks
    SegmentTree heights_;    // of the lines
    bool guarded_ = false;
    Bytes capacity_ = 0;  // that the guard holds to
    Bytes needed_ = 0;    // the part of it that the blocks placed so far have made necessary
    using Line = std::pair<Bytes, Section>;
    std::priority_queue<Line, std::vector<Line>, std::greater<>> lines_;  // with some that are gone
    std::vector<Bytes> height_;                                          // -1: no line starts here
    std::vector<Section> next_;
    std::vector<Section> previous_;
};

}  // namespace overspill::packing
