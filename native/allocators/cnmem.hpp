// NVIDIA's CNMeM, the pool of vDNN: best fit in one pool reserved at the start, growing if allowed.
// In Python: packages/overspill-papers/src/overspill_papers/placement/allocators/cnmem.py, which cites the rules.
#pragma once

#include <cstdint>
#include <vector>

#include "allocator.hpp"
#include "settings.hpp"

namespace overspill {

struct CnmemConfig {
    Bytes pool_bytes = 0;
    bool grows = true;
};

class CnmemAllocator final : public Allocator {
  public:
    CnmemAllocator(Device& device, const CnmemConfig& config)
        : Allocator(device), config_(config), pool_bytes_missing_(round_up(config.pool_bytes, kStepBytes)) {}

    std::vector<PoolBlock*> idle_blocks() const override { return snapshot(idle_); }

  protected:
    PoolBlock* find_block(Bytes nbytes, std::int32_t stream) override {
        if (pool_bytes_missing_ > 0) {
            PoolBlock* pool = segment_malloc(pool_bytes_missing_, stream);
            if (pool == nullptr) return nullptr;
            pool_bytes_missing_ = 0;
            put(pool);
        }
        const Bytes size = round_up(nbytes, kStepBytes);
        const auto it = idle_.lower_bound(Key{size});
        if (it == idle_.end()) return config_.grows ? segment_malloc(size, stream) : nullptr;
        PoolBlock* block = it->second;
        idle_.erase(it);
        if (block->size == size) return block;
        PoolBlock* front = blocks_.cut(block, size);
        put(block);
        return front;
    }

    void return_block(PoolBlock* block) override {
        for (PoolBlock* other : {block->prev, block->next}) {
            if (other == nullptr || !other->free) continue;
            idle_.erase(Key{other->size, other->address});
            blocks_.absorb(block, other);
        }
        put(block);
    }

  private:
    static constexpr Bytes kStepBytes = 512;

    void put(PoolBlock* block) { idle_.emplace(Key{block->size, block->address}, block); }

    CnmemConfig config_;
    Bytes pool_bytes_missing_;
    FreeBlocks idle_;
};

inline const Registered kCnmem("cnmem", [](Device& device, const Settings& settings) -> std::unique_ptr<Allocator> {
    return std::make_unique<CnmemAllocator>(device, CnmemConfig{settings.bytes("pool_bytes"), settings.flag("grows")});
});

}  // namespace overspill
