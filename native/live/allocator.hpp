// The live allocator: memory of a pool, which is given out again when all streams that used it have done their work.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pool.hpp"

namespace overspill::live {

struct Statistics {
    std::int64_t requests = 0;  // of any bytes
    std::int64_t deferred = 0;  // frees that had to wait for events
    Bytes allocated = 0, peak_allocated = 0;
    Bytes reserved = 0, peak_reserved = 0;
    MainSpace main;
    Bytes spilled = 0, peak_spilled = 0;  // that found no room and lie elsewhere
};

// One mutex guards it all: a thread that trains asks once a kernel launch.
class LiveAllocator {
  public:
    LiveAllocator(std::unique_ptr<LiveDevice> device, std::unique_ptr<MemoryPool> pool)
        : device_(std::move(device)), pool_(std::move(pool)) {}

    ~LiveAllocator() {
        for (const Pending& pending : pending_)
            for (const Event event : pending.events) device_->destroy(event);
    }

    LiveAllocator(const LiveAllocator&) = delete;
    LiveAllocator& operator=(const LiveAllocator&) = delete;

    // Nothing when there is no room, after all was given back that could be.
    std::optional<Address> allocate(Bytes nbytes, Stream handle) {
        if (nbytes <= 0) return kNowhere;
        if (nbytes > kAddressSpaceBytes) return std::nullopt;
        const std::lock_guard lock(mutex_);
        if (!pending_.empty()) settle(false);
        const NumberedStream stream = numbered(handle);
        ++statistics_.requests;
        const auto address = from_pool(nbytes, stream);
        if (!address) return std::nullopt;
        blocks_.emplace(*address, Block{nbytes, stream.number});
        statistics_.allocated += nbytes;
        statistics_.peak_allocated = std::max(statistics_.peak_allocated, statistics_.allocated);
        return address;
    }

    // Whether a block was live there.
    bool free(Address address) {
        if (address == kNowhere) return true;
        const std::lock_guard lock(mutex_);
        const auto found = blocks_.find(address);
        if (found == blocks_.end()) return false;
        Pending freed{address, {}};
        statistics_.allocated -= found->second.nbytes;
        if (pool_->mixes_streams() && streams_.size() > 1) freed.wait_for(*device_, handle_of(found->second.stream));
        blocks_.erase(found);
        if (!used_on_.empty()) {
            const auto [begin, end] = used_on_.equal_range(address);
            for (auto it = begin; it != end; ++it) freed.wait_for(*device_, it->second);
            used_on_.erase(begin, end);
        }
        if (freed.events.empty()) {
            pool_->free(address);
        } else {
            ++statistics_.deferred;
            pending_.push_back(std::move(freed));
        }
        return true;
    }

    // The block at `address` is used by this stream too: once freed, it is given out again when the work is done that
    // the stream had been given by then. Whether a block is live there.
    bool use(Address address, Stream handle) {
        const std::lock_guard lock(mutex_);
        const auto found = blocks_.find(address);
        if (found == blocks_.end()) return false;
        if (handle_of(found->second.stream) == handle) return true;
        const auto [begin, end] = used_on_.equal_range(address);
        if (std::none_of(begin, end, [handle](const auto& use) { return use.second == handle; }))
            used_on_.emplace(address, handle);
        return true;
    }

    void begin_step() {
        const std::lock_guard lock(mutex_);
        if (!pending_.empty()) settle(false);
        pool_->begin_step();
    }

    // How blocks are grouped that a thread asks for which has not said it.
    void group_untold(Mobility mobility) {
        const std::lock_guard lock(mutex_);
        untold_ = mobility;
    }

    // Whether what finds no room may lie elsewhere; what no plan has may in any case, for it may come where an op that is
    // stopped half-way cannot be done again.
    void let_spill(bool spills) {
        const std::lock_guard lock(mutex_);
        spills_ = spills;
    }

    // Whether these bytes, which found no room, may lie elsewhere; they count until they are taken back.
    bool spill(Bytes nbytes) {
        const std::lock_guard lock(mutex_);
        const bool is_planned = !groups_of_thread || groups_of_thread->of(nbytes) != kUnplanned;
        if (!spills_ && is_planned) return false;
        statistics_.spilled += nbytes;
        statistics_.peak_spilled = std::max(statistics_.peak_spilled, statistics_.spilled);
        return true;
    }

