// What an allocator is: addresses for blocks of bytes, over a device, with statistics and a segment log.
// In Python: src/overspill/placement/allocators/base.py.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "blocks.hpp"
#include "device.hpp"

namespace overspill {

constexpr Address kNowhere = 0;  // the address of a block of no bytes

enum class SegmentAction : std::int64_t { kAlloc = 0, kFree = 1, kMap = 2, kUnmap = 3 };

struct SegmentEvent {
    std::int64_t at;
    SegmentAction action;
    Address address;
    Bytes nbytes;
    std::int32_t stream;
};

// How long a block is expected to stay; in Python: overspill.core.Mobility.
enum class Mobility : std::int8_t { kMovable = 0, kTemporary = 1, kReclaimed = 2 };

// A number of bytes, its first maximum and the event of that.
struct Gauge {
    Bytes now = 0;
    Bytes peak = 0;
    std::int64_t peak_at = -1;

    void add(Bytes nbytes, std::int64_t at) {
        now += nbytes;
        if (now > peak) {
            peak = now;
            peak_at = at;
        }
    }
};

class Allocator {
  public:
    explicit Allocator(Device& device) : device_(device) {}
    virtual ~Allocator() = default;
    Allocator(const Allocator&) = delete;
    Allocator& operator=(const Allocator&) = delete;

    // A block of at least `nbytes` (more than none), or nullptr when there is no room.
    PoolBlock* allocate_block(Bytes nbytes, std::int32_t stream, Mobility mobility = Mobility::kMovable) {
        PoolBlock* block = nbytes <= kAddressSpaceBytes ? find_grouped_block(nbytes, stream, mobility) : nullptr;
        if (block == nullptr) return nullptr;
        block->free = false;
        block->requested = nbytes;
        requested.add(nbytes, clock);
        allocated.add(block->size, clock);
        return block;
    }

    void free_block(PoolBlock* block) {
        requested.add(-block->requested, clock);
        allocated.add(-block->size, clock);
        block->free = true;
        block->requested = 0;
        return_block(block);
    }

    virtual std::vector<PoolBlock*> idle_blocks() const = 0;

    // Give all memory without live blocks back to the device; most allocators never do.
    virtual void release_cached() {}

    // Let segments be chains of all their blocks, for who looks at them, and go on; and a live block's place there.
    virtual void settle() {}
    virtual void resume() {}
    virtual PoolBlock* in_chain(PoolBlock* block) const { return block; }

    // A step of the job ends here; and until what an allocator learns from steps is there.
    virtual void mark() {}
    virtual void wait() {}

    // The bytes of all segments up to the end of their last live blocks.
    virtual Bytes spread_bytes() const {
        Bytes spread = reserved.now;
        for (const PoolBlock* block : idle_blocks())
            if (block->mapped && block->last()) spread -= block->size;
        return spread;
    }

    // The bytes of the free blocks that hold a request, by their sizes alone.
    virtual Bytes usable_bytes(Bytes request) const {
        if (request <= 1) return reserved.now - allocated.now;
        Bytes usable = 0;
        for (const PoolBlock* block : idle_blocks())
            if (block->mapped && block->size >= request) usable += block->size;
        return usable;
    }

    std::int64_t clock = 0;
    Gauge requested, allocated, reserved;
    std::int64_t retries = 0;
    std::vector<SegmentEvent> segment_log;

  protected:
    virtual PoolBlock* find_block(Bytes nbytes, std::int32_t stream) = 0;

    // The same for allocators that group blocks by their mobility.
    virtual PoolBlock* find_grouped_block(Bytes nbytes, std::int32_t stream, Mobility) { return find_block(nbytes, stream); }

    virtual void return_block(PoolBlock* block) = 0;

    PoolBlock* segment_malloc(Bytes nbytes, std::int32_t stream) {
        const auto address = device_.malloc(nbytes);
        if (!address) return nullptr;
        log_exchange(SegmentAction::kAlloc, *address, nbytes, stream);
        return blocks_.make(*address, nbytes, stream);
    }

    void segment_free(PoolBlock* block) {
        device_.free(block->address);
        log_exchange(SegmentAction::kFree, block->address, block->size, block->stream);
        blocks_.drop(block);
    }

    void log_exchange(SegmentAction action, Address address, Bytes nbytes, std::int32_t stream) {
        const bool gained = action == SegmentAction::kAlloc || action == SegmentAction::kMap;
        reserved.add(gained ? nbytes : -nbytes, clock);
        segment_log.push_back({clock, action, address, nbytes, stream});
    }

    Device& device_;
    BlockStore blocks_;
};

}  // namespace overspill
