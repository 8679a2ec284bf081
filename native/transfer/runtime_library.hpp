// The runtime library of an accelerator, as the process has loaded it already: nothing here needs CUDA to build.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <stdexcept>
#include <string>

namespace overspill::transfer {

using Status = int;
using RawEvent = void*;
using RawStream = void*;

constexpr Status kSuccess = 0;
constexpr unsigned kDisableTiming = 2;
enum class Direction : int { kToDevice = 1, kToHost = 2 };  // cudaMemcpyKind, hipMemcpyKind

// The functions that copies take, by the names that CUDA ("cuda") and ROCm ("hip") give them: they differ in the prefix.
class RuntimeLibrary {
  public:
    // Of the library at `path`; if that is empty, of whatever library with such functions PyTorch has been linked to.
    RuntimeLibrary(const std::string& path, const std::string& prefix) : prefix_(prefix) {
        void* library = RTLD_DEFAULT;
        if (!path.empty())
            library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        else if (dlsym(RTLD_DEFAULT, (prefix + "MemcpyAsync").c_str()) == nullptr)
            library = dlopen(("libc10_" + prefix + ".so").c_str(), RTLD_NOW | RTLD_NOLOAD);  // and what it depends on
        if (!path.empty() && library == nullptr) throw std::runtime_error("there is no library " + path);
        if (path.empty() && library == nullptr) library = RTLD_DEFAULT;
        load(library, get_device, "GetDevice");
        load(library, set_device, "SetDevice");
        load(library, event_create, "EventCreateWithFlags");
        load(library, event_record, "EventRecord");
        load(library, event_destroy, "EventDestroy");
        load(library, stream_wait_event, "StreamWaitEvent");
        load(library, memcpy_async, "MemcpyAsync");
        load(library, error_name, "GetErrorName");
        load(library, last_error, "GetLastError");
    }

    // Raises what went wrong, which is then the device's last error no more.
    void check(Status status, const char* call) const {
        if (status == kSuccess) return;
        last_error();
        const char* name = error_name(status);
        throw std::runtime_error(prefix_ + call + ": " + (name != nullptr ? name : std::to_string(status)));
    }

    Status (*get_device)(int*);
    Status (*set_device)(int);
    Status (*event_create)(RawEvent*, unsigned);
    Status (*event_record)(RawEvent, RawStream);
    Status (*event_destroy)(RawEvent);
    Status (*stream_wait_event)(RawStream, RawEvent, unsigned);
    Status (*memcpy_async)(void*, const void*, std::size_t, int, RawStream);
    const char* (*error_name)(Status);
    Status (*last_error)();

  private:
    template <typename Function>
    void load(void* library, Function& function, const char* name) const {
        function = reinterpret_cast<Function>(dlsym(library, (prefix_ + name).c_str()));
        if (function == nullptr) throw std::runtime_error("no library of this process has " + prefix_ + name);
    }

    std::string prefix_;
};

// While it lives the device is the current one of this thread: event 0 and the default stream are the current device's.
class OnDevice {
  public:
    OnDevice(const RuntimeLibrary& library, int device) : library_(library), device_(device) {
        library_.check(library_.get_device(&before_), "GetDevice");
        if (before_ != device_) library_.check(library_.set_device(device_), "SetDevice");
    }
    ~OnDevice() {
        if (before_ != device_) library_.set_device(before_);
    }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

  private:
    const RuntimeLibrary& library_;
    int device_, before_ = 0;
};

}  // namespace overspill::transfer
