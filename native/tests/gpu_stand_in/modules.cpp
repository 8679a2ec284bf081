// What Triton and PyTorch's launcher of its kernels ask of the driver: modules are loaded, and their kernels do nothing.
// Their arguments are hardly looked at, so that no header is needed here.
#include <cstddef>
#include <cstdint>

#include "card.hpp"

namespace {

constexpr int kMaxThreadsPerBlock = 0;  // CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK

// The first fields of CUlaunchConfig.
struct LaunchConfig {
    unsigned grid[3], block[3], shared_bytes;
    void* stream;
};

int launched(const void* stream) {
    stand_in::launch(reinterpret_cast<std::uint64_t>(stream));
    return stand_in::is_broken() ? 700 : 0;
}

int loaded(void** made) {
    static int something;
    *made = &something;
    return 0;
}

}  // namespace

extern "C" {

int cuModuleLoad(void** module, const char*) { return loaded(module); }
int cuModuleLoadData(void** module, const void*) { return loaded(module); }
int cuModuleUnload(void*) { return 0; }
int cuModuleGetFunction(void** function, void*, const char*) { return loaded(function); }
int cuFuncGetAttribute(int* value, int attribute, void*) {
    *value = attribute == kMaxThreadsPerBlock ? 1024 : 0;
    return 0;
}
int cuFuncSetAttribute(void*, int, int) { return 0; }
int cuFuncSetCacheConfig(void*, int) { return 0; }
int cuCtxGetLimit(std::size_t* value, int) {
    *value = 0;
    return 0;
}
int cuCtxSetLimit(int, std::size_t) { return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int, std::size_t) {
    *blocks = 1;
    return 0;
}
int cuLaunchKernel(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void* stream, void**, void**) {
    return launched(stream);
}
int cuLaunchKernelEx(const LaunchConfig* config, void*, void**, void**) { return launched(config->stream); }
}
