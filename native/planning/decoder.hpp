// From priorities to a timed plan: which trips a program makes, when, and what that costs on the clock. Twin of
// src/overspill/policies/twin.py.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "over.hpp"
#include "program.hpp"
#include "trips.hpp"

namespace overspill::planning {

class Decoder {
  public:
    static constexpr double kByteCost = 1e-15;     // select.py's BYTE_COST_SECONDS
    static constexpr double kIssueMargin = 1.2;    // timing.py's ISSUE_MARGIN
    static constexpr Seconds kNever = std::numeric_limits<Seconds>::infinity();
    static constexpr double kTicks = 1e12;         // select.py's TICKS_PER_SECOND
    static constexpr std::int64_t kNoTime = 1000;  // select.py's LEAST_TICKS

    Decoder(std::shared_ptr<const Graph> graph, const Program& program, Link link, Bytes budget)
        : graph_(std::move(graph)),
          live_(program.live),
          link_(link),
          budget_(budget),
          length_(program.length()) {
        std::vector<std::pair<Index, Index>> running;
        for (Index i = 0; i < length_; ++i) {
            const Index op = program.steps[i].op;
            op_.push_back(op);
            running.emplace_back(op, i);
            seconds_.push_back(graph_->seconds_of(op, graph_->chosen[op]));
            weight_.push_back(std::llrint(seconds_.back() * kTicks) + kNoTime);
        }
        steps_of_ = Lists(graph_->ops(), running);
        room_out_ = std::accumulate(seconds_.begin(), seconds_.begin() + program.end_of_forward, 0.0);
        room_back_ = std::accumulate(seconds_.begin() + program.end_of_forward, seconds_.end(), 0.0);
        for (const Gap& gap : program.gaps)
            if (program.may_leave(gap))
                trips_.push_back({gap.tensor, gap.start, gap.end, program.copy_start(gap), program.latest_release(gap),
                                  program.earliest_return(gap), program.version(gap), graph_->nbytes[gap.tensor]});
        find_slower();
        propose();
    }

    std::size_t size() const { return candidates_.size(); }
    const std::vector<Candidate>& candidates() const { return candidates_; }
    const std::vector<Trip>& trips() const { return trips_; }
    const std::vector<Slower>& slower() const { return slower_; }
    const std::vector<Index>& ops() const { return op_; }
    Index length() const { return length_; }

    // The plan that takes the candidates `first` before all others, where candidates cost `dearer` seconds more.
    Decoded decode(std::span<const Seconds> dearer, std::span<const std::uint8_t> first) {
        Decoded plan;
        plan.looks = static_cast<std::int64_t>(size());
        plan.chosen = select(dearer, first, plan.looks);
        set_algorithms(plan.chosen);
        std::vector<std::uint8_t> made(trips_.size(), 0);
        for (const Index c : plan.chosen) {
            const Index trip = candidates_[c].trip;
            if (trip < 0 || made[trip]) continue;
            made[trip] = 1;
            plan.trips.push_back(trip);
        }
        time(plan);
        run(plan);
        return plan;
    }

  private:
    using Pairs = std::vector<std::pair<Index, Index>>;

    std::shared_ptr<const Graph> graph_;
    std::vector<Seconds> seconds_;
    std::vector<std::int64_t> weight_;  // of each step, for the time relieved
    std::vector<Bytes> live_;
    std::vector<Index> op_;
    std::vector<Trip> trips_;
    std::vector<Slower> slower_;
    Link link_;
    Bytes budget_;
    Index length_;
    Seconds room_out_ = 0, room_back_ = 0;
    Lists steps_of_, of_tensor_;  // steps by op, candidates by tensor
    std::vector<Candidate> candidates_;
    // Scratch of one decoding.
    std::vector<Bytes> now_live_;
    std::vector<Seconds> step_seconds_, clock_;
    std::vector<std::uint8_t> copied_;  // by trip: whether it sends its tensor to the store

    // -- candidates (trips.py)

    void find_slower() {
        for (Index i = 0; i < length_; ++i) {
            const Index op = op_[i], chosen = graph_->chosen[op];
            const std::vector<Algorithm>& all = graph_->algorithms[op];
            for (Index k = chosen + 1; k < static_cast<Index>(all.size()); ++k)
                slower_.push_back({i, op, k, graph_->seconds[op] * (all[k].slowdown - all[k - 1].slowdown),
                                   graph_->seconds_of(op, k), all[k - 1].workspace - all[k].workspace,
                                   graph_->workspace_of(op, chosen) - all[k].workspace});
        }
    }

