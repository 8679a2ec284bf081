// Search for a layout within a capacity that jumps back over decisions that a dead end does not depend on.
// Twin of src/overspill/placement/packing/backjump_twin.py, which explains the rules.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
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
          load_(static_cast<std::size_t>(sections), 0),
          order_(size_.size()),
          lowest_((size_.size() + kGroup - 1) / kGroup) {
        const int n = static_cast<int>(size_.size());
        for (int block = 0; block < n; ++block) {
            for (int t = start_[block]; t < end_[block]; ++t) {
                covers_[t].push_back(block);
                load_[t] += size_[block];
            }
            for (int other = 0; other < n; ++other)
                if (other != block && start_[other] < end_[block] && start_[block] < end_[other])
                    neighbours_[block].push_back(other);
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
            frames_.push_back({block, offset_[block], raises_.size(), saved_.size()});
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
    static constexpr std::size_t kGroup = 32;  // blocks that share a bound on their offsets
    using Word = std::uint64_t;

    // A decision: this block lies at this offset.
    struct Frame {
        int block;
        Units offset;
        std::size_t raises, saved;
    };

    // An unplaced block, and the offset that it had before it was raised.
    struct Raise {
        int block;
        Units offset;
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
        witness_.assign(load_.size(), 0);
        lowest_.assign(lowest_.size(), 0);
        for (std::size_t block = 0; block < size_.size(); ++block)
            order_[static_cast<std::size_t>(rank[block])] = static_cast<int>(block);
        for (std::vector<int>& cover : covers_) cover.clear();
        for (auto block = order_.rbegin(); block != order_.rend(); ++block)
            for (int t = start_[*block]; t < end_[*block]; ++t) {
                covers_[t].push_back(*block);
                witness_[t] = *block;
            }
        raises_.clear();
        saved_.clear();
        saved_reasons_.clear();
        frames_.clear();
        nodes_ = 0;
    }

    static std::size_t word_of(int block) { return static_cast<std::size_t>(block) / 64; }
    static Word bit_of(int block) { return Word{1} << (block % 64); }
    Word* reason(int block) { return &reasons_[static_cast<std::size_t>(block) * words_]; }

    void raise(int block, Units offset) {
        raises_.push_back({block, offset_[block]});
        offset_[block] = offset;
    }

    void lower(int block, Units offset) {
        offset_[block] = offset;
        Units& lowest = lowest_[static_cast<std::size_t>(rank_[block]) / kGroup];
        lowest = std::min(lowest, offset);
    }

    // Take back a decision and what was forbidden after it.
    void undo(const Frame& frame) {
        for (; saved_.size() > frame.saved; saved_.pop_back()) {
            const auto first = saved_reasons_.end() - static_cast<std::ptrdiff_t>(words_);
            std::copy(first, saved_reasons_.end(), reason(saved_.back()));
            saved_reasons_.erase(first, saved_reasons_.end());
        }
        const std::size_t word = word_of(frame.block);
        const Word others = ~bit_of(frame.block);  // no reason had it before
        for (; raises_.size() > frame.raises; raises_.pop_back()) {
            const Raise& last = raises_.back();
            lower(last.block, last.offset);
            reason(last.block)[word] &= others;
        }
        lower(frame.block, frame.offset);
        for (int t = start_[frame.block]; t < end_[frame.block]; ++t) left_[t] += size_[frame.block];
    }

    void add_reason(int block) {
        const Word* from = reason(block);
        Word* to = conflict_.data();
        for (std::size_t w = 0, words = words_; w < words; ++w) to[w] |= from[w];
    }

    // The unplaced block of the lowest offset, the first of them in the preorder.
    int next() {
        const std::size_t n = size_.size();
        int best = -1;
        Units offset = kPlaced;
        for (std::size_t group = 0; group < lowest_.size(); ++group) {
            if (lowest_[group] >= offset) continue;
            Units low = kPlaced;
            for (std::size_t k = group * kGroup; k < std::min(n, (group + 1) * kGroup); ++k) {
                const int block = order_[k];
                low = std::min(low, offset_[block]);
                if (offset_[block] < offset && (below_[block] < 0 || offset_[below_[block]] == kPlaced)) {
                    best = block;
                    offset = offset_[block];
                }
            }
            lowest_[group] = low;
        }
        return best;
    }

    // Place a block at its offset; false, with the conflict, if that leaves too little room somewhere.
    bool place(int block) {
        const Units top = offset_[block] + size_[block];
        place_[block] = offset_[block];
        offset_[block] = kPlaced;
        int first = start_[block], last = end_[block];
        for (int t = first; t < last; ++t) left_[t] -= size_[block];
        const std::size_t word = word_of(block);
        const Word bit = bit_of(block);
        for (const int other : neighbours_[block]) {
            if (offset_[other] >= top) continue;  // a placed one too
            raise(other, top);
            reason(other)[word] |= bit;
            first = std::min(first, start_[other]);
            last = std::max(last, end_[other]);
        }
        return all_have_room(first, last);
    }

    // Whether what is left fits into each of the sections [first, last); the conflict if not.
    bool all_have_room(int first, int last) {
        for (int t = first; t < last; ++t)
            if (!has_room(t)) {
                explain(t);
                return false;
            }
        return true;
    }

    // One unplaced block that lies low enough will do, and most often the one of the last time still does.
    bool has_room(int t) {
        const Units highest = capacity_ - left_[t];
        if (offset_[witness_[t]] <= highest || left_[t] == 0) return true;
        for (const int block : covers_[t])
            if (offset_[block] <= highest) {
                witness_[t] = block;
                return true;
            }
        return false;
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
            Word& word = conflict_[word_of(block)];
            const Word bit = bit_of(block);
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
        saved_.push_back(block);
        saved_reasons_.insert(saved_reasons_.end(), reason(block), reason(block) + words_);
        raise(block, support);
        std::copy(conflict_.begin(), conflict_.end(), reason(block));
        return all_have_room(start_[block], end_[block]);
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
    std::vector<int> order_;                    // the preorder
    std::vector<Units> place_;                  // the offset of each placed block
    std::vector<Units> offset_;                 // the lowest possible one of each unplaced block; kPlaced for others
    std::vector<Units> lowest_;                 // of each group of blocks in the preorder: no offset is lower
    std::vector<Word> reasons_;                 // of each block: the placed blocks that its lowest offset follows from
    std::vector<std::int64_t> blames_;
    std::vector<Word> conflict_;                // placed blocks that cannot all lie where they do
    std::vector<Units> left_;                   // of each section: the total of what is unplaced
    std::vector<int> witness_;                  // of each section: the block that last showed it to have room
    std::vector<Raise> raises_;
    std::vector<int> saved_;                    // blocks that were forbidden to lie somewhere, and their reasons before
    std::vector<Word> saved_reasons_;
    std::vector<Frame> frames_;
    std::int64_t nodes_ = 0;
};

}  // namespace overspill::packing
