// What the search decides, and the changes by which it goes from one decision to another. Twin of
// src/overspill/policies/changes.py.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "decoder.hpp"
#include "program.hpp"
#include "random.hpp"

namespace overspill::planning {

// What is recomputed, which of it is fleeting (by tensor), and what steers the greedy choice: seconds that trips of a
// tensor and slower algorithms of an op cost more (`Decoder::what`), and the trips that are made first.
struct Decision {
    Flags recompute, fleeting;
    std::shared_ptr<const std::vector<Seconds>> dearer;
    std::shared_ptr<const std::vector<Key>> away;

    bool same_program(const Decision& other) const {
        return recompute == other.recompute && fleeting == other.fleeting;
    }

    bool steers_like(const Decision& other) const { return dearer == other.dearer && away == other.away; }

    // What is not recomputed is not fleeting.
    void tidy() {
        for (std::size_t t = 0; t < fleeting.size(); ++t) fleeting[t] &= recompute[t];
    }
};

// The Units of src/overspill/policies/units.py: what is recomputed together.
struct Units {
    std::vector<std::vector<Index>> tensors;  // by unit
    std::vector<std::vector<Index>> alike;    // by unit
    std::vector<Index> near;                  // by tensor

    Index size() const { return static_cast<Index>(tensors.size()); }
};

// Decisions near another one: one of several kinds of change, drawn at random.
class Changes {
  public:
    Changes(const Units& units, const std::vector<Seconds>& most_dearer, double steering, Random& random)
        : units_(units),
          most_dearer_(most_dearer),
          random_(random),
          kinds_{{{0.1, &Changes::toggle},
                  {0.2, &Changes::toggle_near_a_stall},
                  {0.3, &Changes::swap},
                  {0.05, &Changes::block},
                  {0.25, &Changes::one_fleeting},
                  {0.05, &Changes::block_of_fleeting},
                  {0.2, &Changes::alike},
                  {steering, &Changes::steer}}} {
        for (const Kind& kind : kinds_) total_ += kind.share;
    }

