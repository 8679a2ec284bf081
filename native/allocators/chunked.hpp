// Virtual addressing by chunks: each block has addresses of its own, with equal chunks of memory behind them.
// In Python: src/overspill/placement/allocators/chunked.py, which cites the rules.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "allocator.hpp"
#include "caching.hpp"
#include "settings.hpp"

namespace overspill {

struct ChunkedConfig {
    Bytes chunk_bytes = kPageBytes;
};

class ChunkedAllocator final : public Allocator {
  public:
    ChunkedAllocator(Device& device, const ChunkedConfig& config)
        : Allocator(device), config_(config), small_(*this, device) {}

    std::vector<PoolBlock*> idle_blocks() const override {
        std::vector<PoolBlock*> all = snapshot(idle_);
        const std::vector<PoolBlock*> small = small_.idle_blocks();
        all.insert(all.end(), small.begin(), small.end());
        return all;
    }

    Bytes usable_bytes(Bytes request) const override {
        if (is_small(request)) return Allocator::usable_bytes(request);
        return kept_bytes_ >= request ? kept_bytes_ : 0;
    }

  protected:
    PoolBlock* find_block(Bytes nbytes, std::int32_t stream) override {
        if (is_small(nbytes)) {
            PoolBlock* block = small_.find_block(nbytes, stream);
            retries = small_.retries;
            return block;
        }
        const Bytes size = round_up(nbytes, config_.chunk_bytes);
        if (const auto it = idle_.lower_bound(Key{size}); it != idle_.end() && it->second->size == size) {
            return take(it->second);
        }
        const auto address = device_.reserve(size);
        if (!address) return nullptr;
        const Bytes kept = std::min(size, kept_bytes_);
        if (kept < size && !device_.map(*address, size - kept)) {
            device_.unreserve(*address, size);
            return nullptr;
        }
        unmap(kept);
        if (kept > 0) device_.map(*address + size - kept, kept);
        log_exchange(SegmentAction::kMap, *address, size, stream);
        return blocks_.make(*address, size, stream);
    }

    void return_block(PoolBlock* block) override {
        if (block->size < config_.chunk_bytes) {
            small_.return_block(block);
        } else {
            keep(block);
        }
    }

  private:
    // PyTorch's caching allocator for small blocks, whose segments stand in the books of the one around it.
    class SmallBlocks final : public CachingAllocator {
      public:
        SmallBlocks(ChunkedAllocator& owner, Device& device)
            : CachingAllocator(device, CachingConfig{}), owner_(owner) {}
        using CachingAllocator::find_block;
        using CachingAllocator::return_block;

      protected:
        void log_exchange(SegmentAction action, Address address, Bytes nbytes, std::int32_t stream) override {
            owner_.log_exchange(action, address, nbytes, stream);
        }

      private:
        ChunkedAllocator& owner_;
    };

    static constexpr Bytes kSmallShare = 2;

    bool is_small(Bytes nbytes) const { return nbytes <= config_.chunk_bytes / kSmallShare; }

    void keep(PoolBlock* block) {
        kept_bytes_ += block->size;
        idle_.emplace(Key{block->size, block->address}, block);
    }

    PoolBlock* take(PoolBlock* block) {
        kept_bytes_ -= block->size;
        idle_.erase(Key{block->size, block->address});
        return block;
    }

    // Take kept chunks, with the addresses before them, out of the smallest free blocks.
    void unmap(Bytes nbytes) {
        while (nbytes > 0) {
            PoolBlock* block = take(idle_.begin()->second);
            const Bytes size = std::min(nbytes, block->size);
            block->size -= size;
            const Address start = block->address + block->size;
            device_.unmap(start, size);
            device_.unreserve(start, size);
            log_exchange(SegmentAction::kUnmap, start, size, block->stream);
            nbytes -= size;
            if (block->size > 0)
                keep(block);
            else
                blocks_.drop(block);
        }
    }

    ChunkedConfig config_;
    FreeBlocks idle_;
    Bytes kept_bytes_ = 0;  // of chunks that no live block has
    SmallBlocks small_;
};

inline const Registered kChunked("chunked", [](Device& device, const Settings& settings) -> std::unique_ptr<Allocator> {
    return std::make_unique<ChunkedAllocator>(device, ChunkedConfig{settings.bytes("chunk_bytes")});
});

}  // namespace overspill
