// The walk of the search from plan to plan, which keeps the best. Twin of src/overspill/policies/walk.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "changes.hpp"
#include "decoder.hpp"
#include "planner.hpp"
#include "random.hpp"

namespace overspill::planning {

// A plan that fits, and the decision that it comes from.
struct Attempt {
    Decision decision;
    std::shared_ptr<const Decoder> decoder;
    Decoded plan;
};

class Walk {
  public:
    std::int64_t looks = 0;  // how often candidates were looked at in all attempts, which is what takes time

    Walk(Planner planner, Units units)
        : planner_(std::move(planner)), units_(std::move(units)), most_dearer_(planner_.most_dearer()) {}

    std::shared_ptr<const Attempt> best() const { return best_; }
    std::size_t tensors() const { return units_.near.size(); }

    // Where to walk from: several plans, each of which avoids the stalls and slow algorithms of the one before.
    void begin(Flags recompute, std::vector<Key> away) {
        auto dearer = std::make_shared<const std::vector<Seconds>>(most_dearer_.size(), 0.0);
        Decision decision{std::move(recompute), Flags(units_.near.size(), 0), std::move(dearer),
                          std::make_shared<const std::vector<Key>>(std::move(away))};
        Made before;
        for (int repair = 0; repair < kRepairs; ++repair) {
            const Made made = attempt(std::move(decision), nullptr, false);
            if (!made || (before && made->plan.cost() >= before->plan.cost())) break;
            before = made;
            if (!best_ || made->plan.cost() < best_->plan.cost()) best_ = made;
            const std::vector<Seconds>& lost = made->plan.lost;
            if (std::ranges::all_of(lost, [](Seconds s) { return s == 0; })) break;
            decision = made->decision;
            std::vector<Seconds> more = *decision.dearer;
            for (std::size_t i = 0; i < more.size(); ++i) more[i] += lost[i];
            decision.dearer = std::make_shared<const std::vector<Seconds>>(std::move(more));
        }
    }

    // From the best plan on by changes drawn with a fixed seed, of which early ones may cost up to about `warm` seconds:
    // `most` attempts, or as many as there are before `looks` are `until` or a plan takes `aim` seconds. `alive` is called
    // before each.
    template <typename Alive>
    void go_on(std::int64_t most, std::int64_t until, double steering, Seconds warm, Seconds aim, Alive alive) {
        Random random(0);
        Changes changes(units_, most_dearer_, steering, random);
        const std::int64_t begun = looks;
        Made current = best_;
        for (std::int64_t made = 0; made < most && looks < until && best_->plan.seconds > aim; ++made) {
            alive();
            const double left = std::min(static_cast<double>(until - looks) / static_cast<double>(until - begun),
                                         1 - static_cast<double>(made) / static_cast<double>(most));
            Decision decision = changes.of(current->decision, current->plan.lost);
            const bool keeps = decision.steers_like(current->decision) && random.uniform() < kKeeping;
            const Made next = attempt(std::move(decision), current.get(), keeps);
            if (!next) continue;
            if (next->plan.seconds <= current->plan.seconds + warm * (left * left) * random.exponential()) current = next;
            if (next->plan.cost() <= best_->plan.cost()) best_ = next;
        }
    }

  private:
    using Made = std::shared_ptr<const Attempt>;

    static constexpr int kRepairs = 3;       // walk.py's REPAIRS
    static constexpr double kKeeping = 0.9;  // its KEEPING

    Planner planner_;
    Units units_;
    std::vector<Seconds> most_dearer_;
    Made best_;

    // The plan that a decision leads to; none where it does not fit. `near` may have the same program; where the plan
    // `keeps` its trips, these are made but for those that are superfluous, others only where they leave too little room.
    Made attempt(Decision decision, const Attempt* near, bool keeps) {
        std::shared_ptr<const Decoder> decoder;
        if (near && near->decision.same_program(decision))
            decoder = near->decoder;
        else
            decoder = planner_.fitting(decision.recompute, decision.fleeting);
        if (!decoder) return nullptr;
        decision.tidy();
        const Flags first = keeps ? decoder->as_chosen(*near->decoder, near->plan) : decoder->among(*decision.away);
        Decoded plan = decoder->decode(*decision.dearer, first);
        looks += plan.looks;
        return std::make_shared<const Attempt>(Attempt{std::move(decision), std::move(decoder), std::move(plan)});
    }
};

}  // namespace overspill::planning
