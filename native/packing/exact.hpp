// Exact search for a layout within a capacity: one attempt, with one preorder, of at most so many nodes.
//
// It finds canonical solutions: each block lies on the floor or on another block, and blocks are placed in the order of
// their offsets, equal offsets in the order of a preorder. Any layout can be let down to a canonical one, so the search
// is complete. Canonical search, sections, dominance, hatless pruning and decomposition: M. D. Moffitt, MiniMalloc: A
// Lightweight Memory Allocator for Hardware-Accelerated Machine Learning, ASPLOS 2023 (github.com/google/minimalloc).
//
// An aligned block lies at the lowest of its offsets above what it lies on; a pinned block is placed when its address
// comes up, and others may lie on it; a block with gaps takes part in all sections of all its pieces. The search stays
// complete: such blocks can be let down in the same way.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace overspill::packing {

using Units = std::int64_t;

constexpr Units kPlaced = std::numeric_limits<Units>::max() / 4;
constexpr Units kAnywhere = -1;

constexpr Units aligned(Units offset, Units alignment) {
    return alignment == 1 ? offset : (offset + alignment - 1) / alignment * alignment;
}

enum class Outcome { kFits, kInfeasible, kUnknown };

// The blocks in units; block i lives in the half-open ranges of sections piece_first[i] to piece_first[i + 1].
struct ExactBlocks {
    int sections = 0;
    std::vector<int> piece_first, piece_start, piece_end;
    std::vector<Units> size, alignment, pinned, below, lifetime;

    int count() const { return static_cast<int>(size.size()); }
    bool held(int block) const { return pinned[block] != kAnywhere; }
    int first(int block) const { return piece_start[piece_first[block]]; }
    int last(int block) const { return piece_end[piece_first[block + 1] - 1]; }

    template <typename Visit>
    void each_section(int block, Visit visit) const {
        for (int piece = piece_first[block]; piece < piece_first[block + 1]; ++piece)
            for (int t = piece_start[piece]; t < piece_end[piece]; ++t) visit(t);
    }
};

struct Attempt {
    std::vector<Units> highest;  // of each block: the largest offset that is allowed
    std::vector<Units> ceiling;  // of each section: what its blocks may reach together
    std::string keys;            // of the preorder: lifetime (W), size (S), area (A), total of the fullest section (T)
    const double* noise;         // a factor for each block and key
    bool live;                   // whether the parts of a split are put in preorder anew
    std::int64_t node_limit;
};

class ExactSearch {
  public:
    explicit ExactSearch(ExactBlocks blocks) : blocks_(std::move(blocks)) {
        const int n = blocks_.count();
        covers_.resize(blocks_.sections);
        load_.assign(blocks_.sections, 0);
        all_crossing_.assign(blocks_.sections + 1, 0);
        for (int block = 0; block < n; ++block) {
            if (empty(block)) continue;
            blocks_.each_section(block, [&](int t) {
                covers_[t].push_back(block);
                load_[t] += blocks_.size[block];
            });
            for (int t = blocks_.first(block) + 1; t < blocks_.last(block); ++t) ++all_crossing_[t];
        }
        find_neighbours();
    }

    // Whether all blocks fit; `stop` is asked now and then whether to give up. Depth first with its own stack: the frame
    // on top is the node at hand, `solved` says how the one that was above it ended.
    template <typename Stop>
    Outcome attempt(const Attempt& request, Stop stop) {
        request_ = &request;
        reset();
        if (!start()) return Outcome::kInfeasible;
        bool solved = true;
        while (!frames_.empty()) {
            Frame& frame = frames_.back();
            if (solved && frame.next_part < frame.part_end) {
                if (++nodes_ > request.node_limit || (nodes_ % kNodesPerStop == 0 && stop())) return Outcome::kUnknown;
                const Part part = parts_[frame.next_part++];
                open(part);
                solved = choose(frames_.back());
                if (!solved) close();
                continue;
            }
            if (!solved && frame.block >= 0) {
                take_back(frame);
                solved = learn(frame) && choose(frame);
                if (solved) continue;
            }
            close();
        }
        return solved ? Outcome::kFits : Outcome::kInfeasible;
    }

    std::int64_t nodes() const { return nodes_; }
    const std::vector<Units>& offsets() const { return place_; }

  private:
    static constexpr std::int64_t kNodesPerStop = 64;

