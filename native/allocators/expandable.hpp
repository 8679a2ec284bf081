// Expandable segments of PyTorch's caching allocator: address space reserved at once, memory mapped page by page.
//
//     segment   | live | free ......| unmapped ...................................|
//               ^base               ^always a whole number of pages from the base
//
// Rules: c10/cuda/CUDACachingAllocator.cpp (pytorch 001074d2), find_expandable_block, map_block, unmap_block.
// The oracle in Python: tests/placement/allocators/caching_oracle.py.
#pragma once

#include <algorithm>
#include <cstdint>

#include "allocator.hpp"

namespace overspill {

constexpr Bytes kUnlimitedReservationBytes = Bytes{1} << 46;

// The free blocks of one kind, small or large; and the address space yet without memory.
struct Pool {
    Pool(Bytes page_bytes_, bool small_) : page_bytes(page_bytes_), small(small_) {}

    Bytes page_bytes;
    bool small;
    FreeBlocks free;
    FreeBlocks unmapped;
    std::int64_t searches = 0;  // the clock by which garbage collection measures age
};

// What expandable segments need of the allocator whose pools they fill.
class PoolOwner {
  public:
    virtual Pool& pool_of(const PoolBlock* block) = 0;
    virtual Key key(const PoolBlock* block) const = 0;
    virtual std::int64_t birth() = 0;
    virtual void put(PoolBlock* block) = 0;
    virtual void join(PoolBlock* block, PoolBlock* other) = 0;
    virtual void log_mapping(SegmentAction action, Address address, Bytes nbytes, std::int32_t stream) = 0;

  protected:
    ~PoolOwner() = default;
};

class ExpandableSegments {
  public:
    ExpandableSegments(PoolOwner& owner, Device& device, BlockStore& blocks)
        : owner_(owner), device_(device), blocks_(blocks), reservation_(kUnlimitedReservationBytes) {
        // Nine eighths of the device's memory, so that unmapped pages can come back at the end of the segment.
        if (const auto total = device.capacity_bytes()) reservation_ = *total + *total / 8;
    }

    // Bytes of address space of one segment.
    Bytes reservation() const { return reservation_; }

    // The block at `it` or one behind it that leaves more of the segment's end to grow into.
    static FreeBlocks::iterator best_of(FreeBlocks& free, FreeBlocks::iterator it) {
        for (auto next = std::next(it); next != free.end(); ++next) {
            if (next->second->stream != it->second->stream || room(next->second) >= room(it->second)) break;
            it = next;
        }
        return it;
    }

    // A new segment, all of it without memory; in no index yet.
    PoolBlock* open(const Pool& pool, std::int32_t stream) {
        const Bytes reservation = round_up(reservation_, pool.page_bytes);
        const auto base = device_.reserve(reservation);
        if (!base) return nullptr;
        PoolBlock* block = make(pool, *base, reservation, stream, *base);
        block->mapped = false;
        return block;
    }

    PoolBlock* grow(Pool& pool, Bytes size, std::int32_t stream) {
        PoolBlock* block = candidate(pool, size, stream);
        if (block == nullptr || (!block->mapped && !map(block, std::min(block->size, size)))) return nullptr;
        while (block->size < size) {
            PoolBlock* following = block->next;
            if (!map(following, std::min(size - block->size, following->size))) return nullptr;
            block = following;
        }
        pool.free.erase(owner_.key(block));
        return block;
    }

    // Unmap all whole pages inside free blocks, and give up segments that are left without memory.
    void release(Pool& pool) {
        for (PoolBlock* block : snapshot(pool.free)) release(pool, block);
    }

    // The same, the largest blocks first, until it is enough.
    template <typename Enough>
    void release(Pool& pool, const Enough& enough) {
        const auto blocks = snapshot(pool.free);
        for (auto block = blocks.rbegin(); block != blocks.rend() && !enough(); ++block) release(pool, *block);
    }

