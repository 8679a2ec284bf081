// Where a program is over its budget, kept up to date while the greedy choice takes bytes off.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "swaps.hpp"

namespace overspill::search {

// The steps over the budget and how long they are. Steps lie in blocks: what is taken off a whole block is noted once,
// and its steps are looked at only when the least of them drops out.
class Excess {
  public:
    Excess(const std::vector<std::int64_t>& weight, std::vector<Bytes> excess) : excess_(std::move(excess)) {
        const std::size_t length = weight.size();
        time_.assign(length + 1, 0);
        taken_.assign(length / kBlock + 1, 0);
        least_.assign(length / kBlock + 1, kNone);
        for (std::size_t i = 1; i <= length; ++i) {
            Bytes& over = excess_[i - 1];
            if (over > 0)
                time_[i] += weight[i - 1];
            else
                over = kNone;
            least_[(i - 1) / kBlock] = std::min(least_[(i - 1) / kBlock], over);
            if (const std::size_t parent = i + (i & (~i + 1)); parent <= length) time_[parent] += time_[i];
        }
    }

    // Takes bytes off the steps in `span`; those that are not over the budget any more drop out.
    void relieve(Span span, Bytes nbytes, const std::vector<std::int64_t>& weight) {
        const std::size_t end = static_cast<std::size_t>(span.end);
        for (std::size_t at = static_cast<std::size_t>(span.start), next = 0; at < end; at = next) {
            const std::size_t block = at / kBlock;
            next = std::min(end, (block + 1) * kBlock);
            if (least_[block] == kNone) continue;
            if (next - at == kBlock) {
                taken_[block] += nbytes;
                least_[block] -= nbytes;
                if (least_[block] > 0) continue;
            } else {
                for (std::size_t i = at; i < next; ++i)
                    if (excess_[i] != kNone) excess_[i] -= nbytes;
            }
            drop_out(block, weight);
        }
    }

    std::int64_t within(Span span) const {
        std::int64_t sum = 0;
        std::size_t start = static_cast<std::size_t>(span.start), end = static_cast<std::size_t>(span.end);
        for (; end > start; end &= end - 1) sum += time_[end];
        for (; start > end; start &= start - 1) sum -= time_[start];
        return sum;
    }

  private:
    static constexpr std::size_t kBlock = 64;
    static constexpr Bytes kNone = std::numeric_limits<Bytes>::max();  // of a step that is not over the budget

    std::vector<Bytes> excess_;        // by step, without what is noted of its block
    std::vector<Bytes> taken_, least_;  // by block: what is taken off all its steps, and the least excess of one
    std::vector<std::int64_t> time_;   // of steps over the budget, a Fenwick tree

    void drop_out(std::size_t block, const std::vector<std::int64_t>& weight) {
        Bytes least = kNone;
        for (std::size_t i = block * kBlock; i < std::min(excess_.size(), (block + 1) * kBlock); ++i) {
            if (excess_[i] == kNone) continue;
            excess_[i] -= taken_[block];
            least = std::min(least, excess_[i] > 0 ? excess_[i] : kNone);
            if (excess_[i] > 0) continue;
            excess_[i] = kNone;
            for (std::size_t k = i + 1; k < time_.size(); k += k & (~k + 1)) time_[k] -= weight[i];
        }
        taken_[block] = 0;
        least_[block] = least;
    }
};

}  // namespace overspill::search
