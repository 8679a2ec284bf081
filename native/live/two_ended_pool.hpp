// The pool with two ends of Dymem (HPDC 2020, section 3.3.3): blocks from the low end by best fit, temporary ones from
// the high end, so that they do not cut up one another's space; what has no room there gets memory of its own.
#pragma once

#include <algorithm>
#include <map>
#include <optional>
#include <unordered_map>

#include "pool.hpp"

namespace overspill::live {

class TwoEndedPool final : public MemoryPool {
  public:
    TwoEndedPool(LiveDevice& device, Bytes main_bytes)
        : device_(device), main_bytes_(round_up(main_bytes, kMinBlockBytes)) {}

    ~TwoEndedPool() override {
        for (const auto& [address, nbytes] : live_)
            if (!in_main(address)) device_.free(address);
        if (main_) device_.free(*main_);
    }

    std::optional<Address> allocate(Bytes nbytes, NumberedStream, bool temporary) override {
        const Bytes size = round_up(nbytes, kMinBlockBytes);
        if (!main_) acquire_main();
        auto address = temporary ? take_high(size) : take_low(size);
        if (!address) address = device_.malloc(size);  // the incremental space
        if (address) live_.emplace(*address, size);
        return address;
    }

    void free(Address address) override {
        const Bytes size = live_.extract(address).mapped();
        if (!in_main(address)) {
            device_.free(address);
            return;
        }
        give(address, size);
    }

    void trim() override {
        if (!main_ || free_.empty() || free_.begin()->second != main_bytes_) return;
        device_.free(*main_);
        main_.reset();
        free_.clear();
    }

    bool mixes_streams() const override { return true; }

  private:
    void acquire_main() {
        main_ = device_.malloc(main_bytes_);
        if (main_) free_.emplace(*main_, main_bytes_);
    }

    bool in_main(Address address) const {
        return main_ && address >= *main_ && address < *main_ + main_bytes_;
    }

    // The smallest hole that fits, the lowest among equals.
    std::optional<Address> take_low(Bytes size) {
        auto best = free_.end();
        for (auto it = free_.begin(); it != free_.end(); ++it)
            if (it->second >= size && (best == free_.end() || it->second < best->second)) best = it;
        if (best == free_.end()) return std::nullopt;
        const auto [start, bytes] = *best;
        free_.erase(best);
        if (bytes > size) free_.emplace(start + size, bytes - size);
        return start;
    }

    // The highest hole that fits.
    std::optional<Address> take_high(Bytes size) {
        const auto fits = [size](const auto& hole) { return hole.second >= size; };
        const auto hole = std::find_if(free_.rbegin(), free_.rend(), fits);
        if (hole == free_.rend()) return std::nullopt;
        const Address start = hole->first + hole->second - size;
        hole->second -= size;
        if (hole->second == 0) free_.erase(hole->first);
        return start;
    }

    void give(Address start, Bytes size) {
        auto next = free_.lower_bound(start);
        if (next != free_.end() && next->first == start + size) {
            size += next->second;
            next = free_.erase(next);
        }
        if (next != free_.begin()) {
            const auto before = std::prev(next);
            if (before->first + before->second == start) {
                before->second += size;
                return;
            }
        }
        free_.emplace_hint(next, start, size);
    }

    LiveDevice& device_;
    Bytes main_bytes_;
    std::optional<Address> main_;
    std::map<Address, Bytes> free_;
    std::unordered_map<Address, Bytes> live_;
};

}  // namespace overspill::live
