// TensorFlow's best-fit allocator with coalescing (BFC): a few growing regions, loose splits, no streams.
// In Python: packages/overspill-papers/src/overspill_papers/placement/allocators/bfc.py, which cites the rules.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "allocator.hpp"
#include "settings.hpp"

namespace overspill {

struct BfcConfig {
    bool allow_growth = true;
    bool garbage_collection = true;
    double fragmentation_fraction = 0;
};

class BfcAllocator final : public Allocator {
  public:
    BfcAllocator(Device& device, const BfcConfig& config) : Allocator(device), config_(config) {
        const auto capacity = device.capacity_bytes();
        if (!capacity && !config.allow_growth)
            throw std::invalid_argument(
                "the tensorflow allocator without allow_growth takes the whole device: give its capacity");
        limit_ = capacity.value_or(kAddressSpaceBytes);
        next_region_ = round_up(config.allow_growth ? std::min(limit_, kFirstRegionBytes) : limit_, kStepBytes);
        most_waste_ = kMostWasteBytes;
        if (config.fragmentation_fraction > 0)  // never 0: no block of nothing is split off
            most_waste_ =
                std::max<Bytes>(1, static_cast<Bytes>(config.fragmentation_fraction * static_cast<double>(limit_)));
    }

    std::vector<PoolBlock*> idle_blocks() const override { return snapshot(idle_); }

  protected:
    PoolBlock* find_block(Bytes nbytes, std::int32_t stream) override {
        const Bytes size = round_up(nbytes, kStepBytes);
        PoolBlock* block = find_free(size);
        if (block == nullptr && extend(size, stream)) block = find_free(size);
        if (block == nullptr && release_idle_regions(size)) {
            ++retries;
            if (extend(size, stream)) block = find_free(size);
        }
        return block;
    }

    void return_block(PoolBlock* block) override {
        for (PoolBlock* other : {block->next, block->prev}) {
            if (other == nullptr || !other->free) continue;
            idle_.erase(Key{other->size, other->address});
            blocks_.absorb(block, other);
        }
        put(block);
    }

  private:
    static constexpr Bytes kStepBytes = 256;
    static constexpr Bytes kFirstRegionBytes = Bytes{2} << 20;
    static constexpr Bytes kMostWasteBytes = Bytes{128} << 20;
    static constexpr float kBackpedal = 0.9F;

    void put(PoolBlock* block) { idle_.emplace(Key{block->size, block->address}, block); }

    PoolBlock* find_free(Bytes size) {
        const auto it = idle_.lower_bound(Key{size});
        if (it == idle_.end()) return nullptr;
        PoolBlock* block = it->second;
        idle_.erase(it);
        if (block->size < 2 * size && block->size - size < most_waste_) return block;
        PoolBlock* front = blocks_.cut(block, size);
        put(block);
        return front;
    }

    bool extend(Bytes size, std::int32_t stream) {
        const Bytes available = (limit_ - reserved.now) / kStepBytes * kStepBytes;
        if (size > available) return false;
        const bool grown = size > next_region_;
        while (size > next_region_) next_region_ *= 2;
        Bytes nbytes = std::min(next_region_, available);
        PoolBlock* block = segment_malloc(nbytes, stream);
        while (block == nullptr) {
            const Bytes less = round_up(static_cast<Bytes>(static_cast<float>(nbytes) * kBackpedal), kStepBytes);
            nbytes = less < nbytes ? less : nbytes - kStepBytes;
            if (nbytes < size) return false;
            block = segment_malloc(nbytes, stream);
        }
        if (!grown) next_region_ *= 2;
        put(block);
        return true;
    }

    bool release_idle_regions(Bytes size) {
        if (!config_.garbage_collection) return false;
        std::vector<PoolBlock*> regions;
        Bytes idle = 0;
        for (const auto& entry : idle_) {
            if (entry.second->split()) continue;
            regions.push_back(entry.second);
            idle += entry.second->size;
        }
        if (idle == 0 || size > limit_ - reserved.now + idle) return false;
        std::sort(regions.begin(), regions.end(), [](PoolBlock* a, PoolBlock* b) { return a->address < b->address; });
        for (PoolBlock* block : regions) {
            idle_.erase(Key{block->size, block->address});
            segment_free(block);
        }
        return true;
    }

    BfcConfig config_;
    Bytes limit_ = 0;
    Bytes next_region_ = 0;
    Bytes most_waste_ = 0;
    FreeBlocks idle_;
};

inline const Registered kBfc("tensorflow", [](Device& device, const Settings& settings) -> std::unique_ptr<Allocator> {
    return std::make_unique<BfcAllocator>(device,
                                          BfcConfig{settings.flag("allow_growth"), settings.flag("garbage_collection"),
                                                    settings.number("fragmentation_fraction")});
});

}  // namespace overspill