    void propose() {
        const std::vector<Seconds> clock = starts(seconds_);
        for (Index t = 0; t < static_cast<Index>(trips_.size()); ++t) {
            const Trip& trip = trips_[t];
            const Seconds out = link_.offload(trip.nbytes), back = link_.prefetch(trip.nbytes);
            const Seconds disturbed = (out + back) * link_.compute_share;
            const Index first = trip.start + 1, last = trip.end;
            Index gone = before(clock, clock[first] + out);
            Index needed = after(clock, clock[last] - back) - 1;
            std::array<Span, 2> away{}, leaving{Span{first, last}, Span{}}, arriving{};
            if (trip.wraps()) {
                gone = std::min(gone, length_);
                needed = std::max(needed, Index{0});
                away = {Span{0, needed}, Span{gone, length_}};
                leaving = {Span{first, gone}, Span{}};
                arriving = {Span{needed, last}, Span{}};
            } else if (gone < needed) {
                away = {Span{gone, needed}, Span{}};
                leaving = {Span{first, gone}, Span{}};
                arriving = {Span{needed, last}, Span{}};
            }
            offer(away, trip.nbytes, disturbed, out, back, t);
            offer(leaving, trip.nbytes, disturbed + out, 0, 0, t);
            offer(arriving, trip.nbytes, disturbed + back, 0, 0, t);
        }
        for (Index s = 0; s < static_cast<Index>(slower_.size()); ++s) {
            const Slower& choice = slower_[s];
            const std::array<Span, 2> spans{Span{choice.position, choice.position + 1}, Span{}};
            candidates_.push_back(
                {spans, choice.relieved, choice.cost + kByteCost * static_cast<double>(choice.relieved), 0, 0, -1, s});
        }
        std::vector<std::pair<Index, Index>> parts;
        for (Index c = 0; c < static_cast<Index>(size()); ++c)
            if (candidates_[c].trip >= 0) parts.emplace_back(trips_[candidates_[c].trip].tensor, c);
        of_tensor_ = Lists(graph_->tensors(), parts);
    }

    void offer(std::array<Span, 2> spans, Bytes nbytes, Seconds cost, Seconds out, Seconds back, Index trip) {
        if (spans[0].start >= spans[0].end) std::swap(spans[0], spans[1]);
        if (spans[0].start >= spans[0].end) return;
        if (spans[1].start >= spans[1].end) spans[1] = Span{};
        candidates_.push_back({spans, nbytes, cost + kByteCost * static_cast<double>(nbytes), out, back, trip, -1});
    }

    static std::vector<Seconds> starts(const std::vector<Seconds>& seconds) {
        std::vector<Seconds> clock(seconds.size() + 1, 0.0);
        std::partial_sum(seconds.begin(), seconds.end(), clock.begin() + 1);
        return clock;
    }

    static Index before(const std::vector<Seconds>& clock, Seconds when) {
        return static_cast<Index>(std::lower_bound(clock.begin(), clock.end(), when) - clock.begin());
    }

    static Index after(const std::vector<Seconds>& clock, Seconds when) {
        return static_cast<Index>(std::upper_bound(clock.begin(), clock.end(), when) - clock.begin());
    }

    // -- the greedy choice (select.py)

    std::vector<Bytes> excess() const {
        std::vector<Bytes> found = live_;
        for (Bytes& bytes : found) bytes -= budget_;
        return found;
    }

    struct Choice {
        const Decoder& among;
        std::span<const Seconds> dearer;
        std::vector<Seconds> out;
        Flags open;
        Over over;
        Seconds room_out, room_back;
        std::vector<Index> taken;

        Choice(const Decoder& decoder, std::span<const Seconds> extra)
            : among(decoder),
              dearer(extra),
              open(decoder.size(), 1),
              over(decoder.weight_, decoder.excess()),
              room_out(decoder.room_out_),
              room_back(decoder.room_back_) {
            out.reserve(decoder.size());
            for (const Candidate& candidate : decoder.candidates_) out.push_back(candidate.out);
        }

