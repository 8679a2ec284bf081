// One GPU's allocator for PyTorch: streams and their events, CUDA graphs, out of memory, statistics, and a checker.
//
// While a graph is captured nobody may wait for the GPU, so no memory is unmapped: the allocator is not asked. Requests of
// the capture come from the graph's pool, any others from a pool beside it, and what is freed waits for the end.
#pragma once

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../allocators/chunked.hpp"
#include "../allocators/planned.hpp"
#include "../allocators/two_ended.hpp"
#include "gpu_device.hpp"

namespace overspill::live {

struct OutOfMemoryError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Looks at every block without what the allocator thinks of it: no byte twice, and none without memory.
class Checker {
  public:
    void took(const GpuDevice& device, Address address, Bytes nbytes) {
        const auto next = live_.lower_bound(address);
        require(next == live_.end() || address + nbytes <= next->first, "overlaps the block above it", address);
        require(next == live_.begin() || std::prev(next)->second <= address, "overlaps the block below it", address);
        require(device.is_mapped(address, nbytes), "has no memory", address);
        live_.emplace(address, address + nbytes);
    }
    void gave(Address address) { require(live_.erase(address) == 1, "was freed and is not there", address); }

  private:
    static void require(bool holds, const char* what, Address address) {
        if (holds) return;
        std::fprintf(stderr, "overspill: the block at %#llx %s\n", static_cast<unsigned long long>(address), what);
        std::abort();
    }

    std::map<Address, Address> live_;
};

using PoolId = std::pair<std::uint64_t, std::uint64_t>;
using InCapture = std::function<bool(Stream)>;  // whether a stream is one of those that are captured

// The memory of graphs. They write to blocks that were freed long ago, so nothing is given back before the last is gone.
class GraphPool final : public CachingAllocator {
  public:
    using CachingAllocator::CachingAllocator;
    void release_cached() override {}
    void close() { CachingAllocator::release_cached(); }

    std::int64_t graphs = 0;
};

class Service {
  public:
    // The allocator `name`; where the driver has no virtual memory, one that caches by PyTorch's rules.
    Service(const Driver& driver, int ordinal, const std::string& name, bool checks)
        : driver_(driver), device_(driver, ordinal), ordinal_(ordinal), allocator_(made(name)) {
        planned_ = dynamic_cast<PlannedAllocator*>(allocator_.get());
        if (checks) checker_ = std::make_unique<Checker>();
    }

    void* take(Bytes nbytes, Stream stream) {
        if (nbytes <= 0) return nullptr;
        const std::lock_guard lock(mutex_);
        finish_frees();
        const std::int32_t number = number_of(stream);
        Allocator& from = source_of(stream);
        PoolBlock* block = from.allocate_block(nbytes, number);
        while (block == nullptr && captures_.empty() && !waiting_.empty()) {  // memory that other streams were about to give back
            {
                const InContext here(driver_, device_.context());
                driver_.check(driver_.synchronize(), "cuCtxSynchronize");
            }
            finish_frees();
            block = from.allocate_block(nbytes, number);
        }
        device_.trim();
        if (block == nullptr) {
            ++out_of_memory_;
            throw OutOfMemoryError(told(nbytes));
        }
        ++from.clock;
        from.segment_log.clear();
        live_.emplace(block->address, Live{block, &from, {}});
        ++taken_;
        note_peaks();
        if (checker_) checker_->took(device_, block->address, nbytes);
        return reinterpret_cast<void*>(block->address);
    }

    // Whether there was such a block.
    bool give(void* pointer) {
        if (pointer == nullptr) return true;
        const std::lock_guard lock(mutex_);
        const auto found = live_.find(reinterpret_cast<Address>(pointer));
        if (found == live_.end()) return false;
        if (checker_) checker_->gave(found->first);
        Live live = std::move(found->second);
        live_.erase(found);
        ++given_;
        if (!captures_.empty() && (live.from == allocator_.get() || !live.users.empty()))
            postponed_.push_back(std::move(live));
        else
            free(live);
        device_.trim();
        return true;
    }

    // A stream other than the block's own has work with it.
    void uses(void* pointer, Stream stream) {
        const std::lock_guard lock(mutex_);
        const auto found = live_.find(reinterpret_cast<Address>(pointer));
        if (found == live_.end() || number_of(stream) == found->second.block->stream) return;
        auto& users = found->second.users;
        if (std::find(users.begin(), users.end(), stream) == users.end()) users.push_back(stream);
    }

    void* base_of(void* pointer, std::size_t* nbytes) {
        const std::lock_guard lock(mutex_);
        const auto found = live_.find(reinterpret_cast<Address>(pointer));
        if (found == live_.end()) return nullptr;
        if (nbytes != nullptr) *nbytes = static_cast<std::size_t>(found->second.block->size);
        return pointer;
    }

