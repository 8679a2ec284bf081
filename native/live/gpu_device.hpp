// A GPU as the device of an allocator: pages of memory behind virtual addresses, or plain allocations where the driver
// has none.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <unordered_map>
#include <vector>

#include "device.hpp"
#include "driver.hpp"

namespace overspill::live {

class GpuDevice final : public Device {
  public:
    GpuDevice(const Driver& driver, int ordinal)
        : GpuDevice(driver, ordinal, driver.handle_of(ordinal), driver.has_virtual_memory(ordinal)) {}

    bool is_virtual() const { return is_virtual_; }
    Context context() const { return context_; }

    // No more than so many bytes; the driver's error says whether the card has them.
    void limit(Bytes nbytes) { limit_ = nbytes; }
    Bytes total_bytes() const { return *capacity_bytes(); }

    std::optional<Address> malloc(Bytes nbytes) override {
        if (!room(nbytes)) return std::nullopt;
        const InContext here(driver_, context_);
        const BesideCapture beside(driver_);
        DevicePointer address = 0;
        const Result result = driver_.memory_alloc(&address, static_cast<std::size_t>(nbytes));
        if (result == kOutOfMemory) return std::nullopt;
        driver_.check(result, "cuMemAlloc");
        plain_.emplace(static_cast<Address>(address), nbytes);
        held_ += nbytes;
        return static_cast<Address>(address);
    }

    void free(Address address) override {  // the driver waits for the work that uses it
        const InContext here(driver_, context_);
        driver_.check(driver_.memory_free(static_cast<DevicePointer>(address)), "cuMemFree");
        held_ -= plain_.extract(address).mapped();
    }

    std::optional<Address> reserve(Bytes nbytes) override {
        DevicePointer address = 0;
        const auto size = static_cast<std::size_t>(round_up(nbytes, kPageBytes));
        if (driver_.address_reserve(&address, size, kPageBytes, 0, 0) != kSuccess) return std::nullopt;
        reserved_.emplace(static_cast<Address>(address), Reserved{size, size});
        return static_cast<Address>(address);
    }

    // The driver takes addresses back only as they were reserved: when no part of them is left.
    void unreserve(Address address, Bytes nbytes) override {
        const auto found = std::prev(reserved_.upper_bound(address));
        found->second.left -= static_cast<std::size_t>(round_up(nbytes, kPageBytes));
        if (found->second.left > 0) return;
        const auto start = static_cast<DevicePointer>(found->first);
        driver_.check(driver_.address_free(start, found->second.size), "cuMemAddressFree");
        reserved_.erase(found);
    }

    // Page by page, since a mapping can only be taken away as a whole.
    bool map(Address address, Bytes nbytes) override {
        if (!room(nbytes)) return false;
        const InContext here(driver_, context_);
        const BesideCapture beside(driver_);
        if (nbytes > kMuchBytes && !has_free(nbytes)) return false;
        Address at = address;
        Result result = kSuccess;
        for (; at < address + nbytes && result == kSuccess; at += kPageBytes) result = map_page(at);
        if (result == kSuccess) {
            const MemoryAccess access{properties_.location};
            result = driver_.set_access(static_cast<DevicePointer>(address), static_cast<std::size_t>(nbytes), &access, 1);
        } else {
            at -= kPageBytes;  // the one that failed
        }
        if (result == kSuccess) return true;
        for (Address page = address; page < at; page += kPageBytes) unmap_page(page);
        if (result != kOutOfMemory) driver_.check(result, "mapping device memory");
        return false;
    }

    // What runs may still use the pages, and nobody but the host waits for that.
    void unmap(Address address, Bytes nbytes) override {
        const InContext here(driver_, context_);
        driver_.check(driver_.synchronize(), "cuCtxSynchronize");
        for (Address page = address; page < address + nbytes; page += kPageBytes) unmap_page(page);
    }

    // Give the card what was unmapped and is not used again.
    void trim() {
        if (spare_.empty()) return;
        const InContext here(driver_, context_);
        for (const MemoryHandle handle : spare_) driver_.check(driver_.memory_release(handle), "cuMemRelease");
        spare_.clear();
    }

    // Whether there is memory behind all of a range.
    bool is_mapped(Address address, Bytes nbytes) const {
        const auto plain = plain_.upper_bound(address);
        if (plain != plain_.begin() && address + nbytes <= std::prev(plain)->first + std::prev(plain)->second) return true;
        for (Address page = address / kPageBytes * kPageBytes; page < address + nbytes; page += kPageBytes)
            if (!pages_.contains(page)) return false;
        return true;
    }

  private:
    static constexpr Bytes kMuchBytes = 32 * kPageBytes;

    GpuDevice(const Driver& driver, int ordinal, int handle, bool is_virtual)
        : Device(memory_of(driver, handle)), driver_(driver), is_virtual_(is_virtual) {
        properties_.location.device = ordinal;
        driver_.check(driver_.context_retain(&context_, handle), "cuDevicePrimaryCtxRetain");
        if (!is_virtual_) return;
        std::size_t least = 0;
        driver_.check(driver_.granularity(&least, &properties_, 0), "cuMemGetAllocationGranularity");
        is_virtual_ = least > 0 && kPageBytes % static_cast<Bytes>(least) == 0;
    }

    static Bytes memory_of(const Driver& driver, int handle) {
        std::size_t nbytes = 0;
        driver.check(driver.device_memory(&nbytes, handle), "cuDeviceTotalMem");
        return static_cast<Bytes>(nbytes);
    }

    bool room(Bytes nbytes) const { return held_ + nbytes <= limit_.value_or(total_bytes()); }

    // Asked before a large mapping, which would fail only after its last page that fits.
    bool has_free(Bytes nbytes) const {
        std::size_t free_bytes = 0, total = 0;
        driver_.check(driver_.memory_info(&free_bytes, &total), "cuMemGetInfo");
        return static_cast<Bytes>(free_bytes + spare_.size() * kPageBytes) >= nbytes;
    }

    Result map_page(Address page) {
        MemoryHandle handle = 0;
        if (!spare_.empty()) {
            handle = spare_.back();
            spare_.pop_back();
        } else if (const Result result = driver_.memory_create(&handle, kPageBytes, &properties_, 0); result != kSuccess) {
            return result;
        }
        if (const Result result = driver_.memory_map(static_cast<DevicePointer>(page), kPageBytes, 0, handle, 0);
            result != kSuccess) {
            spare_.push_back(handle);
            return result;
        }
        pages_.emplace(page, handle);
        held_ += kPageBytes;
        return kSuccess;
    }

    void unmap_page(Address page) {
        driver_.check(driver_.memory_unmap(static_cast<DevicePointer>(page), kPageBytes), "cuMemUnmap");
        spare_.push_back(pages_.extract(page).mapped());
        held_ -= kPageBytes;
    }

    struct Reserved {
        std::size_t size, left;
    };

    const Driver& driver_;
    bool is_virtual_;
    MemoryProperties properties_;
    Context context_ = nullptr;
    std::optional<Bytes> limit_;
    Bytes held_ = 0;
    std::map<Address, Reserved> reserved_;  // addresses
    std::unordered_map<Address, MemoryHandle> pages_;
    std::map<Address, Bytes> plain_;
    std::vector<MemoryHandle> spare_;  // memory without an address
};

}  // namespace overspill::live