        // The cost per byte and time relieved; infinite where nothing is.
        Seconds score(Index index) const {
            const Candidate& c = among.candidates_[index];
            const std::int64_t time = over.within(c.spans[0]) + (c.spans[1].end ? over.within(c.spans[1]) : 0);
            const double area = static_cast<double>(c.nbytes) * static_cast<double>(time);
            if (!(area > 0)) return kNever;
            const Seconds exposed = std::max(out[index] - std::max(0.0, room_out), 0.0) +
                                    std::max(c.back - std::max(0.0, room_back), 0.0);
            return (c.cost + dearer[index] + exposed) / area;
        }

        void take(Index index) {
            const Candidate& c = among.candidates_[index];
            for (const Span& span : c.spans) over.relieve(span, c.nbytes, among.weight_);
            open[index] = 0;
            room_out -= out[index];
            room_back -= c.back;
            if (c.trip >= 0)
                for (const Index other : among.of_tensor_[among.trips_[c.trip].tensor]) out[other] = 0.0;
            taken.push_back(index);
        }

        // Gives back, dearest first, what later choices made superfluous.
        void prune() {
            std::vector<Bytes> change(among.live_.size() + 1, 0);
            for (const Index index : taken)
                for (const Span& span : among.candidates_[index].spans) {
                    change[span.start] -= among.candidates_[index].nbytes;
                    change[span.end] += among.candidates_[index].nbytes;
                }
            std::vector<Bytes> room(among.live_.size());
            Bytes away = 0;
            for (std::size_t i = 0; i < room.size(); ++i) room[i] = among.budget_ - among.live_[i] - (away += change[i]);
            const auto price = [&](Index i) { return among.candidates_[i].cost + dearer[i] + among.candidates_[i].back; };
            std::vector<Index> order = taken;
            std::stable_sort(order.begin(), order.end(), [&](Index a, Index b) { return price(a) > price(b); });
            Flags gone(among.size(), 0);
            for (const Index index : order) {
                const Candidate& c = among.candidates_[index];
                const auto fits = [&](const Span& span) {
                    return std::all_of(room.begin() + span.start, room.begin() + span.end,
                                       [&](Bytes bytes) { return bytes >= c.nbytes; });
                };
                if (!fits(c.spans[0]) || !fits(c.spans[1])) continue;
                for (const Span& span : c.spans)
                    for (Index i = span.start; i < span.end; ++i) room[i] -= c.nbytes;
                gone[index] = 1;
            }
            std::erase_if(taken, [&](Index index) { return gone[index] != 0; });
        }
    };

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

    std::vector<Index> select(std::span<const Seconds> dearer, std::span<const std::uint8_t> first,
                              std::int64_t& looks) const {
        Choice choice(*this, dearer);
        for (Index i = 0; i < static_cast<Index>(size()); ++i)
            if (first[i]) choice.take(i);
        // A score only grows while others are taken, but where a copy serves several trips: one that has not grown since
        // it was looked at is the least.
        LeastFirst queue;
        for (Index i = 0; i < static_cast<Index>(size()); ++i)
            if (choice.open[i]) queue.add(choice.score(i), i);
        queue.arrange();
        while (!queue.empty()) {
            const auto [score, index] = queue.top();
            ++looks;
            const Seconds now = choice.open[index] ? choice.score(index) : kNever;
            if (now > score) {
                queue.raise(now);
                continue;
            }
            queue.raise(kNever);
            const bool copies = choice.out[index] > 0;
            choice.take(index);
            if (!copies) continue;
            for (const Index other : of_tensor_[trips_[candidates_[index].trip].tensor])
                if (choice.open[other]) queue.push(choice.score(other), other);
        }
        choice.prune();
        return choice.taken;
    }

    // -- when transfers start and are awaited (timing.py)

    void set_algorithms(const std::vector<Index>& chosen) {
        step_seconds_ = seconds_;
        now_live_ = live_;
        std::vector<Index> slowest(static_cast<std::size_t>(graph_->ops()), -1);
        for (const Index c : chosen) {
            const Index s = candidates_[c].slower;
            if (s < 0) continue;
            Index& most = slowest[slower_[s].op];
            if (most < 0 || slower_[s].number > slower_[most].number) most = s;
        }
        for (Index op = 0; op < graph_->ops(); ++op) {
            if (slowest[op] < 0) continue;
            for (const Index position : steps_of_[op]) {
                step_seconds_[position] = slower_[slowest[op]].seconds;
                now_live_[position] -= slower_[slowest[op]].saved;
            }
        }
        clock_ = starts(step_seconds_);
    }