    // From here on the requests of a capture go to the pool `id`, which other graphs may have too.
    void begin_capture(PoolId id, InCapture in_capture) {
        const std::lock_guard lock(mutex_);
        for (const auto& capture : captures_)
            if (capture.first == id) throw std::runtime_error("two graphs that share a pool are captured at once");
        auto& pool = pools_[id];
        if (pool == nullptr) pool = std::make_unique<GraphPool>(device_, pool_config());
        ++pool->graphs;
        captures_.emplace_back(id, std::move(in_capture));
    }

    void end_capture(PoolId id) {
        const std::lock_guard lock(mutex_);
        std::erase_if(captures_, [&](const auto& capture) { return capture.first == id; });
        if (!captures_.empty()) return;
        for (Live& live : std::exchange(postponed_, {})) free(live);
        if (beside_ != nullptr) closed_.push_back(std::move(beside_));
        drop_closed();
    }

    // A graph of the pool is gone.
    void release_pool(PoolId id) {
        const std::lock_guard lock(mutex_);
        const auto found = pools_.find(id);
        if (found == pools_.end() || --found->second->graphs > 0) return;
        closed_.push_back(std::move(found->second));
        pools_.erase(found);
        drop_closed();
    }

    void end_step() {
        const std::lock_guard lock(mutex_);
        allocator_->mark();
    }

    void empty_cache() {
        const std::lock_guard lock(mutex_);
        if (!captures_.empty()) return;
        if (!waiting_.empty()) {
            const InContext here(driver_, device_.context());
            driver_.check(driver_.synchronize(), "cuCtxSynchronize");
        }
        finish_frees();
        allocator_->release_cached();
        allocator_->segment_log.clear();
        device_.trim();
    }

    void set_fraction(double fraction) {
        const std::lock_guard lock(mutex_);
        device_.limit(static_cast<Bytes>(fraction * static_cast<double>(device_.total_bytes())));
    }

    void wait_for_plans() { allocator_->wait(); }

    // In the order of `AllocatorFigures` in overspill/runtime/allocator.py.
    static constexpr int kFigures = 21;
    void figures(std::int64_t* into) {
        const std::lock_guard lock(mutex_);
        const auto now = bytes_now();
        const std::array<std::int64_t, 14> found{
            now[0],
            std::max(allocator_->requested.peak, peaks_[0]),
            now[1],
            std::max(allocator_->allocated.peak, peaks_[1]),
            now[2],
            std::max(allocator_->reserved.peak, peaks_[2]),
            static_cast<std::int64_t>(live_.size()),
            taken_,
            given_,
            static_cast<std::int64_t>(waiting_.size() + postponed_.size()),
            allocator_->retries,
            out_of_memory_,
            planned_ == nullptr ? 0 : planned_->region_bytes(),
            device_.is_virtual(),
        };
        const auto counts = (planned_ == nullptr ? PlannedCounts{} : planned_->counts()).values();
        std::copy(counts.begin(), counts.end(), std::copy(found.begin(), found.end(), into));
    }

    void reset_peaks() {
        const std::lock_guard lock(mutex_);
        for (Gauge* gauge : {&allocator_->requested, &allocator_->allocated, &allocator_->reserved}) gauge->peak = gauge->now;
        peaks_ = bytes_now();
    }

  private:
    std::unique_ptr<Allocator> made(const std::string& name) {
        if (!device_.is_virtual()) return std::make_unique<CachingAllocator>(device_, CachingConfig{});
        if (name == "chunked") return std::make_unique<ChunkedAllocator>(device_, kPageBytes);
        if (name == "gtbm") return std::make_unique<TwoEndedAllocator>(device_, TwoEndedConfig{std::nullopt, true, true});
        return std::make_unique<PlannedAllocator>(device_, true, true);
    }

    struct Live {
        PoolBlock* block;
        Allocator* from;
        std::vector<Stream> users;
    };
    struct Waiting {
        Live live;
        std::vector<Event> events;
    };

    CachingConfig pool_config() const {
        CachingConfig config;
        config.expandable_segments = device_.is_virtual();
        if (config.expandable_segments) config.large_segment_bytes = kPageBytes;
        return config;
    }

    Allocator& source_of(Stream stream) {
        if (captures_.empty()) return *allocator_;
        for (const auto& [id, in_capture] : captures_)
            if (in_capture(stream)) return *pools_.at(id);
        if (beside_ == nullptr) beside_ = std::make_unique<GraphPool>(device_, pool_config());
        return *beside_;
    }

