// Best fit in one pool that grows at its end. In Python: src/overspill/placement/allocators/best_fit.py.
#pragma once

#include <cstdint>
#include <vector>

#include "allocator.hpp"
#include "expandable.hpp"
#include "settings.hpp"

namespace overspill {

struct BestFitConfig {
    Bytes step_bytes = 512;
};

class BestFitAllocator final : public Allocator {
  public:
    BestFitAllocator(Device& device, const BestFitConfig& config) : Allocator(device), config_(config) {
        const auto capacity = device.capacity_bytes();
        unmapped_bytes_ = capacity ? round_up(*capacity, kPageBytes) : kUnlimitedReservationBytes;
    }

    std::vector<PoolBlock*> idle_blocks() const override { return snapshot(idle_); }

  protected:
    PoolBlock* find_block(Bytes nbytes, std::int32_t stream) override {
        const Bytes size = round_up(nbytes, config_.step_bytes);
        const auto it = idle_.lower_bound(Key{size});
        PoolBlock* block = it != idle_.end() ? it->second : nullptr;
        if (block == nullptr || block->size < size) block = grown(size, stream);
        if (block == nullptr) return nullptr;
        idle_.erase(key(block));
        if (block->size == size) return block;
        PoolBlock* front = blocks_.cut(block, size);
        put(block);
        return front;
    }

    void return_block(PoolBlock* block) override {
        for (PoolBlock* other : {block->prev, block->next}) {
            if (other == nullptr || !other->free) continue;
            idle_.erase(key(other));
            if (other == last_) last_ = block;
            blocks_.absorb(block, other);
        }
        put(block);
    }

  private:
    // The end of the pool can grow: it comes after all holes.
    static Key key(const PoolBlock* block) {
        return {block->next != nullptr ? block->size : kAddressSpaceBytes, block->address};
    }

    void put(PoolBlock* block) { idle_.emplace(key(block), block); }

    // The last block of the pool, free and of at least `size` bytes after pages were added.
    PoolBlock* grown(Bytes size, std::int32_t stream) {
        const bool open = last_ != nullptr && last_->free;
        const Bytes missing = round_up(size - (open ? last_->size : 0), kPageBytes);
        if (missing > unmapped_bytes_) return nullptr;
        const auto end =
            last_ == nullptr ? device_.reserve(unmapped_bytes_) : std::optional<Address>(last_->address + last_->size);
        if (!end) return nullptr;
        if (!device_.map(*end, missing)) {
            if (last_ == nullptr) device_.unreserve(*end, unmapped_bytes_);
            return nullptr;
        }
        unmapped_bytes_ -= missing;
        log_exchange(SegmentAction::kMap, *end, missing, stream);
        if (open) {
            idle_.erase(key(last_));
            last_->size += missing;
        } else {
            PoolBlock* added = blocks_.make(*end, missing, stream);
            added->splice(last_, nullptr);
            last_ = added;
        }
        put(last_);
        return last_;
    }

    BestFitConfig config_;
    FreeBlocks idle_;
    Bytes unmapped_bytes_ = 0;
    PoolBlock* last_ = nullptr;
};

inline const Registered kBestFit("best-fit",
                                 [](Device& device, const Settings& settings) -> std::unique_ptr<Allocator> {
                                     return std::make_unique<BestFitAllocator>(
                                         device, BestFitConfig{settings.bytes("step_bytes")});
                                 });

}  // namespace overspill
