// A CUDA device through the driver, which is loaded when the first one is made: nothing here needs CUDA to build.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <optional>
#include <stdexcept>
#include <string>
#include <unordered_map>

#include "device.hpp"

namespace overspill::live {

// The driver's types and numbers as cuda.h of CUDA 12 has them.
namespace cuda {

using Result = int;
using DevicePointer = unsigned long long;
using Handle = unsigned long long;
using Context = void*;
using DriverEvent = void*;
using DriverStream = void*;

constexpr Result kSuccess = 0;
constexpr Result kOutOfMemory = 2;
constexpr Result kDeinitialized = 4;
constexpr Result kNotReady = 600;
constexpr unsigned kEventDisableTiming = 2;

struct Location {
    int type = 1;  // CU_MEM_LOCATION_TYPE_DEVICE
    int id = 0;
};

struct AllocationProperties {
    int type = 1;  // CU_MEM_ALLOCATION_TYPE_PINNED
    int requested_handle_types = 0;
    Location location;
    void* win32_handle_meta_data = nullptr;
    unsigned char flags[8] = {};
};
static_assert(sizeof(AllocationProperties) == 32);

struct Access {
    Location location;
    int flags = 3;  // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
};

class Driver {
  public:
    Driver() : library_(dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) {
        if (library_ == nullptr) throw std::runtime_error("there is no CUDA driver on this machine (libcuda.so.1)");
        load(init, "cuInit");
        load(device_get, "cuDeviceGet");
        load(primary_context_retain, "cuDevicePrimaryCtxRetain");
        load(context_push, "cuCtxPushCurrent_v2");
        load(context_pop, "cuCtxPopCurrent_v2");
        load(error_name, "cuGetErrorName");
        load(memory_info, "cuMemGetInfo_v2");
        load(memory_alloc, "cuMemAlloc_v2");
        load(memory_free, "cuMemFree_v2");
        load(granularity, "cuMemGetAllocationGranularity");
        load(address_reserve, "cuMemAddressReserve");
        load(address_free, "cuMemAddressFree");
        load(create, "cuMemCreate");
        load(release, "cuMemRelease");
        load(map, "cuMemMap");
        load(unmap, "cuMemUnmap");
        load(set_access, "cuMemSetAccess");
        load(event_create, "cuEventCreate");
        load(event_record, "cuEventRecord");
        load(event_query, "cuEventQuery");
        load(event_synchronize, "cuEventSynchronize");
        load(event_destroy, "cuEventDestroy_v2");
    }

    // A driver that has shut down with the process took all memory with it: there is nothing left to give back.
    void check(Result result, const char* call) const {
        if (result != kSuccess && result != kDeinitialized) fail(result, call);
    }

    [[noreturn]] void fail(Result result, const char* call) const {
        const char* name = nullptr;
        error_name(result, &name);
        throw std::runtime_error(std::string(call) + ": " + (name != nullptr ? name : std::to_string(result)));
    }

    Result (*init)(unsigned);
    Result (*device_get)(int*, int);
    Result (*primary_context_retain)(Context*, int);
    Result (*context_push)(Context);
    Result (*context_pop)(Context*);
    Result (*error_name)(Result, const char**);
    Result (*memory_info)(std::size_t*, std::size_t*);
    Result (*memory_alloc)(DevicePointer*, std::size_t);
    Result (*memory_free)(DevicePointer);
    Result (*granularity)(std::size_t*, const AllocationProperties*, int);
    Result (*address_reserve)(DevicePointer*, std::size_t, std::size_t, DevicePointer, unsigned long long);
    Result (*address_free)(DevicePointer, std::size_t);
    Result (*create)(Handle*, std::size_t, const AllocationProperties*, unsigned long long);
    Result (*release)(Handle);
    Result (*map)(DevicePointer, std::size_t, std::size_t, Handle, unsigned long long);
    Result (*unmap)(DevicePointer, std::size_t);
    Result (*set_access)(DevicePointer, std::size_t, const Access*, std::size_t);
    Result (*event_create)(DriverEvent*, unsigned);
    Result (*event_record)(DriverEvent, DriverStream);
    Result (*event_query)(DriverEvent);
    Result (*event_synchronize)(DriverEvent);
    Result (*event_destroy)(DriverEvent);

  private:
    template <typename Function>
    void load(Function& function, const char* name) {
        function = reinterpret_cast<Function>(dlsym(library_, name));
        if (function == nullptr) throw std::runtime_error(std::string("the CUDA driver has no ") + name);
    }

