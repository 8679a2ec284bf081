// What a plan is made of: swaps of tensors to the store, slower algorithms, and what either relieves and costs.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "program.hpp"

namespace overspill::search {

struct Link {
    Seconds latency;
    double offload_bytes_per_second;
    double prefetch_bytes_per_second;
    bool full_duplex;
    double compute_share;  // of compute time that a running transfer takes away
    Seconds transfer_host, op_host;  // what the host spends on each
    bool behind_host;                // ops run behind the host, which waits for none of them

    Seconds offload(Bytes nbytes) const { return latency + static_cast<double>(nbytes) / offload_bytes_per_second; }
    Seconds prefetch(Bytes nbytes) const { return latency + static_cast<double>(nbytes) / prefetch_bytes_per_second; }
};

// A swap that a tensor may make in a gap. Its copy may start before the step `copy`, where it is needed: unless the
// store has the tensor as it is after `version` writes. It has to be gone by `latest`, and comes back from `earliest`
// on.
struct Swap {
    Index tensor, start, end, copy, latest, earliest, version;
    Bytes nbytes;

    bool wraps() const { return end <= start; }
};

// A slower algorithm for the op at a step: how long the op takes then, and what it saves to the fastest one.
struct Slower {
    Index position, op, number;
    Seconds cost, seconds;
    Bytes relieved, saved;
};

struct Span {
    Index start = 0, end = 0;
};

// The parts of a swap: while its tensor can be away without a stall, would still be leaving, would already be arriving.
enum class Part : std::uint8_t { kAway, kLeaving, kArriving };

// A way to have `nbytes` less on the device during the spans: a part of a swap, or (swap < 0) a slower algorithm, or a
// collective that runs where it is waited for, and not beside compute.
struct Candidate {
    std::array<Span, 2> spans;
    Bytes nbytes;
    Seconds cost, out, back;
    Index swap, slower;
    Part part{};
    Index flight = -1;
    bool leaves_in_backward = false, returns_in_backward = false;
};

// When each step starts if none waits, and at last when the program ends.
class Clock {
  public:
    Clock() = default;

    explicit Clock(const std::vector<Seconds>& seconds) : starts_(seconds.size() + 1, 0.0) {
        std::partial_sum(seconds.begin(), seconds.end(), starts_.begin() + 1);
    }

    Seconds operator[](Index step) const { return starts_[step]; }

    // The first step that starts at `when` or later.
    Index from(Seconds when) const {
        return static_cast<Index>(std::lower_bound(starts_.begin(), starts_.end(), when) - starts_.begin());
    }

    // The last step that starts at `when` or sooner; -1 if there is none.
    Index until(Seconds when) const {
        return static_cast<Index>(std::upper_bound(starts_.begin(), starts_.end(), when) - starts_.begin()) - 1;
    }

  private:
    std::vector<Seconds> starts_;
};

// A program's steps as a plan sees them: how long each is, what is there in it, and how much compute hides transfers.
struct Steps {
    static constexpr double kTicks = 1e12;         // select.py's TICKS_PER_SECOND
    static constexpr double kMostTicks = 1e18;     // its MOST_TICKS
    static constexpr std::int64_t kNoTime = 1000;  // its LEAST_TICKS

    std::vector<Index> op;
    std::vector<Seconds> seconds;
    std::vector<std::int64_t> ticks;  // for the time relieved
    std::vector<Bytes> alone;  // what is there in each when collectives run where they are waited for
    std::vector<Bytes> live;   // the same when each runs beside compute
    std::vector<Flight> flights;
    std::vector<Span> wanted;  // of each flight, the steps beside which it runs
    Lists of_op;
    Index end_of_forward;
    Seconds in_forward = 0, in_backward = 0;

