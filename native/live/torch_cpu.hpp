// PyTorch's CPU allocator, for who is not built with PyTorch: a thread that is inside a planned program gets memory of a
// live allocator, every other what PyTorch itself gives.
#pragma once

#include <dlfcn.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "allocator.hpp"
#include "torch_error.hpp"

namespace overspill::live {

// What PyTorch 2.11 to 2.13 declare in c10/core/Allocator.h, c10/util/UniqueVoidPtr.h and c10/core/Device.h: the same
// members in the same order, and the same virtual functions.
namespace torch_abi {

using Deleter = void (*)(void*);

struct Device {
    std::int8_t type = 0;  // the CPU
    std::int8_t index = -1;
};

class DataPtr {
  public:
    // The data is its own context.
    DataPtr(void* data, Deleter deleter) : data_(data), context_(data, deleter) {}

    bool is_simple() const { return data_ == context_.get(); }

    // The data, which nobody gives back now.
    void* taken() { return context_.release(); }

  private:
    void* data_;
    std::unique_ptr<void, Deleter> context_;
    Device device_;
};
static_assert(sizeof(DataPtr) == 4 * sizeof(void*));

class Allocator {
  public:
    virtual ~Allocator() = default;
    virtual DataPtr allocate(std::size_t nbytes) = 0;
    virtual bool is_simple_data_ptr(const DataPtr&) const = 0;
    virtual Deleter raw_deleter() const = 0;
    virtual void copy_data(void* to, const void* from, std::size_t nbytes) const = 0;
};

template <typename Function>
Function symbol(const char* name) {
    void* loaded = dlopen("libc10.so", RTLD_LAZY | RTLD_NOLOAD);
    void* found = loaded != nullptr ? dlsym(loaded, name) : nullptr;
    if (loaded != nullptr) dlclose(loaded);  // the process keeps it
    if (found == nullptr) throw std::runtime_error(std::string("PyTorch is not loaded, or has no ") + name);
    return reinterpret_cast<Function>(found);
}

}  // namespace torch_abi

// The allocators that the programs of this thread have their memory from, the innermost last.
inline thread_local std::vector<std::shared_ptr<LiveAllocator>> serving_thread;

// Whose a block is: of a live allocator's memory, or `spilled` bytes of PyTorch's own that it had no room for.
struct Owned {
    std::shared_ptr<LiveAllocator> allocator;
    Bytes spilled = 0;
};

// The blocks by their addresses. Many threads ask, so there are many tables, each with a lock of its own.
class Owners {
  public:
    void add(void* block, Owned owned) {
        Table& table = of(block);
        const std::lock_guard lock(table.mutex);
        table.owners.emplace(block, std::move(owned));
    }

    // Of a block that is given back; without an allocator where it is PyTorch's alone.
    Owned take(void* block) {
        Table& table = of(block);
        const std::lock_guard lock(table.mutex);
        const auto found = table.owners.find(block);
        if (found == table.owners.end()) return {};
        Owned owned = std::move(found->second);
        table.owners.erase(found);
        return owned;
    }

    void lock_all() {
        for (Table& table : tables_) table.mutex.lock();
    }

    void unlock_all() {
        for (Table& table : tables_) table.mutex.unlock();
    }

  private:
    struct Table {
        std::mutex mutex;
        std::unordered_map<void*, Owned> owners;
    };

    Table& of(void* block) { return tables_[reinterpret_cast<std::uintptr_t>(block) / kBlockBytes % tables_.size()]; }

    static constexpr std::uintptr_t kBlockBytes = 512;
    std::array<Table, 64> tables_;
};

class TorchCpuAllocator final : public torch_abi::Allocator {
  public:
    // Bytes that were asked for so far: of live allocators, and of PyTorch's own.
    struct Asked {
        std::atomic<std::int64_t> ours{0};
        std::atomic<std::int64_t> elsewhere{0};
    };

    // PyTorch's allocator from the first call on, for good: tensors may outlive anything.
    static TorchCpuAllocator& installed() {
        static auto* found = new TorchCpuAllocator();
        return *found;
    }

