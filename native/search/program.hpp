// The steps of a graph with recomputations put in, and the lifetimes that follow from their order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

namespace overspill::search {

using Bytes = std::int64_t;
using Seconds = double;
using Index = std::int32_t;
using Flags = std::vector<std::uint8_t>;

constexpr Seconds kNever = std::numeric_limits<Seconds>::infinity();

// Lists of numbers, one after another.
struct Lists {
    std::vector<Index> first{0}, values;

    Lists() = default;

    // For each of `count` keys the values that have it, in their order.
    Lists(Index count, std::span<const std::pair<Index, Index>> keys_values)
        : first(static_cast<std::size_t>(count) + 1, 0), values(keys_values.size()) {
        for (const auto& [key, value] : keys_values) ++first[key + 1];
        std::partial_sum(first.begin(), first.end(), first.begin());
        std::vector<Index> next(first.begin(), first.end() - 1);
        for (const auto& [key, value] : keys_values) values[next[key]++] = value;
    }

    void close() { first.push_back(static_cast<Index>(values.size())); }

    std::span<const Index> operator[](Index i) const {
        return {values.data() + first[i], static_cast<std::size_t>(first[i + 1] - first[i])};
    }
};

// Bytes that come and go, summed up at the end.
class ByStep {
  public:
    explicit ByStep(std::size_t length) : change_(length + 2, 0) {}

    // So many more at the steps from `first` until before `end`, which is at most one beyond the last.
    void add(Index first, Index end, Bytes nbytes) {
        change_[first] += nbytes;
        change_[end] -= nbytes;
    }

    // Adds them to what there is at each step.
    void add_to(std::vector<Bytes>& steps) const {
        Bytes sum = 0;
        for (std::size_t i = 0; i < steps.size(); ++i) steps[i] += sum += change_[i];
    }

  private:
    std::vector<Bytes> change_;
};

struct Algorithm {
    Bytes workspace;
    double slowdown;
};

// What an op sends between ranks: nothing, or a gather or a scatter, which may start apart from where it is waited for.
enum class Sends : std::uint8_t { kNothing, kGather, kScatter };

// A graph, by op and by tensor.
struct Graph {
    Lists reads, writes, recompute_reads, recompute_writes;
    Flags forward;
    std::vector<Seconds> seconds;  // of compute
    std::vector<Sends> sends;
    std::vector<Seconds> sent;  // of what it sends
    std::vector<Bytes> workspace;
    std::vector<std::vector<Algorithm>> algorithms;
    std::vector<Index> chosen;  // the algorithm that each op takes
    std::vector<Index> least;   // its algorithm of least workspace
    std::vector<Bytes> nbytes;
    Flags persistent, movable, leaves, output;  // leaves: worth a transfer as well
    Flags can_rematerialize;                    // its producer can make it again
    bool whole = false;                         // one graph runs the whole step
    std::vector<Index> producer, last_use;      // -1: none

    Index ops() const { return static_cast<Index>(forward.size()); }
    Index tensors() const { return static_cast<Index>(nbytes.size()); }

    Bytes workspace_of(Index op, Index algorithm) const {
        return algorithm ? algorithms[op][algorithm].workspace : workspace[op];
    }

    Seconds seconds_of(Index op, Index algorithm) const {
        return seconds[op] * (algorithm ? algorithms[op][algorithm].slowdown : 1.0);
    }

    bool rematerializes(Index op, Index tensor) const {
        const auto made = recompute_writes[op];
        return std::find(made.begin(), made.end(), tensor) != made.end();
    }

    void derive() {
        producer.assign(nbytes.size(), -1);
        last_use.assign(nbytes.size(), -1);
        for (Index op = 0; op < ops(); ++op) {
            for (const Index t : reads[op]) last_use[t] = op;
            for (const Index t : writes[op]) {
                last_use[t] = op;
                if (!persistent[t] && producer[t] < 0) producer[t] = op;
            }
        }
        can_rematerialize.assign(nbytes.size(), 0);
        for (Index t = 0; t < tensors(); ++t) {
            if (output[t]) last_use[t] = ops();
            can_rematerialize[t] = producer[t] >= 0 && rematerializes(producer[t], t);
        }
    }
};

struct Step {
    Index op;
    bool recompute;
    std::vector<Index> makes;
};

struct Gap {
    Index tensor, start, end;
    bool rematerialized;

    bool wraps() const { return end <= start; }
};

// Puts recomputations in front of the backward ops that need them, each as late as it can be.
class Recomputations {
  public:
    Recomputations(const Graph& graph, const Flags& dropped, const Flags& drop_after_use, const Flags& kept)
        : graph_(graph),
          dropped_(dropped),
          drop_after_use_(drop_after_use),
          kept_(kept),
          rematerialized_(graph.nbytes.size(), 0) {}

