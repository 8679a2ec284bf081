// PyTorch's caching allocator: cached segments, best fit by stream, split and joined blocks; without graph capture and
// record_stream. Rules: c10/cuda/CUDACachingAllocator.cpp, pytorch 001074d2 and later; constants of
// c10/core/AllocatorConfig.h, torch 2.13. Each function names the one there that it follows.
// The oracle in Python: tests/placement/allocators/caching_oracle.py.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "allocator.hpp"
#include "expandable.hpp"
#include "settings.hpp"

namespace overspill {

constexpr Bytes kMinBlockBytes = 512;
constexpr Bytes kSmallBytes = Bytes{1} << 20;
constexpr Bytes kSmallSegmentBytes = Bytes{2} << 20;
constexpr Bytes kMinLargeSegmentBytes = Bytes{10} << 20;
constexpr Bytes kRoundLargeBytes = Bytes{2} << 20;
constexpr int kFirstDivisionInterval = 20;
constexpr int kDivisionIntervals = 16;

struct CachingConfig {
    std::optional<Bytes> max_split_bytes;
    Bytes max_non_split_rounding_bytes = Bytes{20} << 20;
    Bytes large_segment_bytes = Bytes{20} << 20;
    std::array<std::int64_t, kDivisionIntervals> roundup_power2_divisions{};
    double garbage_collection_threshold = 0;
    bool expandable_segments = false;
    double per_process_memory_fraction = 1;
    // Among free blocks of equal size the lowest address is taken, or the oldest, or as if later segments lay lower.
    enum class TieBreak { kAddress, kOldest, kFalling } tie_break = TieBreak::kAddress;
};

// Bytes of a block: to 512 bytes, or to a division of a power of 2 (round_size).
inline Bytes round_size(Bytes nbytes, const std::array<std::int64_t, kDivisionIntervals>& divisions) {
    if (nbytes < kMinBlockBytes) return kMinBlockBytes;
    const int floor = std::bit_width(static_cast<std::uint64_t>(nbytes)) - 1;
    const int interval = std::clamp(floor - kFirstDivisionInterval, 0, kDivisionIntervals - 1);
    const std::int64_t count = divisions[interval];
    if (count > 1 && nbytes > kMinBlockBytes * count) return round_up(nbytes, (Bytes{1} << floor) / count);
    return round_up(nbytes, kMinBlockBytes);
}

// Bytes of a new segment for a block of `size` (get_allocation_size).
inline Bytes segment_size(Bytes size, Bytes large_segment_bytes) {
    if (size <= kSmallBytes) return kSmallSegmentBytes;
    if (size < kMinLargeSegmentBytes) return large_segment_bytes;
    return round_up(size, kRoundLargeBytes);
}

class CachingAllocator : public Allocator, protected PoolOwner {
  public:
    CachingAllocator(Device& device, const CachingConfig& config)
        : Allocator(device),
          config_(config),
          small_(kSmallSegmentBytes, true),
          large_(config.large_segment_bytes, false) {
        // A limit exists only for a fraction below 1 (setMemoryFraction), and garbage is collected only with a limit.
        const auto capacity = device.capacity_bytes();
        if (capacity && config.per_process_memory_fraction < 1)
            limit_ = static_cast<Bytes>(config.per_process_memory_fraction * static_cast<double>(*capacity));
        collects_ = limit_ && config.garbage_collection_threshold > 0;
        if (config.expandable_segments) expandable_.emplace(static_cast<PoolOwner&>(*this), device, blocks_);
    }

    std::vector<PoolBlock*> idle_blocks() const override {
        std::vector<PoolBlock*> all;
        for (const Pool* pool : {&large_, &small_}) {
            for (const auto& entry : pool->free) all.push_back(entry.second);
            for (const auto& entry : pool->unmapped) all.push_back(entry.second);
        }
        return all;
    }

    // Release all segments without live blocks, the large ones first (release_cached_blocks).
    void release_cached() override {
        for (Pool* pool : {&large_, &small_}) {
            if (expandable_) {
                expandable_->release(*pool);
                continue;
            }
            for (PoolBlock* block : snapshot(pool->free))
                if (!block->split()) release(block);
        }
    }

    // Whether the cache could serve an allocation; nothing changes.
    bool finds(Bytes nbytes, std::int32_t stream) {
        const Bytes size = round_size(nbytes, config_.roundup_power2_divisions);
        Pool& pool = pool_for(size);
        return best(pool, size, stream) != pool.free.end();
    }

    // A block of a segment that is there before the first event.
    struct Piece {
        Address address;
        Bytes size, requested;
        bool free, mapped;
    };