    Steps(const Graph& graph, const Program& program)
        : alone(program.live), live(program.live), flights(program.flights), end_of_forward(program.end_of_forward) {
        std::vector<std::pair<Index, Index>> running;
        for (Index i = 0; i < program.length(); ++i) {
            op.push_back(program.steps[i].op);
            running.emplace_back(op.back(), i);
            seconds.push_back(graph.seconds_of(op.back(), graph.chosen[op.back()]));
        }
        const Seconds longest =
            seconds.empty() ? 0 : *std::ranges::max_element(seconds) * static_cast<double>(length());
        const double per_second = longest * kTicks > kMostTicks ? kMostTicks / longest : kTicks;
        for (const Seconds one : seconds) ticks.push_back(std::llrint(one * per_second) + kNoTime);
        of_op = Lists(graph.ops(), running);
        in_forward = std::accumulate(seconds.begin(), seconds.begin() + program.end_of_forward, 0.0);
        in_backward = std::accumulate(seconds.begin() + program.end_of_forward, seconds.end(), 0.0);
        find_wanted();
    }

    Index length() const { return static_cast<Index>(op.size()); }

  private:
    static constexpr double kEarly = 1.2;  // overlap.py's EARLY

    void find_wanted() {
        const Clock clock(seconds);
        wanted.resize(flights.size());
        Seconds next = kNever;
        for (std::size_t f = flights.size(); f-- > 0;) {
            const Flight& flight = flights[f];
            if (flight.gathers) {
                next = std::min(clock[flight.position], next) - kEarly * flight.seconds;
                wanted[f] = {std::clamp(clock.until(next), flight.first, flight.position), flight.position};
            } else {
                const Index done = clock.from(clock[flight.position] + flight.seconds);
                wanted[f] = {flight.position + 1, std::clamp(done, flight.position + 1, flight.last)};
            }
        }
        ByStep there(live.size());
        for (std::size_t f = 0; f < flights.size(); ++f)
            if (wanted[f].start < wanted[f].end) there.add(wanted[f].start, wanted[f].end, flights[f].nbytes);
        there.add_to(live);
    }
};

// All that a plan of a program may do, in a fixed order.
class Candidates {
  public:
    Candidates(const Graph& graph, const Program& program, const Steps& steps, const Link& link) {
        for (const Gap& gap : program.gaps)
            if (!gap.rematerialized)
                swaps_.push_back({gap.tensor, gap.start, gap.end, program.copy_start(gap), program.latest_release(gap),
                                  program.earliest_return(gap), program.version(gap), graph.nbytes[gap.tensor]});
        find_slower(graph, steps);
        offer_trips(steps, link);
        for (Index f = 0; f < static_cast<Index>(steps.flights.size()); ++f) {
            if (steps.wanted[f].start >= steps.wanted[f].end) continue;
            const Flight& flight = steps.flights[f];
            all_.push_back({{steps.wanted[f], Span{}},
                            flight.nbytes,
                            flight.seconds + kByteCost * static_cast<double>(flight.nbytes),
                            0,
                            0,
                            -1,
                            -1,
                            {},
                            f});
        }
        for (Index s = 0; s < static_cast<Index>(slower_.size()); ++s) {
            const Slower& choice = slower_[s];
            const std::array<Span, 2> spans{Span{choice.position, choice.position + 1}, Span{}};
            all_.push_back(
                {spans, choice.relieved, choice.cost + kByteCost * static_cast<double>(choice.relieved), 0, 0, -1, s});
        }
        std::vector<std::pair<Index, Index>> parts;
        for (Index c = 0; c < size(); ++c)
            if (all_[c].swap >= 0) parts.emplace_back(tensor_of(c), c);
        of_tensor_ = Lists(graph.tensors(), parts);
    }

    Index size() const { return static_cast<Index>(all_.size()); }
    const Candidate& operator[](Index candidate) const { return all_[candidate]; }
    const std::vector<Candidate>& all() const { return all_; }
    const std::vector<Swap>& swaps() const { return swaps_; }
    const std::vector<Slower>& slower() const { return slower_; }

