// Simulated annealing over what is recomputed, dropped after use, and penalised: from plan to plan, keeping the best.
// Source: Kirkpatrick, Gelatt and Vecchi 1983, "Optimization by simulated annealing".
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "changes.hpp"
#include "list_scheduler.hpp"
#include "planner.hpp"
#include "random.hpp"

namespace overspill::search {

// A plan that fits, and the decision that it comes from.
struct Attempt {
    Decision decision;
    std::shared_ptr<const ListScheduler> scheduler;
    TimedPlan plan;
};

class Annealing {
  public:
    std::int64_t evaluations = 0;  // how often candidates were looked at in all attempts, which is what takes time

    Annealing(Planner planner, RematGroups groups)
        : planner_(std::move(planner)), groups_(std::move(groups)), most_penalty_(planner_.most_penalty()) {}

    std::shared_ptr<const Attempt> best() const { return best_; }
    std::size_t tensors() const { return groups_.near.size(); }

    // A start: the least seconds of its plan, and where that is not far from the best of plans that avoid the stalls and
    // slow algorithms of the one before; never where it does not fit.
    Seconds begin(Flags recompute, Flags kept) {
        auto penalty = std::make_shared<const std::vector<Seconds>>(most_penalty_.size(), 0.0);
        const Flags none(groups_.near.size(), 0);
        Made made = attempt({std::move(recompute), none, std::move(kept), std::move(penalty)}, nullptr, false);
        if (!made) return kNever;
        for (int repair = 0;; ++repair) {
            if (!best_ || made->plan.cost() < best_->plan.cost()) best_ = made;
            if (repair == kRepairs || made->plan.seconds > kFar * best_->plan.seconds) break;
            Decision decision = made->decision;
            std::vector<Seconds> more = *decision.penalty;
            for (std::size_t i = 0; i < more.size(); ++i) more[i] += made->plan.stall_seconds[i];
            decision.penalty = std::make_shared<const std::vector<Seconds>>(std::move(more));
            const Made now = attempt(std::move(decision), made.get(), false);
            if (!now || now->plan.cost() >= made->plan.cost()) break;
            made = now;
        }
        return made->plan.seconds;
    }

    // Changes of the best plan, drawn with a fixed seed, of which early ones may cost up to about `temperature`
    // seconds: `most` attempts, or as many as there are before they evaluate `most_evaluations` candidates or a plan
    // takes `target_seconds` seconds. What the starts evaluated does not count: of a large graph it is more than all of
    // that. `alive` is called before each.
    template <typename Alive>
    void anneal(std::int64_t most, std::int64_t most_evaluations, double perturbation_rate, Seconds temperature,
                Seconds target_seconds, Alive alive) {
        Random random(0);
        Changes changes(groups_, most_penalty_, perturbation_rate, random);
        const std::int64_t begun = evaluations;
        Made current = best_;
        for (std::int64_t made = 0;
             made < most && evaluations - begun < most_evaluations && best_->plan.seconds > target_seconds; ++made) {
            alive();
            const double left =
                1 - std::max(static_cast<double>(evaluations - begun) / static_cast<double>(most_evaluations),
                             static_cast<double>(made) / static_cast<double>(most));
            Decision decision = changes.of(current->decision, current->plan.stall_seconds);
            const bool keeps = decision.penalised_like(current->decision) && random.uniform() < kKeeping;
            const Made next = attempt(std::move(decision), current.get(), keeps);
            if (!next) continue;
            if (next->plan.seconds <= current->plan.seconds + temperature * (left * left) * random.exponential())
                current = next;
            if (next->plan.cost() <= best_->plan.cost()) best_ = next;
        }
    }

  private:
    using Made = std::shared_ptr<const Attempt>;

    static constexpr int kRepairs = 3;     // how often a start is made again with its stalls as penalties
    static constexpr double kFar = 1.2;  // … unless it takes so much longer than the best
    static constexpr double kKeeping =
        0.9;  // how often a change of what is recomputed keeps the swaps of the plan before

    Planner planner_;
    RematGroups groups_;
    std::vector<Seconds> most_penalty_;
    Made best_;

    // The plan that a decision leads to; none where it does not fit. `near` may have the same program; where the plan
    // `keeps` its swaps, these are made but for those that are superfluous, others only where they leave too little
    // room.
    Made attempt(Decision decision, const Attempt* near, bool keeps) {
        std::shared_ptr<const ListScheduler> scheduler;
        if (near && near->decision.same_program(decision))
            scheduler = near->scheduler;
        else
            scheduler = planner_.fitting(decision.recompute, decision.drop_after_use, decision.kept);
        if (!scheduler) return nullptr;
        decision.tidy();
        const Flags first = keeps ? scheduler->as_chosen(*near->scheduler, near->plan) : scheduler->none();
        TimedPlan plan = scheduler->plan(*decision.penalty, first);
        evaluations += plan.evaluations;
        return std::make_shared<const Attempt>(Attempt{std::move(decision), std::move(scheduler), std::move(plan)});
    }
};

}  // namespace overspill::search