    // Begin with a segment that holds `pieces` in the order of their addresses: its live blocks. An expandable one has
    // unmapped address space behind them.
    std::vector<PoolBlock*> adopt(Address base, std::int32_t stream, bool small, bool expandable,
                                  const std::vector<Piece>& pieces) {
        Pool& pool = small ? small_ : large_;
        std::vector<PoolBlock*> live;
        PoolBlock* before = nullptr;
        Address end = base;
        const auto add = [&](const Piece& piece) {
            PoolBlock* block = blocks_.make(piece.address, piece.size, stream);
            block->in_small = small;
            block->base = base;
            block->born = birth();
            block->requested = piece.requested;
            block->free = piece.free;
            block->mapped = piece.mapped;
            block->splice(before, nullptr);
            before = block;
            end = piece.address + piece.size;
            if (piece.mapped) reserved.add(piece.size, -1);
            if (!piece.free) {
                requested.add(piece.requested, -1);
                allocated.add(piece.size, -1);
                live.push_back(block);
            } else if (piece.mapped) {
                put(block);
            } else {
                pool.unmapped.emplace(Key{stream, piece.address}, block);
            }
        };
        for (const Piece& piece : pieces) add(piece);
        const Bytes left = expandable && expandable_ ? expandable_->reservation() - (end - base) : 0;
        if (left > 0) add({end, left, 0, true, false});
        return live;
    }

  protected:
    PoolBlock* find_block(Bytes nbytes, std::int32_t stream) override {
        const Bytes size = round_size(nbytes, config_.roundup_power2_divisions);
        Pool& pool = pool_for(size);
        PoolBlock* block = find_free(pool, size, stream);
        if (block == nullptr) block = new_block(pool, size, stream);
        return block == nullptr ? nullptr : cut_off(pool, block, size);
    }

    void return_block(PoolBlock* block) override {
        join(block, block->prev);
        join(block, block->next);
        put(block);
    }

    // The first `size` bytes of a block that was taken out; the rest of it is free, where it is split off.
    PoolBlock* cut_off(const Pool& pool, PoolBlock* block, Bytes size) {
        if (!splits(pool, block->size - size, size)) return block;
        PoolBlock* front = blocks_.cut(block, size);
        front->born = birth();
        put(block);
        return front;
    }

    Pool& pool_for(Bytes size) { return size <= kSmallBytes ? small_ : large_; }
    Pool& pool_of(const PoolBlock* block) override { return block->in_small ? small_ : large_; }
    std::int64_t birth() override { return ++births_; }

    Key key(const PoolBlock* block) const override {
        std::int64_t rank = 0;
        if (config_.tie_break == CachingConfig::TieBreak::kOldest) rank = block->born;
        if (config_.tie_break == CachingConfig::TieBreak::kFalling) rank = -block->base;
        return {block->stream, block->size, rank, block->address};
    }

    // Put `block` among the free ones of its pool (insert_into_blocks).
    void put(PoolBlock* block) override {
        Pool& pool = pool_of(block);
        block->indexed_at = pool.searches;
        pool.free.emplace(key(block), block);
    }

    // Merge a free neighbour of the same kind into `block` (try_merge_blocks).
    void join(PoolBlock* block, PoolBlock* other) override {
        if (other == nullptr || !other->free || other->mapped != block->mapped) return;
        Pool& pool = pool_of(other);
        if (other->mapped) {
            pool.free.erase(key(other));
        } else {
            pool.unmapped.erase(Key{other->stream, other->address});
        }
        blocks_.absorb(block, other);
    }

    void log_mapping(SegmentAction action, Address address, Bytes nbytes, std::int32_t stream) override {
        log_exchange(action, address, nbytes, stream);
    }

    // The best free block of the stream, or the end of the index (get_free_block).
    FreeBlocks::iterator best(Pool& pool, Bytes size, std::int32_t stream) {
        const auto none = pool.free.end();
        auto it = pool.free.lower_bound(Key{stream, size});
        if (it == none || it->second->stream != stream) return none;
        if (expandable_) it = expandable_->best_of(pool.free, it);
        // Large blocks are not split, and serve only requests of nearly their size.
        if (const auto most = config_.max_split_bytes) {
            const Bytes found = it->second->size;
            if (size < *most && found >= *most) return none;
            if (size >= *most && found >= size + config_.max_non_split_rounding_bytes) return none;
        }
        return it;
    }

    PoolBlock* find_free(Pool& pool, Bytes size, std::int32_t stream) {
        if (collects_) ++pool.searches;
        const auto it = best(pool, size, stream);
        if (it == pool.free.end()) return nullptr;
        PoolBlock* block = it->second;
        pool.free.erase(it);
        return block;
    }

