// Replaying events on an allocator. In Python: replay_on in src/overspill/placement/replay.py.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "allocator.hpp"

namespace overspill {

enum Action : std::int8_t { kAllocate = 0, kFree = 1, kTry = 2, kEmpty = 3 };
constexpr Address kNotPlaced = -1;

struct EventsView {
    const std::int8_t* action;
    const std::int64_t* block;
    const std::int64_t* nbytes;
    const std::int32_t* stream;
    const std::int8_t* mobility;  // nullptr: all are movable
    std::int64_t count;
    std::int64_t block_count;
};

struct ReplayResult {
    std::int64_t failed_at = -1;
    std::int64_t skipped = 0;
    std::vector<Address> addresses;
    // after every event that was done: requested, allocated, reserved; and usable, spread, if a request is given
    std::vector<std::vector<Bytes>> curves;
};

class Replayer {
  public:
    Replayer(Allocator& allocator, const EventsView& events)
        : allocator_(allocator),
          events_(events),
          states_(events.block_count, State::kFree),
          blocks_(events.block_count) {
        result_.addresses.assign(events.block_count, kNotPlaced);
    }

    ReplayResult run(bool curves, std::optional<Bytes> request) {
        result_.curves.resize(request ? 5 : (curves ? 3 : 0));
        for (auto& curve : result_.curves) curve.reserve(events_.count);
        for (std::int64_t at = 0; at < events_.count; ++at) {
            allocator_.clock = at;
            if (events_.action[at] == kFree) {
                free(at);
            } else if (events_.action[at] == kEmpty) {
                allocator_.release_cached();
            } else if (!allocate(at)) {
                result_.failed_at = at;
                break;
            }
            if (result_.curves.empty()) continue;
            result_.curves[0].push_back(allocator_.requested.now);
            result_.curves[1].push_back(allocator_.allocated.now);
            result_.curves[2].push_back(allocator_.reserved.now);
            if (!request) continue;
            result_.curves[3].push_back(allocator_.usable_bytes(*request));
            result_.curves[4].push_back(allocator_.spread_bytes());
        }
        return std::move(result_);
    }

  private:
    enum class State : std::uint8_t { kFree, kLive, kNowhere, kWithoutRoom };

    // Whether the replay goes on: the block was placed, or it is elastic.
    bool allocate(std::int64_t at) {
        const std::int64_t block = events_.block[at];
        if (states_[block] != State::kFree) refuse(at, "allocates", "is live");
        if (events_.nbytes[at] == 0) {
            states_[block] = State::kNowhere;
            result_.addresses[block] = kNowhere;
            return true;
        }
        PoolBlock* placed = allocator_.allocate_block(events_.nbytes[at], events_.stream[at],
                                                      events_.mobility == nullptr ? Mobility::kMovable : Mobility{events_.mobility[at]});
        if (placed != nullptr) {
            states_[block] = State::kLive;
            blocks_[block] = placed;
            result_.addresses[block] = placed->address;
            return true;
        }
        if (events_.action[at] == kAllocate) return false;
        states_[block] = State::kWithoutRoom;
        ++result_.skipped;
        return true;
    }

    void free(std::int64_t at) {
        const std::int64_t block = events_.block[at];
        if (states_[block] == State::kFree) refuse(at, "frees", "is not live");
        if (states_[block] == State::kLive) allocator_.free_block(blocks_[block]);
        states_[block] = State::kFree;
    }

    [[noreturn]] void refuse(std::int64_t at, const std::string& what, const std::string& state) const {
        throw std::invalid_argument("event " + std::to_string(at) + " " + what + " block " +
                                    std::to_string(events_.block[at]) + ", which " + state);
    }

    Allocator& allocator_;
    const EventsView& events_;
    std::vector<State> states_;
    std::vector<PoolBlock*> blocks_;
    ReplayResult result_;
};

}  // namespace overspill