    torch_abi::DataPtr allocate(std::size_t nbytes) override {
        if (serving_thread.empty() || nbytes <= kTinyBytes || forked_) {
            asked_.elsewhere += static_cast<std::int64_t>(nbytes);
            return torchs_own_.allocate(nbytes);
        }
        const auto& allocator = serving_thread.back();
        const auto size = static_cast<Bytes>(nbytes);
        const auto address = allocator->allocate(size, kStream);
        if (!address && allocator->spill(size)) {
            asked_.elsewhere += size;
            void* const data = torchs_own_.allocate(nbytes).taken();
            owners_.add(data, {allocator, size});
            return {data, &release};
        }
        if (!address)
            TorchOutOfMemory::get().raise("Overspill's pool finds no room for " + std::to_string(nbytes) +
                                          " bytes; it holds " + std::to_string(allocator->statistics().reserved));
        asked_.ours += size;
        void* const data = reinterpret_cast<void*>(*address);
        owners_.add(data, {allocator});
        report_new_(reporter_, data, nbytes);
        return {data, &release};
    }

    bool is_simple_data_ptr(const torch_abi::DataPtr& data) const override { return data.is_simple(); }
    torch_abi::Deleter raw_deleter() const override { return &release; }
    void copy_data(void* to, const void* from, std::size_t nbytes) const override { std::memcpy(to, from, nbytes); }

    const Asked& asked() const { return asked_; }

  private:
    // Handles and scalars, which may stay for long, and each of which would take 512 bytes of a pool.
    static constexpr std::size_t kTinyBytes = 8;
    static constexpr Stream kStream = 0;  // the CPU has done its work when a block is freed
    static constexpr std::uint8_t kPriority = 255;

    TorchCpuAllocator()
        : torchs_own_(*torch_abi::symbol<torch_abi::Allocator* (*)()>("_ZN3c1015GetCPUAllocatorEv")()),
          free_torchs_own_(torchs_own_.raw_deleter()),
          reporter_(torch_abi::symbol<void* (*)()>("_ZN3c1025profiledCPUMemoryReporterEv")()),
          report_new_(torch_abi::symbol<ReportNew>("_ZN3c1025ProfiledCPUMemoryReporter3NewEPvm")),
          report_deleted_(torch_abi::symbol<ReportDeleted>("_ZN3c1025ProfiledCPUMemoryReporter6DeleteEPv")) {
        if (free_torchs_own_ == nullptr) throw std::runtime_error("PyTorch's CPU allocator has been replaced");
        const auto set = torch_abi::symbol<void (*)(torch_abi::Allocator*, std::uint8_t)>(
            "_ZN3c1015SetCPUAllocatorEPNS_9AllocatorEh");
        // A forked child may find an allocator's lock taken for good, and what it has is a copy: it gives nothing back.
        pthread_atfork([] { installed().owners_.lock_all(); }, [] { installed().owners_.unlock_all(); },
                       [] {
                           installed().owners_.unlock_all();
                           forked_ = true;
                       });
        set(this, kPriority);
    }

    // Also of blocks that PyTorch allocates raw, which may be its own.
    static void release(void* block) noexcept {
        TorchCpuAllocator& self = installed();
        try {
            const Owned owned = self.owners_.take(block);
            if (owned.allocator == nullptr || owned.spilled != 0) self.free_torchs_own_(block);
            if (owned.allocator == nullptr) return;
            if (forked_) {
                new Owned(owned);  // nor may the last block take the allocator with it
            } else if (owned.spilled != 0) {
                owned.allocator->take_back(owned.spilled);
            } else {
                self.report_deleted_(self.reporter_, block);
                owned.allocator->free(reinterpret_cast<Address>(block));
            }
        } catch (const std::exception& error) {
            static std::atomic<bool> told{false};
            if (!told.exchange(true)) std::fprintf(stderr, "overspill: a block could not be freed: %s\n", error.what());
        }
    }

    // PyTorch's profiler hears of our blocks as of its own (c10::ProfiledCPUMemoryReporter).
    using ReportNew = void (*)(void*, void*, std::size_t);
    using ReportDeleted = void (*)(void*, void*);

    inline static bool forked_ = false;

    torch_abi::Allocator& torchs_own_;
    torch_abi::Deleter free_torchs_own_;
    void* reporter_;
    ReportNew report_new_;
    ReportDeleted report_deleted_;
    Owners owners_;
    Asked asked_;
};

}  // namespace overspill::live
