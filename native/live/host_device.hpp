// Host memory as a device: the pages of its physical chunks are moved behind reserved addresses, in any order. Virtual
// addressing runs here as it does on a GPU, and what is resident can be measured. All memory is private to the process:
// a forked child has a copy.
#pragma once

#include <sys/mman.h>
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
          page_bytes_(sysconf(_SC_PAGESIZE)) {}

    ~HostDevice() override {
        for (const auto& [address, nbytes] : mappings_) munmap(pointer(address), static_cast<std::size_t>(nbytes));
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

    // A chunk is called by the address at which its pages are while they are mapped nowhere.
    std::optional<Chunk> create(Bytes nbytes) override {
        if (!fits(nbytes)) return std::nullopt;
        const auto home = new_mapping(nbytes, PROT_READ | PROT_WRITE);
        if (!home) return std::nullopt;
        chunks_.emplace(*home, Pages{*home, nbytes});
        used_bytes_ += nbytes;
        return *home;
    }

    void release(Chunk chunk, Bytes nbytes) override {
        chunks_.erase(chunk);
        drop_mapping(chunk, nbytes);
        used_bytes_ -= nbytes;
    }

    // As on CUDA, the memory cannot be touched before `set_access`. Where the chunk was mapped before, nothing is left.
    void map(Address address, Bytes nbytes, Chunk chunk) override {
        move(chunks_.at(chunk), address);
        mapped_[address] = chunk;
        if (mprotect(pointer(address), static_cast<std::size_t>(nbytes), PROT_NONE) != 0) fail("mprotect");
    }

    void set_access(Address address, Bytes nbytes) override {
        if (mprotect(pointer(address), static_cast<std::size_t>(nbytes), PROT_READ | PROT_WRITE) != 0) fail("mprotect");
    }

    void unmap(Address address, Bytes nbytes) override {
        const Chunk chunk = mapped_.extract(address).mapped();
        const auto pages = chunks_.find(chunk);
        if (pages != chunks_.end() && pages->second.at == address) move(pages->second, chunk);
        if (mmap(pointer(address), static_cast<std::size_t>(nbytes), PROT_NONE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED)
            fail("mmap");
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
        Bytes total = 0;
        for (const auto& [address, nbytes] : plain_) total += resident_at(address, nbytes);
        for (const auto& [chunk, pages] : chunks_) total += resident_at(pages.at, pages.nbytes);
        return total;
    }

  private:
    // Where the pages of a chunk are now.
    struct Pages {
        Address at;
        Bytes nbytes;
    };

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

    Bytes resident_at(Address address, Bytes nbytes) const {
        std::vector<unsigned char> pages(static_cast<std::size_t>(nbytes / page_bytes_));
        if (mincore(pointer(address), static_cast<std::size_t>(nbytes), pages.data()) != 0) fail("mincore");
        return page_bytes_ * std::count_if(pages.begin(), pages.end(), [](auto page) { return page & 1U; });
    }

    // The addresses that the pages leave stay ours, and empty: else another thread might get them.
    static void move(Pages& pages, Address to) {
        const auto size = static_cast<std::size_t>(pages.nbytes);
        if (mremap(pointer(pages.at), size, size, MREMAP_MAYMOVE | MREMAP_FIXED | kKeepSource, pointer(to)) ==
            MAP_FAILED)
            fail("mremap, which needs Linux 5.7 or later");
        pages.at = to;
    }

    static constexpr int kKeepSource = 4;  // MREMAP_DONTUNMAP, which older headers do not have

    std::optional<Bytes> capacity_bytes_;
    Bytes used_bytes_ = 0;
    Events events_;
    Bytes page_bytes_;
    std::unordered_map<Address, Bytes> plain_;
    std::unordered_map<Address, Bytes> mappings_;
    std::unordered_map<Chunk, Pages> chunks_;
    std::unordered_map<Address, Chunk> mapped_;
};

}  // namespace overspill::live