    // Pools without graphs and blocks go; a block that was freed may still be in use by other streams.
    void drop_closed() {
        if (!captures_.empty()) return;
        std::erase_if(closed_, [](const auto& pool) {
            if (pool->allocated.now > 0) return false;
            pool->close();
            return true;
        });
        device_.trim();
    }

    // Requested, allocated and reserved bytes of the allocator and all pools.
    std::array<Bytes, 3> bytes_now() const {
        std::array<Bytes, 3> sum{};
        const auto add = [&](const Allocator* one) {
            if (one == nullptr) return;
            sum[0] += one->requested.now;
            sum[1] += one->allocated.now;
            sum[2] += one->reserved.now;
        };
        add(allocator_.get());
        add(beside_.get());
        for (const auto& pool : pools_) add(pool.second.get());
        for (const auto& pool : closed_) add(pool.get());
        return sum;
    }

    void note_peaks() {
        if (pools_.empty() && closed_.empty() && beside_ == nullptr) return;  // the allocator has its own
        const auto now = bytes_now();
        for (std::size_t i = 0; i < now.size(); ++i) peaks_[i] = std::max(peaks_[i], now[i]);
    }

    std::int32_t number_of(Stream stream) {
        return streams_.try_emplace(stream, static_cast<std::int32_t>(streams_.size())).first->second;
    }

    Event event_of() {
        if (!events_.empty()) {
            const Event event = events_.back();
            events_.pop_back();
            return event;
        }
        Event event = nullptr;
        driver_.check(driver_.event_create(&event, kNoTiming), "cuEventCreate");
        return event;
    }

    void free(Live& live) {
        if (live.users.empty()) return release(live);
        // Other streams have used it: it is free when they have passed this point.
        const InContext here(driver_, device_.context());
        Waiting waits{std::move(live), {}};
        for (const Stream user : waits.live.users) {
            const Event event = event_of();
            const Result result = driver_.event_record(event, user);
            if (result == kDeinitialized) return;  // the process ends
            driver_.check(result, "cuEventRecord");
            waits.events.push_back(event);
        }
        waiting_.push_back(std::move(waits));
    }

    void release(const Live& live) {
        live.from->free_block(live.block);
        ++live.from->clock;
        if (live.from != allocator_.get()) drop_closed();
    }

    // Free what other streams have passed.
    void finish_frees() {
        if (waiting_.empty() || !captures_.empty()) return;
        const InContext here(driver_, device_.context());
        std::erase_if(waiting_, [this](Waiting& waits) {
            while (!waits.events.empty()) {
                const Result result = driver_.event_query(waits.events.back());
                if (result == kNotReady) return false;
                driver_.check(result, "cuEventQuery");
                events_.push_back(waits.events.back());
                waits.events.pop_back();
            }
            release(waits.live);
            return true;
        });
    }

    // As PyTorch says it, for those who look for its words.
    std::string told(Bytes nbytes) const {
        std::size_t free_bytes = 0, total = 0;
        {
            const InContext here(driver_, device_.context());
            driver_.memory_info(&free_bytes, &total);
        }
        const auto text = [](auto value) {
            std::array<char, 32> found{};
            const double mib = static_cast<double>(value) / (1 << 20);
            std::snprintf(found.data(), found.size(), mib < 1024 ? "%.2f MiB" : "%.2f GiB", mib < 1024 ? mib : mib / 1024);
            return std::string(found.data());
        };
        const auto now = bytes_now();
        return "CUDA out of memory. Tried to allocate " + text(nbytes) + ". GPU " + std::to_string(ordinal_) +
               " has a total capacity of " + text(total) + " of which " + text(free_bytes) +
               " is free. Of the memory that Overspill's allocator holds, " + text(now[1]) +
               " is allocated, and " + text(now[2] - now[1]) + " is reserved but unallocated.";
    }

    const Driver& driver_;
    GpuDevice device_;
    int ordinal_;
    std::mutex mutex_;
    std::unique_ptr<Allocator> allocator_;
    PlannedAllocator* planned_ = nullptr;
    std::unique_ptr<Checker> checker_;
    std::unordered_map<Address, Live> live_;
    std::deque<Waiting> waiting_;
    std::map<PoolId, std::unique_ptr<GraphPool>> pools_;
    std::vector<std::pair<PoolId, InCapture>> captures_;
    std::unique_ptr<GraphPool> beside_;
    std::vector<std::unique_ptr<GraphPool>> closed_;
    std::vector<Live> postponed_;
    std::array<Bytes, 3> peaks_{};
    std::unordered_map<Stream, std::int32_t> streams_;
    std::vector<Event> events_;
    std::int64_t taken_ = 0, given_ = 0, out_of_memory_ = 0;
};

}  // namespace overspill::live
