// List scheduling: swaps and slower algorithms chosen greedily, each transfer timed, and what that costs on the clock.
// The clock gives the seconds of src/overspill/simulate/clock.py; a test holds them together.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "program.hpp"
#include "select.hpp"
#include "swaps.hpp"
#include "timing.hpp"

namespace overspill::search {

struct TimedPlan {
    std::int64_t evaluations = 0;  // how often a candidate was looked at: what the choice took
    Seconds seconds = 0;
    Bytes moved_bytes = 0;
    Bytes peak_bytes = 0;
    std::vector<Index> chosen;          // candidates, in the order in which they were taken
    std::vector<Index> swaps;           // those made, in their order
    Flags copied;                       // of each swap made: whether its tensor is sent, and not in the store already
    std::vector<Index> release, issue;  // of each swap made
    std::vector<Seconds>
        stall_seconds;  // by tensor what compute waited for it, then by op what its algorithm took longer

    // What is to be made small.
    std::pair<Seconds, Bytes> cost() const { return {seconds, moved_bytes}; }
};

// Stands for the gap of a swap in every program of a graph: for its tensor and the ops at its ends.
using Key = std::int64_t;

// The streams of simulate/clock.py: compute, a copy stream each way, that of collectives, and the host that issues all.
class Streams {
  public:
    explicit Streams(const Link& link) : link_(link) {}

    Seconds end() const { return std::max(now_, host_); }
    Seconds offload(Bytes nbytes) { return transfer(out_free_, link_.offload(nbytes)); }
    Seconds prefetch(Bytes nbytes) { return transfer(back_free_, link_.prefetch(nbytes)); }

    Seconds send(Seconds duration) {
        if (link_.behind_host) host_ += link_.op_host;
        const Seconds start = std::max({now_, host_, sent_free_});
        sent_free_ = start + duration;
        if (link_.compute_share > 0) running_.emplace_back(start, sent_free_);
        return sent_free_;
    }

    Seconds wait(Seconds until) {
        const Seconds waited = std::max(0.0, until - now_);
        now_ = std::max(now_, until);
        return waited;
    }

    void compute(Seconds seconds) {
        now_ = std::max(now_, host_);
        if (link_.behind_host) host_ += link_.op_host;
        Seconds end = now_ + seconds;
        if (link_.compute_share > 0) {
            std::erase_if(running_, [&](const auto& span) { return span.second <= now_; });
            Seconds beside = 0;
            for (const auto& [since, until] : running_)
                beside += std::max(0.0, std::min(end, until) - std::max(now_, since));
            end += link_.compute_share * beside;
        }
        now_ = end;
    }

  private:
    const Link& link_;
    Seconds now_ = 0, host_ = 0, out_free_ = 0, back_free_ = 0, sent_free_ = 0;
    std::vector<std::pair<Seconds, Seconds>> running_;

    Seconds transfer(Seconds& free, Seconds duration) {
        if (link_.transfer_host > 0) {
            host_ = link_.transfer_host + (link_.behind_host ? host_ : std::max(host_, now_));
            if (!link_.behind_host) now_ = std::max(now_, host_);
        }
        const Seconds start = std::max({now_, host_, link_.full_duplex ? free : std::max(out_free_, back_free_)});
        free = start + duration;
        if (link_.compute_share > 0) running_.emplace_back(start, free);
        return free;
    }
};

class ListScheduler {
  public:
    ListScheduler(std::shared_ptr<const Graph> graph, const Program& program, Link link, Bytes budget)
        : graph_(std::move(graph)),
          link_(link),
          budget_(budget),
          steps_(*graph_, program),
          candidates_(*graph_, program, steps_, link) {}

    const Candidates& candidates() const { return candidates_; }

    // How many there are of what may be penalty: tensors, then ops.
    Index whats() const { return graph_->tensors() + graph_->ops(); }

    // The plan that takes the candidates `first` before all others, where swaps of a tensor and then slower algorithms
    // of an op cost `penalty` seconds more.
    TimedPlan plan(std::span<const Seconds> penalty, const Flags& first) const {
        TimedPlan plan;
        plan.evaluations = candidates_.size();
        std::vector<Seconds> cost;
        cost.reserve(static_cast<std::size_t>(candidates_.size()));
        for (Index c = 0; c < candidates_.size(); ++c) cost.push_back(candidates_[c].cost + penalty[what(c)]);
        plan.chosen = Choice(candidates_, steps_, budget_, cost, first).made(plan.evaluations);
        Flags made(candidates_.swaps().size(), 0);
        for (const Index c : plan.chosen)
            if (candidates_[c].swap >= 0) made[candidates_[c].swap] = 1;
        for (Index swap = 0; swap < static_cast<Index>(made.size()); ++swap)
            if (made[swap]) plan.swaps.push_back(swap);
        std::vector<Seconds> seconds = steps_.seconds;
        std::vector<Bytes> live = steps_.alone;
        take_slower(plan.chosen, seconds, live);
        const Clock clock(seconds);
        Timing timing(candidates_.swaps(), plan.swaps, steps_, link_, clock, std::move(live), budget_);
        plan.peak_bytes = timing.peak();
        plan.copied = std::move(timing.copied);
        plan.release = std::move(timing.release);
        plan.issue = std::move(timing.issue);
        plan.stall_seconds.assign(graph_->nbytes.size() + graph_->forward.size(), 0);
        plan.seconds = run(plan, timing.flown, seconds, plan.stall_seconds);
        for (Index i = 0; i < static_cast<Index>(plan.swaps.size()); ++i)
            if (plan.copied[i]) plan.moved_bytes += swap(plan, i).nbytes;
        return plan;
    }