    // A block of new memory; where the device has none, after releasing cached segments, in PyTorch's order.
    PoolBlock* new_block(Pool& pool, Bytes size, std::int32_t stream) {
        if (collects_) collect_garbage();
        PoolBlock* block = grow(pool, size, stream);
        if (block == nullptr && release_oversize(pool, size, stream)) block = grow(pool, size, stream);
        if (block == nullptr) {
            release_cached();
            ++retries;
            block = grow(pool, size, stream);
        }
        return block;
    }

  private:
    // A block of at least `size` bytes of new memory (alloc_block).
    PoolBlock* grow(Pool& pool, Bytes size, std::int32_t stream) {
        const Bytes nbytes = segment_size(size, config_.large_segment_bytes);
        if (limit_ && reserved.now + nbytes > *limit_) return nullptr;
        if (expandable_) return expandable_->grow(pool, size, stream);
        PoolBlock* block = segment_malloc(nbytes, stream);
        if (block != nullptr) {
            block->in_small = pool.small;
            block->born = birth();
            block->base = block->address;
        }
        return block;
    }

    // Whether the rest of a block is split off (should_split).
    bool splits(const Pool& pool, Bytes rest, Bytes size) const {
        if (pool.small || expandable_) return rest >= kMinBlockBytes;
        return rest > kSmallBytes && (!config_.max_split_bytes || size < *config_.max_split_bytes);
    }

    // Release blocks that are never split; whether they are enough (release_available_cached_blocks).
    bool release_oversize(Pool& pool, Bytes size, std::int32_t stream) {
        if (!config_.max_split_bytes || expandable_) return false;
        const Bytes most = *config_.max_split_bytes;
        const Bytes wanted = std::max(size, most);
        auto it = pool.free.lower_bound(Key{stream, wanted});
        if (it != pool.free.end() && it->second->stream == stream) {
            release(it->second);
            return true;
        }
        // No single block is enough: release several, the largest first.
        Bytes released = 0;
        while (it != pool.free.begin() && released < wanted) {
            --it;
            PoolBlock* block = it->second;
            if (block->stream != stream || block->size < most) break;
            released += block->size;
            it = std::next(it);  // release erases the one before
            release(block);
        }
        return released >= wanted;
    }

    // Release large segments of at least average age until the threshold is met (garbage_collect_cached_blocks).
    void collect_garbage() {
        const auto threshold = static_cast<Bytes>(config_.garbage_collection_threshold * static_cast<double>(*limit_));
        const Bytes target = reserved.now - threshold;
        if (target <= 0 || expandable_) return;
        std::vector<PoolBlock*> idle;
        std::int64_t age = 0;
        for (const auto& entry : large_.free) {
            if (entry.second->split()) continue;
            idle.push_back(entry.second);
            age += large_.searches - entry.second->indexed_at;
        }
        Bytes reclaimed = 0;
        bool any = true;
        while (target > reclaimed && any && !idle.empty()) {
            const double mean = static_cast<double>(age) / static_cast<double>(idle.size());
            any = false;
            std::vector<PoolBlock*> younger;
            for (PoolBlock* block : idle) {
                const std::int64_t block_age = large_.searches - block->indexed_at;
                if (static_cast<double>(block_age) < mean) {
                    younger.push_back(block);
                    continue;
                }
                any = true;
                reclaimed += block->size;
                age -= block_age;
                release(block);
            }
            idle.swap(younger);
        }
    }

    void release(PoolBlock* block) {
        pool_of(block).free.erase(key(block));
        segment_free(block);
    }

    CachingConfig config_;
    std::optional<Bytes> limit_;
    bool collects_ = false;
    std::int64_t births_ = 0;

  protected:
    Pool small_, large_;
    std::optional<ExpandableSegments> expandable_;
};

inline const Registered kCaching("pytorch", [](Device& device, const Settings& settings) -> std::unique_ptr<Allocator> {
    CachingConfig config;
    config.max_split_bytes = settings.maybe_bytes("max_split_bytes");
    config.max_non_split_rounding_bytes = settings.bytes("max_non_split_rounding_bytes");
    config.large_segment_bytes = settings.bytes("large_segment_bytes");
    const auto divisions = settings.integers("roundup_power2_divisions");
    std::copy_n(divisions.begin(), std::min(divisions.size(), config.roundup_power2_divisions.size()),
                config.roundup_power2_divisions.begin());
    config.garbage_collection_threshold = settings.number("garbage_collection_threshold");
    config.expandable_segments = settings.flag("expandable_segments");
    config.per_process_memory_fraction = settings.number("per_process_memory_fraction");
    const auto tie_break = settings.text("tie_break");
    if (tie_break == "oldest") config.tie_break = CachingConfig::TieBreak::kOldest;
    if (tie_break == "falling") config.tie_break = CachingConfig::TieBreak::kFalling;
    return std::make_unique<CachingAllocator>(device, config);
});

}  // namespace overspill
