// The unplaced blocks as points (start, end) of a k-d tree: the first of them, in a given order, in a range of time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

namespace overspill::packing {

using Bytes = std::int64_t;
using Section = std::int32_t;
using Index = std::int32_t;

// Built once over all blocks; `fill` then starts a run in which every block is there. Nodes lie in one array, the
// children of node v at 2v and 2v + 1, the leaves last.
class BlockTree {
  public:
    static constexpr Index kNone = std::numeric_limits<Index>::max();

    BlockTree(std::span<const Section> start, std::span<const Section> end)
        : items_(start.size()), slot_(start.size()) {
        std::vector<Point> points(start.size());
        for (std::size_t i = 0; i < points.size(); ++i) points[i] = {start[i], end[i], static_cast<Index>(i)};
        while (leaves_ * kLeafBlocks < points.size()) leaves_ *= 2;
        nodes_.resize(2 * leaves_);
        boxes_.resize(2 * leaves_);
        build(points, 1, 0, leaves_);
        for (std::size_t k = 0; k < points.size(); ++k) {
            items_[k] = {points[k].start, points[k].end, kNone};
            slot_[points[k].block] = static_cast<Index>(k);
        }
    }

    // Put every block in; `order` lists them from the most to the least wanted, `rank` is its inverse.
    void fill(std::span<const Index> order, std::span<const Index> rank) {
        order_ = order;
        for (std::size_t i = 0; i < slot_.size(); ++i) items_[slot_[i]].rank = rank[i];
        for (std::size_t leaf = 0; leaf < leaves_; ++leaf) nodes_[leaves_ + leaf] = best_of_leaf(leaf);
        for (std::size_t v = leaves_ - 1; v >= 1; --v) nodes_[v] = std::min(nodes_[2 * v], nodes_[2 * v + 1]);
    }

    void remove(Index block) {
        const std::size_t slot = slot_[block];
        items_[slot].rank = kNone;
        const std::size_t leaf = leaf_of(slot);
        std::size_t v = leaves_ + leaf;
        for (Index best = best_of_leaf(leaf); nodes_[v] != best; best = std::min(nodes_[2 * v], nodes_[2 * v + 1])) {
            nodes_[v] = best;
            v /= 2;
            if (v == 0) break;
        }
    }

    // The rank of the first block after rank `after` whose life lies in [low, high); kNone if there is none.
    Index first_within(Section low, Section high, Index after = -1) const {
        Index best = kNone;
        search_within(1, low, high, after, best);
        return best;
    }

    // A block whose life lies in [low, high) and holds section t; kNone if there is none.
    Index cover(Section low, Section high, Section t) const { return search_cover(1, low, high, t); }

  private:
    static constexpr std::size_t kLeafBlocks = 8;

    struct Point {
        Section start;
        Section end;
        Index block;
    };
    struct Item {
        Section start;
        Section end;
        Index rank;
    };
    struct Box {
        Section min_start;
        Section max_start;
        Section min_end;
        Section max_end;
    };

    std::size_t first_slot(std::size_t leaf) const { return leaf * items_.size() / leaves_; }

    std::size_t leaf_of(std::size_t slot) const {
        std::size_t leaf = slot * leaves_ / items_.size();
        while (first_slot(leaf + 1) <= slot) ++leaf;
        return leaf;
    }

    void build(std::vector<Point>& points, std::size_t v, std::size_t first_leaf, std::size_t last_leaf) {
        const auto low = points.begin() + static_cast<std::ptrdiff_t>(first_slot(first_leaf));
        const auto high = points.begin() + static_cast<std::ptrdiff_t>(first_slot(last_leaf));
        Box box{std::numeric_limits<Section>::max(), -1, std::numeric_limits<Section>::max(), -1};
        for (auto p = low; p != high; ++p) {
            box.min_start = std::min(box.min_start, p->start);
            box.max_start = std::max(box.max_start, p->start);
            box.min_end = std::min(box.min_end, p->end);
            box.max_end = std::max(box.max_end, p->end);
        }
        boxes_[v] = box;
        if (v >= leaves_) return;
        const std::size_t middle = (first_leaf + last_leaf) / 2;
        const auto cut = points.begin() + static_cast<std::ptrdiff_t>(first_slot(middle));
        if (box.max_start - box.min_start >= box.max_end - box.min_end) {
            std::nth_element(low, cut, high, [](const Point& a, const Point& b) { return a.start < b.start; });
        } else {
            std::nth_element(low, cut, high, [](const Point& a, const Point& b) { return a.end < b.end; });
        }
        build(points, 2 * v, first_leaf, middle);
        build(points, 2 * v + 1, middle, last_leaf);
    }

    Index best_of_leaf(std::size_t leaf) const {
        Index best = kNone;
        for (std::size_t k = first_slot(leaf); k < first_slot(leaf + 1); ++k) best = std::min(best, items_[k].rank);
        return best;
    }

    void search_within(std::size_t v, Section low, Section high, Index after, Index& best) const {
        const Box& box = boxes_[v];
        if (nodes_[v] >= best || box.max_start < low || box.min_end > high) return;
        if (box.min_start >= low && box.max_end <= high && nodes_[v] > after) {
            best = nodes_[v];
        } else if (v >= leaves_) {
            const std::size_t leaf = v - leaves_;
            for (std::size_t k = first_slot(leaf); k < first_slot(leaf + 1); ++k) {
                const Item& item = items_[k];
                if (item.start >= low && item.end <= high && item.rank > after) best = std::min(best, item.rank);
            }
        } else {
            const std::size_t likely = nodes_[2 * v] <= nodes_[2 * v + 1] ? 0 : 1;
            search_within(2 * v + likely, low, high, after, best);
            search_within(2 * v + 1 - likely, low, high, after, best);
        }
    }

    Index search_cover(std::size_t v, Section low, Section high, Section t) const {
        const Box& box = boxes_[v];
        if (nodes_[v] == kNone || box.max_start < low || box.min_start > t || box.min_end > high || box.max_end <= t)
            return kNone;
        if (box.min_start >= low && box.max_start <= t && box.min_end > t && box.max_end <= high)
            return order_[nodes_[v]];
        if (v < leaves_) {
            const Index found = search_cover(2 * v, low, high, t);
            return found != kNone ? found : search_cover(2 * v + 1, low, high, t);
        }
        const std::size_t leaf = v - leaves_;
        for (std::size_t k = first_slot(leaf); k < first_slot(leaf + 1); ++k) {
            const Item& item = items_[k];
            if (item.rank != kNone && low <= item.start && item.start <= t && t < item.end && item.end <= high)
                return order_[item.rank];
        }
        return kNone;
    }

    std::size_t leaves_ = 1;
    std::vector<Item> items_;   // the blocks in the order of the leaves; an absent one has rank kNone
    std::vector<Index> slot_;   // where a block is in items_
    std::vector<Index> nodes_;  // the first rank below each node
    std::vector<Box> boxes_;
    std::span<const Index> order_;
};

}  // namespace overspill::packing