  private:
    void release(Pool& pool, PoolBlock* block) {
        unmap(block);
        if (block->split()) return;
        pool.unmapped.erase(Key{block->stream, block->address});
        device_.unreserve(block->address, block->size);
        blocks_.drop(block);
    }

    static Bytes room(const PoolBlock* block) {
        const PoolBlock* following = block->next;
        return block->size + (following != nullptr && !following->mapped ? following->size : 0);
    }

    static Bytes space(const PoolBlock* block, Bytes enough) {
        Bytes nbytes = 0;
        for (; block != nullptr && block->free && nbytes < enough; block = block->next) nbytes += block->size;
        return nbytes;
    }

    // The block at the lowest address from which `size` bytes of free or unmapped space follow.
    PoolBlock* candidate(Pool& pool, Bytes size, std::int32_t stream) {
        for (auto it = pool.unmapped.lower_bound(Key{stream}); it != pool.unmapped.end(); ++it) {
            PoolBlock* block = it->second;
            if (block->stream != stream) break;
            if (block->prev != nullptr && block->prev->free) block = block->prev;
            if (space(block, size) >= size) return block;
        }
        PoolBlock* block = size <= round_up(reservation_, pool.page_bytes) ? open(pool, stream) : nullptr;
        if (block != nullptr) pool.unmapped.emplace(Key{stream, block->address}, block);
        return block;
    }

    bool map(PoolBlock* block, Bytes size) {
        Pool& pool = owner_.pool_of(block);
        const Address address = block->address;
        const Bytes nbytes = round_up(size, pool.page_bytes);
        if (!device_.map(address, nbytes)) return false;
        pool.unmapped.erase(Key{block->stream, address});
        if (nbytes < block->size) {
            PoolBlock* rest = make(pool, address + nbytes, block->size - nbytes, block->stream, block->base);
            rest->mapped = false;
            rest->splice(block, block->next);
            pool.unmapped.emplace(Key{rest->stream, rest->address}, rest);
            block->size = nbytes;
        }
        block->mapped = true;
        owner_.join(block, block->prev);
        owner_.join(block, block->next);
        owner_.put(block);
        owner_.log_mapping(SegmentAction::kMap, address, nbytes, block->stream);
        return true;
    }

    // Take the memory of all whole pages inside a free block; what is left of it at either side stays free.
    void unmap(PoolBlock* block) {
        Pool& pool = owner_.pool_of(block);
        const Address end = block->address + block->size;
        const Address first = block->base + round_up(block->address - block->base, pool.page_bytes);
        const Address last = end - (end - block->base) % pool.page_bytes;
        if (first >= last) return;
        pool.free.erase(owner_.key(block));
        if (first > block->address) leave_free(pool, block, block->address, first, block->prev, block);
        if (last < end) leave_free(pool, block, last, end, block, block->next);
        block->address = first;
        block->size = last - first;
        block->mapped = false;
        owner_.join(block, block->prev);
        owner_.join(block, block->next);
        pool.unmapped.emplace(Key{block->stream, block->address}, block);
        device_.unmap(first, last - first);
        owner_.log_mapping(SegmentAction::kUnmap, first, last - first, block->stream);
    }

    void leave_free(Pool& pool, PoolBlock* block, Address start, Address end, PoolBlock* before, PoolBlock* after) {
        PoolBlock* part = make(pool, start, end - start, block->stream, block->base);
        part->splice(before, after);
        owner_.put(part);
    }

    PoolBlock* make(const Pool& pool, Address address, Bytes size, std::int32_t stream, Address base) {
        PoolBlock* block = blocks_.make(address, size, stream);
        block->in_small = pool.small;
        block->base = base;
        block->born = owner_.birth();
        return block;
    }

    PoolOwner& owner_;
    Device& device_;
    BlockStore& blocks_;
    Bytes reservation_;
};

}  // namespace overspill
