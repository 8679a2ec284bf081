// Search for a layout within a capacity that jumps back over decisions that a dead end does not depend on.
// Twin of src/overspill/placement/packing/backjump_twin.py, which explains the rules.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "exact.hpp"

namespace overspill::packing {

class BackjumpSearch {
  public:
    // Block i lives in the sections [start[i], end[i]), and `below[i]`, an equal one, is placed before it (-1: none).
    BackjumpSearch(int sections, std::vector<int> start, std::vector<int> end, std::vector<Units> size,
                   std::vector<int> below)
        : start_(std::move(start)),
          end_(std::move(end)),
          size_(std::move(size)),
          below_(std::move(below)),
          words_((size_.size() + 63) / 64),
          covers_(static_cast<std::size_t>(sections)),
          neighbours_(size_.size()),
          load_(static_cast<std::size_t>(sections), 0) {
        const int n = static_cast<int>(size_.size());
        std::vector<int> seen(size_.size(), -1);
        for (int block = 0; block < n; ++block)
            for (int t = start_[block]; t < end_[block]; ++t) {
                covers_[t].push_back(block);
                load_[t] += size_[block];
            }
        for (int block = 0; block < n; ++block) {
            seen[block] = block;
            for (int t = start_[block]; t < end_[block]; ++t)
                for (const int other : covers_[t]) {
                    if (seen[other] == block) continue;
                    seen[other] = block;
                    neighbours_[block].push_back(other);
                }
        }
    }

    // Whether a layout was found; no is no proof. `rank[i]` is the place of block i in the preorder. It gives up after
    // `patience` nodes without more blocks placed than ever before, or when `stop`, asked now and then, says so.
    template <typename Stop>
    bool attempt(Units capacity, std::span<const std::int64_t> rank, std::int64_t patience, Stop stop) {
        reset(capacity, rank);
        std::size_t most = 0;
        std::int64_t last_gain = 0;
        for (std::int64_t decisions = 1; frames_.size() < size_.size(); ++decisions) {
            if (frames_.size() > most) {
                most = frames_.size();
                last_gain = nodes_;
            }
            ++nodes_;
            if (nodes_ - last_gain > patience || (decisions % kDecisionsPerStop == 0 && stop())) return false;
            const int block = next();
            frames_.push_back({block, offset_[block], trail_.size(), saved_.size()});
            if (!place(block) && !back()) return false;
        }
        return true;
    }

    std::int64_t nodes() const { return nodes_; }
    const std::vector<Units>& offsets() const { return place_; }
    // How often each block was unplaced in a section that had no room for all of its blocks.
    const std::vector<std::int64_t>& blames() const { return blames_; }

  private:
    static constexpr std::int64_t kDecisionsPerStop = 64;
    using Word = std::uint64_t;

    // A decision: this block lies at this offset.
    struct Frame {
        int block;
        Units offset;
        std::size_t trail, saved;
    };

    struct Change {
        Units* where;
        Units value;
    };

    void reset(Units capacity, std::span<const std::int64_t> rank) {
        capacity_ = capacity;
        rank_ = rank;
        place_.assign(size_.size(), 0);
        offset_.assign(size_.size(), 0);
        reasons_.assign(size_.size() * words_, 0);
        blames_.assign(size_.size(), 0);
        conflict_.assign(words_, 0);
        left_ = load_;
        floor_.assign(load_.size(), 0);
        lowest_.assign(load_.size(), 0);
        unplaced_.assign(load_.size(), 0);
        std::vector<int> last_first(size_.size());
        for (std::size_t block = 0; block < size_.size(); ++block)
            last_first[size_.size() - 1 - static_cast<std::size_t>(rank[block])] = static_cast<int>(block);
        for (std::vector<int>& cover : covers_) cover.clear();
        for (const int block : last_first)
            for (int t = start_[block]; t < end_[block]; ++t) {
                covers_[t].push_back(block);
                lowest_[t] = block;
                ++unplaced_[t];
            }
        trail_.clear();
        saved_.clear();
        saved_reasons_.clear();
        frames_.clear();
        nodes_ = 0;
    }

    Word* reason(int block) { return &reasons_[static_cast<std::size_t>(block) * words_]; }

    void set(Units& where, Units value) {
        trail_.push_back({&where, where});
        where = value;
    }

    void raise(int block, Units offset) {
        set(offset_[block], offset);
        saved_.push_back(block);
        saved_reasons_.insert(saved_reasons_.end(), reason(block), reason(block) + words_);
    }

    void undo(const Frame& frame) {
        for (; trail_.size() > frame.trail; trail_.pop_back()) *trail_.back().where = trail_.back().value;
        for (; saved_.size() > frame.saved; saved_.pop_back()) {
            const auto first = saved_reasons_.end() - static_cast<std::ptrdiff_t>(words_);
            std::copy(first, saved_reasons_.end(), reason(saved_.back()));
            saved_reasons_.erase(first, saved_reasons_.end());
        }
    }

    void add_reason(int block) {
        for (std::size_t w = 0; w < words_; ++w) conflict_[w] |= reason(block)[w];
    }

