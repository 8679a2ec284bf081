// The greedy choice of what to take off the device, cheapest per byte-second relieved first.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "excess.hpp"
#include "program.hpp"
#include "swaps.hpp"

namespace overspill::search {

// Scores with their candidates, the least first, ties by candidate: a heap of those that are finite.
class LeastFirst {
  public:
    struct Entry {
        Seconds score;
        Index index;

        bool operator<(const Entry& other) const {
            return score < other.score || (score == other.score && index < other.index);
        }
    };

    bool empty() const { return heap_.empty(); }
    const Entry& top() const { return heap_.front(); }

    void add(Seconds score, Index index) {
        if (score < kNever) heap_.push_back({score, index});
    }

    void arrange() {
        for (std::size_t hole = heap_.size() / 2; hole-- > 0;) sink(hole, heap_[hole]);
    }

    void push(Seconds score, Index index) {
        if (!(score < kNever)) return;
        heap_.push_back({score, index});
        std::push_heap(heap_.begin(), heap_.end(), [](const Entry& a, const Entry& b) { return b < a; });
    }

    // Gives the top another, larger score; an infinite one takes it out.
    void raise(Seconds score) {
        Entry moving{score, heap_.front().index};
        if (!(score < kNever)) {
            moving = heap_.back();
            heap_.pop_back();
            if (heap_.empty()) return;
        }
        sink(0, moving);
    }

  private:
    std::vector<Entry> heap_;

    void sink(std::size_t hole, Entry moving) {
        for (std::size_t child = 2 * hole + 1; child < heap_.size(); child = 2 * hole + 1) {
            child += child + 1 < heap_.size() && heap_[child + 1] < heap_[child];
            if (!(heap_[child] < moving)) break;
            heap_[hole] = heap_[child];
            hole = child;
        }
        heap_[hole] = moving;
    }
};

// One choice among candidates of this `cost` within a budget, of which those `first` are taken before all others.
class Choice {
  public:
    Choice(const Candidates& among, const Steps& steps, Bytes budget, std::span<const Seconds> cost, const Flags& first)
        : among_(among),
          steps_(steps),
          budget_(budget),
          cost_(cost),
          open_(static_cast<std::size_t>(among.size()), 1),
          excess_steps_(steps.ticks, excess(first)),
          room_out_{steps.in_forward, steps.in_backward},
          room_back_{steps.in_forward, steps.in_backward} {
        out_.reserve(static_cast<std::size_t>(among.size()));
        for (const Candidate& candidate : among.all()) out_.push_back(candidate.out);
        for (Index i = 0; i < among_.size(); ++i)
            if (first[i]) mark(i);
    }

    // The candidates taken. `evaluations`: how often one was looked at.
    std::vector<Index> made(std::int64_t& evaluations) {
        // A score only grows while others are taken, but for those that become cheaper: one that has not grown since it
        // was looked at is the least.
        LeastFirst queue;
        for (Index i = 0; i < among_.size(); ++i)
            if (open_[i]) queue.add(score(i), i);
        queue.arrange();
        while (!queue.empty()) {
            const auto [before, index] = queue.top();
            ++evaluations;
            const Seconds now = open_[index] ? score(index) : kNever;
            if (now > before) {
                queue.raise(now);
                continue;
            }
            queue.raise(kNever);
            take(index);
            for (const Index other : cheaper_) queue.push(score(other), other);
        }
        prune();
        return std::move(taken_);
    }

  private:
    const Candidates& among_;
    const Steps& steps_;
    Bytes budget_;
    std::span<const Seconds> cost_;
    std::vector<Seconds> out_;
    Flags open_;
    Excess excess_steps_;
    std::array<Seconds, 2> room_out_, room_back_;  // of the link in forward and in backward
    std::vector<Index> taken_;
    std::vector<Index> cheaper_;  // open candidates that the last one taken has made cheaper

    // By how much each step is over the budget when those `first` are taken.
    std::vector<Bytes> excess(const Flags& first) const {
        ByStep away(steps_.live.size());
        for (Index i = 0; i < among_.size(); ++i)
            if (first[i]) relieve(among_[i], away);
        std::vector<Bytes> found = steps_.live;
        away.add_to(found);
        for (Bytes& bytes : found) bytes -= budget_;
        return found;
    }

    // Takes off the device what a candidate takes off.
    static void relieve(const Candidate& c, ByStep& away) {
        for (const Span& span : c.spans) away.add(span.start, span.end, -c.nbytes);
    }

    // The cost per byte and time relieved; infinite where nothing is.
    Seconds score(Index index) {
        const Candidate& c = among_[index];
        const std::int64_t time =
            excess_steps_.within(c.spans[0]) + (c.spans[1].end ? excess_steps_.within(c.spans[1]) : 0);
        const double area = static_cast<double>(c.nbytes) * static_cast<double>(time);
        if (!(area > 0)) return kNever;
        const Seconds exposed = std::max(out_[index] - std::max(0.0, room_out_[c.leaves_in_backward]), 0.0) +
                                std::max(c.back - std::max(0.0, room_back_[c.returns_in_backward]), 0.0);
        return (cost_[index] + exposed) / area;
    }

    void take(Index index) {
        for (const Span& span : among_[index].spans) excess_steps_.relieve(span, among_[index].nbytes, steps_.ticks);
        mark(index);
    }

    // Counts a candidate as taken. Whichever part of a swap it is, one copy in the store serves every swap of its
    // tensor.
    void mark(Index index) {
        const Candidate& c = among_[index];
        open_[index] = 0;
        room_out_[c.leaves_in_backward] -= out_[index];
        room_back_[c.returns_in_backward] -= c.back;
        taken_.push_back(index);
        cheaper_.clear();
        if (c.swap < 0) return;
        for (const Index other : among_.of_tensor(among_.tensor_of(index)))
            if (std::exchange(out_[other], 0.0) > 0 && open_[other]) cheaper_.push_back(other);
    }

    // Gives back, dearest first, what later choices made superfluous.
    void prune() {
        ByStep away(steps_.live.size());
        for (const Index index : taken_) relieve(among_[index], away);
        std::vector<Bytes> room = steps_.live;
        away.add_to(room);
        for (Bytes& bytes : room) bytes = budget_ - bytes;
        const auto price = [&](Index i) { return cost_[i] + among_[i].back; };
        std::vector<Index> order = taken_;
        std::stable_sort(order.begin(), order.end(), [&](Index a, Index b) { return price(a) > price(b); });
        Flags gone(static_cast<std::size_t>(among_.size()), 0);
        for (const Index index : order) {
            const Candidate& c = among_[index];
            const auto fits = [&](const Span& span) {
                return std::all_of(room.begin() + span.start, room.begin() + span.end,
                                   [&](Bytes bytes) { return bytes >= c.nbytes; });
            };
            if (!fits(c.spans[0]) || !fits(c.spans[1])) continue;
            for (const Span& span : c.spans)
                for (Index i = span.start; i < span.end; ++i) room[i] -= c.nbytes;
            gone[index] = 1;
        }
        std::erase_if(taken_, [&](Index index) { return gone[index] != 0; });
    }
};

}  // namespace overspill::search
