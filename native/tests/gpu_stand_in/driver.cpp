// libcuda.so.1: what PyTorch's expandable segments and its caching allocator ask of the driver.
// Rules of the driver that would go wrong silently otherwise end the process.
#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "card.hpp"

namespace {

using namespace stand_in;

constexpr std::size_t kGranularity = std::size_t{2} << 20;

struct Chunk {
    std::size_t nbytes;
    int device;
    bool released = false;  // its memory lives on while it is mapped
    int maps = 0;
};

std::mutex guard;
std::map<CUdeviceptr, std::size_t> reserved;
std::map<CUdeviceptr, std::pair<std::size_t, int>> mapped;  // size and chunk
std::map<int, Chunk> chunks;

void* raw(CUdeviceptr address) { return reinterpret_cast<void*>(address); }
std::uint64_t number(const void* handle) { return reinterpret_cast<std::uint64_t>(handle); }

// A context is its device's number, off by one: nobody looks into it.
CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(static_cast<std::uintptr_t>(device) + 1); }

void in_context() { require(has_context(), "a call outside of any context"); }

CUresult well() { return is_broken() ? static_cast<CUresult>(700) : CUDA_SUCCESS; }

// `guard` is held.
void drop_unused(int file) {
    const auto chunk = chunks.find(file);
    if (!chunk->second.released || chunk->second.maps > 0) return;
    give_back(chunk->second.device, chunk->second.nbytes);
    chunks.erase(chunk);
    close(file);
}

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

// The runtime has the same numbers. Weak: the driver can be built without it (tests/runtime/live).
__attribute__((weak)) int cudaDeviceGetAttribute(int* value, int attribute, int device);
CUresult CUDAAPI cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
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
    require(nbytes > 0, "cuMemAlloc of nothing");
    void* found = allocate(current_device(), nbytes);
    *address = static_cast<CUdeviceptr>(number(found));
    return found != nullptr ? well() : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult CUDAAPI cuMemFree(CUdeviceptr address) {
    in_context();
    require(stand_in::free(raw(address)), "cuMemFree of what cuMemAlloc did not give");
    return well();
}

CUresult CUDAAPI cuMemHostRegister(void* address, std::size_t nbytes, unsigned) {
    in_context();
    const Registering done = register_host(address, nbytes);
    if (done == Registering::kShared) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    return done == Registering::kRefused ? CUDA_ERROR_NOT_PERMITTED : well();
}

