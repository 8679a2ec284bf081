// PyTorch's caching allocator: cached segments, best fit by stream, split and joined blocks.
// In Python: src/overspill/placement/allocators/caching.py, which cites the rules.
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

inline Bytes round_size(Bytes nbytes, const std::array<std::int64_t, kDivisionIntervals>& divisions) {
    if (nbytes < kMinBlockBytes) return kMinBlockBytes;
    const int floor = std::bit_width(static_cast<std::uint64_t>(nbytes)) - 1;
    const int interval = std::clamp(floor - kFirstDivisionInterval, 0, kDivisionIntervals - 1);
    const std::int64_t count = divisions[interval];
    if (count > 1 && nbytes > kMinBlockBytes * count) return round_up(nbytes, (Bytes{1} << floor) / count);
    return round_up(nbytes, kMinBlockBytes);
}

inline Bytes segment_size(Bytes size, Bytes large_segment_bytes) {
    if (size <= kSmallBytes) return kSmallSegmentBytes;
    if (size < kMinLargeSegmentBytes) return large_segment_bytes;
    return round_up(size, kRoundLargeBytes);
}

class CachingAllocator : public Allocator, private PoolOwner {
  public:
    CachingAllocator(Device& device, const CachingConfig& config)
        : Allocator(device),
          config_(config),
          small_(kSmallSegmentBytes, true),
          large_(config.large_segment_bytes, false) {
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

  protected:
    PoolBlock* find_block(Bytes nbytes, std::int32_t stream) override {
        const Bytes size = round_size(nbytes, config_.roundup_power2_divisions);
        Pool& pool = size <= kSmallBytes ? small_ : large_;
        PoolBlock* block = find_free(pool, size, stream);
        if (block == nullptr) block = new_block(pool, size, stream);
        if (block != nullptr && splits(pool, block->size - size, size)) {
            PoolBlock* front = blocks_.cut(block, size);
            front->born = birth();
            put(block);
            return front;
        }
        return block;
    }

    void return_block(PoolBlock* block) override {
        join(block, block->prev);
        join(block, block->next);
        put(block);
    }

  private:
    Pool& pool_of(const PoolBlock* block) override { return block->in_small ? small_ : large_; }
    std::int64_t birth() override { return ++births_; }

    Key key(const PoolBlock* block) const override {
        std::int64_t rank = 0;
        if (config_.tie_break == CachingConfig::TieBreak::kOldest) rank = block->born;
        if (config_.tie_break == CachingConfig::TieBreak::kFalling) rank = -block->base;
        return {block->stream, block->size, rank, block->address};
    }

    void put(PoolBlock* block) override {
        Pool& pool = pool_of(block);
        block->indexed_at = pool.searches;
        pool.free.emplace(key(block), block);
    }

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

    PoolBlock* find_free(Pool& pool, Bytes size, std::int32_t stream) {
        if (collects_) ++pool.searches;
        auto it = pool.free.lower_bound(Key{stream, size});
        if (it == pool.free.end() || it->second->stream != stream) return nullptr;
        if (expandable_) it = expandable_->best_of(pool.free, it);
        PoolBlock* block = it->second;
        if (const auto most = config_.max_split_bytes) {
            if (size < *most && block->size >= *most) return nullptr;
            if (size >= *most && block->size >= size + config_.max_non_split_rounding_bytes) return nullptr;
        }
        pool.free.erase(it);
        return block;
    }

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

    bool splits(const Pool& pool, Bytes rest, Bytes size) const {
        if (pool.small || expandable_) return rest >= kMinBlockBytes;
        return rest > kSmallBytes && (!config_.max_split_bytes || size < *config_.max_split_bytes);
    }

    bool release_oversize(Pool& pool, Bytes size, std::int32_t stream) {
        if (!config_.max_split_bytes || expandable_) return false;
        const Bytes most = *config_.max_split_bytes;
        const Bytes wanted = std::max(size, most);
        auto it = pool.free.lower_bound(Key{stream, wanted});
        if (it != pool.free.end() && it->second->stream == stream) {
            release(it->second);
            return true;
        }
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
    Pool small_, large_;
    std::optional<Bytes> limit_;
    bool collects_ = false;
    std::int64_t births_ = 0;
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
