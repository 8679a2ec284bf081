// When transfers start and are awaited: the latest that costs no time, the earliest that memory demands.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "program.hpp"
#include "swaps.hpp"

namespace overspill::search {

using Pairs = std::vector<std::pair<Index, Index>>;

// Trips made, as numbers of `made`, by one of their steps; of the same step as in `made`.
inline std::vector<Index> by(Index Swap::* step, const std::vector<Swap>& swaps, const std::vector<Index>& made,
                             Index length) {
    Pairs found;
    for (Index i = 0; i < static_cast<Index>(made.size()); ++i) found.emplace_back(swaps[made[i]].*step, i);
    return Lists(length + 1, found).values;
}

// The swaps that a plan makes: which send their tensor to the store, and before which steps each is released and
// issued.
class Timing {
  public:
    Flags copied;                       // of each swap made: whether its tensor is sent, and not in the store already
    std::vector<Index> release, issue;  // of each swap made
    std::vector<Span> flown;            // of each flight, the steps beside which it runs

    // `made` are in the order of `swaps`: by tensor, then by start. `live` are the bytes on the device at each step if
    // no swap were made, `clock` tells when each step starts.
    Timing(const std::vector<Swap>& swaps, const std::vector<Index>& made, const Steps& steps, const Link& link,
           const Clock& clock, std::vector<Bytes> live, Bytes budget)
        : flown(steps.flights.size()),
          swaps_(swaps),
          made_(made),
          steps_(steps),
          link_(link),
          clock_(clock),
          live_(std::move(live)),
          budget_(budget) {
        ByStep away(live_.size());
        for (Index i = 0; i < count(); ++i) {
            const Swap& swap = of(i);
            away.add(swap.start + 1, swap.wraps() ? length() : swap.end, -swap.nbytes);
            if (swap.wraps()) away.add(0, swap.end, -swap.nbytes);
        }
        away.add_to(live_);
        find_copies();
        find_releases();
        find_issues();
    }

    // The most bytes on the device at a step.
    Bytes peak() const { return live_.empty() ? 0 : *std::ranges::max_element(live_); }

  private:
    static constexpr double kIssueMargin = 1.2;  // timing.py's ISSUE_MARGIN

    const std::vector<Swap>& swaps_;
    const std::vector<Index>& made_;
    const Steps& steps_;
    const Link& link_;
    const Clock& clock_;
    std::vector<Bytes> live_;
    Bytes budget_;

    Index count() const { return static_cast<Index>(made_.size()); }
    const Swap& of(Index i) const { return swaps_[made_[i]]; }
    Index length() const { return static_cast<Index>(live_.size()); }

    void add(Index from, Index to, Bytes nbytes) {
        for (Index i = from; i < to; ++i) live_[i] += nbytes;
    }

    // One copy in the store serves the swaps of a tensor until it is written again; one that wraps finds it there.
    void find_copies() {
        copied.assign(made_.size(), 0);
        for (Index i = 0; i < count();) {
            Index end = i, stored = -1;
            for (; end < count() && of(end).tensor == of(i).tensor; ++end)
                if (of(end).wraps()) stored = 0;
            for (; i < end; ++i) {
                if (of(i).version <= stored) continue;
                copied[i] = 1;
                stored = of(i).version;
            }
        }
    }

    // Each offload is awaited once it should be done; where memory is short before, the one that is done first.
    void find_releases() {
        release.assign(made_.size(), 0);
        Pairs copies;
        for (const Index i : by(&Swap::start, swaps_, made_, length())) {
            if (copied[i])
                copies.emplace_back(of(i).copy, i);
            else
                release[i] = of(i).start + 1;
        }
        const Lists starting(length() + 1, copies);
        std::vector<std::pair<Index, Seconds>> leaving, staying;  // (swap made, when its copy is done)
        Seconds link_free = 0, delay = 0;
        for (Index position = 0; position <= length(); ++position) {
            Seconds now = clock_[position] + delay;
            for (const Index i : starting[position]) {
                link_free = std::max(link_free, now) + link_.offload(of(i).nbytes);
                leaving.emplace_back(i, link_free);
            }
            if (leaving.empty()) continue;
            Bytes over = position < length() ? live_[position] - budget_ : 0;
            for (const auto& [i, done] : leaving)
                if (of(i).start < position) over += of(i).nbytes;
            staying.clear();
            for (const auto& [i, done] : leaving) {
                const Swap& swap = of(i);
                if (swap.start < position && (done <= now || over > 0 || position >= swap.latest)) {
                    now = std::max(now, done);
                    over -= swap.nbytes;
                    release[i] = position;
                } else {
                    staying.emplace_back(i, done);
                }
            }
            std::swap(leaving, staying);
            delay = now - clock_[position];
        }
        for (Index i = 0; i < count(); ++i) add(of(i).start + 1, release[i], of(i).nbytes);
    }

    // Each prefetch is issued as late as it arrives in time, later where there is no room, in the order of need.
    void find_issues() {
        issue.assign(made_.size(), 0);
        const std::vector<Index> order = by(&Swap::end, swaps_, made_, length());
        std::vector<Index> wanted(made_.size());
        Seconds next = kNever;
        for (auto i = order.rbegin(); i != order.rend(); ++i) {
            next = std::min(clock_[of(*i).end], next) - kIssueMargin * link_.prefetch(of(*i).nbytes);
            wanted[*i] = std::max(Index{0}, clock_.until(next));
        }
        std::size_t flight = 0;
        for (const Index i : order) {
            const Swap& swap = of(i);
            for (; flight < flown.size() && steps_.flights[flight].position <= swap.end; ++flight) find_flown(flight);
            const Index free = swap.wraps() ? 0 : release[i];
            const Index first = std::min(std::max({wanted[i], swap.earliest, free}), swap.end);
            Index at = swap.end;
            while (at > first && live_[at - 1] + swap.nbytes <= budget_) --at;
            issue[i] = at;
            add(at, swap.end, swap.nbytes);
        }
        for (; flight < flown.size(); ++flight) find_flown(flight);
    }

    // A collective runs beside the steps that it wants, or those next to it for which there is room.
    void find_flown(std::size_t f) {
        const Flight& flight = steps_.flights[f];
        Span span = steps_.wanted[f];
        const auto fits = [&](Index i) { return live_[i] + flight.nbytes <= budget_; };
        if (flight.gathers) {
            Index at = span.end;
            while (at > span.start && fits(at - 1)) --at;
            span.start = at;
        } else {
            Index at = span.start;
            while (at < span.end && fits(at)) ++at;
            span.end = at;
        }
        flown[f] = span;
        add(span.start, span.end, flight.nbytes);
    }
};

}  // namespace overspill::search