CUresult CUDAAPI cuMemHostUnregister(void* address) {
    in_context();
    return unregister_host(address) ? well() : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

CUresult CUDAAPI cuPointerGetAttribute(void* value, CUpointer_attribute attribute, CUdeviceptr address) {
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) {
        std::memcpy(value, &address, sizeof address);
        return device_of(raw(address)) >= 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    }
    if (attribute != CU_POINTER_ATTRIBUTE_MEMORY_TYPE) return CUDA_ERROR_NOT_SUPPORTED;
    const unsigned type = device_of(raw(address)) >= 0 ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    std::memcpy(value, &type, sizeof type);
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemGetAllocationGranularity(std::size_t* nbytes, const CUmemAllocationProp* properties,
                                               CUmemAllocationGranularity_flags option) {
    require(properties->type == CU_MEM_ALLOCATION_TYPE_PINNED &&
                properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
                option == CU_MEM_ALLOC_GRANULARITY_MINIMUM,
            "properties of a device's memory");
    *nbytes = kGranularity;
    return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr* address, std::size_t nbytes, std::size_t, CUdeviceptr,
                                     unsigned long long flags) {
    const std::lock_guard lock(guard);
    in_context();
    require(nbytes > 0 && nbytes % kGranularity == 0 && flags == 0, "a reservation of whole pages");
    void* start = mmap(nullptr, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    *address = static_cast<CUdeviceptr>(number(start));
    reserved[*address] = nbytes;
    return well();
}

CUresult CUDAAPI cuMemAddressFree(CUdeviceptr address, std::size_t nbytes) {
    const std::lock_guard lock(guard);
    in_context();
    require(reserved.count(address) == 1 && reserved[address] == nbytes, "cuMemAddressFree of a part");
    const auto first = mapped.lower_bound(address);
    require(first == mapped.end() || first->first >= address + nbytes, "cuMemAddressFree of mapped addresses");
    reserved.erase(address);
    return munmap(raw(address), nbytes) == 0 ? well() : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t nbytes,
                             const CUmemAllocationProp* properties, unsigned long long) {
    const std::lock_guard lock(guard);
    in_context();
    require(properties->type == CU_MEM_ALLOCATION_TYPE_PINNED && properties->win32HandleMetaData == nullptr,
            "plain chunks");
    require(nbytes > 0 && nbytes % kGranularity == 0, "a chunk of whole pages");
    const int device = properties->location.id;
    if (!take(device, nbytes)) return CUDA_ERROR_OUT_OF_MEMORY;
    const int file = memfd_create("chunk", 0);
    require(file >= 0 && ftruncate(file, static_cast<off_t>(nbytes)) == 0, "the machine gives no memory for a chunk");
    chunks[file] = {nbytes, device};
    *handle = static_cast<CUmemGenericAllocationHandle>(file);
    return well();
}

CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
    const std::lock_guard lock(guard);
    in_context();
    const int file = static_cast<int>(handle);
    require(chunks.count(file) == 1 && !chunks[file].released, "cuMemRelease of no chunk");
    chunks[file].released = true;
    drop_unused(file);
    return well();
}

CUresult CUDAAPI cuMemMap(CUdeviceptr address, std::size_t nbytes, std::size_t offset,
                          CUmemGenericAllocationHandle handle, unsigned long long) {
    const std::lock_guard lock(guard);
    in_context();
    const int file = static_cast<int>(handle);
    require(chunks.count(file) == 1 && chunks[file].nbytes == nbytes && offset == 0, "cuMemMap of a whole chunk");
    require(mapped.count(address) == 0, "cuMemMap over another chunk");
    mapped[address] = {nbytes, file};
    ++chunks[file].maps;
    map_range(chunks[file].device, address, nbytes);
    void* start = mmap(raw(address), nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file, 0);
    return start == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : well();
}

CUresult CUDAAPI cuMemUnmap(CUdeviceptr address, std::size_t nbytes) {
    const std::lock_guard lock(guard);
    in_context();
    require(mapped.count(address) == 1 && mapped[address].first == nbytes, "cuMemUnmap of what is mapped");
    const int file = mapped[address].second;
    mapped.erase(address);
    unmap_range(address);
    void* start = mmap(raw(address), nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    --chunks[file].maps;
    drop_unused(file);
    return start == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : well();
}

CUresult CUDAAPI cuMemSetAccess(CUdeviceptr address, std::size_t nbytes, const CUmemAccessDesc* access,
                                std::size_t count) {
    in_context();
    require(count == 1 && access->location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
                access->location.id < settings().devices && access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
            "read and write on one device");
    return mprotect(raw(address), nbytes, PROT_READ | PROT_WRITE) == 0 ? well() : CUDA_ERROR_INVALID_VALUE;
}

CUresult CUDAAPI cuMemcpyDtoHAsync(void* target, CUdeviceptr source, std::size_t nbytes, CUstream stream) {
    in_context();
    require(device_of(raw(source)) >= 0, "cuMemcpyDtoHAsync from what is no device's memory");
    copy(target, raw(source), nbytes, number(stream));
    return well();
}

CUresult CUDAAPI cuMemcpyHtoDAsync(CUdeviceptr target, const void* source, std::size_t nbytes, CUstream stream) {
    in_context();
    require(device_of(raw(target)) >= 0, "cuMemcpyHtoDAsync to what is no device's memory");
    copy(raw(target), source, nbytes, number(stream));
    return well();
}

CUresult CUDAAPI cuMemcpyAsync(CUdeviceptr target, CUdeviceptr source, std::size_t nbytes, CUstream stream) {
    in_context();
    copy(raw(target), raw(source), nbytes, number(stream));
    return well();
}

CUresult CUDAAPI cuStreamCreateWithPriority(CUstream* stream, unsigned, int) {
    in_context();
    *stream = reinterpret_cast<CUstream>(make_stream(current_device()));
    return well();
}
CUresult CUDAAPI cuStreamCreate(CUstream* stream, unsigned flags) { return cuStreamCreateWithPriority(stream, flags, 0); }
CUresult CUDAAPI cuStreamDestroy(CUstream) { return CUDA_SUCCESS; }
CUresult CUDAAPI cuStreamQuery(CUstream) { return well(); }

CUresult CUDAAPI cuStreamSynchronize(CUstream stream) {
    in_context();
    synchronise_stream(number(stream));
    return well();
}

CUresult CUDAAPI cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
    in_context();
    stand_in::wait(number(stream), number(event));
    return well();
}

CUresult CUDAAPI cuEventCreate(CUevent* event, unsigned flags) {
    in_context();
    *event = reinterpret_cast<CUevent>(make_event((flags & CU_EVENT_DISABLE_TIMING) == 0));
    return well();
}

CUresult CUDAAPI cuEventRecord(CUevent event, CUstream stream) {
    in_context();
    record(number(event), number(stream));
    return well();
}

CUresult CUDAAPI cuEventQuery(CUevent event) {
    in_context();
    if (is_broken()) return well();
    return passed(number(event)) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult CUDAAPI cuEventSynchronize(CUevent event) {
    in_context();
    synchronise_event(number(event));
    return well();
}

CUresult CUDAAPI cuEventDestroy(CUevent event) {
    in_context();
    require(destroy_event(number(event)), "an event was destroyed that is not there");
    return CUDA_SUCCESS;
}

// What was taken through the driver and not given back.
std::size_t stand_in_leaks() {
    const std::lock_guard lock(guard);
    return live_blocks() + reserved.size() + chunks.size() + live_events();
}
}