    void take_back(Bytes nbytes) {
        const std::lock_guard lock(mutex_);
        statistics_.spilled -= nbytes;
    }

    // Let the pool's main space be of that size, if all that was freed is out of use and no block lies there.
    bool resize(Bytes main_bytes, bool grows) {
        const std::lock_guard lock(mutex_);
        settle(true);
        return pool_->resize(main_bytes, grows);
    }

    // Take no more of the device than this from now on; what is over is given back as far as no block uses it.
    void limit(Bytes capacity_bytes) {
        const std::lock_guard lock(mutex_);
        device_->limit(capacity_bytes);
        if (device_->used_bytes() <= capacity_bytes) return;
        settle(true);
        pool_->trim();
    }

    // Wait for the events of freed blocks, and give the memory that no block uses back to the device.
    void trim() {
        const std::lock_guard lock(mutex_);
        settle(true);
        pool_->trim();
    }

    Statistics statistics() {
        const std::lock_guard lock(mutex_);
        note_reserved();
        statistics_.main = pool_->main_space();
        return statistics_;
    }

    template <typename Function>
    auto with_device(Function function) {
        const std::lock_guard lock(mutex_);
        return function(*device_);
    }

  private:
    struct Block {
        Bytes nbytes;
        std::int32_t stream;
    };

    // A freed block, and what must have passed before its place is given out again.
    struct Pending {
        Address address = 0;
        std::vector<Event> events;

        void wait_for(LiveDevice& device, Stream stream) { events.push_back(device.record(stream)); }
    };

    std::optional<Address> from_pool(Bytes nbytes, NumberedStream stream) {
        const Mobility mobility = groups_of_thread ? groups_of_thread->of(nbytes) : untold_;
        auto address = pool_->allocate(nbytes, stream, mobility);
        if (!address && !pending_.empty()) {
            settle(true);
            address = pool_->allocate(nbytes, stream, mobility);
        }
        if (!address) {
            pool_->trim();
            address = pool_->allocate(nbytes, stream, mobility);
        }
        note_reserved();
        return address;
    }

    // Complete the frees whose events have passed; `wait` for those that have not.
    void settle(bool wait) {
        std::erase_if(pending_, [&](Pending& pending) {
            while (!pending.events.empty()) {
                const Event event = pending.events.back();
                if (wait) device_->wait(event);
                if (!device_->passed(event)) return false;
                device_->destroy(event);
                pending.events.pop_back();
            }
            pool_->free(pending.address);
            return true;
        });
    }

    NumberedStream numbered(Stream handle) {
        if (!streams_.empty() && streams_[last_stream_] == handle)
            return {static_cast<std::int32_t>(last_stream_), handle};
        const auto found = std::find(streams_.begin(), streams_.end(), handle);
        last_stream_ = static_cast<std::size_t>(found - streams_.begin());
        if (found == streams_.end()) {
            if (pool_->mixes_streams()) finish_streams();
            streams_.push_back(handle);
        }
        return {static_cast<std::int32_t>(last_stream_), handle};
    }

    Stream handle_of(std::int32_t number) const { return streams_[static_cast<std::size_t>(number)]; }

    // As long as there was one stream, its frees needed no events, but what it freed may now go to another.
    void finish_streams() {
        for (const Stream handle : streams_) {
            const Event event = device_->record(handle);
            device_->wait(event);
            device_->destroy(event);
        }
    }

    void note_reserved() {
        statistics_.reserved = device_->used_bytes();
        statistics_.peak_reserved = std::max(statistics_.peak_reserved, statistics_.reserved);
    }

    mutable std::mutex mutex_;
    std::unique_ptr<LiveDevice> device_;
    std::unique_ptr<MemoryPool> pool_;
    std::unordered_map<Address, Block> blocks_;
    std::unordered_multimap<Address, Stream> used_on_;
    std::vector<Pending> pending_;
    std::vector<Stream> streams_;
    std::size_t last_stream_ = 0;
    Mobility untold_ = Mobility::kMovable;
    bool spills_ = false;
    Statistics statistics_;
};

}  // namespace overspill::live
