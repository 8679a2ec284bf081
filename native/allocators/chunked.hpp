// Chunks of memory behind consecutive virtual addresses: section 4 of "Out-of-core training ... with adaptive window-based
// scheduling". Any chunks serve any request, so nothing is lost but the end of each block's last chunk (eq. 1).
//
// Chunks stay at the addresses at which they were freed. A block of as many chunks and of the same stream takes them
// there, without a call of the driver. Any other block takes kept chunks away from the smallest kept blocks first, and then
// new ones. Requests of half a chunk or less share the segments of a caching allocator, as in the paper's framework
// (sony/nnabla-ext-cuda, CudaCachedVirtualArray).
// The oracle in Python: tests/placement/allocators/chunked_oracle.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "caching.hpp"

namespace overspill {

class ChunkedAllocator final : public CachingAllocator {
  public:
    ChunkedAllocator(Device& device, Bytes chunk_bytes) : CachingAllocator(device, CachingConfig{}), chunk_bytes_(chunk_bytes) {}

    std::vector<PoolBlock*> idle_blocks() const override {
        auto all = CachingAllocator::idle_blocks();
        for (const auto& entry : kept_) all.push_back(entry.second);
        return all;
    }

    void release_cached() override {
        unmap(kept_bytes_);
        CachingAllocator::release_cached();
    }

    // Kept chunks can be combined: all of them, if they suffice.
    Bytes usable_bytes(Bytes request) const override {
        if (is_small(request)) return CachingAllocator::usable_bytes(request);
        return kept_bytes_ >= request ? kept_bytes_ : 0;
    }

  protected:
    PoolBlock* find_block(Bytes nbytes, std::int32_t stream) override {
        if (is_small(nbytes)) return CachingAllocator::find_block(nbytes, stream);
        const Bytes size = round_up(nbytes, chunk_bytes_);
        const auto kept = kept_.lower_bound(Key{size, stream});
        if (kept != kept_.end() && kept->second->size == size && kept->second->stream == stream) return take(kept);
        PoolBlock* block = combined(size, stream);
        if (block == nullptr) {
            CachingAllocator::release_cached();
            ++retries;
            block = combined(size, stream);
        }
        return block;
    }

    void return_block(PoolBlock* block) override {
        if (block->size < chunk_bytes_) {
            CachingAllocator::return_block(block);
        } else {
            keep(block);
        }
    }

  private:
    static constexpr Bytes kSmallShare = 2;

    bool is_small(Bytes nbytes) const { return nbytes <= chunk_bytes_ / kSmallShare; }

    void keep(PoolBlock* block) {
        kept_bytes_ += block->size;
        kept_.emplace(Key{block->size, block->stream, block->address}, block);
    }

    PoolBlock* take(FreeBlocks::iterator at) {
        PoolBlock* block = at->second;
        kept_bytes_ -= block->size;
        kept_.erase(at);
        return block;
    }

    // A block at new addresses, over kept chunks first, then new ones.
    PoolBlock* combined(Bytes size, std::int32_t stream) {
        const auto address = device_.reserve(size);
        if (!address) return nullptr;
        const Bytes kept = std::min(size, kept_bytes_), fresh = size - kept;
        if (fresh > 0 && !device_.map(*address, fresh)) {
            device_.unreserve(*address, size);
            return nullptr;
        }
        unmap(kept);
        if (kept > 0 && !device_.map(*address + fresh, kept)) {  // a driver may refuse what it just took back
            if (fresh > 0) device_.unmap(*address, fresh);
            device_.unreserve(*address, size);
            return nullptr;
        }
        log_exchange(SegmentAction::kMap, *address, size, stream);
        return blocks_.make(*address, size, stream);
    }

    // Unmap so much of the kept chunks, from the ends of the smallest blocks.
    void unmap(Bytes nbytes) {
        while (nbytes > 0) {
            PoolBlock* block = take(kept_.begin());
            const Bytes size = std::min(nbytes, block->size);
            block->size -= size;
            const Address start = block->address + block->size;
            device_.unmap(start, size);
            device_.unreserve(start, size);
            log_exchange(SegmentAction::kUnmap, start, size, block->stream);
            nbytes -= size;
            if (block->size > 0) {
                keep(block);
            } else {
                blocks_.drop(block);
            }
        }
    }

    Bytes chunk_bytes_;
    Bytes kept_bytes_ = 0;
    FreeBlocks kept_;
};

inline const Registered kChunked("chunked", [](Device& device, const Settings& settings) -> std::unique_ptr<Allocator> {
    return std::make_unique<ChunkedAllocator>(device, settings.bytes("chunk_bytes"));
});

}  // namespace overspill
