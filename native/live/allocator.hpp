// The live allocator: planned requests get their places in an arena, all others memory of a pool; it can record a step.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#include "arena.hpp"
#include "pool.hpp"

namespace overspill::live {

enum class Recorded : std::int64_t { kAllocate = 0, kFree = 1, kStep = 2 };

// (what, number of the block, bytes, stream)
using Record = std::array<std::int64_t, 4>;
constexpr std::int64_t kUnknown = -1;  // as the number of a block: it was allocated before the recording

struct Statistics {
    std::int64_t requests = 0;    // of any bytes
    std::int64_t planned = 0;     // got their planned place
    std::int64_t occupied = 0;    // did not: another block was still there
    std::int64_t mismatches = 0;  // did not: they were not what was planned
    std::int64_t deferred = 0;    // frees that had to wait for events
    Bytes allocated = 0, peak_allocated = 0;
    Bytes reserved = 0, peak_reserved = 0;
    MainSpace main;
    Bytes spilled = 0, peak_spilled = 0;  // that found no room and lie elsewhere
    bool needs_reoptimisation = false;
};

// One mutex guards it all. The i-th request gets the i-th place, so requests have an order of all threads anyway; what
// is done under it takes some tens of nanoseconds when planned, and a thread that trains asks once a kernel launch.
class LiveAllocator {
  public:
    LiveAllocator(std::unique_ptr<LiveDevice> device, std::unique_ptr<MemoryPool> pool)
        : device_(std::move(device)), pool_(std::move(pool)) {}

    ~LiveAllocator() {
        for (const Pending& pending : pending_)
            for (const Event event : pending.events) device_->destroy(event);
        for (const auto& arena : retired_) device_->free(arena->base());
        if (arena_) device_->free(arena_->base());
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
        Address address = 0;
        if (!planned(nbytes, stream, address)) {
            const auto found = from_pool(nbytes, stream);
            if (!found) return std::nullopt;
            address = *found;
            pool_blocks_.emplace(address, PoolBlock{nbytes, stream.number});
        }
        statistics_.allocated += nbytes;
        statistics_.peak_allocated = std::max(statistics_.peak_allocated, statistics_.allocated);
        if (recording_ && interruptions_ == 0) record_allocation(address, nbytes, handle);
        return address;
    }

    // Whether a block was live there.
    bool free(Address address) {
        if (address == kNowhere) return true;
        const std::lock_guard lock(mutex_);
        Pending freed;
        freed.address = address;
        freed.arena = arena_at(address);
        if (freed.arena != nullptr) {
            freed.index = freed.arena->find(address);
            if (freed.index == Arena::kNobody) return false;
            statistics_.allocated -= freed.arena->free(freed.index);
            if (freed.arena->shared(freed.index)) {
                freed.wait_for(*device_, handle_of(freed.arena->stream(freed.index)));
            } else if (freed.arena == arena_.get() && used_on_.empty() && !recording_) {  // nothing else to see to
                arena_->complete(freed.index);
                return true;
            }
        } else {
            const auto found = pool_blocks_.find(address);
            if (found == pool_blocks_.end()) return false;
            statistics_.allocated -= found->second.nbytes;
            if (pool_->mixes_streams() && streams_.size() > 1)
                freed.wait_for(*device_, handle_of(found->second.stream));
            pool_blocks_.erase(found);
        }
        if (!used_on_.empty()) {
            const auto [begin, end] = used_on_.equal_range(address);
            for (auto it = begin; it != end; ++it) freed.wait_for(*device_, it->second);
            used_on_.erase(begin, end);
        }
        if (freed.events.empty()) {
            complete(freed);
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
        std::int32_t own = 0;
        if (Arena* arena = arena_at(address)) {
            const std::int32_t index = arena->find(address);
            if (index == Arena::kNobody) return false;
            own = arena->stream(index);
        } else {
            const auto found = pool_blocks_.find(address);
            if (found == pool_blocks_.end()) return false;
            own = found->second.stream;
        }
        if (handle_of(own) == handle) return true;
        const auto [begin, end] = used_on_.equal_range(address);
        if (std::none_of(begin, end, [handle](const auto& use) { return use.second == handle; }))
            used_on_.emplace(address, handle);
        return true;
    }

    // A new step begins: its first request is the first of the plan again.
    void begin_step() {
        const std::lock_guard lock(mutex_);
        if (!pending_.empty()) settle(false);
        if (arena_) arena_->begin_step();
        pool_->begin_step();
        if (recording_) log_.push_back({static_cast<std::int64_t>(Recorded::kStep), 0, 0, 0});
    }

    // A part of the program that may differ from step to step (section 4.3): its requests are neither recorded nor
    // planned. May be nested.
    void interrupt() {
        const std::lock_guard lock(mutex_);
        ++interruptions_;
    }

    void resume() {
        const std::lock_guard lock(mutex_);
        if (interruptions_ == 0) throw std::logic_error("resume without interrupt");
        --interruptions_;
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

    void start_recording() {
        const std::lock_guard lock(mutex_);
        recording_ = true;
        log_.clear();
        recorded_.clear();
        blocks_recorded_ = 0;
    }

    std::vector<Record> stop_recording() {
        const std::lock_guard lock(mutex_);
        recording_ = false;
        recorded_.clear();
        return std::exchange(log_, {});
    }

    // Take no more of the device than this from now on; what is over is given back as far as no block uses it.
    void limit(Bytes capacity_bytes) {
        const std::lock_guard lock(mutex_);
        device_->limit(capacity_bytes);
        if (device_->used_bytes() <= capacity_bytes) return;
        settle(true);
        pool_->trim();
    }

    // Whether blocks of an arena that was given up are still live.
    bool drains() const {
        const std::lock_guard lock(mutex_);
        return !retired_.empty();
    }

    // Whether there was memory for an arena of `nbytes`, in which requests are placed from the next step on. The i-th
    // place is for requests on the i-th stream. The arena before goes first, if none of its blocks is live.
    bool plan(Bytes nbytes, std::vector<Place> places, const std::vector<Stream>& streams) {
        const std::lock_guard lock(mutex_);
        for (std::size_t i = 0; i < places.size(); ++i) places[i].stream = numbered(streams[i]).number;
        retire_arena();
        settle(true);
        pool_->trim();
        const auto base = device_->malloc(nbytes);
        if (!base) return false;
        arena_ = std::make_unique<Arena>(*base, nbytes, std::move(places));
        statistics_.needs_reoptimisation = false;
        note_reserved();
        return true;
    }

    // Blocks of the arena stay until they are freed.
    void forget_plan() {
        const std::lock_guard lock(mutex_);
        retire_arena();
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
    struct PoolBlock {
        Bytes nbytes;
        std::int32_t stream;
    };

    // A freed block: of an arena with its number there, or of the pool.
    struct Pending {
        Address address = 0;
        Arena* arena = nullptr;
        std::int32_t index = Arena::kNobody;
        std::vector<Event> events;

        void wait_for(LiveDevice& device, Stream stream) { events.push_back(device.record(stream)); }
    };

    bool planned(Bytes nbytes, NumberedStream stream, Address& address) {
        if (!arena_ || interruptions_ != 0) return false;
        switch (arena_->take(nbytes, stream.number, address)) {
            case Answer::kPlanned:
                ++statistics_.planned;
                return true;
            case Answer::kOutside:
                return false;
            case Answer::kOccupied:
                ++statistics_.occupied;
                return false;
            case Answer::kMismatch:
                ++statistics_.mismatches;
                statistics_.needs_reoptimisation = true;
                return false;
        }
        return false;
    }

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
            complete(pending);
            return true;
        });
    }

