// The kinds of steps that a stream has, by their requests, and which of them the current one is.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "blocks.hpp"
#include "guard.hpp"
#include "solver.hpp"
#include "steps.hpp"

namespace overspill::live {

struct Layout;

// A block at its planned address. `twin` is its place among the heap's blocks while its region is lent to the heap.
struct PlannedBlock : PoolBlock {
    Layout* layout = nullptr;
    Guard::Parts parts{0, 0};
    bool placed = false;
    bool live = false;
};

// The addresses of one shape, from the region's base on.
struct Layout {
    Bytes peak = 0;
    std::vector<PlannedBlock> blocks;  // one a request
    std::int64_t live = 0;
};

// Steps with the same requests. Sizes that vary stand with their largest, so that one layout serves all of them (§4.3).
struct Shape {
    Steps expected;
    Bytes load = 0;
    std::unique_ptr<Layout> layout;
    std::int64_t ticket = 0;  // of the question to the solver that is open; 0: none
    std::int64_t cycles = 0;  // that were followed one after the other
    std::int64_t used = 0;
};

// The requests `[begin, end)` of the log as a step. Of what lives now, the step before says how long it is carried, if it
// had as many requests (`repeats`).
inline Steps step_of(const Log& log, std::int64_t begin, std::int64_t end, bool repeats) {
    Steps step;
    step.reserve(static_cast<std::size_t>(end - begin));
    const auto until = [&](std::int64_t at) {
        std::int64_t freed = log[at].end;
        if (freed == kAlive && repeats) {
            const Request& before = log[at - (end - begin)];
            if (before.end <= begin) return kUnknown;
            freed = before.end == kAlive ? kAlive : before.end + (end - begin);
        }
        if (freed == kAlive) return repeats ? kLonger : kUnknown;
        return freed > at + (end - begin) ? kLonger : static_cast<std::int32_t>(freed - begin);
    };
    for (std::int64_t at = begin; at < end; ++at) step.push_back({log[at].nbytes, log[at].nbytes, until(at)});
    return step;
}

// What both allow; nothing where their requests are not as many.
inline std::optional<Steps> joined(const Steps& one, const Steps& other) {
    if (one.size() != other.size()) return std::nullopt;
    Steps found = one;
    for (std::size_t i = 0; i < one.size(); ++i) {
        found[i].least = std::min(one[i].least, other[i].least);
        found[i].nbytes = std::max(one[i].nbytes, other[i].nbytes);
        found[i].end = std::max(one[i].end, other[i].end);
    }
    return found;
}

// Whether `step` does nothing that was not expected.
inline bool covers(const Steps& expected, const Steps& step) {
    return std::equal(step.begin(), step.end(), expected.begin(), expected.end(),
                      [](const Expected& s, const Expected& e) { return e.takes(s.nbytes) && s.end <= e.end; });
}

class Shapes {
  public:
    explicit Shapes(Solver& solver) : solver_(solver) {}

    std::vector<std::unique_ptr<Shape>> all;
    std::vector<std::unique_ptr<Layout>> retired;  // with blocks that still live
    Shape* followed = nullptr;
    std::size_t next = 0;  // λ
    bool clean = true;     // whether the step was as expected so far
    bool sure = false;     // whether so many requests in a row were as expected that it is no other step
    std::int64_t clock = 0;

    // Begin a step whose first request is of `size`.
    bool begin(Bytes size, bool must_start) {
        Shape* found = nullptr;
        for (const auto& shape : all) {
            const bool starts = shape->expected[0].takes(size);
            if (must_start && !starts) continue;
            const auto rank = [&](const Shape& s) { return std::pair(s.expected[0].takes(size), s.used); };
            if (found == nullptr || rank(*found) < rank(*shape)) found = shape.get();
        }
        follow(found, 0);
        return found != nullptr;
    }

    void follow(Shape* shape, std::size_t from) {
        followed = shape;
        next = from;
        misses_ = 0;
        run_ = 0;
        sure = false;
        clean = true;
        if (shape != nullptr) shape->used = ++clock;
    }

    bool complete() const { return followed != nullptr && next == followed->expected.size(); }

    // Which request of the followed step this is; nothing for a foreign one. `log` from `begin` on is the step so far.
    std::optional<std::size_t> number(Bytes size, const Log& log, std::int64_t begin) {
        if (followed == nullptr) return std::nullopt;
        const Steps* expected = &followed->expected;
        if (next < expected->size() && (*expected)[next].takes(size)) [[likely]] {
            misses_ = 0;
            if (++run_ >= std::min(kSure, expected->size())) sure = true;
            return next++;
        }
        run_ = 0;
        if (clean && other_with(size, log, begin)) return next++;
        clean = false;
        // Some requests more or fewer than expected: go on where one of just this size is near.
        const std::size_t low = next > kNear ? next - kNear : 0;
        for (std::size_t at = next; at < std::min(next + kNear, expected->size()); ++at)
            if ((*expected)[at].nbytes == size) return next = at + 1, at;
        for (std::size_t at = std::min(next, expected->size()); at-- > low;)
            if ((*expected)[at].nbytes == size) return next = at + 1, at;
        if (next < expected->size() && (*expected)[next].varies()) return next++;  // larger than ever: no place
        if (++misses_ > kMostMisses) {
            followed->cycles = 0;
            followed = nullptr;
        }
        return std::nullopt;
    }