    // The tensor of a candidate that is a part of a swap, and all such parts of a tensor's swaps.
    Index tensor_of(Index candidate) const { return swaps_[all_[candidate].swap].tensor; }
    std::span<const Index> of_tensor(Index tensor) const { return of_tensor_[tensor]; }

  private:
    static constexpr double kByteCost = 1e-15;  // select.py's BYTE_COST_SECONDS

    std::vector<Candidate> all_;
    std::vector<Swap> swaps_;
    std::vector<Slower> slower_;
    Lists of_tensor_;

    void find_slower(const Graph& graph, const Steps& steps) {
        for (Index i = 0; i < steps.length(); ++i) {
            const Index op = steps.op[i], chosen = graph.chosen[op];
            const std::vector<Algorithm>& menu = graph.algorithms[op];
            for (Index k = chosen + 1; k < static_cast<Index>(menu.size()); ++k)
                slower_.push_back({i, op, k, graph.seconds[op] * (menu[k].slowdown - menu[k - 1].slowdown),
                                   graph.seconds_of(op, k), menu[k - 1].workspace - menu[k].workspace,
                                   graph.workspace_of(op, chosen) - menu[k].workspace});
        }
    }

    // A swap relieves memory for nothing only while its tensor can be away without a stall; the rest of it costs the
    // wait.
    void offer_trips(const Steps& steps, const Link& link) {
        const Clock clock(steps.seconds);
        // Of what the host spends, as much counts as it is busy anyway: all of it where a CPU is the host.
        const Seconds issuing = link.op_host * static_cast<double>(steps.length()), computing = clock[steps.length()];
        const double host_share = !link.behind_host || issuing > computing ? 1.0 : issuing / computing;
        for (Index t = 0; t < static_cast<Index>(swaps_.size()); ++t) {
            const Swap& swap = swaps_[t];
            const Seconds out = link.offload(swap.nbytes), back = link.prefetch(swap.nbytes);
            const Seconds disturbed = (out + back) * link.compute_share + 2 * link.transfer_host * host_share;
            const Index first = swap.start + 1, last = swap.end;
            Index gone = clock.from(clock[first] + out);
            Index needed = clock.until(clock[last] - back);
            std::array<Span, 2> away{}, leaving{Span{first, last}, Span{}}, arriving{};
            if (swap.wraps()) {
                gone = std::min(gone, steps.length());
                needed = std::max(needed, Index{0});
                away = {Span{0, needed}, Span{gone, steps.length()}};
            } else if (gone < needed) {
                away = {Span{gone, needed}, Span{}};
            }
            if (swap.wraps() || gone < needed) {
                leaving = {Span{first, gone}, Span{}};
                arriving = {Span{needed, last}, Span{}};
            }
            const std::size_t before = all_.size();
            offer(Part::kAway, away, swap.nbytes, disturbed, out, back, t);
            offer(Part::kLeaving, leaving, swap.nbytes, disturbed + out, 0, 0, t);
            offer(Part::kArriving, arriving, swap.nbytes, disturbed + back, 0, 0, t);
            for (std::size_t c = before; c < all_.size(); ++c) {
                all_[c].leaves_in_backward = swap.start >= steps.end_of_forward;
                all_[c].returns_in_backward = swap.end >= steps.end_of_forward;
            }
        }
    }

    void offer(Part part, std::array<Span, 2> spans, Bytes nbytes, Seconds cost, Seconds out, Seconds back,
               Index swap) {
        if (spans[0].start >= spans[0].end) std::swap(spans[0], spans[1]);
        if (spans[0].start >= spans[0].end) return;
        if (spans[1].start >= spans[1].end) spans[1] = Span{};
        all_.push_back({spans, nbytes, cost + kByteCost * static_cast<double>(nbytes), out, back, swap, -1, part});
    }
};

}  // namespace overspill::search
