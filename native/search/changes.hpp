// What the annealing decides, and the random changes by which it goes from one decision to a near one.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "list_scheduler.hpp"
#include "program.hpp"
#include "random.hpp"

namespace overspill::search {

// What is recomputed, what of it is dropped after each use, what else is kept for that (flags by tensor), and penalties
// of the greedy choice: seconds that swaps of a tensor and slower algorithms of an op are counted to cost more
// (`ListScheduler::what`).
struct Decision {
    Flags recompute, drop_after_use, kept;
    std::shared_ptr<const std::vector<Seconds>> penalty;

    bool same_program(const Decision& other) const {
        return recompute == other.recompute && drop_after_use == other.drop_after_use && kept == other.kept;
    }

    bool penalised_like(const Decision& other) const { return penalty == other.penalty; }

    // What is not recomputed is not drop_after_use.
    void tidy() {
        for (std::size_t t = 0; t < drop_after_use.size(); ++t) drop_after_use[t] &= recompute[t];
    }
};

// The RematGroups of src/overspill/policies/auto/remat_groups.py: what is recomputed together.
struct RematGroups {
    std::vector<std::vector<Index>> tensors;  // by group
    std::vector<std::vector<Index>> alike;    // by group
    std::vector<Index> near;                  // by tensor

    Index size() const { return static_cast<Index>(tensors.size()); }
};

// Decisions near another one: one of several kinds of change, drawn at random.
class Changes {
  public:
    Changes(const RematGroups& groups, const std::vector<Seconds>& most_penalty, double perturbation_rate,
            Random& random)
        : groups_(groups),
          most_penalty_(most_penalty),
          random_(random),
          kinds_{{{0.1, &Changes::toggle},
                  {0.2, &Changes::toggle_near_a_stall},
                  {0.3, &Changes::exchange},
                  {0.05, &Changes::block},
                  {0.25, &Changes::toggle_drop_after_use},
                  {0.05, &Changes::block_of_drop_after_use},
                  {0.2, &Changes::alike},
                  {perturbation_rate, &Changes::perturb}}} {
        for (const Kind& kind : kinds_) total_ += kind.share;
    }

    // A change of `decision`, whose plan stalls for these seconds.
    Decision of(const Decision& decision, std::span<const Seconds> stall_seconds) {
        stall_seconds_ = stall_seconds;
        Decision changed = decision;
        if (!groups_.size()) {
            perturb(changed);
            return changed;
        }
        const double drawn = random_.uniform() * total_;
        double bound = 0;
        for (const Kind& kind : kinds_)
            if (drawn < (bound += kind.share)) {
                (this->*kind.change)(changed);
                break;
            }
        changed.tidy();
        return changed;
    }

  private:
    static constexpr Index kFew = 8;  // how many neighbours a change reaches

    struct Kind {
        double share;
        void (Changes::*change)(Decision&);
    };

    const RematGroups& groups_;
    const std::vector<Seconds>& most_penalty_;
    Random& random_;
    std::array<Kind, 8> kinds_;
    double total_ = 0;
    std::span<const Seconds> stall_seconds_;

    // -- what is recomputed

    // One or two groups, anywhere.
    void toggle(Decision& decision) {
        for (Index left = 1 + random_.below(2); left > 0; --left) toggle(decision.recompute, any());
    }

    void toggle_near_a_stall(Decision& decision) { toggle(decision.recompute, place()); }

    // A group in place of another near it, mostly dropped after use as that was.
    void exchange(Decision& decision) {
        const Index at = place();
        std::vector<Index> dropped, kept;
        for (Index u = std::max(at - kFew / 2, 0); u < std::min(at + kFew / 2 + 1, groups_.size()); ++u) {
            if (all_of(decision.recompute, u)) dropped.push_back(u);
            if (none_of(decision.recompute, u)) kept.push_back(u);
        }
        if (dropped.empty() || kept.empty()) return toggle(decision);
        const Index before = one_of(dropped), now = one_of(kept);
        if (!none_of(decision.drop_after_use, before) || random_.uniform() < 0.5) {
            set(decision.drop_after_use, before, false);
            set(decision.drop_after_use, now, true);
        }
        set(decision.recompute, before, false);
        set(decision.recompute, now, true);
    }