    void time(Decoded& plan) {
        for (const Index t : plan.trips) {
            const Trip& trip = trips_[t];
            if (trip.wraps()) {
                add(trip.start + 1, length_, -trip.nbytes);
                add(0, trip.end, -trip.nbytes);
            } else {
                add(trip.start + 1, trip.end, -trip.nbytes);
            }
        }
        find_copies(plan.trips);
        release(plan);
        issue(plan);
    }

    void add(Index from, Index to, Bytes nbytes) {
        for (Index i = from; i < to; ++i) now_live_[i] += nbytes;
    }

    // One copy in the store serves the trips of a tensor until it is written again; one that wraps finds it there.
    void find_copies(const std::vector<Index>& made) {
        copied_.assign(trips_.size(), 0);
        std::vector<Index> order = made;
        std::sort(order.begin(), order.end(), [&](Index a, Index b) {
            return std::pair(trips_[a].tensor, trips_[a].start) < std::pair(trips_[b].tensor, trips_[b].start);
        });
        for (std::size_t i = 0; i < order.size();) {
            std::size_t end = i;
            Index stored = -1;
            for (; end < order.size() && trips_[order[end]].tensor == trips_[order[i]].tensor; ++end)
                if (trips_[order[end]].wraps()) stored = 0;
            for (; i < end; ++i) {
                const Trip& trip = trips_[order[i]];
                if (trip.version <= stored) continue;
                copied_[order[i]] = 1;
                stored = trip.version;
            }
        }
    }

    // Each offload is awaited once it should be done; where memory is short before, the one that is done first.
    void release(Decoded& plan) {
        plan.release.assign(plan.trips.size(), 0);
        Pairs copies;
        for (const Index i : by_start(plan.trips)) {
            const Trip& trip = trips_[plan.trips[i]];
            if (copied_[plan.trips[i]])
                copies.emplace_back(trip.copy, i);
            else
                plan.release[i] = trip.start + 1;
        }
        const Lists starting(length_ + 1, copies);
        std::vector<std::pair<Index, Seconds>> leaving, staying;  // (trip made, when its copy is done)
        Seconds link_free = 0, delay = 0;
        for (Index position = 0; position <= length_; ++position) {
            Seconds now = clock_[position] + delay;
            for (const Index i : starting[position]) {
                link_free = std::max(link_free, now) + link_.offload(trips_[plan.trips[i]].nbytes);
                leaving.emplace_back(i, link_free);
            }
            if (leaving.empty()) continue;
            Bytes over = position < length_ ? now_live_[position] - budget_ : 0;
            for (const auto& [i, done] : leaving)
                if (trips_[plan.trips[i]].start < position) over += trips_[plan.trips[i]].nbytes;
            staying.clear();
            for (const auto& [i, done] : leaving) {
                const Trip& trip = trips_[plan.trips[i]];
                if (trip.start < position && (done <= now || over > 0 || position >= trip.latest)) {
                    now = std::max(now, done);
                    over -= trip.nbytes;
                    plan.release[i] = position;
                } else {
                    staying.emplace_back(i, done);
                }
            }
            std::swap(leaving, staying);
            delay = now - clock_[position];
        }
        for (std::size_t i = 0; i < plan.trips.size(); ++i) {
            const Trip& trip = trips_[plan.trips[i]];
            add(trip.start + 1, plan.release[i], trip.nbytes);
        }
    }

    // Each prefetch is issued as late as it arrives in time, later where there is no room, in the order of need.
    void issue(Decoded& plan) {
        plan.issue.assign(plan.trips.size(), 0);
        const std::vector<Index> order = by_end(plan.trips);
        std::vector<Index> wanted(plan.trips.size());
        Seconds next = kNever;
        for (auto i = order.rbegin(); i != order.rend(); ++i) {
            const Trip& trip = trips_[plan.trips[*i]];
            next = std::min(clock_[trip.end], next) - kIssueMargin * link_.prefetch(trip.nbytes);
            wanted[*i] = std::max(Index{0}, after(clock_, next) - 1);
        }
        for (const Index i : order) {
            const Trip& trip = trips_[plan.trips[i]];
            const Index free = trip.wraps() ? 0 : plan.release[i];
            const Index first = std::min(std::max({wanted[i], trip.earliest, free}), trip.end);
            Index at = trip.end;
            while (at > first && now_live_[at - 1] + trip.nbytes <= budget_) --at;
            plan.issue[i] = at;
            add(at, trip.end, trip.nbytes);
        }
    }

