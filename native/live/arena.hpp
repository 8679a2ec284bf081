// The planned part of a step (profile-guided placement, section 4.2): the i-th request gets the i-th planned place. A
// request that the plan does not have, or one less, does not shift the others: these find their places by their sizes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <numeric>
#include <unordered_map>
#include <utility>
#include <vector>

#include "device.hpp"

namespace overspill::live {

// One planned request: where its block lies in the arena and when it lives; or that it does not lie there.
struct Place {
    static constexpr Bytes kOutside = -1;  // as `nbytes`: the plan leaves this one to the pool

    Address offset = 0;
    Bytes nbytes = kOutside;
    std::int32_t stream = 0;  // its number
    std::int64_t start = 0;
    std::int64_t end = 0;  // beyond the last start for a block that the step does not free
};

enum class Answer {
    kPlanned,   // at the planned place
    kOutside,   // the plan leaves it to the pool
    kOccupied,  // another block is still there: the program freed it later than in the recorded step
    kMismatch,  // not the request that was planned
};

// Requests come in the recorded order, but nothing is sure about the frees. A block whose free the plan counts on when
// a place is given out is *late* while it is still there, and blocks of the step before are, at the beginning of one;
// a place is given out only where no late block lies. All others are apart from it by the layout: places are given out
// in the order of the plan, though some may be left out.
class Arena {
  public:
    Arena(Address base, Bytes nbytes, std::vector<Place> places) : base_(base), nbytes_(nbytes) {
        std::unordered_map<Address, std::int32_t> slots;
        slots_.reserve(places.size());
        for (const Place& place : places) {
            const auto slot = slots.emplace(place.offset, static_cast<std::int32_t>(slots.size())).first->second;
            slots_.push_back({place.offset, place.nbytes, 0, place.stream, slot, 0, kNever, State::kFree, false});
        }
        occupant_.assign(slots.size(), kNobody);
        slot_of_ = std::move(slots);
        order_frees(places);
        find_shared();
        next_ = slots_.size();  // until a step begins
    }

    Address base() const { return base_; }
    Bytes nbytes() const { return nbytes_; }
    bool owns(Address address) const { return address >= base_ && address < base_ + nbytes_; }
    std::int64_t live() const { return live_; }

    void begin_step() {
        begun_ = true;
        next_ = due_ = freed_ = 0;
        late_.clear();
        if (live_ == 0) return;
        for (std::size_t i = 0; i < slots_.size(); ++i) note_late(static_cast<std::int32_t>(i));
    }

    Answer take(Bytes nbytes, std::int32_t stream, Address& address) {
        if (next_ == slots_.size()) return begun_ ? Answer::kMismatch : Answer::kOutside;
        const std::size_t found = wanted(round_up(nbytes, kAlignmentBytes), stream);
        if (found == slots_.size()) return Answer::kMismatch;
        next_ = found + 1;
        const auto index = static_cast<std::int32_t>(found);
        Slot& slot = slots_[found];
        while (due_ < slot.due) note_late(free_order_[due_++]);
        if (slot.nbytes == Place::kOutside) return Answer::kOutside;
        if (!late_.empty() && late_at(slot)) return Answer::kOccupied;
        slot.state = State::kLive;
        slot.requested = nbytes;
        occupant_[static_cast<std::size_t>(slot.place)] = index;
        ++live_;
        address = base_ + slot.offset;
        return Answer::kPlanned;
    }

    // The live block at `address`; kNobody if none begins there.
    std::int32_t find(Address address) {
        if (freed_ < free_order_.size()) {  // the free that the plan expects next
            const std::int32_t expected = free_order_[freed_];
            const Slot& slot = slots_[static_cast<std::size_t>(expected)];
            if (base_ + slot.offset == address && slot.state == State::kLive) return expected;
        }
        const auto found = slot_of_.find(address - base_);
        if (found == slot_of_.end()) return kNobody;
        const std::int32_t index = occupant_[static_cast<std::size_t>(found->second)];
        if (index == kNobody || slots_[static_cast<std::size_t>(index)].state != State::kLive) return kNobody;
        return index;
    }

    // The bytes that were requested; the place is given out again after `complete`.
    Bytes free(std::int32_t index) {
        Slot& slot = slots_[static_cast<std::size_t>(index)];
        slot.state = State::kPending;
        if (slot.rank != kNever) freed_ = slot.rank + 1;
        return slot.requested;
    }

    void complete(std::int32_t index) {
        Slot& slot = slots_[static_cast<std::size_t>(index)];
        slot.state = State::kFree;
        occupant_[static_cast<std::size_t>(slot.place)] = kNobody;
        --live_;
    }

    std::int32_t stream(std::int32_t index) const { return slots_[static_cast<std::size_t>(index)].stream; }

    // Whether some other stream is planned to use a part of this place at some time.
    bool shared(std::int32_t index) const { return slots_[static_cast<std::size_t>(index)].shared; }

