// A block: a piece of a segment that an allocator gives out or keeps for later; and an index of the free ones.
// In Python: src/overspill/placement/allocators/blocks.py.
#pragma once

#include <compare>
#include <cstdint>
#include <deque>
#include <iterator>
#include <limits>
#include <map>
#include <vector>

#include "device.hpp"

namespace overspill {

struct PoolBlock {
    Address address = 0;
    Bytes size = 0;
    std::int32_t stream = 0;
    bool free = true;
    bool mapped = true;     // false: address space without memory behind it
    bool in_small = false;  // which pool of the caching allocator the block belongs to
    std::int8_t region = 0;  // which part of a pool with two ends
    Bytes requested = 0;
    PoolBlock* prev = nullptr;
    PoolBlock* next = nullptr;
    std::int64_t born = 0;        // numbers blocks by their creation
    std::int64_t indexed_at = 0;  // the age counter when the block became free
    Address base = 0;             // where its segment starts
    // Of allocators that plan: the number of its request and its bytes, and a planned block's place in the heap or the
    // other way round.
    std::int64_t request = 0;
    Bytes counted = 0;
    PoolBlock* twin = nullptr;
    bool planned = false;

    bool split() const { return prev != nullptr || next != nullptr; }

    // Whether no live block lies behind it in its segment.
    bool last() const {
        const PoolBlock* following = next;
        while (following != nullptr && following->free) following = following->next;
        return following == nullptr;
    }

    // Put this block between its neighbours.
    void splice(PoolBlock* before, PoolBlock* after) {
        prev = before;
        next = after;
        if (before != nullptr) before->next = this;
        if (after != nullptr) after->prev = this;
    }
};

// Owns all blocks of an allocator and gives the unused ones out again.
class BlockStore {
  public:
    PoolBlock* make(Address address, Bytes size, std::int32_t stream) {
        PoolBlock* block;
        if (unused_.empty()) {
            block = &blocks_.emplace_back();
        } else {
            block = unused_.back();
            unused_.pop_back();
            *block = PoolBlock{};
        }
        block->address = address;
        block->size = size;
        block->stream = stream;
        return block;
    }

    void drop(PoolBlock* block) { unused_.push_back(block); }

    // A new block of the first `size` bytes of `block`, which keeps the rest.
    PoolBlock* cut(PoolBlock* block, Bytes size) {
        PoolBlock* front = make(block->address, size, block->stream);
        front->mapped = block->mapped;
        front->in_small = block->in_small;
        front->base = block->base;
        front->splice(block->prev, block);
        block->address += size;
        block->size -= size;
        return front;
    }

    // Let `block` take over its neighbour `other`, which is gone then.
    void absorb(PoolBlock* block, PoolBlock* other) {
        if (block->prev == other) {
            block->address = other->address;
            block->prev = other->prev;
            if (block->prev != nullptr) block->prev->next = block;
        } else {
            block->next = other->next;
            if (block->next != nullptr) block->next->prev = block;
        }
        block->size += other->size;
        drop(other);
    }

  private:
    std::deque<PoolBlock> blocks_;
    std::vector<PoolBlock*> unused_;
};

// Orders free blocks. A search key leaves its last parts at the lowest value, as a shorter tuple does in Python.
struct Key {
    static constexpr std::int64_t kLowest = std::numeric_limits<std::int64_t>::min();

    std::int64_t first = kLowest;
    std::int64_t second = kLowest;
    std::int64_t third = kLowest;
    std::int64_t fourth = kLowest;

    friend auto operator<=>(const Key&, const Key&) = default;
};

using FreeBlocks = std::map<Key, PoolBlock*>;

// The blocks of an index at this moment, in order: for loops that change it.
inline std::vector<PoolBlock*> snapshot(const FreeBlocks& index) {
    std::vector<PoolBlock*> blocks;
    blocks.reserve(index.size());
    for (const auto& entry : index) blocks.push_back(entry.second);
    return blocks;
}

}  // namespace overspill
