// Dymem's pool, filled from both ends by the mobility of blocks (GTBM), with an incremental space beside it.
// In Python: src/overspill/placement/allocators/two_ended.py, which cites the rules.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "allocator.hpp"
#include "settings.hpp"

namespace overspill {

struct TwoEndedConfig {
    std::optional<Bytes> pool_bytes;
    bool grows = true;
};

class TwoEndedAllocator final : public Allocator {
  public:
    TwoEndedAllocator(Device& device, const TwoEndedConfig& config) : Allocator(device), config_(config) {}

    std::vector<PoolBlock*> idle_blocks() const override { return snapshot(idle_); }

    // The bytes used from both ends of the main space, and the incremental space.
    Bytes spread_bytes() const override {
        const auto gap = idle_.lower_bound(Key{kGap});
        return reserved.now - (gap != idle_.end() && gap->second->arena == kGap ? gap->second->size : 0);
    }

  protected:
    PoolBlock* find_block(Bytes nbytes, std::int32_t stream) override {
        return find_grouped_block(nbytes, stream, Mobility::kMovable);
    }

    PoolBlock* find_grouped_block(Bytes nbytes, std::int32_t stream, Mobility mobility) override {
        if (!opened_) open(stream);
        const Bytes size = round_up(nbytes, kStepBytes);
        if (mobility == Mobility::kReclaimed) {
            PoolBlock* block = outside(size, stream);
            return block != nullptr ? block : inside(size, kLow);
        }
        PoolBlock* block = inside(size, mobility == Mobility::kTemporary ? kHigh : kLow);
        if (block == nullptr && config_.grows) block = outside(size, stream);
        return block;
    }

    void return_block(PoolBlock* block) override {
        if (block->arena == kOutside) {
            segment_free(block);
            return;
        }
        for (PoolBlock* other : {block->prev, block->next}) {
            if (other == nullptr || !other->free) continue;
            idle_.erase(key(other));
            blocks_.absorb(block, other);
        }
        put(block);
    }

  private:
    enum Arena : std::int8_t { kLow = 0, kGap = 1, kHigh = 2, kOutside = 3 };

    static constexpr Bytes kStepBytes = 512;
    static constexpr Bytes kFirstPoolBytes = Bytes{10} << 30;

    // Among equals the one that is further from the gap is the first.
    static Key key(const PoolBlock* block) {
        return {block->arena, block->size, block->arena == kHigh ? -block->address : block->address};
    }

    // Take the main space from the device: what was asked for, or all there is.
    void open(std::int32_t stream) {
        opened_ = true;
        const auto capacity = device_.capacity_bytes();
        const Bytes first = capacity ? *capacity / 12 * 10 + *capacity % 12 * 10 / 12 : kFirstPoolBytes;
        const Bytes wanted = round_up(config_.pool_bytes.value_or(first), kStepBytes);
        PoolBlock* pool = wanted != 0 ? segment_malloc(wanted, stream) : nullptr;
        if (pool == nullptr && capacity) {
            const Bytes left = (*capacity - device_.used_bytes()) / kPageBytes * kPageBytes;
            if (left != 0) pool = segment_malloc(left, stream);
        }
        if (pool == nullptr) return;
        put(pool);
    }

    PoolBlock* outside(Bytes size, std::int32_t stream) {
        PoolBlock* block = segment_malloc(size, stream);
        if (block != nullptr) block->arena = kOutside;
        return block;
    }

    // A block from one end of the main space, or from where else there is room.
    PoolBlock* inside(Bytes size, Arena end) {
        for (const Arena arena : {end, kGap, end == kLow ? kHigh : kLow}) {
            const auto it = idle_.lower_bound(Key{arena, size});
            if (it == idle_.end() || it->second->arena != arena) continue;
            PoolBlock* block = it->second;
            idle_.erase(it);
            return cut(block, size, arena == kGap ? end : arena);
        }
        return nullptr;
    }

    // Bytes of a free block, from its lower or its upper side as the end has it; the rest stays free.
    PoolBlock* cut(PoolBlock* hole, Bytes size, Arena end) {
        if (hole->size == size) {
            hole->arena = end;
            return hole;
        }
        PoolBlock* front = blocks_.cut(hole, end == kLow ? size : hole->size - size);
        PoolBlock* taken = end == kLow ? front : hole;
        taken->arena = end;
        put(end == kLow ? hole : front);
        return taken;
    }

    // Make `block` a hole of the end that lies around it, or the gap; its neighbours are live.
    void put(PoolBlock* block) {
        if (block->next != nullptr && block->next->arena == kLow)
            block->arena = kLow;
        else if (block->prev != nullptr && block->prev->arena == kHigh)
            block->arena = kHigh;
        else
            block->arena = kGap;
        idle_.emplace(key(block), block);
    }

    TwoEndedConfig config_;
    FreeBlocks idle_;
    bool opened_ = false;
};

inline const Registered kTwoEnded("gtbm", [](Device& device, const Settings& settings) -> std::unique_ptr<Allocator> {
    return std::make_unique<TwoEndedAllocator>(
        device, TwoEndedConfig{settings.maybe_bytes("pool_bytes"), settings.flag("grows")});
});

}  // namespace overspill