    // An independent part of what is left: the unplaced blocks `items_[begin, end)`, all within [first, last).
    // They lie no lower than `offset`, and at the same offset come later in the preorder than `rank`.
    struct Part {
        int first, last;
        std::size_t begin, end;
        Units offset;
        int rank;
    };

    struct Candidate {
        Units offset;
        int rank, block;
        friend bool operator<(const Candidate& a, const Candidate& b) {
            return std::tie(a.offset, a.rank) < std::tie(b.offset, b.rank);
        }
    };

    // A node: which block of a part comes next.
    struct Frame {
        Part part;
        std::size_t candidate_begin, next_candidate, candidate_end;
        std::size_t part_begin, next_part, part_end;  // what is left after the choice
        std::size_t item_begin, trail, trail_of_choice;
        int block = -1;        // the one tried
        Units offset = 0;      // where
        bool covered = false;  // whether an unplaced block can come to lie on it
    };

    struct Change {
        Units* where;
        Units value;
    };

    bool empty(int block) const { return blocks_.piece_first[block] == blocks_.piece_first[block + 1]; }

    // Two blocks live together where a piece of one begins within a piece of the other, or at its first section.
    void find_neighbours() {
        const int n = blocks_.count();
        std::vector<std::vector<int>> beginning(blocks_.sections);
        for (int block = 0; block < n; ++block)
            for (int piece = blocks_.piece_first[block]; piece < blocks_.piece_first[block + 1]; ++piece)
                beginning[blocks_.piece_start[piece]].push_back(block);
        neighbours_.resize(n);
        std::vector<int> seen(n, -1);
        for (int block = 0; block < n; ++block) {
            seen[block] = block;
            const auto note = [&](const std::vector<int>& others) {
                for (const int other : others) {
                    if (seen[other] == block) continue;
                    seen[other] = block;
                    neighbours_[block].push_back(other);
                }
            };
            for (int piece = blocks_.piece_first[block]; piece < blocks_.piece_first[block + 1]; ++piece) {
                note(covers_[blocks_.piece_start[piece]]);
                for (int t = blocks_.piece_start[piece] + 1; t < blocks_.piece_end[piece]; ++t) note(beginning[t]);
            }
        }
    }

    void set(Units& where, Units value) {
        trail_.push_back({&where, where});
        where = value;
    }

    void undo(std::size_t mark) {
        for (; trail_.size() > mark; trail_.pop_back()) *trail_.back().where = trail_.back().value;
    }

    void reset() {
        const int n = blocks_.count();
        offset_.assign(n, 0);
        for (int block = 0; block < n; ++block)
            if (blocks_.held(block)) offset_[block] = blocks_.pinned[block];
        place_ = offset_;
        rank_.resize(n);
        for (int block = 0; block < n; ++block) rank_[block] = block;
        floor_.assign(blocks_.sections, 0);
        left_ = load_;
        crossing_ = all_crossing_;
        lowest_.assign(blocks_.sections, 0);
        for (int t = 0; t < blocks_.sections; ++t) lowest_[t] = covers_[t].empty() ? 0 : covers_[t].front();
        trail_.clear();
        items_.clear();
        candidates_.clear();
        parts_.clear();
        frames_.clear();
        nodes_ = 0;
    }

    // The root: no block is placed, and what is there falls into parts.
    bool start() {
        const int n = blocks_.count();
        for (int block = 0; block < n; ++block)
            if (offset_[block] > request_->highest[block]) return false;
        if (!raise_floors(0, blocks_.sections)) return false;
        Frame root{};
        root.part = {0, blocks_.sections, 0, 0, 0, -1};
        for (int block = 0; block < n; ++block)
            if (!empty(block)) items_.push_back(block);
        root.part.end = items_.size();
        root.item_begin = items_.size();
        root.block = -1;
        frames_.push_back(root);
        split(frames_.back(), true);
        return true;
    }

    // Floors of the sections [first, last): the lowest offset of what is unplaced; false if one breaks its ceiling.
    bool raise_floors(int first, int last) {
        for (int t = first; t < last; ++t) {
            if (left_[t] == 0) continue;
            if (offset_[lowest_[t]] != floor_[t]) {
                Units low = kPlaced;
                for (const int block : covers_[t]) low = std::min(low, offset_[block]);
                lowest_[t] = *std::find_if(covers_[t].begin(), covers_[t].end(),
                                           [&](int block) { return offset_[block] == low; });
                if (low != floor_[t]) set(floor_[t], low);
            }
            if (floor_[t] + left_[t] > request_->ceiling[t]) return false;
        }
        return true;
    }