    // The unplaced block of the lowest offset, the first of them in the preorder.
    int next() const {
        int best = -1;
        for (int block = 0; block < static_cast<int>(size_.size()); ++block) {
            const Units offset = offset_[block];
            if (offset == kPlaced || (best >= 0 && offset > offset_[best])) continue;
            if (best >= 0 && offset == offset_[best] && rank_[block] > rank_[best]) continue;
            if (below_[block] < 0 || offset_[below_[block]] == kPlaced) best = block;
        }
        return best;
    }

    // Place a block at its offset; false, with the conflict, if that leaves too little room somewhere.
    bool place(int block) {
        const Units top = offset_[block] + size_[block];
        place_[block] = offset_[block];
        set(offset_[block], kPlaced);
        int first = start_[block], last = end_[block];
        for (int t = first; t < last; ++t) {
            set(left_[t], left_[t] - size_[block]);
            set(unplaced_[t], unplaced_[t] - 1);
            if (left_[t] > 0 && floor_[t] < top) set(floor_[t], top);  // or more
        }
        for (const int other : neighbours_[block]) {
            if (offset_[other] >= top) continue;  // a placed one too
            raise(other, top);
            reason(other)[block / 64] |= Word{1} << (block % 64);
            first = std::min(first, start_[other]);
            last = std::max(last, end_[other]);
        }
        return raise_floors(first, last);
    }

    // Floors of the sections [first, last), which are no lower than before.
    bool raise_floors(int first, int last) {
        for (int t = first; t < last; ++t) {
            if (left_[t] == 0) continue;
            if (offset_[lowest_[t]] != floor_[t]) {
                Units low = kPlaced, seen = 0;
                for (const int block : covers_[t]) {
                    if (offset_[block] == kPlaced) continue;
                    if (offset_[block] < low) low = offset_[lowest_[t] = block];
                    if (low == floor_[t] || ++seen == unplaced_[t]) break;
                }
                if (low != floor_[t]) set(floor_[t], low);
            }
            if (floor_[t] + left_[t] > capacity_) {
                explain(t);
                return false;
            }
        }
        return true;
    }

    // The conflict of a section without room: why its unplaced blocks lie no lower.
    void explain(int t) {
        std::fill(conflict_.begin(), conflict_.end(), 0);
        for (const int block : covers_[t]) {
            if (offset_[block] == kPlaced) continue;
            add_reason(block);
            ++blames_[block];
        }
    }

    // Undo decisions up to the last one in the conflict, and forbid that; false if there is none.
    bool back() {
        while (!frames_.empty()) {
            const Frame frame = frames_.back();
            const int block = frame.block;
            ++nodes_;
            frames_.pop_back();
            undo(frame);
            Word& word = conflict_[static_cast<std::size_t>(block) / 64];
            const Word bit = Word{1} << (block % 64);
            if (!(word & bit)) continue;
            word &= ~bit;
            if (forbid(frame)) return true;
        }
        return false;
    }

    // The block lies higher than where it was tried: on an unplaced one. False, with the conflict, if it cannot.
    bool forbid(const Frame& frame) {
        const int block = frame.block;
        Units support = kPlaced;
        for (const int other : neighbours_[block])
            if (offset_[other] != kPlaced)
                support = std::min(support, std::max(offset_[other], frame.offset) + size_[other]);
        add_reason(block);
        if (support == kPlaced) return false;
        for (const int other : neighbours_[block])
            if (offset_[other] != kPlaced && frame.offset + size_[other] < support) add_reason(other);
        raise(block, support);
        std::copy(conflict_.begin(), conflict_.end(), reason(block));
        return raise_floors(start_[block], end_[block]);
    }

    std::vector<int> start_, end_;
    std::vector<Units> size_;
    std::vector<int> below_;
    std::size_t words_;                         // of a set of blocks
    std::vector<std::vector<int>> covers_;      // of each section, those that come last in the preorder first
    std::vector<std::vector<int>> neighbours_;  // of each block: those that live with it
    std::vector<Units> load_;

    Units capacity_ = 0;
    std::span<const std::int64_t> rank_;
    std::vector<Units> place_;                  // the offset of each placed block
    std::vector<Units> offset_;                 // the lowest possible one of each unplaced block; kPlaced for others
    std::vector<Word> reasons_;                 // of each block: the placed blocks that its lowest offset follows from
    std::vector<std::int64_t> blames_;
    std::vector<Word> conflict_;                // placed blocks that cannot all lie where they do
    std::vector<Units> left_;                   // of each section: the total of what is unplaced
    std::vector<Units> unplaced_;               // of each section: how many blocks are unplaced
    std::vector<Units> floor_;                  // of each section: the lowest offset of what is unplaced
    std::vector<int> lowest_;                   // of each section: a block that was at its floor
    std::vector<Change> trail_;
    std::vector<int> saved_;                    // blocks whose reasons changed, and what they were
    std::vector<Word> saved_reasons_;
    std::vector<Frame> frames_;
    std::int64_t nodes_ = 0;
};

}  // namespace overspill::packing
