// PyTorch's own error of a GPU that is full, thrown by who is not built with PyTorch.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <typeinfo>

extern "C" {
void* __cxa_allocate_exception(std::size_t) noexcept;
void __cxa_free_exception(void*) noexcept;
[[noreturn]] void __cxa_throw(void*, void* type, void (*)(void*));  // declared as GCC does by itself
}

namespace overspill::live {

// c10/util/Exception.h of 2.11 to 2.13: OutOfMemoryError is Error, which begins with std::exception, and adds nothing.
class TorchOutOfMemory {
  public:
    static const TorchOutOfMemory& get() {
        static const TorchOutOfMemory found;
        return found;
    }

    // Whoever calls an allocator recognises it: `torch.OutOfMemoryError` in Python, and cuDNN's callers, which then try
    // an engine with a smaller workspace. Without PyTorch std::bad_alloc.
    [[noreturn]] void raise(const std::string& message) const {
        if (make_ == nullptr || vtable_ == nullptr || type_ == nullptr) throw std::bad_alloc();
        void* error = __cxa_allocate_exception(kRoomBytes);
        try {
            make_(error, {"overspill_malloc", "overspill", 0}, message);
        } catch (...) {
            __cxa_free_exception(error);
            throw;
        }
        void* const functions = vtable_ + 2;  // behind the offset and the type
        std::memcpy(error, &functions, sizeof functions);
        __cxa_throw(error, type_, [](void* thrown) { static_cast<std::exception*>(thrown)->~exception(); });
    }

  private:
    struct SourceLocation {  // c10::SourceLocation
        const char* function;
        const char* file;
        std::uint32_t line;
    };
    using Make = void (*)(void* error, SourceLocation, std::string);

    static constexpr std::size_t kRoomBytes = 1024;  // for an Error, which has about 200

    TorchOutOfMemory() {
        make_ = reinterpret_cast<Make>(symbol(
            "_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"));
        vtable_ = static_cast<void**>(symbol("_ZTVN3c1016OutOfMemoryErrorE"));
        type_ = static_cast<std::type_info*>(symbol("_ZTIN3c1016OutOfMemoryErrorE"));
    }

    // Of a library of PyTorch's that is loaded; which of them has it depends on the release.
    static void* symbol(const char* name) {
        for (const char* library : {"libc10.so", "libc10_cuda.so", "libtorch_python.so"}) {
            void* loaded = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
            if (loaded == nullptr) continue;
            void* found = dlsym(loaded, name);
            dlclose(loaded);  // the process keeps it
            if (found != nullptr) return found;
        }
        return nullptr;
    }

    Make make_ = nullptr;
    void** vtable_ = nullptr;
    std::type_info* type_ = nullptr;
};

}  // namespace overspill::live