    // A new node for a part, with the blocks that may come next in it.
    void open(const Part& part) {
        Frame frame{};
        frame.part = part;
        frame.trail = trail_.size();
        frame.candidate_begin = frame.next_candidate = candidates_.size();
        frame.part_begin = frame.next_part = frame.part_end = parts_.size();
        frame.item_begin = items_.size();
        Units lowest_top = kPlaced;
        Candidate forced{kPlaced, 0, -1};
        for (std::size_t i = part.begin; i < part.end; ++i) {
            const int block = items_[i];
            lowest_top = std::min(lowest_top, offset_[block] + blocks_.size[block]);
            if (blocks_.held(block))
                forced = std::min(forced, Candidate{offset_[block], static_cast<int>(rank_[block]), block});
        }
        Units highest = kPlaced;
        for (int t = part.first; t < part.last; ++t)
            if (left_[t] > 0) highest = std::min(highest, request_->ceiling[t] - left_[t]);
        for (std::size_t i = part.begin; i < part.end; ++i) {
            const int block = items_[i];
            const Units offset = offset_[block];
            if (offset >= lowest_top || offset > highest || offset < part.offset) continue;
            const int rank = static_cast<int>(rank_[block]);
            if (offset == part.offset && rank < part.rank) continue;
            if (const Units below = blocks_.below[block]; below >= 0 && offset_[below] != kPlaced) continue;
            const Candidate candidate{offset, rank, block};
            if (!(forced < candidate)) candidates_.push_back(candidate);
        }
        std::sort(candidates_.begin() + static_cast<std::ptrdiff_t>(frame.candidate_begin), candidates_.end());
        frame.candidate_end = candidates_.size();
        frames_.push_back(frame);
    }

    void close() {
        const Frame& frame = frames_.back();
        candidates_.resize(frame.candidate_begin);
        parts_.resize(frame.part_begin);
        items_.resize(frame.item_begin);
        frames_.pop_back();
    }

    // Place the next candidate that leaves hope; false if there is none.
    bool choose(Frame& frame) {
        while (frame.next_candidate < frame.candidate_end) {
            const Candidate candidate = candidates_[frame.next_candidate++];
            if (offset_[candidate.block] != candidate.offset) continue;
            frame.block = candidate.block;
            frame.offset = candidate.offset;
            frame.trail_of_choice = trail_.size();
            if (place(frame)) return true;
            take_back(frame);
            if (!learn(frame)) break;
        }
        undo(frame.trail);
        frame.block = -1;
        return false;
    }

    bool place(Frame& frame) {
        const int block = frame.block;
        const Units top = frame.offset + blocks_.size[block];
        place_[block] = frame.offset;
        set(offset_[block], kPlaced);
        blocks_.each_section(block, [&](int t) { set(left_[t], left_[t] - blocks_.size[block]); });
        int first = blocks_.first(block), last = blocks_.last(block);
        frame.covered = false;
        bool fits = true;
        for (const int other : neighbours_[block]) {
            if (offset_[other] == kPlaced) continue;
            frame.covered = true;
            if (offset_[other] >= top) continue;
            const Units raised = aligned(top, blocks_.alignment[other]);
            if (raised > request_->highest[other]) {
                fits = false;
                break;
            }
            set(offset_[other], raised);
            first = std::min(first, blocks_.first(other));
            last = std::max(last, blocks_.last(other));
        }
        if (!fits || !raise_floors(first, last)) return false;
        bool splits = false;
        for (int t = blocks_.first(block) + 1; t < blocks_.last(block); ++t) {
            set(crossing_[t], crossing_[t] - 1);
            splits |= crossing_[t] == 0;
        }
        if (splits) {
            split(frame, false);
        } else {
            const std::size_t begin = items_.size();
            for (std::size_t i = frame.part.begin; i < frame.part.end; ++i)
                if (const int item = items_[i]; item != block) items_.push_back(item);
            add_part(frame, {frame.part.first, frame.part.last, begin, items_.size(), frame.offset, rank(block)});
        }
        return true;
    }

    int rank(int block) const { return static_cast<int>(rank_[block]); }

    void add_part(Frame& frame, const Part& part) {
        if (part.begin == part.end) return;
        parts_.push_back(part);
        frame.part_end = parts_.size();
    }

