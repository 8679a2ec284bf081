// Boxes: blocks that fill a rectangle of time and bytes with little waste become one block, and these again.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <queue>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "block_tree.hpp"

namespace overspill::packing {

// Box `first` and box `second` become one, which is `waste` empty (a share of it); `shift` is where `second` lies in it,
// and `first` lies at its bottom. Boxes 0 to n - 1 are the blocks, the k-th merge makes box n + k.
struct Merge {
    Index first;
    Index second;
    Section start;
    Section end;
    Bytes nbytes;
    Bytes shift;
    double waste;
};

// Merges the pair of boxes that wastes least, again and again, while that is at most `most_waste` of the new box. Two
// that ever live together are stacked, two that never do lie side by side.
class Boxer {
  public:
    Boxer(std::span<const Section> start, std::span<const Section> end, std::span<const Bytes> nbytes) {
        for (std::size_t i = 0; i < start.size(); ++i)
            boxes_.push_back({start[i], end[i], nbytes[i], static_cast<Index>(i)});
        slot_.resize(boxes_.size());
        for (std::size_t i = 0; i < boxes_.size(); ++i) slot_[i] = static_cast<Index>(i);
    }

    std::vector<Merge> merges(double most_waste, std::uint64_t seed) {
        seed_ = seed;
        std::vector<Merge> made;
        std::size_t offers = kOffers * boxes_.size();
        for (const Box& box : std::vector<Box>(boxes_)) offer(box, most_waste);
        while (!pairs_.empty() && offers-- > 0) {
            const Pair best = pairs_.top();
            pairs_.pop();
            if (slot_[best.first] < 0) continue;
            if (slot_[best.second] < 0) {  // its partner has gone into another box: look for the next best
                offer(boxes_[slot_[best.first]], most_waste);
                continue;
            }
            made.push_back(merge(boxes_[slot_[best.first]], boxes_[slot_[best.second]], best.waste));
            offer(boxes_.back(), most_waste);
        }
        return made;
    }

  private:
    static constexpr std::size_t kOffers = 16;  // for each block; all that are equal may want the same partner

    struct Box {
        Section start;
        Section end;
        Bytes nbytes;
        Index id;

        double area() const { return static_cast<double>(end - start) * static_cast<double>(nbytes); }
    };

    struct Pair {
        double waste;
        double rank;  // of pairs that waste the same: the smallest new box first, or at random
        Index first;
        Index second;
        friend bool operator<(const Pair& a, const Pair& b) {  // the top of the queue is the least
            return std::tie(a.waste, a.rank, a.first, a.second) > std::tie(b.waste, b.rank, b.first, b.second);
        }
    };

    static bool together(const Box& a, const Box& b) { return a.start < b.end && b.start < a.end; }

    double drawn(Index a, Index b) const {
        std::uint64_t x = seed_ + (static_cast<std::uint64_t>(std::min(a, b)) << 32) + static_cast<std::uint64_t>(std::max(a, b));
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;  // splitmix64 (Vigna)
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
        return static_cast<double>((x ^ (x >> 31)) >> 11);
    }

    // Queue the partner with which `box` wastes least.
    void offer(const Box& box, double most_waste) {
        Pair best{most_waste, 0, -1, -1};
        for (const Box& other : boxes_) {
            if (other.id == box.id) continue;
            const double length = std::max(box.end, other.end) - std::min(box.start, other.start);
            const Bytes nbytes = together(box, other) ? box.nbytes + other.nbytes : std::max(box.nbytes, other.nbytes);
            const double area = length * static_cast<double>(nbytes);
            const double filled = box.area() + other.area();
            if (filled < (1 - best.waste) * area) continue;
            const double waste = std::max(1 - filled / area, 0.0);
            const Pair pair{waste, seed_ == 0 ? area : drawn(box.id, other.id), box.id, other.id};
            if (best.second < 0 || best < pair) best = pair;
        }
        if (best.second >= 0) pairs_.push(best);
    }

    Merge merge(const Box a, const Box b, double waste) {
        const bool stacked = together(a, b);
        const bool swap = stacked && b.end - b.start > a.end - a.start;  // the longer one lies at the bottom
        const Box& low = swap ? b : a;
        const Box& high = swap ? a : b;
        const Merge made{low.id, high.id, std::min(a.start, b.start), std::max(a.end, b.end),
                         stacked ? a.nbytes + b.nbytes : std::max(a.nbytes, b.nbytes), stacked ? low.nbytes : 0, waste};
        remove(a.id);
        remove(b.id);
        const auto id = static_cast<Index>(slot_.size());
        slot_.push_back(static_cast<Index>(boxes_.size()));
        boxes_.push_back({made.start, made.end, made.nbytes, id});
        return made;
    }

    void remove(Index id) {
        const Index slot = slot_[id];
        boxes_[slot] = boxes_.back();
        slot_[boxes_[slot].id] = slot;
        boxes_.pop_back();
        slot_[id] = -1;
    }

    std::vector<Box> boxes_;   // those that are in no other
    std::vector<Index> slot_;  // where a box is in boxes_; -1: in another box
    std::priority_queue<Pair> pairs_;
    std::uint64_t seed_ = 0;
};

}  // namespace overspill::packing
