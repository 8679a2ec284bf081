// From priorities to a timed plan: which trips a program makes, when, and what that costs on the clock. Twin of
// src/overspill/policies/twin.py.
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
#include "timing.hpp"
#include "trips.hpp"

namespace overspill::planning {

struct Decoded {
    std::int64_t looks = 0;  // how often a candidate was looked at: what the choice took
    Seconds seconds = 0;
    Bytes moved_bytes = 0;
    std::vector<Index> chosen;          // candidates, in the order in which they were taken
    std::vector<Index> trips;           // those made
    std::vector<Index> release, issue;  // of each trip made
    std::vector<Seconds> lost;          // by candidate: what its tensor waited, or what its op's algorithm took longer
};

// The streams of simulate/clock.py: compute, and a copy stream each way.
class Streams {
  public:
    explicit Streams(const Link& link) : link_(link) {}

    Seconds now() const { return now_; }
    Seconds offload(Bytes nbytes) { return transfer(out_free_, link_.offload(nbytes)); }
    Seconds prefetch(Bytes nbytes) { return transfer(back_free_, link_.prefetch(nbytes)); }

    Seconds wait(Seconds until) {
        const Seconds waited = std::max(0.0, until - now_);
        now_ = std::max(now_, until);
        return waited;
    }

    void compute(Seconds seconds) {
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
    Seconds now_ = 0, out_free_ = 0, back_free_ = 0;
    std::vector<std::pair<Seconds, Seconds>> running_;

    Seconds transfer(Seconds& free, Seconds duration) {
        const Seconds start = std::max(now_, link_.full_duplex ? free : std::max(out_free_, back_free_));
        free = start + duration;
        if (link_.compute_share > 0) running_.emplace_back(start, free);
        return free;
    }
};

class Decoder {
  public:
    Decoder(std::shared_ptr<const Graph> graph, const Program& program, Link link, Bytes budget)
        : graph_(std::move(graph)),
          link_(link),
          budget_(budget),
          steps_(*graph_, program),
          candidates_(*graph_, program, steps_, link) {}

    const Candidates& candidates() const { return candidates_; }
    const std::vector<Index>& ops() const { return steps_.op; }

    // The plan that takes the candidates `first` before all others, where candidates cost `dearer` seconds more.
    Decoded decode(std::span<const Seconds> dearer, std::span<const std::uint8_t> first) const {
        Decoded plan;
        plan.looks = candidates_.size();
        plan.chosen = Choice(candidates_, steps_, budget_, dearer, first).made(plan.looks);
        Flags made(candidates_.trips().size(), 0);
        for (const Index c : plan.chosen) {
            const Index trip = candidates_[c].trip;
            if (trip < 0 || made[trip]) continue;
            made[trip] = 1;
            plan.trips.push_back(trip);
        }
        std::vector<Seconds> seconds = steps_.seconds;
        std::vector<Bytes> live = steps_.live;
        take_slower(plan.chosen, seconds, live);
        const Clock clock(seconds);
        Timing timing(candidates_.trips(), plan.trips, link_, clock, std::move(live), budget_);
        run(plan, timing, seconds);
        plan.release = std::move(timing.release);
        plan.issue = std::move(timing.issue);
        return plan;
    }

    // The candidates that are the same parts of the same trips as those that were `chosen` in another decoder.
    Flags as_chosen(const Decoder& other, std::span<const Index> chosen) const {
        Pairs before;
        for (const Index c : chosen)
            if (other.candidates_[c].trip >= 0) before.emplace_back(other.candidates_.tensor_of(c), c);
        const Lists by_tensor(static_cast<Index>(graph_->nbytes.size()), before);
        Flags found(static_cast<std::size_t>(candidates_.size()), 0);
        for (Index c = 0; c < candidates_.size() && candidates_[c].trip >= 0; ++c)
            for (const Index o : by_tensor[candidates_.tensor_of(c)])
                if (candidates_[c].part == other.candidates_[o].part && ends(c) == other.ends(o)) found[c] = 1;
        return found;
    }

  private:
    std::shared_ptr<const Graph> graph_;
    Link link_;
    Bytes budget_;
    Steps steps_;
    Candidates candidates_;

    // The ops at the ends of the gap of a trip, which are the same in every program; -1 beyond the last step.
    std::pair<Index, Index> ends(Index candidate) const {
        const Trip& trip = candidates_.trips()[candidates_[candidate].trip];
        return {steps_.op[trip.start], trip.end < steps_.length() ? steps_.op[trip.end] : -1};
    }

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

    // Puts the plan on the clock.
    void run(Decoded& plan, const Timing& timing, const std::vector<Seconds>& seconds) const {
        const Index length = steps_.length();
        Pairs copying, releasing, coming, arriving;
        for (const Index i : timing.by_start()) {
            if (timing.copied(i)) copying.emplace_back(timing.of(i).copy, i);
            releasing.emplace_back(timing.release[i], i);
            coming.emplace_back(timing.issue[i], i);
            arriving.emplace_back(timing.of(i).end, i);
        }
        std::stable_sort(coming.begin(), coming.end(), [&](const auto& a, const auto& b) {
            return timing.of(a.second).end < timing.of(b.second).end;
        });
        const Lists offloads(length + 1, copying), releases(length + 1, releasing), prefetches(length + 1, coming),
            arrivals(length + 1, arriving);
        std::vector<Seconds> left(plan.trips.size(), 0), there(plan.trips.size(), 0);
        std::vector<Seconds> lost_of_tensor(graph_->nbytes.size(), 0), lost_of_op(graph_->forward.size(), 0);
        Streams streams(link_);
        for (Index position = 0; position <= length; ++position) {
            for (const Index i : offloads[position]) {
                left[i] = streams.offload(timing.of(i).nbytes);
                plan.moved_bytes += timing.of(i).nbytes;
            }
            for (const Index i : releases[position])
                if (timing.copied(i)) lost_of_tensor[timing.of(i).tensor] += streams.wait(left[i]);
            for (const Index i : prefetches[position]) there[i] = streams.prefetch(timing.of(i).nbytes);
            for (const Index i : arrivals[position]) lost_of_tensor[timing.of(i).tensor] += streams.wait(there[i]);
            if (position == length) break;
            streams.compute(seconds[position]);
            lost_of_op[steps_.op[position]] += seconds[position] - steps_.seconds[position];
        }
        plan.seconds = streams.now();
        plan.lost.reserve(static_cast<std::size_t>(candidates_.size()));
        for (Index c = 0; c < candidates_.size(); ++c)
            plan.lost.push_back(candidates_[c].trip >= 0 ? lost_of_tensor[candidates_.tensor_of(c)]
                                                         : lost_of_op[candidates_.slower()[candidates_[c].slower].op]);
    }
};

}  // namespace overspill::planning