    // A change of `decision`, whose plan has `lost` these seconds.
    Decision of(const Decision& decision, std::span<const Seconds> lost) {
        lost_ = lost;
        Decision changed = decision;
        if (!units_.size()) {
            steer(changed);
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
    static constexpr Index kFew = 8;  // changes.py's FEW

    struct Kind {
        double share;
        void (Changes::*change)(Decision&);
    };

    const Units& units_;
    const std::vector<Seconds>& most_dearer_;
    Random& random_;
    std::array<Kind, 8> kinds_;
    double total_ = 0;
    std::span<const Seconds> lost_;

    // -- what is recomputed

    // One or two units, anywhere.
    void toggle(Decision& decision) {
        for (Index left = 1 + random_.below(2); left > 0; --left) toggle(decision.recompute, any());
    }

    void toggle_near_a_stall(Decision& decision) { toggle(decision.recompute, place()); }

    // A unit in place of another near it, and mostly as fleeting as that was.
    void swap(Decision& decision) {
        const Index at = place();
        std::vector<Index> dropped, kept;
        for (Index u = std::max(at - kFew / 2, 0); u < std::min(at + kFew / 2 + 1, units_.size()); ++u) {
            if (all_of(decision.recompute, u)) dropped.push_back(u);
            if (none_of(decision.recompute, u)) kept.push_back(u);
        }
        if (dropped.empty() || kept.empty()) return toggle(decision);
        const Index before = one_of(dropped), now = one_of(kept);
        if (!none_of(decision.fleeting, before) || random_.uniform() < 0.5) {
            set(decision.fleeting, before, false);
            set(decision.fleeting, now, true);
        }
        set(decision.recompute, before, false);
        set(decision.recompute, now, true);
    }

    // Some units that are made one after another, all or none.
    void block(Decision& decision) { set_block(decision.recompute); }

    // Units like one another, as layers of a network are: recomputed, or for every use, or no longer.
    void alike(Decision& decision) {
        const Index at = random_.uniform() < 0.5 ? place() : any();
        const std::vector<Index>& all = units_.alike[at];
        const Index most = 1 + static_cast<Index>(std::pow(static_cast<double>(all.size()), random_.uniform()));
        const auto here = static_cast<Index>(std::lower_bound(all.begin(), all.end(), at) - all.begin());
        const Index first = std::max(here - random_.below(most), 0);
        const Index every = most > 2 && random_.uniform() < 0.3 ? 2 : 1;
        const double kind = random_.uniform();
        for (Index i = first; i < std::min(first + most, static_cast<Index>(all.size())); i += every) {
            if (kind < 0.75) set(decision.recompute, all[i], kind < 0.5);
            if (kind < 0.2 || kind >= 0.75) set(decision.fleeting, all[i], kind < 0.875);
        }
    }

    // -- what is dropped again at once

    void one_fleeting(Decision& decision) {
        std::vector<Index> recomputed;
        for (Index u = 0; u < units_.size(); ++u)
            if (all_of(decision.recompute, u)) recomputed.push_back(u);
        if (recomputed.empty()) return toggle(decision);
        toggle(decision.fleeting, one_of(recomputed));
    }

    void block_of_fleeting(Decision& decision) { set_block(decision.fleeting); }

    // -- what moves

    // Other costs: what is waited for dearer, or any; or without the trips that come first.
    void steer(Decision& decision) {
        const double kind = random_.uniform();
        if (kind >= 0.3 && kind < 0.4 && !decision.away->empty()) {
            decision.away = std::make_shared<const std::vector<Key>>();
            return;
        }
        std::vector<Seconds> dearer = *decision.dearer;
        if (kind < 0.3) {
            const double share = random_.uniform();
            for (std::size_t i = 0; i < dearer.size(); ++i) dearer[i] += share * lost_[i];
        } else {
            const auto size = static_cast<double>(dearer.size());
            const auto some = static_cast<Index>(size / std::pow(10.0, 1.0 + 2.0 * random_.uniform()));
            for (Index left = std::max(some, 1); left > 0; --left) {
                const Index one = random_.below(static_cast<Index>(dearer.size()));
                const double share = random_.uniform();
                dearer[one] = random_.uniform() < 0.7 ? share * most_dearer_[one] : 0.0;
            }
        }
        decision.dearer = std::make_shared<const std::vector<Seconds>>(std::move(dearer));
    }

    // -- where

    Index any() { return random_.below(units_.size()); }

    Index one_of(const std::vector<Index>& some) { return some[random_.below(static_cast<Index>(some.size()))]; }

    // A unit near a stall, drawn by how long it is; any if there is none.
    Index place() {
        const std::size_t tensors = units_.near.size();
        double waited = 0;
        for (std::size_t t = 0; t < tensors; ++t) waited += lost_[t];
        if (!(waited > 0)) return any();
        const double drawn = random_.uniform() * waited;
        std::size_t stalled = 0;
        for (double sum = lost_[0]; stalled + 1 < tensors && sum <= drawn; sum += lost_[stalled]) ++stalled;
        const Index at = units_.near[stalled] + random_.below(kFew + 1) - kFew / 2;
        return std::clamp(at, 0, units_.size() - 1);
    }

    void set_block(Flags& flags) {
        const Index first = any(), count = 2 + random_.below(kFew - 1);
        const bool all = random_.uniform() < 0.5;
        for (Index u = first; u < std::min(first + count, units_.size()); ++u) set(flags, u, all);
    }

    bool all_of(const Flags& flags, Index unit) const {
        return std::ranges::all_of(units_.tensors[unit], [&](Index t) { return flags[t] != 0; });
    }

    bool none_of(const Flags& flags, Index unit) const {
        return std::ranges::none_of(units_.tensors[unit], [&](Index t) { return flags[t] != 0; });
    }

    void set(Flags& flags, Index unit, bool to) const {
        for (const Index t : units_.tensors[unit]) flags[t] = to;
    }

    void toggle(Flags& flags, Index unit) const { set(flags, unit, !all_of(flags, unit)); }
};

}  // namespace overspill::planning
