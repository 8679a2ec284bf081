// Where a program is over its budget, kept up to date while the greedy choice takes bytes off.
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "swaps.hpp"

namespace overspill::search {

// The steps over the budget and how long they are.
class Excess {
  public:
    Excess(const std::vector<std::int64_t>& weight, std::vector<Bytes> excess) : excess_(std::move(excess)) {
        const std::size_t length = weight.size();
        time_.assign(length + 1, 0);
        next_.resize(length + 1);
        std::iota(next_.begin(), next_.end(), 0);
        for (std::size_t i = 1; i <= length; ++i) {
            if (excess_[i - 1] > 0)
                time_[i] += weight[i - 1];
            else
                next_[i - 1] = static_cast<Index>(i);
            if (const std::size_t parent = i + (i & (~i + 1)); parent <= length) time_[parent] += time_[i];
        }
    }

    // Takes bytes off the steps in `span`; those that are not over the budget any more drop out.
    void relieve(Span span, Bytes nbytes, const std::vector<std::int64_t>& weight) {
        for (Index i = next(span.start); i < span.end; i = next(i + 1)) {
            if ((excess_[i] -= nbytes) > 0) continue;
            next_[i] = i + 1;
            for (std::size_t k = static_cast<std::size_t>(i) + 1; k < time_.size(); k += k & (~k + 1))
                time_[k] -= weight[i];
        }
    }

    std::int64_t within(Span span) { return next(span.start) < span.end ? before(span.end) - before(span.start) : 0; }

  private:
    std::vector<Bytes> excess_;       // of steps that are over the budget
    std::vector<std::int64_t> time_;  // of these steps, a Fenwick tree
    std::vector<Index> next_;         // towards the next such step: a forest with compressed paths

    Index next(Index step) {
        while (next_[step] != step) step = next_[step] = next_[next_[step]];
        return step;
    }

    std::int64_t before(Index step) const {
        std::int64_t sum = 0;
        for (std::size_t i = static_cast<std::size_t>(step); i > 0; i &= i - 1) sum += time_[i];
        return sum;
    }
};

}  // namespace overspill::search