    // Learn from a step that has ended; whether it was one more of a known shape, as expected.
    bool learn(Steps step) {
        if (step.empty()) return true;
        // The shape of just these sizes, or one that is no worse for taking them too.
        Shape* known = nullptr;
        std::optional<Steps> both;
        for (const auto& shape : all) {
            if (shape->expected.size() != step.size()) continue;
            auto found = joined(shape->expected, step);
            const bool fits = std::equal(step.begin(), step.end(), shape->expected.begin(),
                                         [](const Expected& s, const Expected& e) { return e.takes(s.nbytes); });
            if (!fits && !worth(*found, shape->load, load_of(step))) continue;
            known = shape.get();
            both = std::move(found);
            if (fits) break;
        }
        if (known != nullptr) {
            const bool grown = !std::equal(both->begin(), both->end(), known->expected.begin(), [](auto& a, auto& b) {
                return a.nbytes == b.nbytes && a.end == b.end;
            });
            known->expected = std::move(*both);
            known->used = ++clock;
            if (grown) ask(*known);
            return !grown;
        }
        // Seen twice it is a shape.
        for (auto it = candidates_.begin(); it != candidates_.end(); ++it) {
            both = joined(*it, step);
            if (!both || !worth(*both, load_of(*it), load_of(step))) continue;
            candidates_.erase(it);
            add(std::move(*both));
            return false;
        }
        candidates_.push_back(std::move(step));
        if (candidates_.size() > kMostCandidates) candidates_.pop_front();
        return false;
    }

    Shape& add(Steps expected) {
        // A loop inside of the new step was no step.
        for (std::size_t i = all.size(); i-- > 0;)
            if (within(all[i]->expected, expected)) drop(i);
        if (all.size() >= kMostShapes) {
            const auto oldest = std::min_element(all.begin(), all.end(),
                                                 [](const auto& a, const auto& b) { return a->used < b->used; });
            drop(static_cast<std::size_t>(oldest - all.begin()));
        }
        Shape& shape = *all.emplace_back(std::make_unique<Shape>());
        shape.expected = std::move(expected);
        shape.used = ++clock;
        ask(shape);
        return shape;
    }

    // Keep a layout for as long as blocks of it live.
    void retire(std::unique_ptr<Layout> layout) {
        if (layout != nullptr && layout->live > 0) retired.push_back(std::move(layout));
        std::erase_if(retired, [](const auto& old) { return old->live == 0; });
    }

  private:
    static constexpr std::size_t kNear = 8;
    static constexpr std::size_t kSure = 8;
    static constexpr int kMostMisses = 8;
    static constexpr std::size_t kMostShapes = 32;
    static constexpr std::size_t kMostCandidates = 4;
    static constexpr double kWorth = 1.02;

    // Whether one layout for both needs no more than one for each, which share the region.
    static bool worth(const Steps& both, Bytes one, Bytes other) {
        return static_cast<double>(load_of(both)) <= kWorth * static_cast<double>(std::max(one, other));
    }

    void ask(Shape& shape) {
        shape.load = load_of(shape.expected);
        shape.ticket = solver_.ask(shape.expected);
    }

    void drop(std::size_t i) {
        if (followed == all[i].get()) followed = nullptr;
        retire(std::move(all[i]->layout));
        all.erase(all.begin() + static_cast<std::ptrdiff_t>(i));
    }

    static bool within(const Steps& loop, const Steps& step) {
        return loop.size() < step.size() && std::search(step.begin(), step.end(), loop.begin(), loop.end(), [](auto& a, auto& b) {
                                                return a.nbytes == b.nbytes;
                                            }) != step.end();
    }

    // Go over to a shape that begins as this step did and has this request next.
    bool other_with(Bytes size, const Log& log, std::int64_t begin) {
        for (const auto& shape : all) {
            if (shape.get() == followed || next >= shape->expected.size() || !shape->expected[next].takes(size)) continue;
            bool same = log.next() - begin == static_cast<std::int64_t>(next);
            for (std::size_t i = 0; same && i < next; ++i)
                same = shape->expected[i].takes(log[begin + static_cast<std::int64_t>(i)].nbytes);
            if (!same) continue;
            follow(shape.get(), next);
            return true;
        }
        return false;
    }

    Solver& solver_;
    std::deque<Steps> candidates_;
    int misses_ = 0;
    std::size_t run_ = 0;
};

}  // namespace overspill::live
