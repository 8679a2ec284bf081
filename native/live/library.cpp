// The shared library that PyTorch takes as its allocator (torch.cuda.memory.CUDAPluggableAllocator): a C interface.
#include <cxxabi.h>
#include <dlfcn.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <typeinfo>
#include <utility>

#include "service.hpp"

namespace {

using overspill::live::Driver;
using overspill::live::OutOfMemoryError;
using overspill::live::Service;
using overspill::live::Stream;

constexpr int kMostDevices = 64;

struct Settings {
    std::string allocator = "planned";
    bool checks = false;
};
Settings settings;
thread_local std::string last_error;

// Never destroyed: blocks are given back until the process ends.
struct Services {
    std::mutex mutex;
    std::unique_ptr<Driver> driver;
    std::array<std::atomic<Service*>, kMostDevices> of{};
};
Services& services() {
    static auto* found = new Services;
    return *found;
}

Service* existing(int device) {
    return device >= 0 && device < kMostDevices ? services().of[static_cast<std::size_t>(device)].load() : nullptr;
}

// `lock` is that of the services.
const Driver& driver(const std::lock_guard<std::mutex>&) {
    auto& found = services().driver;
    if (found == nullptr) found = std::make_unique<Driver>();
    return *found;
}

Service& service(int device) {
    if (Service* found = existing(device)) return *found;
    if (device < 0 || device >= kMostDevices) throw std::runtime_error("there is no GPU " + std::to_string(device));
    Services& all = services();
    const std::lock_guard lock(all.mutex);
    auto& at = all.of[static_cast<std::size_t>(device)];
    if (at == nullptr) at = new Service(driver(lock), device, settings.allocator, settings.checks);
    return *at.load();
}

template <typename Do>
void for_all(const Do& what) {
    for (int device = 0; device < kMostDevices; ++device)
        if (Service* found = existing(device)) what(*found);
}

// Whether it went well; otherwise `overspill_error` has the reason.
template <typename Do>
bool attempt(const Do& what) {
    try {
        what();
        return true;
    } catch (const std::exception& error) {
        last_error = error.what();
    }
    return false;
}

// torch.OutOfMemoryError, where this process has it: its constructor and type are in libc10, to which nothing here links.
[[noreturn]] void raise_out_of_memory(const std::string& text) {
    struct SourceLocation {
        const char *function, *file;
        std::uint32_t line;
    };
    using Construct = void (*)(void*, SourceLocation, std::string);
    if (void* torch = dlopen("libc10.so", RTLD_NOW | RTLD_NOLOAD)) {
        const auto construct = reinterpret_cast<Construct>(dlsym(
            torch, "_ZN3c1016OutOfMemoryErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"));
        auto* type = static_cast<std::type_info*>(dlsym(torch, "_ZTIN3c1016OutOfMemoryErrorE"));
        if (construct != nullptr && type != nullptr) {
            constexpr std::size_t kRoom = 1024;  // several times what it takes
            void* error = abi::__cxa_allocate_exception(kRoom);
            construct(error, SourceLocation{"overspill_malloc", "native/live/library.cpp", 0}, text);
            abi::__cxa_throw(error, type, [](void* thrown) { static_cast<std::exception*>(thrown)->~exception(); });
        }
    }
    throw OutOfMemoryError(text);
}

}  // namespace

#define OVERSPILL_API __attribute__((visibility("default")))

extern "C" {

// --- What PyTorch calls; errors are C++ exceptions.

OVERSPILL_API void* overspill_malloc(std::size_t nbytes, int device, Stream stream) {
    try {
        return service(device).take(static_cast<overspill::Bytes>(nbytes), stream);
    } catch (const OutOfMemoryError& error) {
        last_error = error.what();
    }
    raise_out_of_memory(last_error);
}

// Destructors call this: an error is told once, and the block's bytes are never used again.
OVERSPILL_API void overspill_free(void* pointer, std::size_t, int device, Stream) {
    static std::atomic<bool> told{false};
    const bool well = attempt([&] {
        Service* found = existing(device);
        if (found == nullptr || !found->give(pointer)) throw std::runtime_error("a block was freed that is not there");
    });
    if (!well && !told.exchange(true)) std::fprintf(stderr, "overspill: %s\n", last_error.c_str());
}

OVERSPILL_API void overspill_record_stream(void* pointer, Stream stream) {
    for_all([&](Service& found) { found.uses(pointer, stream); });
}

OVERSPILL_API void* overspill_base_allocation(void* pointer, std::size_t* nbytes) {
    void* base = nullptr;
    for_all([&](Service& found) {
        if (base == nullptr) base = found.base_of(pointer, nbytes);
    });
    return base;
}

OVERSPILL_API void overspill_empty_cache() {
    for_all([](Service& found) { found.empty_cache(); });
}

OVERSPILL_API void overspill_set_fraction(double fraction, int device) { service(device).set_fraction(fraction); }

// --- What Overspill calls; errors are 0 or null, and overspill_error() says why.

OVERSPILL_API const char* overspill_error() { return last_error.c_str(); }

OVERSPILL_API void overspill_configure(const char* allocator, int checks) { settings = {allocator, checks != 0}; }

// 1: the driver has virtual memory, 0: it has none, -1: an error. It makes no context on the GPU.
OVERSPILL_API int overspill_has_virtual_memory(int device) {
    int found = 0;
    return attempt([&] {
        const std::lock_guard lock(services().mutex);
        found = driver(lock).has_virtual_memory(device);
    })
               ? found
               : -1;
}

OVERSPILL_API void* overspill_take(std::size_t nbytes, int device, Stream stream) {
    void* found = nullptr;
    attempt([&] { found = service(device).take(static_cast<overspill::Bytes>(nbytes), stream); });
    return found;
}

OVERSPILL_API int overspill_give(void* pointer, int device) {
    return attempt([&] {
        if (!service(device).give(pointer)) throw std::runtime_error("a block was freed that is not there");
    });
}

OVERSPILL_API void overspill_step() {
    for_all([](Service& found) { found.end_step(); });
}

OVERSPILL_API void overspill_wait() {
    for_all([](Service& found) { found.wait_for_plans(); });
}

// The number of figures; they are zero for a GPU that was not used.
OVERSPILL_API int overspill_figures(int device, std::int64_t* into) {
    if (Service* found = existing(device)) {
        found->figures(into);
    } else {
        std::fill_n(into, Service::kFigures, 0);
    }
    return Service::kFigures;
}

OVERSPILL_API void overspill_reset_peaks(int device) {
    if (Service* found = existing(device)) found->reset_peaks();
}
}

// --- What PyTorch calls around the capture of a graph, by the addresses that overspill_pool_function gives. Their types
// are C++'s; those of PyTorch have the same layout.

static void begin_capture(int device, overspill::live::PoolId pool, overspill::live::InCapture in_capture) {
    service(device).begin_capture(pool, std::move(in_capture));
}

static void end_capture(int device, overspill::live::PoolId pool) { service(device).end_capture(pool); }

// Destructors call this too.
static void release_pool(int device, overspill::live::PoolId pool) {
    if (!attempt([&] { service(device).release_pool(pool); })) std::fprintf(stderr, "overspill: %s\n", last_error.c_str());
}

extern "C" OVERSPILL_API void* overspill_pool_function(int which) {
    const std::array<void*, 3> functions{reinterpret_cast<void*>(&begin_capture), reinterpret_cast<void*>(&end_capture),
                                         reinterpret_cast<void*>(&release_pool)};
    return functions.at(static_cast<std::size_t>(which));
}
