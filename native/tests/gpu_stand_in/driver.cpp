// libcuda.so.1: what PyTorch asks of the driver about devices and contexts; the runtime has the rest.
#if __has_include(<cuda.h>)
#include <cuda.h>

#include "../../live/driver.hpp"
static_assert(sizeof(overspill::live::MemoryProperties) == sizeof(CUmemAllocationProp));
static_assert(offsetof(overspill::live::MemoryProperties, location) == offsetof(CUmemAllocationProp, location));
static_assert(sizeof(overspill::live::MemoryAccess) == sizeof(CUmemAccessDesc));
static_assert(overspill::live::kHasVirtualMemory == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
#else
#include "cuda_types.hpp"
#endif

#include <cstdint>
#include <cstdio>
#include <utility>

#include "card.hpp"

namespace {

using namespace stand_in;

std::uint64_t number(const void* handle) { return reinterpret_cast<std::uint64_t>(handle); }

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)); }

// A context is its device's number, off by one: nobody looks into it.
CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(static_cast<std::uintptr_t>(device) + 1); }

// A real driver refuses, and what was captured is lost.
void outside_of_captures() { require(!is_capturing(), "the host asks for the end of work while a graph is captured"); }

void in_context() { require(has_context(), "a call outside of any context"); }

CUresult well() { return is_broken() ? static_cast<CUresult>(700) : CUDA_SUCCESS; }

}  // namespace

extern "C" {

CUresult CUDAAPI cuInit(unsigned flags) { return flags == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }

CUresult CUDAAPI cuDriverGetVersion(int* version) {
    *version = 13000;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetCount(int* count) {
    *count = settings().devices;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGet(CUdevice* device, int ordinal) {
    *device = ordinal;
    return ordinal >= 0 && ordinal < settings().devices ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult CUDAAPI cuDeviceGetName(char* name, int length, CUdevice) {
    std::snprintf(name, static_cast<std::size_t>(length), "%s", settings().name.c_str());
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceTotalMem(std::size_t* nbytes, CUdevice) {
    *nbytes = settings().card_bytes;
    return CUDA_SUCCESS;
}

// The runtime has the same numbers.
__attribute__((weak)) int cudaDeviceGetAttribute(int* value, int attribute, int device);
CUresult CUDAAPI cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
    if (attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) {
        *value = settings().has_virtual_memory;
        return CUDA_SUCCESS;
    }
    return static_cast<CUresult>(cudaDeviceGetAttribute(value, static_cast<int>(attribute), device));
}

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    *context = context_of(device);
    return CUDA_SUCCESS;
}
CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }

CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxPushCurrent(CUcontext context) {
    const auto device = static_cast<int>(number(context)) - 1;
    require(device >= 0 && device < settings().devices, "a context that is not there");
    push_context(device);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxPopCurrent(CUcontext* context) {
    const int device = pop_context();
    require(device >= 0, "a context was popped that nobody pushed");
    *context = context_of(device);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetCurrent(CUcontext* context) {
    *context = has_context() ? context_of(current_device()) : nullptr;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSetCurrent(CUcontext context) {
    if (context != nullptr) set_device(static_cast<int>(number(context)) - 1);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetDevice(CUdevice* device) {
    *device = current_device();
    return has_context() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult CUDAAPI cuCtxSynchronize() {
    in_context();
    outside_of_captures();
    synchronise_device(current_device());
    return well();
}

CUresult CUDAAPI cuGetErrorName(CUresult error, const char** name) {
    *name = error == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OF_THE_STAND_IN";
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGetErrorString(CUresult error, const char** text) {
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "an error of the stand-in GPU";
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemGetInfo(std::size_t* free_bytes, std::size_t* total) {
    in_context();
    *total = settings().card_bytes;
    *free_bytes = *total - used_bytes(current_device());
    return well();
}

CUresult CUDAAPI cuMemAlloc(CUdeviceptr* address, std::size_t nbytes) {
    in_context();
    *address = number(allocate(current_device(), nbytes));
    return *address != 0 ? well() : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult CUDAAPI cuMemFree(CUdeviceptr address) {
    synchronise_device(current_device());
    return stand_in::free(pointer(address)) ? well() : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuMemGetAllocationGranularity(std::size_t* nbytes, const CUmemAllocationProp*,
                                               CUmemAllocationGranularity_flags) {
    *nbytes = std::size_t{2} << 20;
    return well();
}
CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr* address, std::size_t nbytes, std::size_t, CUdeviceptr,
                                     unsigned long long) {
    *address = number(reserve_addresses(nbytes));
    return *address != 0 ? well() : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult CUDAAPI cuMemAddressFree(CUdeviceptr address, std::size_t nbytes) {
    return release_addresses(pointer(address), nbytes) ? well() : CUDA_ERROR_INVALID_VALUE;
}
CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle* memory, std::size_t nbytes,
                             const CUmemAllocationProp* properties, unsigned long long) {
    *memory = create_memory(properties->location.id, nbytes);
    return *memory != 0 ? well() : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle memory) {
    return release_memory(memory) ? well() : CUDA_ERROR_INVALID_VALUE;
}
CUresult CUDAAPI cuMemMap(CUdeviceptr address, std::size_t nbytes, std::size_t offset,
                          CUmemGenericAllocationHandle memory, unsigned long long) {
    return offset == 0 && map_memory(pointer(address), nbytes, memory) ? well() : CUDA_ERROR_INVALID_VALUE;
}
CUresult CUDAAPI cuMemUnmap(CUdeviceptr address, std::size_t nbytes) {
    return unmap_memory(pointer(address), nbytes) ? well() : CUDA_ERROR_INVALID_VALUE;
}
CUresult CUDAAPI cuMemSetAccess(CUdeviceptr address, std::size_t nbytes, const CUmemAccessDesc*, std::size_t count) {
    return count == 1 && allow_access(pointer(address), nbytes) ? well() : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuEventCreate(CUevent* event, unsigned) {
    in_context();
    *event = reinterpret_cast<CUevent>(make_event());
    return well();
}
CUresult CUDAAPI cuEventRecord(CUevent event, CUstream stream) {
    in_context();
    record(number(event), number(stream));
    return well();
}
CUresult CUDAAPI cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
    thread_local CUstreamCaptureMode here{};
    std::swap(here, *mode);
    return well();
}
CUresult CUDAAPI cuEventQuery(CUevent event) {
    outside_of_captures();
    return ask(number(event)) ? well() : CUDA_ERROR_NOT_READY;
}
CUresult CUDAAPI cuEventDestroy(CUevent event) {
    return destroy_event(number(event)) ? well() : CUDA_ERROR_INVALID_VALUE;
}
}