    void* library_;
};

}  // namespace cuda

class CudaDevice final : public LiveDevice {
  public:
    CudaDevice(int index, std::optional<Bytes> capacity_bytes) : capacity_bytes_(capacity_bytes) {
        driver_.check(driver_.init(0), "cuInit");
        driver_.check(driver_.device_get(&device_, index), "cuDeviceGet");
        // The context that PyTorch uses too; it is kept as long as the process lives.
        driver_.check(driver_.primary_context_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
        properties_.location.id = device_;
        const Current current(*this);
        std::size_t granularity = 0;
        driver_.check(driver_.granularity(&granularity, &properties_, 0), "cuMemGetAllocationGranularity");
        granularity_ = static_cast<Bytes>(granularity);
        if (!capacity_bytes_) {
            std::size_t free_bytes = 0, total_bytes = 0;
            driver_.check(driver_.memory_info(&free_bytes, &total_bytes), "cuMemGetInfo");
            capacity_bytes_ = static_cast<Bytes>(total_bytes);
        }
    }

    std::optional<Address> malloc(Bytes nbytes) override {
        if (used_bytes_ + nbytes > *capacity_bytes_) return std::nullopt;
        const Current current(*this);
        cuda::DevicePointer address = 0;
        if (!had_room(driver_.memory_alloc(&address, static_cast<std::size_t>(nbytes)), "cuMemAlloc"))
            return std::nullopt;
        sizes_.emplace(static_cast<Address>(address), nbytes);
        used_bytes_ += nbytes;
        return static_cast<Address>(address);
    }

    // cuMemFree waits for the device by itself.
    void free(Address address) override {
        const Current current(*this);
        used_bytes_ -= sizes_.extract(address).mapped();
        driver_.check(driver_.memory_free(pointer(address)), "cuMemFree");
    }

    Bytes granularity() const override { return granularity_; }

    std::optional<Address> reserve(Bytes nbytes) override {
        const Current current(*this);
        cuda::DevicePointer address = 0;
        if (!had_room(driver_.address_reserve(&address, size(nbytes), 0, 0, 0), "cuMemAddressReserve"))
            return std::nullopt;
        return static_cast<Address>(address);
    }

    void unreserve(Address address, Bytes nbytes) override {
        const Current current(*this);
        driver_.check(driver_.address_free(pointer(address), size(nbytes)), "cuMemAddressFree");
    }

    std::optional<Chunk> create(Bytes nbytes) override {
        if (used_bytes_ + nbytes > *capacity_bytes_) return std::nullopt;
        const Current current(*this);
        cuda::Handle handle = 0;
        if (!had_room(driver_.create(&handle, size(nbytes), &properties_, 0), "cuMemCreate")) return std::nullopt;
        used_bytes_ += nbytes;
        return static_cast<Chunk>(handle);
    }

    void release(Chunk chunk, Bytes nbytes) override {
        const Current current(*this);
        used_bytes_ -= nbytes;
        driver_.check(driver_.release(static_cast<cuda::Handle>(chunk)), "cuMemRelease");
    }

    void map(Address address, Bytes nbytes, Chunk chunk) override {
        const Current current(*this);
        driver_.check(driver_.map(pointer(address), size(nbytes), 0, static_cast<cuda::Handle>(chunk), 0), "cuMemMap");
    }

    void set_access(Address address, Bytes nbytes) override {
        const Current current(*this);
        const cuda::Access access{properties_.location};
        driver_.check(driver_.set_access(pointer(address), size(nbytes), &access, 1), "cuMemSetAccess");
    }

    void unmap(Address address, Bytes nbytes) override {
        const Current current(*this);
        driver_.check(driver_.unmap(pointer(address), size(nbytes)), "cuMemUnmap");
    }

    Event record(Stream stream) override {
        const Current current(*this);
        cuda::DriverEvent event = nullptr;
        driver_.check(driver_.event_create(&event, cuda::kEventDisableTiming), "cuEventCreate");
        driver_.check(driver_.event_record(event, reinterpret_cast<cuda::DriverStream>(stream)), "cuEventRecord");
        return reinterpret_cast<Event>(event);
    }

    bool passed(Event event) override {
        const Current current(*this);
        const cuda::Result result = driver_.event_query(driver_event(event));
        if (result == cuda::kNotReady) return false;
        driver_.check(result, "cuEventQuery");
        return true;
    }

    void wait(Event event) override {
        const Current current(*this);
        driver_.check(driver_.event_synchronize(driver_event(event)), "cuEventSynchronize");
    }

    void destroy(Event event) override {
        const Current current(*this);
        driver_.check(driver_.event_destroy(driver_event(event)), "cuEventDestroy");
    }

    std::optional<Bytes> capacity_bytes() const override { return capacity_bytes_; }
    void limit(Bytes capacity_bytes) override { capacity_bytes_ = capacity_bytes; }
    Bytes used_bytes() const override { return used_bytes_; }

  private:
    // PyTorch's threads, autograd's above all, need not have the context of the device.
    class Current {
      public:
        explicit Current(const CudaDevice& device) : driver_(device.driver_) {
            driver_.check(driver_.context_push(device.context_), "cuCtxPushCurrent");
        }
        ~Current() {
            cuda::Context popped = nullptr;
            driver_.context_pop(&popped);
        }
        Current(const Current&) = delete;
        Current& operator=(const Current&) = delete;

      private:
        const cuda::Driver& driver_;
    };

    static cuda::DevicePointer pointer(Address address) { return static_cast<cuda::DevicePointer>(address); }
    static std::size_t size(Bytes nbytes) { return static_cast<std::size_t>(nbytes); }
    static cuda::DriverEvent driver_event(Event event) { return reinterpret_cast<cuda::DriverEvent>(event); }

    bool had_room(cuda::Result result, const char* call) const {
        if (result == cuda::kOutOfMemory) return false;
        if (result != cuda::kSuccess) driver_.fail(result, call);
        return true;
    }

    cuda::Driver driver_;
    int device_ = 0;
    cuda::Context context_ = nullptr;
    cuda::AllocationProperties properties_;
    Bytes granularity_ = 0;
    std::optional<Bytes> capacity_bytes_;
    Bytes used_bytes_ = 0;
    std::unordered_map<Address, Bytes> sizes_;
};

}  // namespace overspill::live
