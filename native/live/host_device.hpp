// Host memory as a device: its physical memory is a file without a name, whose pieces are mapped in any order behind
// reserved addresses. Virtual addressing runs here as it does on a GPU, and what is resident can be measured.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <string>
#include <system_error>
#include <unordered_map>
#include <vector>

#include "device.hpp"

namespace overspill::live {

class HostDevice final : public LiveDevice {
  public:
    HostDevice(std::optional<Bytes> capacity_bytes, bool events_by_hand)
        : capacity_bytes_(capacity_bytes),
          events_(events_by_hand),
          page_bytes_(sysconf(_SC_PAGESIZE)),
          physical_(0, kAddressSpaceBytes),
          file_(memfd_create("overspill", MFD_CLOEXEC)) {
        if (file_ < 0) fail("memfd_create");
    }

    ~HostDevice() override {
        for (const auto& [address, nbytes] : mappings_) munmap(pointer(address), static_cast<std::size_t>(nbytes));
        close(file_);
    }

    std::optional<Address> malloc(Bytes nbytes) override {
        const Bytes size = round_up(std::max<Bytes>(nbytes, 1), page_bytes_);
        if (!fits(size)) return std::nullopt;
        const auto address = new_mapping(size, PROT_READ | PROT_WRITE);
        if (!address) return std::nullopt;
        plain_.emplace(*address, size);
        used_bytes_ += size;
        return address;
    }

    void free(Address address) override {
        const Bytes size = plain_.extract(address).mapped();
        used_bytes_ -= size;
        drop_mapping(address, size);
    }

    Bytes granularity() const override { return page_bytes_; }

    std::optional<Address> reserve(Bytes nbytes) override { return new_mapping(nbytes, PROT_NONE); }
    void unreserve(Address address, Bytes nbytes) override { drop_mapping(address, nbytes); }

    std::optional<Chunk> create(Bytes nbytes) override {
        if (!fits(nbytes)) return std::nullopt;
        const auto chunk = physical_.take(nbytes);
        if (!chunk) return std::nullopt;
        if (*chunk + nbytes > file_bytes_) {
            if (ftruncate(file_, *chunk + nbytes) != 0) fail("ftruncate");
            file_bytes_ = *chunk + nbytes;
        }
        used_bytes_ += nbytes;
        return chunk;
    }

    void release(Chunk chunk, Bytes nbytes) override {
        if (fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, chunk, nbytes) != 0) fail("fallocate");
        physical_.give(chunk, nbytes);
        used_bytes_ -= nbytes;
    }

    // As on CUDA, the memory cannot be touched before `set_access`.
    void map(Address address, Bytes nbytes, Chunk chunk) override {
        remap(address, nbytes, MAP_SHARED | MAP_FIXED, file_, chunk);
    }

    void set_access(Address address, Bytes nbytes) override {
        if (mprotect(pointer(address), static_cast<std::size_t>(nbytes), PROT_READ | PROT_WRITE) != 0) fail("mprotect");
    }

    void unmap(Address address, Bytes nbytes) override {
        remap(address, nbytes, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    }

    Event record(Stream stream) override { return events_.record(stream); }
    bool passed(Event event) override { return events_.passed(event); }
    void wait(Event event) override { events_.finish(event); }
    void destroy(Event event) override { events_.destroy(event); }
    void complete(Stream stream) { events_.complete(stream); }

    std::optional<Bytes> capacity_bytes() const override { return capacity_bytes_; }
    void limit(Bytes capacity_bytes) override { capacity_bytes_ = capacity_bytes; }
    Bytes used_bytes() const override { return used_bytes_; }

    // The pages of plain memory and of chunks that the kernel holds for us now.
    Bytes resident_bytes() const {
        struct stat status {};
        if (fstat(file_, &status) != 0) fail("fstat");
        Bytes total = Bytes{512} * status.st_blocks;
        for (const auto& [address, nbytes] : plain_) {
            std::vector<unsigned char> pages(static_cast<std::size_t>(nbytes / page_bytes_));
            if (mincore(pointer(address), static_cast<std::size_t>(nbytes), pages.data()) != 0) fail("mincore");
            total += page_bytes_ * std::count_if(pages.begin(), pages.end(), [](auto page) { return page & 1U; });
        }
        return total;
    }

  private:
    static void* pointer(Address address) { return reinterpret_cast<void*>(address); }

    [[noreturn]] static void fail(const char* call) { throw std::system_error(errno, std::generic_category(), call); }

    bool fits(Bytes nbytes) const { return !capacity_bytes_ || used_bytes_ + nbytes <= *capacity_bytes_; }

    std::optional<Address> new_mapping(Bytes nbytes, int protection) {
        void* start = mmap(nullptr, static_cast<std::size_t>(nbytes), protection,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (start == MAP_FAILED) return std::nullopt;
        const auto address = reinterpret_cast<Address>(start);
        mappings_.emplace(address, nbytes);
        return address;
    }

    void drop_mapping(Address address, Bytes nbytes) {
        if (munmap(pointer(address), static_cast<std::size_t>(nbytes)) != 0) fail("munmap");
        mappings_.erase(address);
    }

    static void remap(Address address, Bytes nbytes, int flags, int file, Chunk offset) {
        if (mmap(pointer(address), static_cast<std::size_t>(nbytes), PROT_NONE, flags, file, offset) == MAP_FAILED)
            fail("mmap");
    }

    std::optional<Bytes> capacity_bytes_;
    Bytes used_bytes_ = 0;
    Events events_;
    Bytes page_bytes_;
    Ranges physical_;
    int file_;
    Bytes file_bytes_ = 0;
    std::unordered_map<Address, Bytes> plain_;
    std::unordered_map<Address, Bytes> mappings_;
};

}  // namespace overspill::live