    void complete(const Pending& freed) {
        if (recording_) record_free(freed.address);
        if (freed.arena == nullptr) {
            pool_->free(freed.address);
            return;
        }
        freed.arena->complete(freed.index);
        if (freed.arena != arena_.get() && freed.arena->live() == 0) release_retired();
    }

    void retire_arena() {
        if (!arena_) return;
        retired_.push_back(std::move(arena_));
        release_retired();
    }

    void release_retired() {
        std::erase_if(retired_, [this](const auto& arena) {
            if (arena->live() != 0) return false;
            device_->free(arena->base());
            return true;
        });
    }

    Arena* arena_at(Address address) {
        if (arena_ && arena_->owns(address)) return arena_.get();
        for (const auto& arena : retired_)
            if (arena->owns(address)) return arena.get();
        return nullptr;
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

    void record_allocation(Address address, Bytes nbytes, Stream stream) {
        recorded_[address] = blocks_recorded_;
        log_.push_back({static_cast<std::int64_t>(Recorded::kAllocate), blocks_recorded_++, nbytes, stream});
    }

    // Frees of blocks from before the recording count too: positions are the same in every step.
    void record_free(Address address) {
        const auto found = recorded_.find(address);
        if (found == recorded_.end()) {
            if (interruptions_ == 0) log_.push_back({static_cast<std::int64_t>(Recorded::kFree), kUnknown, 0, 0});
            return;
        }
        log_.push_back({static_cast<std::int64_t>(Recorded::kFree), found->second, 0, 0});
        recorded_.erase(found);
    }

    void note_reserved() {
        statistics_.reserved = device_->used_bytes();
        statistics_.peak_reserved = std::max(statistics_.peak_reserved, statistics_.reserved);
    }

    mutable std::mutex mutex_;
    std::unique_ptr<LiveDevice> device_;
    std::unique_ptr<MemoryPool> pool_;
    std::unique_ptr<Arena> arena_;
    std::vector<std::unique_ptr<Arena>> retired_;
    std::unordered_map<Address, PoolBlock> pool_blocks_;
    std::unordered_multimap<Address, Stream> used_on_;
    std::vector<Pending> pending_;
    std::vector<Stream> streams_;
    std::size_t last_stream_ = 0;
    int interruptions_ = 0;
    Mobility untold_ = Mobility::kMovable;
    bool spills_ = false;
    bool recording_ = false;
    std::vector<Record> log_;
    std::unordered_map<Address, std::int64_t> recorded_;
    std::int64_t blocks_recorded_ = 0;
    Statistics statistics_;
};

}  // namespace overspill::live