    // No candidate taken before the others.
    Flags none() const { return Flags(static_cast<std::size_t>(candidates_.size()), 0); }

    // The candidates that are the same parts of the same swaps as those that a plan of another scheduler takes.
    Flags as_chosen(const ListScheduler& other, const TimedPlan& plan) const {
        Flags found(static_cast<std::size_t>(candidates_.size()), 0);
        for (const Index before : plan.chosen) {
            const Candidate& part = other.candidates_[before];
            if (part.swap < 0) continue;
            const Key gap = other.key(before);
            for (const Index c : candidates_.of_tensor(other.candidates_.tensor_of(before)))
                if (candidates_[c].part == part.part && key(c) == gap) found[c] = 1;
        }
        return found;
    }

  private:
    std::shared_ptr<const Graph> graph_;
    Link link_;
    Bytes budget_;
    Steps steps_;
    Candidates candidates_;

    // What a candidate is of: a tensor's number, or the number of tensors and an op's.
    Index what(Index candidate) const {
        if (candidates_[candidate].swap >= 0) return candidates_.tensor_of(candidate);
        if (const Index flight = candidates_[candidate].flight; flight >= 0)
            return graph_->tensors() + steps_.op[steps_.flights[flight].position];
        return graph_->tensors() + candidates_.slower()[candidates_[candidate].slower].op;
    }

    // Stands for the gap of a swap in every program of the graph.
    Key key(Index candidate) const {
        const Swap& swap = candidates_.swaps()[candidates_[candidate].swap];
        const Key last = swap.end < steps_.length() ? steps_.op[swap.end] : -1;
        return (static_cast<Key>(swap.tensor) << 42) + (static_cast<Key>(steps_.op[swap.start]) << 21) + last;
    }

    const Swap& swap(const TimedPlan& plan, Index made) const { return candidates_.swaps()[plan.swaps[made]]; }

    // The seconds and bytes of the steps with the algorithms chosen, of several for an op the slowest.
    void take_slower(const std::vector<Index>& chosen, std::vector<Seconds>& seconds, std::vector<Bytes>& live) const {
        const std::vector<Slower>& slower = candidates_.slower();
        std::vector<Index> slowest(static_cast<std::size_t>(graph_->ops()), -1);
        for (const Index c : chosen) {
            const Index s = candidates_[c].slower;
            if (s < 0) continue;
            Index& most = slowest[slower[s].op];
            if (most < 0 || slower[s].number > slower[most].number) most = s;
        }
        for (Index op = 0; op < graph_->ops(); ++op) {
            if (slowest[op] < 0) continue;
            for (const Index position : steps_.of_op[op]) {
                seconds[position] = slower[slowest[op]].seconds;
                live[position] -= slower[slowest[op]].saved;
            }
        }
    }

    // Puts the plan on the clock, where steps take `seconds`; says how long it takes, and what is `stall_seconds`.
    Seconds run(const TimedPlan& plan, const std::vector<Span>& flown, const std::vector<Seconds>& seconds,
                std::vector<Seconds>& stall_seconds) const {
        const Index length = steps_.length();
        const auto of = [&](Index i) -> const Swap& { return swap(plan, i); };
        Pairs ending, copying, releasing, coming;
        for (const Index i : by(&Swap::start, candidates_.swaps(), plan.swaps, length)) {
            if (plan.copied[i]) copying.emplace_back(of(i).copy, i);
            releasing.emplace_back(plan.release[i], i);
            ending.emplace_back(of(i).end, i);
        }
        const Lists arrivals(length + 1, ending);
        for (const Index i : arrivals.values) coming.emplace_back(plan.issue[i], i);
        const Lists offloads(length + 1, copying), releases(length + 1, releasing), prefetches(length + 1, coming);
        std::vector<Seconds> left(plan.swaps.size(), 0), there(plan.swaps.size(), 0), sent(flown.size(), 0);
        Pairs sending, ending_sent;
        for (Index f = 0; f < static_cast<Index>(flown.size()); ++f) {
            const Flight& flight = steps_.flights[f];
            sending.emplace_back(flight.gathers ? flown[f].start : flight.position, f);
            ending_sent.emplace_back(flown[f].end, f);
        }
        const Lists sends(length + 1, sending), sends_over(length + 1, ending_sent);
        Streams streams(link_);
        for (Index position = 0; position <= length; ++position) {
            for (const Index i : offloads[position]) left[i] = streams.offload(of(i).nbytes);
            for (const Index i : releases[position])
                if (plan.copied[i]) stall_seconds[of(i).tensor] += streams.wait(left[i]);
            for (const Index i : prefetches[position]) there[i] = streams.prefetch(of(i).nbytes);
            for (const Index i : arrivals[position]) stall_seconds[of(i).tensor] += streams.wait(there[i]);
            for (const Index f : sends[position]) sent[f] = streams.send(steps_.flights[f].seconds);
            for (const Index f : sends_over[position])
                stall_seconds[graph_->tensors() + steps_.op[steps_.flights[f].position]] += streams.wait(sent[f]);
            if (position == length) break;
            if (graph_->sends[steps_.op[position]] != Sends::kNothing) continue;
            streams.compute(seconds[position]);
            stall_seconds[graph_->tensors() + steps_.op[position]] += seconds[position] - steps_.seconds[position];
        }
        return streams.end();
    }
};

}  // namespace overspill::search