    std::vector<Step> steps() {
        std::vector<Step> steps;
        for (Index op = 0; op < graph_.ops(); ++op) {
            if (!graph_.forward[op]) {
                for (const Index t : dropping_) rematerialized_[t] = 0;
                dropping_.clear();
                for (const Index t : graph_.reads[op]) ensure(t, op, steps);
            }
            steps.push_back({op, false, {}});
        }
        return steps;
    }

  private:
    const Graph& graph_;
    const Flags& dropped_;
    const Flags& drop_after_use_;
    const Flags& kept_;
    Flags rematerialized_;
    std::vector<Index> dropping_, pending_;

    // Whether op `now` needs a recomputation of a tensor that it reads.
    bool missing(Index tensor, Index now) const { return graph_.can_rematerialize[tensor] && gone(tensor, now); }

    bool gone(Index tensor, Index now) const {
        if (graph_.persistent[tensor] || rematerialized_[tensor] || kept_[tensor]) return false;
        return graph_.forward[graph_.producer[tensor]] && (dropped_[tensor] || graph_.last_use[tensor] < now);
    }

    void ensure(Index tensor, Index now, std::vector<Step>& steps) {
        if (missing(tensor, now)) pending_.push_back(tensor);
        while (!pending_.empty()) {
            const Index wanted = pending_.back();
            if (!missing(wanted, now)) {
                pending_.pop_back();
                continue;
            }
            const Index op = graph_.producer[wanted];
            const std::size_t before = pending_.size();
            for (const Index t : graph_.recompute_reads[op])
                if (missing(t, now)) pending_.push_back(t);
            if (pending_.size() > before) continue;
            Step step{op, true, {}};
            for (const Index t : graph_.recompute_writes[op])
                if (t == wanted || (dropped_[t] && gone(t, now))) step.makes.push_back(t);
            for (const Index t : step.makes) {
                rematerialized_[t] = 1;
                if (dropped_[t] && drop_after_use_[t]) dropping_.push_back(t);
            }
            steps.push_back(std::move(step));
            pending_.pop_back();
        }
    }
};

// A collective of a step: when it may start, when it has to be over, and its bytes beside those of the step's lifetimes.
struct Flight {
    Index position, first, last;
    Bytes nbytes;
    Seconds seconds;
    bool gathers;
};

class Program {
  public:
    std::vector<Step> steps;
    Lists births, written;    // by tensor
    std::vector<Gap> gaps;    // those in which a tensor is rematerialized, or may leave
    std::vector<Bytes> live;  // when nothing is away but what is rematerialized, with the algorithms chosen
    std::vector<Flight> flights;
    Index end_of_forward = 0;

    Program(const Graph& graph, const Flags& dropped, const Flags& drop_after_use, const Flags& kept)
        : steps(Recomputations(graph, dropped, drop_after_use, kept).steps()), graph_(graph) {
        find_live(find_gaps());
        find_flights();
    }

    Index length() const { return static_cast<Index>(steps.size()); }

    Index earliest_return(const Gap& gap) const {
        if (gap.wraps()) return 0;
        return std::max(gap.start + 1, !graph_.whole && gap.end >= end_of_forward ? end_of_forward : 0);
    }

    Index latest_release(const Gap& gap) const {
        if (gap.wraps()) return length();
        return !graph_.whole && gap.start < end_of_forward ? std::min(gap.end, end_of_forward) : gap.end;
    }

    Index copy_start(const Gap& gap) const {
        Index start = !graph_.whole && gap.start >= end_of_forward ? end_of_forward : 0;
        for (const auto made : {written[gap.tensor], births[gap.tensor]})
            if (const auto before = std::upper_bound(made.begin(), made.end(), gap.start); before != made.begin())
                start = std::max(start, *(before - 1) + 1);
        return start;
    }

    Index version(const Gap& gap) const {
        const auto writes = written[gap.tensor];
        return static_cast<Index>(std::upper_bound(writes.begin(), writes.end(), gap.start) - writes.begin());
    }

    // The bytes at each step with the least workspaces, when all that may leave has left.
    std::vector<Bytes> alone() const {
        std::vector<Bytes> found = live;
        ByStep away(steps.size());
        for (const Gap& gap : gaps) {
            if (gap.rematerialized) continue;
            away.add(gap.start + 1, gap.wraps() ? length() : gap.end, -graph_.nbytes[gap.tensor]);
            if (gap.wraps()) away.add(0, gap.end, -graph_.nbytes[gap.tensor]);
        }
        away.add_to(found);
        for (std::size_t i = 0; i < steps.size(); ++i) {
            const Index op = steps[i].op;
            found[i] += graph_.workspace_of(op, graph_.least[op]) - graph_.workspace_of(op, graph_.chosen[op]);
        }
        return found;
    }

  private:
    const Graph& graph_;

    template <typename Visit>
    void touched(const Step& step, Visit visit) const {
        for (const Index t : step.recompute ? graph_.recompute_reads[step.op] : graph_.reads[step.op]) visit(t);
        for (const Index t : made(step)) visit(t);
    }

