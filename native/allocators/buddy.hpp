// The binary buddy system: blocks of powers of two, halved and joined with the half they came from.
// In Python: packages/overspill-papers/src/overspill_papers/placement/allocators/buddy.py.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "allocator.hpp"
#include "settings.hpp"

namespace overspill {

struct BuddyConfig {
    Bytes least_bytes = 512;
    Bytes segment_bytes = kPageBytes;
};

class BuddyAllocator final : public Allocator {
  public:
    BuddyAllocator(Device& device, const BuddyConfig& config) : Allocator(device), config_(config) {}

    std::vector<PoolBlock*> idle_blocks() const override { return snapshot(idle_); }

  protected:
    PoolBlock* find_block(Bytes nbytes, std::int32_t stream) override {
        const auto power = static_cast<Bytes>(std::bit_ceil(static_cast<std::uint64_t>(nbytes)));
        const Bytes size = std::max(config_.least_bytes, power);
        PoolBlock* block;
        if (const auto it = idle_.lower_bound(Key{size}); it != idle_.end()) {
            block = it->second;
            idle_.erase(it);
        } else {
            block = segment_malloc(std::max(size, config_.segment_bytes), stream);
            if (block == nullptr) return nullptr;
            block->base = block->address;
        }
        while (block->size > size) {
            PoolBlock* front = blocks_.cut(block, block->size / 2);
            put(block);
            block = front;
        }
        return block;
    }

    void return_block(PoolBlock* block) override {
        while (PoolBlock* buddy = idle_buddy(block)) {
            idle_.erase(Key{buddy->size, buddy->address});
            blocks_.absorb(block, buddy);
        }
        put(block);
    }

  private:
    static PoolBlock* idle_buddy(const PoolBlock* block) {
        const bool is_front = ((block->address - block->base) & block->size) == 0;
        PoolBlock* buddy = is_front ? block->next : block->prev;
        return buddy != nullptr && buddy->free && buddy->size == block->size ? buddy : nullptr;
    }

    void put(PoolBlock* block) { idle_.emplace(Key{block->size, block->address}, block); }

    BuddyConfig config_;
    FreeBlocks idle_;
};

inline const Registered kBuddy("buddy", [](Device& device, const Settings& settings) -> std::unique_ptr<Allocator> {
    return std::make_unique<BuddyAllocator>(
        device, BuddyConfig{settings.bytes("least_bytes"), settings.bytes("segment_bytes")});
});

}  // namespace overspill