    static constexpr std::int32_t kNobody = -1;

  private:
    static constexpr std::size_t kLooksAhead = 32;
    static constexpr Bytes kAlignmentBytes = 512;  // to which recorded sizes are rounded up

    // The planned request that this is: the next one if it is as large; or one of those behind it that is; or the next
    // one if its place is large enough. The number of slots if it is none: an extra one.
    std::size_t wanted(Bytes nbytes, std::int32_t stream) const {
        const auto is_exact = [&](const Slot& slot) { return slot.nbytes == nbytes && slot.stream == stream; };
        const Slot& next = slots_[next_];
        if (next.nbytes == Place::kOutside || is_exact(next)) return next_;
        const std::size_t end = std::min(next_ + kLooksAhead, slots_.size());
        for (std::size_t i = next_ + 1; i < end; ++i)
            if (is_exact(slots_[i])) return i;
        return nbytes <= next.nbytes && stream == next.stream ? next_ : slots_.size();
    }

    enum class State : std::uint8_t { kFree, kLive, kPending };

    static constexpr std::uint32_t kNever = ~std::uint32_t{0};

    struct Slot {
        Address offset;
        Bytes nbytes;
        Bytes requested;
        std::int32_t stream;
        std::int32_t place;  // the number of its offset among those of the plan
        std::uint32_t due;   // how many frees the plan has before this request
        std::uint32_t rank;  // its place in the order of frees
        State state;
        bool shared;
    };

    void note_late(std::int32_t index) {
        if (slots_[static_cast<std::size_t>(index)].state != State::kFree) late_.push_back(index);
    }

    bool late_at(const Slot& wanted) {
        std::erase_if(late_, [this](std::int32_t i) {
            return slots_[static_cast<std::size_t>(i)].state == State::kFree;
        });
        return std::any_of(late_.begin(), late_.end(), [&](std::int32_t i) {
            const Slot& other = slots_[static_cast<std::size_t>(i)];
            return other.offset < wanted.offset + wanted.nbytes && wanted.offset < other.offset + other.nbytes;
        });
    }

    void order_frees(const std::vector<Place>& places) {
        std::vector<std::int64_t> ends;
        for (std::size_t i = 0; i < places.size(); ++i)
            if (places[i].nbytes != Place::kOutside) free_order_.push_back(static_cast<std::int32_t>(i));
        const auto end = [&](std::int32_t i) { return places[static_cast<std::size_t>(i)].end; };
        std::stable_sort(free_order_.begin(), free_order_.end(), [&](auto a, auto b) { return end(a) < end(b); });
        for (std::size_t rank = 0; rank < free_order_.size(); ++rank) {
            slots_[static_cast<std::size_t>(free_order_[rank])].rank = static_cast<std::uint32_t>(rank);
            ends.push_back(end(free_order_[rank]));
        }
        for (std::size_t i = 0; i < places.size(); ++i) {
            const auto due = std::upper_bound(ends.begin(), ends.end(), places[i].start);
            slots_[i].due = static_cast<std::uint32_t>(due - ends.begin());
        }
    }

    // A sweep over the addresses with the streams of the places there: mixed where there are two or more.
    void find_shared() {
        std::map<Address, std::vector<std::pair<std::int32_t, int>>> changes;  // (stream, one more or one less)
        for (const Slot& slot : slots_) {
            if (slot.nbytes == Place::kOutside) continue;
            changes[slot.offset].emplace_back(slot.stream, 1);
            changes[slot.offset + slot.nbytes].emplace_back(slot.stream, -1);
        }
        std::map<Address, std::int64_t> mixed_before;  // how many mixed pieces lie before an edge
        std::unordered_map<std::int32_t, std::int64_t> here;
        std::int64_t mixed = 0;
        for (const auto& [edge, streams] : changes) {
            mixed_before.emplace_hint(mixed_before.end(), edge, mixed);
            for (const auto& [stream, change] : streams)
                if ((here[stream] += change) == 0) here.erase(stream);
            mixed += here.size() > 1;
        }
        for (Slot& slot : slots_)
            if (slot.nbytes != Place::kOutside)
                slot.shared = mixed_before.at(slot.offset) != mixed_before.at(slot.offset + slot.nbytes);
    }

    Address base_;
    Bytes nbytes_;
    std::vector<Slot> slots_;
    std::vector<std::int32_t> free_order_;
    std::unordered_map<Address, std::int32_t> slot_of_;
    std::vector<std::int32_t> occupant_;  // by number of the offset
    std::vector<std::int32_t> late_;
    std::size_t next_ = 0;   // the request that comes next
    std::size_t due_ = 0;    // the frees that the plan has had so far
    std::size_t freed_ = 0;  // the free that the plan has next
    std::int64_t live_ = 0;
    bool begun_ = false;
};

}  // namespace overspill::live
