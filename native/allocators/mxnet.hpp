// MXNet's pools: cudaMalloc for every size, freed blocks kept for requests of the same rounded size.
// In Python: packages/overspill-papers/src/overspill_papers/placement/allocators/mxnet.py, which cites the rules.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

#include "allocator.hpp"
#include "settings.hpp"

namespace overspill {

struct MxnetConfig {
    bool rounds = false;
    Bytes page_bytes = 4096;
    Bytes large_round_bytes = Bytes{2} << 20;
    int linear_cutoff = 24;
    int reserve_percent = 5;
};

class MxnetAllocator final : public Allocator {
  public:
    MxnetAllocator(Device& device, const MxnetConfig& config) : Allocator(device), config_(config) {}

    std::vector<PoolBlock*> idle_blocks() const override { return snapshot(idle_); }

  protected:
    PoolBlock* find_block(Bytes nbytes, std::int32_t stream) override {
        const Bytes size = rounded(nbytes);
        const auto it = idle_.lower_bound(Key{size});
        if (it != idle_.end() && it->second->size == size) {
            PoolBlock* block = it->second;
            idle_.erase(it);
            return block;
        }
        if (scarce(size)) {
            release_all();
            ++retries;
        }
        return segment_malloc(size, stream);
    }

    // The latest of a size is taken first: its key is the lowest.
    void return_block(PoolBlock* block) override { idle_.emplace(Key{block->size, -++frees_}, block); }

  private:
    Bytes rounded(Bytes nbytes) const {
        const Bytes size = std::max(nbytes, config_.page_bytes);
        if (!config_.rounds) return size > config_.large_round_bytes ? round_up(size, config_.large_round_bytes) : size;
        const Bytes cutoff = Bytes{1} << config_.linear_cutoff;
        if (size > cutoff) return round_up(size, cutoff);
        return static_cast<Bytes>(std::bit_ceil(static_cast<std::uint64_t>(size)));
    }

    bool scarce(Bytes size) const {
        const auto total = device_.capacity_bytes();
        if (!total) return false;
        const Bytes spare = *total - device_.used_bytes();
        const Bytes reserve = *total / 100 * config_.reserve_percent + *total % 100 * config_.reserve_percent / 100;
        return spare <= reserve || size > spare - reserve;
    }

    void release_all() {
        for (const auto& entry : idle_) segment_free(entry.second);
        idle_.clear();
    }

    MxnetConfig config_;
    FreeBlocks idle_;
    std::int64_t frees_ = 0;
};

inline const Registered kMxnet("mxnet", [](Device& device, const Settings& settings) -> std::unique_ptr<Allocator> {
    return std::make_unique<MxnetAllocator>(
        device, MxnetConfig{settings.text("pool_type") == "round", settings.bytes("page_bytes"),
                            settings.bytes("large_round_bytes"), static_cast<int>(settings.bytes("linear_cutoff")),
                            static_cast<int>(settings.bytes("reserve_percent"))});
});

}  // namespace overspill
