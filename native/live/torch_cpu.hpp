// PyTorch's CPU allocator, for who is not built with PyTorch: a thread that is inside a planned program gets memory of a
// live allocator, every other what PyTorch itself gives.
#pragma once

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
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
    DataPtr(void* data, void* context, Deleter deleter) : data_(data), context_(context, deleter) {}

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
        if (serving_thread.empty() || nbytes == 0 || forked_) {
            asked_.elsewhere += static_cast<std::int64_t>(nbytes);
            return torchs_own_.allocate(nbytes);
        }
        const auto& allocator = serving_thread.back();
        const auto address = allocator->allocate(static_cast<Bytes>(nbytes), kStream);
        if (!address)
            TorchOutOfMemory::get().raise("Overspill's pool finds no room for " + std::to_string(nbytes) +
                                          " bytes; it holds " + std::to_string(allocator->statistics().reserved));
        asked_.ours += static_cast<std::int64_t>(nbytes);
        void* const data = reinterpret_cast<void*>(*address);
        report_new_(reporter_, data, nbytes);
        return {data, new Owned{allocator, *address}, &release};
    }

    // Data and context differ, so that nobody takes the one for the other.
    bool is_simple_data_ptr(const torch_abi::DataPtr&) const override { return false; }
    torch_abi::Deleter raw_deleter() const override { return nullptr; }

    void copy_data(void* to, const void* from, std::size_t nbytes) const override { std::memcpy(to, from, nbytes); }

    const Asked& asked() const { return asked_; }

  private:
    // A block, which keeps its allocator.
    struct Owned {
        std::shared_ptr<LiveAllocator> allocator;
        Address address;
    };

    static constexpr Stream kStream = 0;  // the CPU has done its work when a block is freed

    TorchCpuAllocator()
        : torchs_own_(*torch_abi::symbol<torch_abi::Allocator* (*)()>("_ZN3c1015GetCPUAllocatorEv")()),
          reporter_(torch_abi::symbol<void* (*)()>("_ZN3c1025profiledCPUMemoryReporterEv")()),
          report_new_(torch_abi::symbol<ReportNew>("_ZN3c1025ProfiledCPUMemoryReporter3NewEPvm")),
          report_deleted_(torch_abi::symbol<ReportDeleted>("_ZN3c1025ProfiledCPUMemoryReporter6DeleteEPv")) {
        const auto set = torch_abi::symbol<void (*)(torch_abi::Allocator*, std::uint8_t)>(
            "_ZN3c1015SetCPUAllocatorEPNS_9AllocatorEh");
        // A fork may find locks taken that nobody will give back, and memory that is its parent's to give back.
        pthread_atfork(nullptr, nullptr, [] { forked_ = true; });
        set(this, kPriority);
    }

    static void release(void* context) noexcept {
        if (forked_) return;
        const std::unique_ptr<Owned> owned(static_cast<Owned*>(context));
        try {
            installed().report_deleted_(installed().reporter_, reinterpret_cast<void*>(owned->address));
            owned->allocator->free(owned->address);
        } catch (const std::exception& error) {
            static std::atomic<bool> told{false};
            if (!told.exchange(true)) std::fprintf(stderr, "overspill: a block could not be freed: %s\n", error.what());
        }
    }

    // PyTorch's profiler hears of our blocks as of its own (c10::ProfiledCPUMemoryReporter).
    using ReportNew = void (*)(void*, void*, std::size_t);
    using ReportDeleted = void (*)(void*, void*);

    static constexpr std::uint8_t kPriority = 255;
    inline static bool forked_ = false;

    torch_abi::Allocator& torchs_own_;
    void* reporter_;
    ReportNew report_new_;
    ReportDeleted report_deleted_;
    Asked asked_;
};

}  // namespace overspill::live
