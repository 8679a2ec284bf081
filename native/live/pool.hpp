// Where memory comes from that no plan places: the pool's contract, and best fit over cached segments.
#pragma once

#include <optional>
#include <unordered_map>

#include "../allocators/caching.hpp"
#include "device.hpp"
#include "groups.hpp"

namespace overspill::live {

// A stream by its handle, and by its number among those seen so far.
struct NumberedStream {
    std::int32_t number = 0;
    Stream handle = 0;
};

// `nbytes` that are taken as a whole, of which `least_gap` were never used in this step; `overflows` blocks that belonged
// there had no room.
struct MainSpace {
    Bytes nbytes = 0;
    Bytes least_gap = 0;
    std::int64_t overflows = 0;
};

// What a stream frees, it may be given again at once: its work runs in order. Another stream may not, see
// `mixes_streams`.
class MemoryPool {
  public:
    MemoryPool() = default;
    virtual ~MemoryPool() = default;
    MemoryPool(const MemoryPool&) = delete;
    MemoryPool& operator=(const MemoryPool&) = delete;

    // Nothing when there is no room.
    virtual std::optional<Address> allocate(Bytes nbytes, NumberedStream stream, Mobility mobility) = 0;
    virtual void free(Address address) = 0;

    // Give all memory without live blocks back to the device.
    virtual void trim() = 0;

    // Whether what one stream freed may go to another without further ado: its free has to wait for the stream then.
    virtual bool mixes_streams() const { return false; }

    // The space that the pool takes as a whole, if it takes one.
    virtual MainSpace main_space() const { return {}; }

    // From now on the gap is the least that it is from now on.
    virtual void begin_step() {}

    // Let the main space be of that size; whether it is, for it has to be empty. `grows`, in any case from now on: what
    // has no room there gets memory of its own.
    virtual bool resize(Bytes, bool) { return false; }
};

// The plain memory of a live device, for allocators that take segments of it.
class Segments final : public Device {
  public:
    explicit Segments(LiveDevice& device) : device_(device) {}
    std::optional<Address> malloc(Bytes nbytes) override { return device_.malloc(nbytes); }
    void free(Address address) override { device_.free(address); }
    std::optional<Address> reserve(Bytes) override { return std::nullopt; }
    void unreserve(Address, Bytes) override {}
    bool map(Address, Bytes) override { return false; }
    void unmap(Address, Bytes) override {}
    std::optional<Bytes> capacity_bytes() const override { return device_.capacity_bytes(); }
    Bytes used_bytes() const override { return device_.used_bytes(); }

  private:
    LiveDevice& device_;
};

// PyTorch's caching allocator over live memory.
class BestFitPool final : public MemoryPool {
  public:
    explicit BestFitPool(LiveDevice& device) : segments_(device), allocator_(segments_, CachingConfig{}) {}

    ~BestFitPool() override {
        for (const auto& entry : live_) allocator_.free_block(entry.second);
        allocator_.release_cached();
    }

    std::optional<Address> allocate(Bytes nbytes, NumberedStream stream, Mobility) override {
        PoolBlock* block = allocator_.allocate_block(nbytes, stream.number, Mobility::kMovable);
        if (block == nullptr) return std::nullopt;
        live_.emplace(block->address, block);
        return block->address;
    }

    void free(Address address) override { allocator_.free_block(live_.extract(address).mapped()); }

    void trim() override { allocator_.release_cached(); }

    bool owns(Address address) const { return live_.contains(address); }

  private:
    Segments segments_;
    CachingAllocator allocator_;
    std::unordered_map<Address, PoolBlock*> live_;
};

}  // namespace overspill::live