    std::vector<Index> by_start(const std::vector<Index>& made) const {
        return ordered(made, [](const Trip& trip) { return std::pair(trip.start, trip.tensor); });
    }

    std::vector<Index> by_end(const std::vector<Index>& made) const {
        return ordered(made, [](const Trip& trip) { return std::pair(trip.end, trip.tensor); });
    }

    template <typename Key>
    std::vector<Index> ordered(const std::vector<Index>& made, Key key) const {
        std::vector<Index> order(made.size());
        std::iota(order.begin(), order.end(), 0);
        std::sort(order.begin(), order.end(),
                  [&](Index a, Index b) { return key(trips_[made[a]]) < key(trips_[made[b]]); });
        return order;
    }

    // -- the clock (simulate/clock.py)

    struct Stream {
        const Link& link;
        Seconds now = 0, out_free = 0, back_free = 0;
        std::vector<std::pair<Seconds, Seconds>> running;

        Seconds transfer(Seconds& free, Seconds duration) {
            const Seconds start = std::max(now, link.full_duplex ? free : std::max(out_free, back_free));
            free = start + duration;
            if (link.compute_share > 0) running.emplace_back(start, free);
            return free;
        }

        Seconds wait(Seconds until) {
            const Seconds waited = std::max(0.0, until - now);
            now = std::max(now, until);
            return waited;
        }

        void compute(Seconds seconds) {
            Seconds end = now + seconds;
            if (link.compute_share > 0) {
                std::erase_if(running, [&](const auto& span) { return span.second <= now; });
                Seconds beside = 0;
                for (const auto& [since, until] : running)
                    beside += std::max(0.0, std::min(end, until) - std::max(now, since));
                end += link.compute_share * beside;
            }
            now = end;
        }
    };

    void run(Decoded& plan) const {
        Pairs copying, releasing, coming, arriving;
        for (const Index i : by_start(plan.trips)) {
            const Index t = plan.trips[i];
            if (copied_[t]) copying.emplace_back(trips_[t].copy, i);
            releasing.emplace_back(plan.release[i], i);
            coming.emplace_back(plan.issue[i], i);
            arriving.emplace_back(trips_[t].end, i);
        }
        std::stable_sort(coming.begin(), coming.end(), [&](const auto& a, const auto& b) {
            return trips_[plan.trips[a.second]].end < trips_[plan.trips[b.second]].end;
        });
        const Lists offloads(length_ + 1, copying), releases(length_ + 1, releasing), prefetches(length_ + 1, coming),
            arrivals(length_ + 1, arriving);
        std::vector<Seconds> left(plan.trips.size(), 0), there(plan.trips.size(), 0);
        std::vector<Seconds> lost_of_tensor(graph_->nbytes.size(), 0), lost_of_op(graph_->forward.size(), 0);
        Stream stream{link_, 0, 0, 0, {}};
        for (Index position = 0; position <= length_; ++position) {
            for (const Index i : offloads[position]) {
                const Bytes nbytes = trips_[plan.trips[i]].nbytes;
                left[i] = stream.transfer(stream.out_free, link_.offload(nbytes));
                plan.moved_bytes += nbytes;
            }
            for (const Index i : releases[position])
                if (copied_[plan.trips[i]]) lost_of_tensor[trips_[plan.trips[i]].tensor] += stream.wait(left[i]);
            for (const Index i : prefetches[position])
                there[i] = stream.transfer(stream.back_free, link_.prefetch(trips_[plan.trips[i]].nbytes));
            for (const Index i : arrivals[position])
                lost_of_tensor[trips_[plan.trips[i]].tensor] += stream.wait(there[i]);
            if (position == length_) break;
            stream.compute(step_seconds_[position]);
            lost_of_op[op_[position]] += step_seconds_[position] - seconds_[position];
        }
        plan.seconds = stream.now;
        plan.lost.reserve(size());
        for (const Candidate& c : candidates_)
            plan.lost.push_back(c.trip >= 0 ? lost_of_tensor[trips_[c.trip].tensor] : lost_of_op[slower_[c.slower].op]);
    }
};

}  // namespace overspill::planning
