// The requests of one stream as they come, and the period after which they repeat.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <unordered_map>
#include <vector>

#include "device.hpp"

namespace overspill::live {

constexpr std::int64_t kAlive = std::numeric_limits<std::int64_t>::max();

// The λ-th request: its bytes, the bytes that its stream had live before it, and how many requests there had been when
// it was freed (§4.1 of the profile-guided paper, whose clock also counts frees).
struct Request {
    Bytes nbytes;
    Bytes live;
    std::int64_t end = kAlive;
};

// The latest requests by number. Those before `first` are forgotten.
class Log {
  public:
    std::int64_t first() const { return first_; }
    std::int64_t next() const { return first_ + static_cast<std::int64_t>(requests_.size()); }
    const Request& operator[](std::int64_t number) const { return requests_[static_cast<std::size_t>(number - first_)]; }

    std::int64_t add(Bytes nbytes, Bytes live) {
        requests_.push_back({nbytes, live});
        return next() - 1;
    }

    void freed(std::int64_t number) {
        if (number >= first_) requests_[static_cast<std::size_t>(number - first_)].end = next();
    }

    void forget_before(std::int64_t number) {
        if (number <= first_) return;
        requests_.erase(requests_.begin(), requests_.begin() + (number - first_));
        first_ = number;
    }

  private:
    std::vector<Request> requests_;
    std::int64_t first_ = 0;
};

// Finds that the last requests repeat those before them: the same sizes twice, and as many live bytes after both.
//
// A candidate is the distance to the last place with the same eight sizes. It is kept for as long as it holds, so the
// layers of a network, whose live bytes grow, give way to the step that they are part of.
class Repeats {
  public:
    // Look at the newest request of `log`; the period that it completes. `live`: the stream's bytes behind it.
    std::optional<std::int64_t> see(const Log& log, Bytes live) {
        const std::int64_t at = log.next() - 1;
        start_ = std::max(start_, log.first());
        if (at - start_ + 1 < kGram) return std::nullopt;
        std::uint64_t hash = 0;
        for (std::int64_t i = at - kGram + 1; i <= at; ++i)
            hash = (hash ^ static_cast<std::uint64_t>(log[i].nbytes)) * 0x9e3779b97f4a7c15U;
        const auto [found, fresh] = last_.try_emplace(hash, at);
        const std::int64_t before = fresh ? -1 : found->second;
        found->second = at;
        if (period_ > 0 && at - period_ >= start_ && same(log, at)) {
            ++matched_;
        } else {
            period_ = 0;
            if (before < start_) return std::nullopt;
            period_ = at - before;
            for (matched_ = 0; matched_ < period_ && at - matched_ - period_ >= start_ && same(log, at - matched_);) ++matched_;
        }
        if (matched_ < period_ || live_after(log, at - period_) != live) return std::nullopt;
        return period_;
    }

    // Begin anew with the next request.
    void restart(std::int64_t next) {
        start_ = next;
        period_ = 0;
        last_.clear();
    }

  private:
    static constexpr std::int64_t kGram = 8;

    bool same(const Log& log, std::int64_t at) const { return log[at].nbytes == log[at - period_].nbytes; }
    static Bytes live_after(const Log& log, std::int64_t at) { return log[at].live + log[at].nbytes; }

    std::unordered_map<std::uint64_t, std::int64_t> last_;
    std::int64_t start_ = 0;
    std::int64_t period_ = 0;
    std::int64_t matched_ = 0;
};

}  // namespace overspill::live
