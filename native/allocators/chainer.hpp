// Chainer's memory pool, today CuPy's: bins of 512 bytes a stream, always split, joined when freed.
// In Python: packages/overspill-papers/src/overspill_papers/placement/allocators/chainer.py, which cites the rules.
#pragma once

#include <cstdint>
#include <vector>

#include "allocator.hpp"
#include "settings.hpp"

namespace overspill {

struct ChainerConfig {
    Bytes limit_bytes = 0;
};

class ChainerAllocator final : public Allocator {
  public:
    ChainerAllocator(Device& device, const ChainerConfig& config) : Allocator(device), config_(config) {}

    std::vector<PoolBlock*> idle_blocks() const override { return snapshot(idle_); }

  protected:
    PoolBlock* find_block(Bytes nbytes, std::int32_t stream) override {
        const Bytes size = round_up(nbytes, kStepBytes);
        if (PoolBlock* block = find_free(size, stream)) return block;
        if (config_.limit_bytes > 0 && reserved.now + size > config_.limit_bytes) return nullptr;
        PoolBlock* block = segment_malloc(size, stream);
        if (block == nullptr) {
            release_unsplit();
            ++retries;
            block = segment_malloc(size, stream);
        }
        return block;
    }

    void return_block(PoolBlock* block) override {
        for (PoolBlock* other : {block->next, block->prev}) {
            if (other == nullptr || !other->free) continue;
            idle_.erase(key(other));
            blocks_.absorb(block, other);
        }
        put(block);
    }

  private:
    static constexpr Bytes kStepBytes = 512;

    static Key key(const PoolBlock* block) { return {block->stream, block->size, -block->indexed_at}; }

    void put(PoolBlock* block) {
        block->indexed_at = ++frees_;
        idle_.emplace(key(block), block);
    }

    PoolBlock* find_free(Bytes size, std::int32_t stream) {
        const auto it = idle_.lower_bound(Key{stream, size});
        if (it == idle_.end() || it->second->stream != stream) return nullptr;
        PoolBlock* block = it->second;
        idle_.erase(it);
        if (block->size == size) return block;
        PoolBlock* front = blocks_.cut(block, size);
        put(block);
        return front;
    }

    void release_unsplit() {
        for (PoolBlock* block : snapshot(idle_)) {
            if (block->split()) continue;
            idle_.erase(key(block));
            segment_free(block);
        }
    }

    ChainerConfig config_;
    FreeBlocks idle_;
    std::int64_t frees_ = 0;
};

inline const Registered kChainer("chainer", [](Device& device, const Settings& settings) -> std::unique_ptr<Allocator> {
    return std::make_unique<ChainerAllocator>(device, ChainerConfig{settings.bytes("limit_bytes")});
});

}  // namespace overspill
