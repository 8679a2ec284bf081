// The pool with two ends of Dymem (HPDC 2020, section 3.3): the allocator of the simulations over live memory. What no
// plan has lies beside it, so that the main space is empty between two steps and can be made anew in another size.
#pragma once

#include <algorithm>
#include <optional>
#include <unordered_map>

#include "../allocators/two_ended.hpp"
#include "pool.hpp"

namespace overspill::live {

class TwoEndedPool final : public MemoryPool {
  public:
    TwoEndedPool(LiveDevice& device, Bytes main_bytes)
        : segments_(device), allocator_(segments_, {main_bytes, true}), unplanned_(device), main_bytes_(main_bytes) {}

    ~TwoEndedPool() override {
        for (const auto& entry : live_) allocator_.free_block(entry.second);
        allocator_.reopen({});
    }

    std::optional<Address> allocate(Bytes nbytes, NumberedStream stream, Mobility mobility) override {
        if (mobility == kUnplanned) return unplanned_.allocate(nbytes, stream, mobility);
        PoolBlock* block = allocator_.allocate_block(nbytes, stream.number, mobility);
        allocator_.segment_log.clear();
        if (block == nullptr) return std::nullopt;
        overflows_ += mobility != Mobility::kReclaimed && TwoEndedAllocator::is_outside(block);
        least_gap_ = std::min(least_gap_.value_or(allocator_.main_bytes()), allocator_.gap_bytes());
        live_.emplace(block->address, block);
        return block->address;
    }

    void free(Address address) override {
        if (unplanned_.owns(address)) {
            unplanned_.free(address);
            return;
        }
        allocator_.free_block(live_.extract(address).mapped());
        allocator_.segment_log.clear();
    }

    void trim() override {
        unplanned_.trim();
        resize(main_bytes_, grows_);
    }

    bool mixes_streams() const override { return true; }

    MainSpace main_space() const override {
        const Bytes nbytes = allocator_.main_bytes();
        return {nbytes, least_gap_.value_or(nbytes), overflows_};
    }

    void begin_step() override { least_gap_.reset(); }

    bool resize(Bytes main_bytes, bool grows) override {
        grows_ = grows;
        allocator_.let_grow(grows);
        if (!allocator_.reopen({main_bytes, grows})) return false;
        main_bytes_ = main_bytes;
        return true;
    }

  private:
    Segments segments_;
    TwoEndedAllocator allocator_;
    BestFitPool unplanned_;
    std::unordered_map<Address, PoolBlock*> live_;
    Bytes main_bytes_;  // asked for; on a device with less it is what there is
    bool grows_ = true;
    std::optional<Bytes> least_gap_;  // in this step, if it has had a block
    std::int64_t overflows_ = 0;
};

}  // namespace overspill::live