    // Some groups that are made one after another, all or none.
    void block(Decision& decision) { set_block(decision.recompute); }

    // RematGroups like one another, as layers of a network are: recomputed, or for every use, or no longer.
    void alike(Decision& decision) {
        const Index at = random_.uniform() < 0.5 ? place() : any();
        const std::vector<Index>& all = groups_.alike[at];
        const Index most = 1 + static_cast<Index>(std::pow(static_cast<double>(all.size()), random_.uniform()));
        const auto here = static_cast<Index>(std::lower_bound(all.begin(), all.end(), at) - all.begin());
        const Index first = std::max(here - random_.below(most), 0);
        const Index every = most > 2 && random_.uniform() < 0.3 ? 2 : 1;
        const double kind = random_.uniform();
        for (Index i = first; i < std::min(first + most, static_cast<Index>(all.size())); i += every) {
            if (kind < 0.75) set(decision.recompute, all[i], kind < 0.5);
            if (kind < 0.2 || kind >= 0.75) set(decision.drop_after_use, all[i], kind < 0.875);
        }
    }

    // -- what is dropped again at once

    void toggle_drop_after_use(Decision& decision) {
        std::vector<Index> recomputed;
        for (Index u = 0; u < groups_.size(); ++u)
            if (all_of(decision.recompute, u)) recomputed.push_back(u);
        if (recomputed.empty()) return toggle(decision);
        toggle(decision.drop_after_use, one_of(recomputed));
    }

    void block_of_drop_after_use(Decision& decision) { set_block(decision.drop_after_use); }

    // -- what moves

    // Other penalties: more for what compute waited for, or drawn anew for some.
    void perturb(Decision& decision) {
        const double kind = random_.uniform();
        std::vector<Seconds> penalty = *decision.penalty;
        if (kind < 0.3) {
            const double share = random_.uniform();
            for (std::size_t i = 0; i < penalty.size(); ++i) penalty[i] += share * stall_seconds_[i];
        } else {
            const auto size = static_cast<double>(penalty.size());
            const auto some = static_cast<Index>(size / std::pow(10.0, 1.0 + 2.0 * random_.uniform()));
            for (Index left = std::max(some, 1); left > 0; --left) {
                const Index one = random_.below(static_cast<Index>(penalty.size()));
                const double share = random_.uniform();
                penalty[one] = random_.uniform() < 0.7 ? share * most_penalty_[one] : 0.0;
            }
        }
        decision.penalty = std::make_shared<const std::vector<Seconds>>(std::move(penalty));
    }

    // -- where

    Index any() { return random_.below(groups_.size()); }

    Index one_of(const std::vector<Index>& some) { return some[random_.below(static_cast<Index>(some.size()))]; }

    // A group near a stall, drawn by how long it is; any if there is none.
    Index place() {
        const std::size_t tensors = groups_.near.size();
        double waited = 0;
        for (std::size_t t = 0; t < tensors; ++t) waited += stall_seconds_[t];
        if (!(waited > 0)) return any();
        const double drawn = random_.uniform() * waited;
        std::size_t stalled = 0;
        for (double sum = stall_seconds_[0]; stalled + 1 < tensors && sum <= drawn; sum += stall_seconds_[stalled])
            ++stalled;
        const Index at = groups_.near[stalled] + random_.below(kFew + 1) - kFew / 2;
        return std::clamp(at, 0, groups_.size() - 1);
    }

    void set_block(Flags& flags) {
        const Index first = any(), count = 2 + random_.below(kFew - 1);
        const bool all = random_.uniform() < 0.5;
        for (Index u = first; u < std::min(first + count, groups_.size()); ++u) set(flags, u, all);
    }

    bool all_of(const Flags& flags, Index group) const {
        return std::ranges::all_of(groups_.tensors[group], [&](Index t) { return flags[t] != 0; });
    }

    bool none_of(const Flags& flags, Index group) const {
        return std::ranges::none_of(groups_.tensors[group], [&](Index t) { return flags[t] != 0; });
    }

    void set(Flags& flags, Index group, bool to) const {
        for (const Index t : groups_.tensors[group]) flags[t] = to;
    }

    void toggle(Flags& flags, Index group) const { set(flags, group, !all_of(flags, group)); }
};

}  // namespace overspill::search
