// The CUDA driver, as the process finds it: nothing here needs CUDA to build. Names and numbers are those of cuda.h.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace overspill::live {

using Result = int;
using DevicePointer = unsigned long long;
using MemoryHandle = unsigned long long;
using Context = void*;
using Event = void*;
using Stream = void*;

constexpr Result kSuccess = 0, kOutOfMemory = 2, kDeinitialized = 4, kNotReady = 600;
constexpr int kHasVirtualMemory = 102;  // CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
constexpr unsigned kNoTiming = 2;       // CU_EVENT_DISABLE_TIMING

struct MemoryLocation {
    int type = 1;  // CU_MEM_LOCATION_TYPE_DEVICE
    int device = 0;
};
struct MemoryProperties {  // CUmemAllocationProp
    int type = 1;          // CU_MEM_ALLOCATION_TYPE_PINNED
    int handle_types = 0;
    MemoryLocation location;
    void* windows = nullptr;
    struct {
        unsigned char compression = 0, direct = 0;
        unsigned short usage = 0;
        unsigned char reserved[4] = {};
    } flags;
};
struct MemoryAccess {  // CUmemAccessDesc
    MemoryLocation location;
    int flags = 3;  // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
};

class Driver {
  public:
    // Raises where the process has no driver, or one without a function of the first block.
    Driver() {
        library_ = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        if (library_ == nullptr) throw std::runtime_error("there is no CUDA driver: libcuda.so.1 does not load");
        load(init, "cuInit");
        load(device_get, "cuDeviceGet");
        load(device_attribute, "cuDeviceGetAttribute");
        load(device_memory, "cuDeviceTotalMem_v2");
        load(context_retain, "cuDevicePrimaryCtxRetain");
        load(context_push, "cuCtxPushCurrent_v2");
        load(context_pop, "cuCtxPopCurrent_v2");
        load(synchronize, "cuCtxSynchronize");
        load(memory_info, "cuMemGetInfo_v2");
        load(memory_alloc, "cuMemAlloc_v2");
        load(memory_free, "cuMemFree_v2");
        load(event_create, "cuEventCreate");
        load(event_record, "cuEventRecord");
        load(event_query, "cuEventQuery");
        load(event_destroy, "cuEventDestroy_v2");
        load(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
        load(error_name, "cuGetErrorName");
        // Virtual memory, which old drivers do not have.
        find(granularity, "cuMemGetAllocationGranularity");
        find(address_reserve, "cuMemAddressReserve");
        find(address_free, "cuMemAddressFree");
        find(memory_create, "cuMemCreate");
        find(memory_release, "cuMemRelease");
        find(memory_map, "cuMemMap");
        find(memory_unmap, "cuMemUnmap");
        find(set_access, "cuMemSetAccess");
        check(init(0), "cuInit");
    }
    Driver(const Driver&) = delete;
    Driver& operator=(const Driver&) = delete;

    bool has_virtual_memory(int device) const {
        int supported = 0;
        if (!granularity || !address_reserve || !address_free || !memory_create || !memory_release || !memory_map ||
            !memory_unmap || !set_access)
            return false;
        return device_attribute(&supported, kHasVirtualMemory, handle_of(device)) == kSuccess && supported != 0;
    }

    int handle_of(int device) const {
        int found = 0;
        check(device_get(&found, device), "cuDeviceGet");
        return found;
    }

    void check(Result result, const char* call) const {
        if (result != kSuccess) throw std::runtime_error(std::string(call) + " failed: " + name_of(result));
    }

    std::string name_of(Result result) const {
        const char* name = nullptr;
        return error_name(result, &name) == kSuccess && name != nullptr ? name : std::to_string(result);
    }

    Result (*init)(unsigned);
    Result (*device_get)(int*, int);
    Result (*device_attribute)(int*, int, int);
    Result (*device_memory)(std::size_t*, int);
    Result (*context_retain)(Context*, int);
    Result (*context_push)(Context);
    Result (*context_pop)(Context*);
    Result (*synchronize)();
    Result (*memory_info)(std::size_t*, std::size_t*);
    Result (*memory_alloc)(DevicePointer*, std::size_t);
    Result (*memory_free)(DevicePointer);
    Result (*event_create)(Event*, unsigned);
    Result (*event_record)(Event, Stream);
    Result (*event_query)(Event);
    Result (*event_destroy)(Event);
    Result (*exchange_capture_mode)(int*);
    Result (*error_name)(Result, const char**);
    Result (*granularity)(std::size_t*, const MemoryProperties*, int);
    Result (*address_reserve)(DevicePointer*, std::size_t, std::size_t, DevicePointer, unsigned long long);
    Result (*address_free)(DevicePointer, std::size_t);
    Result (*memory_create)(MemoryHandle*, std::size_t, const MemoryProperties*, unsigned long long);
    Result (*memory_release)(MemoryHandle);
    Result (*memory_map)(DevicePointer, std::size_t, std::size_t, MemoryHandle, unsigned long long);
    Result (*memory_unmap)(DevicePointer, std::size_t);
    Result (*set_access)(DevicePointer, std::size_t, const MemoryAccess*, std::size_t);

  private:
    template <typename Function>
    void find(Function& function, const char* name) const {
        function = reinterpret_cast<Function>(dlsym(library_, name));
    }
    template <typename Function>
    void load(Function& function, const char* name) const {
        find(function, name);
        if (function == nullptr) throw std::runtime_error(std::string("the CUDA driver has no ") + name);
    }

    void* library_;
};

// While it lives this thread may map memory although a graph is captured.
class BesideCapture {
  public:
    explicit BesideCapture(const Driver& driver) : driver_(driver) { driver_.exchange_capture_mode(&mode_); }
    ~BesideCapture() { driver_.exchange_capture_mode(&mode_); }
    BesideCapture(const BesideCapture&) = delete;
    BesideCapture& operator=(const BesideCapture&) = delete;

  private:
    const Driver& driver_;
    int mode_ = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED
};

// While it lives a device's primary context is this thread's.
class InContext {
  public:
    InContext(const Driver& driver, Context context) : driver_(driver) {
        driver_.check(driver_.context_push(context), "cuCtxPushCurrent");
    }
    ~InContext() {
        Context before = nullptr;
        driver_.context_pop(&before);
    }
    InContext(const InContext&) = delete;
    InContext& operator=(const InContext&) = delete;

  private:
    const Driver& driver_;
};

}  // namespace overspill::live
