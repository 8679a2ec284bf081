// A stand-in for libcuda.so.1 over host memory, with the signatures of cuda.h: it tries the driver path without a GPU.
// Rules of the driver that would go wrong silently otherwise end the process.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>

namespace {

using Pointer = unsigned long long;
constexpr std::size_t kGranularity = std::size_t{2} << 20;
constexpr std::size_t kTotal = std::size_t{256} << 20;

struct Location {
    int type, id;
};
struct Properties {
    int type, handle_types;
    Location location;
    void* win32;
    unsigned char flags[8];
};
struct Access {
    Location location;
    int flags;
};

std::recursive_mutex guard;
std::size_t used = 0;
std::map<Pointer, std::size_t> plain;
std::map<Pointer, std::size_t> reserved;
std::map<Pointer, std::pair<std::size_t, int>> mapped;  // size and handle
std::map<int, std::size_t> handles;
int events = 0;
int waits = 0;
thread_local int pushed = 0;

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "fake driver: %s\n", what);
    std::abort();
}

void* raw(Pointer address) { return reinterpret_cast<void*>(address); }

void in_context() { require(pushed == 1, "a call outside of the context"); }

}  // namespace

static bool broken = false;

extern "C" {

int cuInit(unsigned flags) { return flags == 0 ? 0 : 1; }
int cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return ordinal == 0 ? 0 : 101;
}
int cuDevicePrimaryCtxRetain(void** context, int) {
    *context = &guard;
    return 0;
}
int cuCtxPushCurrent_v2(void* context) {
    require(context == &guard, "another context");
    ++pushed;
    return 0;
}
int cuCtxPopCurrent_v2(void** context) {
    *context = &guard;
    --pushed;
    return 0;
}
int cuGetErrorName(int, const char** name) {
    *name = "CUDA_ERROR_OF_THE_STAND_IN";
    return 0;
}
int cuMemGetInfo_v2(std::size_t* free_bytes, std::size_t* total) {
    in_context();
    *free_bytes = kTotal - used;
    *total = kTotal;
    return 0;
}
int cuMemAlloc_v2(Pointer* address, std::size_t nbytes) {
    const std::lock_guard lock(guard);
    in_context();
    require(nbytes > 0, "cuMemAlloc of nothing");
    if (used + nbytes > kTotal) return 2;
    *address = reinterpret_cast<Pointer>(std::aligned_alloc(512, (nbytes + 511) / 512 * 512));
    plain[*address] = nbytes;
    used += nbytes;
    return 0;
}
int cuMemFree_v2(Pointer address) {
    const std::lock_guard lock(guard);
    in_context();
    require(plain.count(address) == 1, "cuMemFree of what cuMemAlloc did not give");
    used -= plain[address];
    plain.erase(address);
    std::free(raw(address));
    return 0;
}
int cuMemGetAllocationGranularity(std::size_t* nbytes, const Properties* properties, int option) {
    require(properties->type == 1 && properties->location.type == 1 && option == 0, "properties of a device's memory");
    *nbytes = kGranularity;
    return 0;
}
int cuMemAddressReserve(Pointer* address, std::size_t nbytes, std::size_t, Pointer, unsigned long long flags) {
    const std::lock_guard lock(guard);
    in_context();
    require(nbytes > 0 && nbytes % kGranularity == 0 && flags == 0, "a reservation of whole pages");
    void* start = mmap(nullptr, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *address = reinterpret_cast<Pointer>(start);
    reserved[*address] = nbytes;
    return 0;
}
int cuMemAddressFree(Pointer address, std::size_t nbytes) {
    const std::lock_guard lock(guard);
    in_context();
    require(reserved.count(address) == 1 && reserved[address] == nbytes, "cuMemAddressFree of a part");
    const auto first = mapped.lower_bound(address);
    require(first == mapped.end() || first->first >= address + nbytes, "cuMemAddressFree of mapped addresses");
    reserved.erase(address);
    return munmap(raw(address), nbytes) == 0 ? 0 : 1;
}
int cuMemCreate(unsigned long long* handle, std::size_t nbytes, const Properties* properties, unsigned long long) {
    const std::lock_guard lock(guard);
    in_context();
    require(properties->type == 1 && properties->handle_types == 0 && properties->win32 == nullptr, "plain chunks");
    require(nbytes > 0 && nbytes % kGranularity == 0, "a chunk of whole pages");
    if (used + nbytes > kTotal) return 2;
    const int file = memfd_create("chunk", 0);
    if (ftruncate(file, static_cast<off_t>(nbytes)) != 0) return 1;
    handles[file] = nbytes;
    used += nbytes;
    *handle = static_cast<unsigned long long>(file);
    return 0;
}
int cuMemRelease(unsigned long long handle) {
    const std::lock_guard lock(guard);
    in_context();
    const int file = static_cast<int>(handle);
    require(handles.count(file) == 1, "cuMemRelease of no chunk");
    for (const auto& entry : mapped) require(entry.second.second != file, "cuMemRelease of a mapped chunk");
    used -= handles[file];
    handles.erase(file);
    return close(file);
}
int cuMemMap(Pointer address, std::size_t nbytes, std::size_t offset, unsigned long long handle, unsigned long long) {
    const std::lock_guard lock(guard);
    in_context();
    const int file = static_cast<int>(handle);
    require(handles.count(file) == 1 && handles[file] == nbytes && offset == 0, "cuMemMap of a whole chunk");
    require(mapped.count(address) == 0, "cuMemMap over another chunk");
    mapped[address] = {nbytes, file};
    return mmap(raw(address), nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file, 0) == MAP_FAILED ? 1 : 0;
}
int cuMemUnmap(Pointer address, std::size_t nbytes) {
    const std::lock_guard lock(guard);
    in_context();
    require(mapped.count(address) == 1 && mapped[address].first == nbytes, "cuMemUnmap of what is mapped");
    mapped.erase(address);
    void* start = mmap(raw(address), nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    return start == MAP_FAILED ? 1 : 0;
}
int cuMemSetAccess(Pointer address, std::size_t nbytes, const Access* access, std::size_t count) {
    in_context();
    const Location at = access->location;
    require(count == 1 && at.type == 1 && at.id == 0 && access->flags == 3, "read and write on device 0");
    return mprotect(raw(address), nbytes, PROT_READ | PROT_WRITE) == 0 ? 0 : 1;
}
int cuEventCreate(void** event, unsigned flags) {
    in_context();
    require(flags == 2, "events without times");
    *event = new int(2);
    ++events;
    return 0;
}
int cuEventRecord(void*, void*) {
    in_context();
    return broken ? 700 : 0;
}
int cuEventQuery(void* event) {  // it passes at the third look
    in_context();
    return (*static_cast<int*>(event))-- > 0 ? 600 : 0;
}
int cuEventSynchronize(void* event) {
    in_context();
    *static_cast<int*>(event) = 0;
    ++waits;
    return 0;
}
int cuEventDestroy_v2(void* event) {
    in_context();
    delete static_cast<int*>(event);
    --events;
    return 0;
}

// For the test: what was taken and not given back, and how often somebody waited for an event.
int fake_leaks() {
    return static_cast<int>(plain.size() + reserved.size() + mapped.size() + handles.size()) + events;
}
int fake_waits() { return waits; }
void fake_break() { broken = true; }  // as a kernel does that reads an address which is not there
}
