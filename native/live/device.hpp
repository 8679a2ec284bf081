// What the live allocator needs of a device: plain memory, address space with physical chunks behind it, and events.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <unordered_map>

#include "../allocators/device.hpp"

namespace overspill::live {

using Stream = std::int64_t;  // a cudaStream_t, or any number on a device without streams
using Event = std::int64_t;
using Chunk = std::int64_t;  // a piece of physical memory

// Failures other than a lack of memory throw std::runtime_error.
class LiveDevice {
  public:
    LiveDevice() = default;
    virtual ~LiveDevice() = default;
    LiveDevice(const LiveDevice&) = delete;
    LiveDevice& operator=(const LiveDevice&) = delete;

    virtual std::optional<Address> malloc(Bytes nbytes) = 0;
    virtual void free(Address address) = 0;  // once all work on the device that was given before is done

    virtual Bytes granularity() const = 0;  // all sizes below are multiples of it
    virtual std::optional<Address> reserve(Bytes nbytes) = 0;
    virtual void unreserve(Address address, Bytes nbytes) = 0;
    virtual std::optional<Chunk> create(Bytes nbytes) = 0;
    virtual void release(Chunk chunk, Bytes nbytes) = 0;
    virtual void map(Address address, Bytes nbytes, Chunk chunk) = 0;
    virtual void set_access(Address address, Bytes nbytes) = 0;
    virtual void unmap(Address address, Bytes nbytes) = 0;

    // An event passes when all work that `stream` had been given is done.
    virtual Event record(Stream stream) = 0;
    virtual bool passed(Event event) = 0;
    virtual void wait(Event event) = 0;
    virtual void destroy(Event event) = 0;

    virtual std::optional<Bytes> capacity_bytes() const = 0;
    virtual void limit(Bytes capacity_bytes) = 0;  // from now on; what is taken already stays
    virtual Bytes used_bytes() const = 0;  // plain memory and chunks
};

// Events of a device whose work is done at once; or, `by_hand`, when `complete` says that a stream has done it.
class Events {
  public:
    explicit Events(bool by_hand) : by_hand_(by_hand) {}

    Event record(Stream stream) {
        open_.emplace(++last_, stream);
        if (!by_hand_) done_[stream] = last_;
        return last_;
    }

    bool passed(Event event) const {
        const auto done = done_.find(open_.at(event));
        return done != done_.end() && event <= done->second;
    }

    // What a real stream would come to do in time.
    void finish(Event event) {
        Event& done = done_[open_.at(event)];
        if (done < event) done = event;
    }

    void destroy(Event event) { open_.erase(event); }

    void complete(Stream stream) { done_[stream] = last_; }

  private:
    bool by_hand_;
    Event last_ = 0;
    std::unordered_map<Event, Stream> open_;
    std::map<Stream, Event> done_;
};

// The device of the simulations as a live one: addresses without memory, to try allocators at any size.
class SimulatedLiveDevice final : public LiveDevice {
  public:
    SimulatedLiveDevice(std::optional<Bytes> capacity_bytes, bool events_by_hand)
        : device_(capacity_bytes), events_(events_by_hand) {}

    std::optional<Address> malloc(Bytes nbytes) override { return device_.malloc(nbytes); }
    void free(Address address) override { device_.free(address); }

    Bytes granularity() const override { return kPageBytes; }
    std::optional<Address> reserve(Bytes nbytes) override { return device_.reserve(nbytes); }
    void unreserve(Address address, Bytes nbytes) override { device_.unreserve(address, nbytes); }
    std::optional<Chunk> create(Bytes nbytes) override {
        if (!device_.map(kFirstAddress, nbytes)) return std::nullopt;
        return ++chunks_;
    }
    void release(Chunk, Bytes nbytes) override { device_.unmap(kFirstAddress, nbytes); }
    void map(Address, Bytes, Chunk) override {}
    void set_access(Address, Bytes) override {}
    void unmap(Address, Bytes) override {}

    Event record(Stream stream) override { return events_.record(stream); }
    bool passed(Event event) override { return events_.passed(event); }
    void wait(Event event) override { events_.finish(event); }
    void destroy(Event event) override { events_.destroy(event); }
    void complete(Stream stream) { events_.complete(stream); }

    std::optional<Bytes> capacity_bytes() const override { return device_.capacity_bytes(); }
    void limit(Bytes capacity_bytes) override { device_.limit(capacity_bytes); }
    Bytes used_bytes() const override { return device_.used_bytes(); }

  private:
    SimulatedDevice device_;
    Events events_;
    Chunk chunks_ = 0;
};

}  // namespace overspill::live
