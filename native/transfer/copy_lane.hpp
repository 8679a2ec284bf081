// Copies of one direction on a stream of their own, in order, behind what compute had been given when each was started.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "runtime_library.hpp"

namespace overspill::transfer {

class CopyLane {
  public:
    CopyLane(RuntimeLibrary library, int device, RawStream stream, Direction direction)
        : library_(std::move(library)), device_(device), stream_(stream), direction_(direction) {
        const OnDevice here(library_, device_);
        started_ = create();
    }

    ~CopyLane() {  // a driver that has shut down with the process took its events with it
        library_.event_destroy(started_);
        for (const RawEvent event : idle_) library_.event_destroy(event);
    }
    CopyLane(const CopyLane&) = delete;
    CopyLane& operator=(const CopyLane&) = delete;

    // Starts a copy; the event that passes when it is done, which is to be given back.
    RawEvent start(void* host, void* on_device, std::size_t nbytes, RawStream compute) {
        const OnDevice here(library_, device_);
        // A wait is for what the event was recorded for by then, so that it can be recorded again at once.
        library_.check(library_.event_record(started_, compute), "EventRecord");
        library_.check(library_.stream_wait_event(stream_, started_, 0), "StreamWaitEvent");
        void* to = direction_ == Direction::kToHost ? host : on_device;
        const void* from = direction_ == Direction::kToHost ? on_device : host;
        if (nbytes > 0)
            library_.check(library_.memcpy_async(to, from, nbytes, static_cast<int>(direction_), stream_),
                           "MemcpyAsync");
        const RawEvent done = take();
        const Status status = library_.event_record(done, stream_);
        if (status != kSuccess) give_back(done);
        library_.check(status, "EventRecord");
        return done;
    }

    // Lets what `compute` is given from now on run behind the copy.
    void wait(RawEvent done, RawStream compute) const {
        const OnDevice here(library_, device_);
        library_.check(library_.stream_wait_event(compute, done, 0), "StreamWaitEvent");
    }

    // Nobody will wait for this event any more.
    void give_back(RawEvent event) { idle_.push_back(event); }

  private:
    RawEvent create() const {
        RawEvent event = nullptr;
        library_.check(library_.event_create(&event, kDisableTiming), "EventCreateWithFlags");
        return event;
    }

    RawEvent take() {
        if (idle_.empty()) return create();
        const RawEvent event = idle_.back();
        idle_.pop_back();
        return event;
    }

    RuntimeLibrary library_;
    int device_;
    RawStream stream_;
    Direction direction_;
    RawEvent started_ = nullptr;
    std::vector<RawEvent> idle_;
};

}  // namespace overspill::transfer
