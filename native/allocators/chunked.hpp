// Virtual addressing by chunks: each block has addresses of its own, with equal chunks of memory behind them.
// In Python: src/overspill/placement/allocators/chunked.py, which cites the rules.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "allocator.hpp"
#include "settings.hpp"

namespace overspill {

struct ChunkedConfig {
    Bytes chunk_bytes = kPageBytes;
};

class ChunkedAllocator final : public Allocator {
  public:
    ChunkedAllocator(Device& device, const ChunkedConfig& config) : Allocator(device), config_(config) {}

    std::vector<PoolBlock*> idle_blocks() const override { return snapshot(idle_); }

    Bytes usable_bytes(Bytes request) const override { return kept_bytes() >= request ? kept_bytes() : 0; }

  protected:
    PoolBlock* find_block(Bytes nbytes, std::int32_t stream) override {
        const Bytes size = round_up(nbytes, config_.chunk_bytes);
        if (const auto it = idle_.lower_bound(Key{size}); it != idle_.end() && it->second->size == size) {
            PoolBlock* block = it->second;
            idle_.erase(it);
            return block;
        }
        const auto address = device_.reserve(size);
        if (!address) return nullptr;
        const Bytes kept = std::min(size, kept_bytes());
        if (kept < size && !device_.map(*address, size - kept)) {
            device_.unreserve(*address, size);
            return nullptr;
        }
        unmap(kept);
        if (kept > 0) device_.map(*address + size - kept, kept);
        log_exchange(SegmentAction::kMap, *address, size, stream);
        return blocks_.make(*address, size, stream);
    }

    void return_block(PoolBlock* block) override { put(block); }

  private:
    Bytes kept_bytes() const { return reserved.now - allocated.now; }

    void put(PoolBlock* block) { idle_.emplace(Key{block->size, block->address}, block); }

    // Take kept chunks, with the addresses before them, out of the smallest free blocks.
    void unmap(Bytes nbytes) {
        while (nbytes > 0) {
            PoolBlock* block = idle_.begin()->second;
            idle_.erase(idle_.begin());
            const Bytes size = std::min(nbytes, block->size);
            block->size -= size;
            const Address start = block->address + block->size;
            device_.unmap(start, size);
            device_.unreserve(start, size);
            log_exchange(SegmentAction::kUnmap, start, size, block->stream);
            nbytes -= size;
            if (block->size > 0)
                put(block);
            else
                blocks_.drop(block);
        }
    }

    ChunkedConfig config_;
    FreeBlocks idle_;
};

inline const Registered kChunked("chunked", [](Device& device, const Settings& settings) -> std::unique_ptr<Allocator> {
    return std::make_unique<ChunkedAllocator>(device, ChunkedConfig{settings.bytes("chunk_bytes")});
});

}  // namespace overspill