    std::span<const Index> made(const Step& step) const {
        return step.recompute ? std::span<const Index>(step.makes) : graph_.writes[step.op];
    }

    // Also says how many bytes are there at each step when nothing is away.
    ByStep find_gaps() {
        using Pairs = std::vector<std::pair<Index, Index>>;
        Pairs touching, writing, making;
        touching.reserve(graph_.reads.values.size() + graph_.writes.values.size());
        writing.reserve(graph_.writes.values.size());
        making.reserve(graph_.writes.values.size());
        std::vector<Index> touched_last(graph_.nbytes.size(), -1);
        Flags born(graph_.nbytes.size(), 0);
        for (Index i = 0; i < length(); ++i) {
            const Step& step = steps[i];
            if (!step.recompute && graph_.forward[step.op]) end_of_forward = i + 1;
            touched(step, [&](Index t) {
                if (touched_last[t] != i) touching.emplace_back(t, i);
                touched_last[t] = i;
            });
            for (const Index t : made(step)) {
                if (!step.recompute) writing.emplace_back(t, i);
                if (step.recompute || !born[t]) making.emplace_back(t, i);
                born[t] = 1;
            }
        }
        for (Index t = 0; t < graph_.tensors(); ++t)
            if (graph_.output[t]) touching.emplace_back(t, length());
        const Lists touches(graph_.tensors(), touching);
        births = Lists(graph_.tensors(), making);
        written = Lists(graph_.tensors(), writing);
        ByStep there(steps.size());
        for (Index t = 0; t < graph_.tensors(); ++t) {
            const auto uses = touches[t];
            if (graph_.persistent[t])
                there.add(0, length(), graph_.nbytes[t]);
            else if (!uses.empty())
                there.add(uses.front(), uses.back() + 1, graph_.nbytes[t]);
            if (graph_.persistent[t] && !graph_.movable[t]) continue;
            for (std::size_t k = 0; k + 1 < uses.size(); ++k) {
                const bool rematerialized = !graph_.persistent[t] && births[t].size() > 1 &&
                                            std::ranges::binary_search(births[t].subspan(1), uses[k + 1]);
                if (rematerialized || (graph_.leaves[t] && uses[k + 1] > uses[k] + 1))
                    gaps.push_back({t, uses[k], uses[k + 1], rematerialized});
            }
            if (graph_.persistent[t] && graph_.leaves[t] && !uses.empty() && uses.front() + length() > uses.back() + 1)
                gaps.push_back({t, uses.back(), uses.front(), false});
        }
        return there;
    }

    // A gather may start once its results before are gone, a scatter may last until its result is read, and holds what it
    // reads for the last time.
    void find_flights() {
        if (std::ranges::all_of(graph_.sends, [](Sends sends) { return sends == Sends::kNothing; })) return;
        std::vector<Index> before(graph_.nbytes.size(), -1);
        std::vector<Index> flight_of(graph_.nbytes.size(), -1);
        for (Index i = 0; i < length(); ++i) {
            const Step& step = steps[i];
            const Sends sends = graph_.sends[step.op];
            touched(step, [&](Index t) {
                if (flight_of[t] >= 0) flights[flight_of[t]].last = std::min(flights[flight_of[t]].last, i);
                flight_of[t] = -1;
            });
            if (sends == Sends::kGather) {
                Flight flight{i, 0, i, graph_.workspace[step.op], graph_.sent[step.op], true};
                for (const Index t : made(step)) {
                    flight.first = std::max(flight.first, before[t] + 1);
                    flight.nbytes += graph_.nbytes[t];
                }
                flights.push_back(flight);
            } else if (sends == Sends::kScatter) {
                Flight flight{i, i, length(), graph_.workspace[step.op], graph_.sent[step.op], false};
                for (const Index t : graph_.reads[step.op])
                    if (!graph_.persistent[t] && graph_.last_use[t] == step.op) flight.nbytes += graph_.nbytes[t];
                for (const Index t : made(step)) flight_of[t] = static_cast<Index>(flights.size());
                flights.push_back(flight);
            }
            touched(step, [&](Index t) { before[t] = i; });
        }
    }

    void find_live(ByStep there) {
        for (const Gap& gap : gaps) {
            if (!gap.rematerialized) continue;
            there.add(gap.start + 1, gap.end, -graph_.nbytes[gap.tensor]);
        }
        live.assign(steps.size(), 0);
        there.add_to(live);
        for (std::size_t i = 0; i < steps.size(); ++i) {
            const Step& step = steps[i];
            live[i] += graph_.workspace_of(step.op, graph_.chosen[step.op]);
            if (!step.recompute) continue;
            for (const Index t : graph_.recompute_writes[step.op])  // made with the rest, and wanted by nobody
                if (std::find(step.makes.begin(), step.makes.end(), t) == step.makes.end()) live[i] += graph_.nbytes[t];
        }
    }
};

}  // namespace overspill::search