    // Cut what is left at the boundaries that no unplaced block crosses.
    void split(Frame& frame, bool root) {
        frame.part_begin = frame.next_part = frame.part_end = parts_.size();
        int first = frame.part.first;
        for (int t = frame.part.first + 1; t <= frame.part.last; ++t) {
            if (t < frame.part.last && crossing_[t] > 0) continue;
            const std::size_t begin = items_.size();
            for (std::size_t i = frame.part.begin; i < frame.part.end; ++i) {
                const int item = items_[i];
                if (item != frame.block && blocks_.first(item) >= first && blocks_.first(item) < t)
                    items_.push_back(item);
            }
            add_part(frame, {first, t, begin, items_.size(), frame.offset, frame.block < 0 ? -1 : rank(frame.block)});
            first = t;
        }
        if (!root && (!request_->live || frame.part_end - frame.part_begin == 1)) return;
        for (std::size_t i = frame.part_begin; i < frame.part_end; ++i) {
            put_in_preorder(parts_[i]);
            parts_[i].rank = -1;
            parts_[i].offset = 0;
        }
    }

    void put_in_preorder(const Part& part) {
        const auto begin = items_.begin() + static_cast<std::ptrdiff_t>(part.begin);
        const auto end = items_.begin() + static_cast<std::ptrdiff_t>(part.end);
        std::vector<std::pair<std::array<double, 3>, int>> keyed;
        keyed.reserve(part.end - part.begin);
        for (auto it = begin; it != end; ++it) keyed.emplace_back(keys(*it), *it);
        std::stable_sort(keyed.begin(), keyed.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
        for (std::size_t i = 0; i < keyed.size(); ++i) {
            items_[part.begin + i] = keyed[i].second;
            set(rank_[keyed[i].second], static_cast<Units>(i));
        }
    }

    std::array<double, 3> keys(int block) const {
        std::array<double, 3> found{};
        for (std::size_t i = 0; i < 3; ++i) {
            double value = 0;
            if (request_->keys[i] == 'T') {
                Units fullest = 0;
                blocks_.each_section(block, [&](int t) { fullest = std::max(fullest, left_[t]); });
                value = static_cast<double>(fullest);
            } else {
                value = request_->keys[i] == 'S' ? 1 : static_cast<double>(blocks_.lifetime[block]);
                if (request_->keys[i] != 'W') value *= static_cast<double>(blocks_.size[block]);
            }
            found[i] = value * request_->noise[static_cast<std::size_t>(block) * 3 + i];
        }
        return found;
    }

    void take_back(Frame& frame) {
        undo(frame.trail_of_choice);
        items_.resize(frame.item_begin);
        parts_.resize(frame.part_begin);
        frame.next_part = frame.part_end = frame.part_begin;
    }

    // What follows when the block tried cannot lie where it was tried; false if the node has no solution.
    bool learn(Frame& frame) {
        const int block = frame.block;
        if (!frame.covered || blocks_.held(block)) return fail(frame);
        Units support = kPlaced;
        for (const int other : neighbours_[block])
            if (offset_[other] != kPlaced)
                support = std::min(support, std::max(offset_[other], frame.offset) + blocks_.size[other]);
        support = aligned(support, blocks_.alignment[block]);
        if (support > request_->highest[block]) return fail(frame);
        if (support <= offset_[block]) return true;
        set(offset_[block], support);
        return raise_floors(blocks_.first(block), blocks_.last(block)) || fail(frame);
    }

    bool fail(Frame& frame) {
        undo(frame.trail);
        frame.block = -1;
        return false;
    }

    ExactBlocks blocks_;
    std::vector<std::vector<int>> covers_;      // of each section
    std::vector<std::vector<int>> neighbours_;  // of each block: those live at some time with it
    std::vector<Units> load_, all_crossing_;       // of all blocks

    const Attempt* request_ = nullptr;
    std::vector<Units> place_;      // the offset of each placed block
    std::vector<Units> offset_;     // the lowest possible one of each unplaced block; kPlaced for the others
    std::vector<Units> rank_;       // in the preorder of its part
    std::vector<Units> floor_;      // of each section: the lowest offset of what is unplaced
    std::vector<Units> left_;       // of each section: the total of what is unplaced
    std::vector<Units> crossing_;   // of each boundary: how many unplaced blocks cross it
    std::vector<int> lowest_;       // of each section: a block that was at its floor
    std::vector<Change> trail_;
    std::vector<int> items_;
    std::vector<Candidate> candidates_;
    std::vector<Part> parts_;
    std::vector<Frame> frames_;
    std::int64_t nodes_ = 0;
};

}  // namespace overspill::packing
