// The device: gives out and takes back address ranges, and says no when its memory is used up.
// In Python: src/overspill/placement/simulated_device.py.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>

namespace overspill {

using Address = std::int64_t;
using Bytes = std::int64_t;

constexpr Bytes kPageBytes = Bytes{2} << 20;
constexpr Bytes kSmallRequestBytes = Bytes{1} << 20;
constexpr Bytes kSmallStepBytes = 512;
constexpr Address kFirstAddress = kPageBytes;
constexpr Bytes kAddressSpaceBytes = Bytes{1} << 56;

constexpr Bytes round_up(Bytes nbytes, Bytes step) {
    return (nbytes + step - 1) / step * step;
}

// The free address ranges within [start, end); neighbours are always joined.
class Ranges {
  public:
    Ranges(Address start, Address end) : free_bytes_(end - start) { sizes_.emplace(start, end - start); }

    Bytes free_bytes() const { return free_bytes_; }

    // The lowest free range of that size, now taken.
    std::optional<Address> take(Bytes nbytes) {
        if (nbytes > free_bytes_) return std::nullopt;
        for (auto it = sizes_.begin(); it != sizes_.end(); ++it) {
            const auto [start, size] = *it;
            if (size < nbytes) continue;
            const auto next = sizes_.erase(it);
            if (size > nbytes) sizes_.emplace_hint(next, start + nbytes, size - nbytes);
            free_bytes_ -= nbytes;
            return start;
        }
        return std::nullopt;
    }

    void give(Address start, Bytes nbytes) {
        free_bytes_ += nbytes;
        auto next = sizes_.lower_bound(start);
        if (next != sizes_.end() && next->first == start + nbytes) {
            nbytes += next->second;
            next = sizes_.erase(next);
        }
        if (next != sizes_.begin()) {
            const auto before = std::prev(next);
            if (before->first + before->second == start) {
                before->second += nbytes;
                return;
            }
        }
        sizes_.emplace_hint(next, start, nbytes);
    }

  private:
    std::map<Address, Bytes> sizes_;
    Bytes free_bytes_;
};

// The holes in pages that small requests share: the smallest that fits is taken, the lowest among equals.
class SharedPages {
  public:
    std::optional<Address> take(Bytes nbytes) {
        const auto it = holes_.lower_bound({nbytes, 0});
        if (it == holes_.end()) return std::nullopt;
        const auto [size, start] = *it;
        remove(start);
        if (size > nbytes) add(start + nbytes, size - nbytes);
        return start;
    }

    // Make a range a hole again. The page's address if all of it is one, which it then leaves; but a whole page that is
    // given is new and stays.
    std::optional<Address> give(Address start, Bytes nbytes) {
        const bool is_new = nbytes == kPageBytes;
        Address end = start + nbytes;
        if (end % kPageBytes != 0 && sizes_.contains(end)) end += remove(end);
        if (start % kPageBytes != 0) {
            const auto before = starts_by_end_.find(start);
            if (before != starts_by_end_.end()) start -= remove(before->second);
        }
        if (end - start == kPageBytes && !is_new) return start;
        add(start, end - start);
        return std::nullopt;
    }

  private:
    void add(Address start, Bytes size) {
        holes_.emplace(size, start);
        sizes_.emplace(start, size);
        starts_by_end_.emplace(start + size, start);
    }

    Bytes remove(Address start) {
        const Bytes size = sizes_.extract(start).mapped();
        starts_by_end_.erase(start + size);
        holes_.erase({size, start});
        return size;
    }

    std::set<std::pair<Bytes, Address>> holes_;
    std::unordered_map<Address, Bytes> sizes_;
    std::unordered_map<Address, Address> starts_by_end_;
};

// A simulated device. A subclass may answer otherwise.
class Device {
  public:
    virtual ~Device() = default;
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    explicit Device(std::optional<Bytes> capacity_bytes)
        : capacity_bytes_(capacity_bytes), space_(kFirstAddress, kAddressSpaceBytes) {
        if (capacity_bytes && *capacity_bytes < 0)
            throw std::invalid_argument("a device cannot have " + std::to_string(*capacity_bytes) + " bytes");
    }

    // The address of new memory (cudaMalloc), or nothing when there is no room.
    virtual std::optional<Address> malloc(Bytes nbytes) {
        if (nbytes < kSmallRequestBytes) return malloc_small(round_up(nbytes, kSmallStepBytes));
        const Bytes size = round_up(nbytes, kPageBytes);
        const auto address = take_pages(size);
        if (address) sizes_.emplace(*address, size);
        return address;
    }

    virtual void free(Address address) {
        const auto found = sizes_.find(address);
        const Bytes size = found->second;
        sizes_.erase(found);
        if (size >= kPageBytes) {
            give_pages(address, size);
            return;
        }
        if (const auto page = shared_.give(address, size)) give_pages(*page, kPageBytes);
    }

    // Address space without memory (cuMemAddressReserve), and memory for whole pages of it (cuMemCreate, cuMemMap).
    virtual std::optional<Address> reserve(Bytes nbytes) { return space_.take(round_up(nbytes, kPageBytes)); }

    virtual void unreserve(Address address, Bytes nbytes) { space_.give(address, round_up(nbytes, kPageBytes)); }

    virtual bool map(Address, Bytes nbytes) {
        if (capacity_bytes_ && used_bytes_ + nbytes > *capacity_bytes_) return false;
        used_bytes_ += nbytes;
        return true;
    }

    virtual void unmap(Address, Bytes nbytes) { used_bytes_ -= nbytes; }

    std::optional<Bytes> capacity_bytes() const { return capacity_bytes_; }
    Bytes used_bytes() const { return used_bytes_; }

  private:
    std::optional<Address> take_pages(Bytes size) {
        if (capacity_bytes_ && used_bytes_ + size > *capacity_bytes_) return std::nullopt;
        const auto address = space_.take(size);
        if (address) used_bytes_ += size;
        return address;
    }

    void give_pages(Address address, Bytes size) {
        space_.give(address, size);
        used_bytes_ -= size;
    }

    std::optional<Address> malloc_small(Bytes size) {
        auto address = shared_.take(size);
        if (!address) {
            const auto page = take_pages(kPageBytes);
            if (!page) return std::nullopt;
            shared_.give(*page, kPageBytes);
            address = shared_.take(size);
        }
        sizes_.emplace(*address, size);
        return address;
    }

    std::optional<Bytes> capacity_bytes_;
    Bytes used_bytes_ = 0;
    Ranges space_;
    std::unordered_map<Address, Bytes> sizes_;
    SharedPages shared_;
};

}  // namespace overspill
