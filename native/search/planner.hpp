// From what is recomputed to a program that fits into the budget, and its list scheduler.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "list_scheduler.hpp"
#include "program.hpp"
#include "swaps.hpp"

namespace overspill::search {

// A graph, a device's link and a budget: makes decoders for programs that recompute one thing or another.
class Planner {
  public:
    Planner(std::shared_ptr<const Graph> graph, const Link& link, Bytes budget)
        : graph_(std::move(graph)), link_(link), budget_(budget) {}

    const Graph& graph() const { return *graph_; }

    // The most seconds of penalty that a change draws: for swaps of a tensor, by tensor, then for slower algorithms, by
    // op.
    std::vector<Seconds> most_penalty() const {
        std::vector<Seconds> found;
        for (const Bytes nbytes : graph_->nbytes) found.push_back(link_.offload(nbytes));
        for (Index op = 0; op < graph_->ops(); ++op) {
            const std::vector<Algorithm>& menu = graph_->algorithms[op];
            const auto slowest = std::ranges::max_element(menu, {}, &Algorithm::slowdown);
            found.push_back(graph_->sent[op] + graph_->seconds[op] * ((slowest == menu.end() ? 1.0 : slowest->slowdown) - 1.0));
        }
        return found;
    }

    // A scheduler of the program that recomputes `dropped`, from what is `kept` where that is read, which become those for which there is room where they are
    // made again; none where no program fits.
    std::shared_ptr<const ListScheduler> fitting(Flags& dropped, const Flags& drop_after_use, const Flags& kept) const {
        while (true) {
            const Program program(*graph_, dropped, drop_after_use, kept);
            const std::vector<Bytes> alone = program.alone();
            Flags around(alone.size() + 2, 0);
            bool over = false;
            for (std::size_t i = 0; i < alone.size(); ++i) {
                if (alone[i] <= budget_) continue;
                over = true;
                around[i ? i - 1 : 0] = around[i] = around[i + 1] = 1;
            }
            if (!over) return std::make_shared<const ListScheduler>(graph_, program, link_, budget_);
            if (std::none_of(dropped.begin(), dropped.end(), [](auto flag) { return flag != 0; })) return nullptr;
            bool crowded = false;
            Flags fewer = dropped;
            for (const Gap& gap : program.gaps) {
                if (!gap.rematerialized || !around[gap.end] || !dropped[gap.tensor] || gathered_again(gap.tensor))
                    continue;
                fewer[gap.tensor] = 0;
                crowded = true;
            }
            if (!crowded && fewer == kept_back(dropped)) return nullptr;
            dropped = crowded ? fewer : kept_back(dropped);
        }
    }

  private:
    // Whether a tensor cannot leave but by being gathered again.
    bool gathered_again(Index tensor) const {
        const Index op = graph_->producer[tensor];
        return op >= 0 && graph_->sends[op] == Sends::kGather && !graph_->leaves[tensor];
    }

    Flags kept_back(Flags dropped) const {
        for (Index t = 0; t < graph_->tensors(); ++t) dropped[t] &= gathered_again(t);
        return dropped;
    }

    std::shared_ptr<const Graph> graph_;
    Link link_;
    Bytes budget_;
};

}  // namespace overspill::search
