// libcudart: what PyTorch asks of it, over the cards. Kernels do nothing.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>
#include <vector>

#include "card.hpp"

namespace {

using namespace stand_in;

constexpr int kVersion = CUDART_VERSION;
constexpr std::size_t kPage = 4096;

thread_local cudaError_t last = cudaSuccess;

std::uint64_t number(const void* handle) { return reinterpret_cast<std::uint64_t>(handle); }

// An error is remembered until somebody asks, a failed kernel for good. What only says something about devices does not
// tell of failed kernels: PyTorch asks it in destructors.
cudaError_t result(cudaError_t error = cudaSuccess) {
    set_device(current_device());  // the runtime makes the context current when it first needs it
    if (is_broken()) error = cudaErrorIllegalAddress;
    if (error != cudaSuccess) last = error;
    return error;
}

bool is_device(int device) { return device >= 0 && device < settings().devices; }

cudaError_t launched(cudaStream_t stream) {
    launch(number(stream));
    return result();
}

// What kernels ask of the card when they choose their shape: a Hopper card's figures.
int attribute(cudaDeviceAttr which) {
    switch (which) {
        case cudaDevAttrComputeCapabilityMajor: return 9;
        case cudaDevAttrComputeCapabilityMinor: return 0;
        case cudaDevAttrMultiProcessorCount: return 132;
        case cudaDevAttrMaxThreadsPerBlock: return 1024;
        case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
        case cudaDevAttrWarpSize: return 32;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
        case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
        case cudaDevAttrMaxGridDimX: return 2147483647;
        case cudaDevAttrMaxGridDimY:
        case cudaDevAttrMaxGridDimZ: return 65535;
        default: return 1;
    }
}

struct Shape {
    dim3 grid, block;
    std::size_t shared;
    cudaStream_t stream;
};
thread_local std::vector<Shape> shapes;

int not_in_the_driver() { return 801; }  // CUDA_ERROR_NOT_SUPPORTED

}  // namespace

extern "C" {

cudaError_t cudaGetLastError() {
    const cudaError_t found = last;
    last = is_broken() ? cudaErrorIllegalAddress : cudaSuccess;
    return found;
}
cudaError_t cudaPeekAtLastError() { return last; }

const char* cudaGetErrorName(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "cudaSuccess";
        case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
        case cudaErrorIllegalAddress: return "cudaErrorIllegalAddress";
        case cudaErrorHostMemoryAlreadyRegistered: return "cudaErrorHostMemoryAlreadyRegistered";
        default: return "cudaErrorOfTheStandIn";
    }
}
const char* cudaGetErrorString(cudaError_t error) {
    switch (error) {
        case cudaSuccess: return "no error";
        case cudaErrorMemoryAllocation: return "out of memory";
        case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
        case cudaErrorHostMemoryAlreadyRegistered:
            return "part or all of the requested memory range is already mapped";
        case cudaErrorNotSupported: return "operation not supported by the stand-in GPU";
        default: return "an error of the stand-in GPU";
    }
}

cudaError_t cudaDriverGetVersion(int* version) {
    *version = kVersion;
    return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = kVersion;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int* count) {
    *count = settings().devices;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
    *device = current_device();
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
    if (!is_device(device)) return result(cudaErrorInvalidDevice);
    set_device(device);
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
    if (!is_device(device)) return result(cudaErrorInvalidDevice);
    std::memset(properties, 0, sizeof *properties);
    std::snprintf(properties->name, sizeof properties->name, "%s", settings().name.c_str());
    properties->totalGlobalMem = settings().card_bytes;
    properties->major = attribute(cudaDevAttrComputeCapabilityMajor);
    properties->minor = attribute(cudaDevAttrComputeCapabilityMinor);
    properties->multiProcessorCount = attribute(cudaDevAttrMultiProcessorCount);
    properties->warpSize = attribute(cudaDevAttrWarpSize);
    properties->maxThreadsPerBlock = attribute(cudaDevAttrMaxThreadsPerBlock);
    properties->maxThreadsPerMultiProcessor = attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
    properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
    properties->sharedMemPerBlock = static_cast<std::size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlock));
    properties->sharedMemPerBlockOptin = static_cast<std::size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
    properties->sharedMemPerMultiprocessor =
        static_cast<std::size_t>(attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor));
    const int threads[] = {1024, 1024, 64}, blocks[] = {2147483647, 65535, 65535};
    std::copy(std::begin(threads), std::end(threads), properties->maxThreadsDim);
    std::copy(std::begin(blocks), std::end(blocks), properties->maxGridSize);
    properties->l2CacheSize = 60 << 20;
    properties->textureAlignment = 512;
    properties->unifiedAddressing = properties->concurrentKernels = properties->canMapHostMemory = 1;
    properties->pciBusID = device;
    return result();
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
    *value = attribute(which);
    return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
    *can = 1;
    return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return result(); }
cudaError_t cudaDeviceGetPCIBusId(char* name, int length, int device) {
    std::snprintf(name, static_cast<std::size_t>(length), "0000:%02x:00.0", device);
    return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
    synchronise_device(current_device());
    return result();
}

cudaError_t cudaMemGetInfo(std::size_t* free_bytes, std::size_t* total) {
    *total = settings().card_bytes;
    *free_bytes = *total - used_bytes(current_device());
    return result();
}
cudaError_t cudaMalloc(void** address, std::size_t nbytes) {
    *address = allocate(current_device(), nbytes);
    return result(*address != nullptr ? cudaSuccess : cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void* address) {
    if (address == nullptr) return result();
    return result(stand_in::free(address) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaHostAlloc(void** address, std::size_t nbytes, unsigned flags) {
    const std::size_t whole = (nbytes + kPage - 1) / kPage * kPage;
    *address = std::aligned_alloc(kPage, whole);
    if (*address == nullptr) return result(cudaErrorMemoryAllocation);
    return cudaHostRegister(*address, whole, flags);
}
cudaError_t cudaFreeHost(void* address) {
    const cudaError_t error = cudaHostUnregister(address);
    std::free(address);
    return error;
}
cudaError_t cudaHostRegister(void* address, std::size_t nbytes, unsigned) {
    switch (register_host(address, nbytes)) {
        case Registering::kShared: return result(cudaErrorHostMemoryAlreadyRegistered);
        case Registering::kRefused: return result(cudaErrorNotPermitted);
        default: return result();
    }
}
cudaError_t cudaHostUnregister(void* address) {
    return result(unregister_host(address) ? cudaSuccess : cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
    std::memset(found, 0, sizeof *found);
    const int device = device_of(address);
    const bool pinned = device < 0 && is_pinned(address);
    found->type = device >= 0 ? cudaMemoryTypeDevice : pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    found->device = std::max(device, 0);
    if (device >= 0) found->devicePointer = const_cast<void*>(address);
    if (pinned) found->hostPointer = const_cast<void*>(address);
    return result();
}

cudaError_t cudaMemcpyAsync(void* target, const void* source, std::size_t nbytes, cudaMemcpyKind,
                            cudaStream_t stream) {
    copy(target, source, nbytes, number(stream));
    return result();
}
cudaError_t cudaMemcpy(void* target, const void* source, std::size_t nbytes, cudaMemcpyKind) {
    copy(target, source, nbytes, 0);
    synchronise_stream(0);
    return result();
}
cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, std::size_t nbytes, cudaStream_t stream) {
    copy(target, source, nbytes, number(stream));
    return result();
}
cudaError_t cudaMemcpyToSymbol(const void*, const void*, std::size_t, std::size_t, cudaMemcpyKind) { return result(); }
cudaError_t cudaMemset(void* target, int value, std::size_t nbytes) {
    set(target, value, nbytes, 0);
    return result();
}
cudaError_t cudaMemsetAsync(void* target, int value, std::size_t nbytes, cudaStream_t stream) {
    set(target, value, nbytes, number(stream));
    return result();
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
    *stream = reinterpret_cast<cudaStream_t>(make_stream(current_device()));
    return result();
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t) { return result(); }
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
    *priority = 0;
    return result();
}
cudaError_t cudaStreamQuery(cudaStream_t) { return result(); }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    synchronise_stream(number(stream));
    return result();
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    stand_in::wait(number(stream), number(event));
    return result();
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
    *status = capture_of(number(stream)) != 0 ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return result();
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, std::size_t*) {
    if (id != nullptr) *id = capture_of(number(stream));
    return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
    return result(begin_capture(number(stream)) ? cudaSuccess : cudaErrorStreamCaptureUnsupported);
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
    *graph = reinterpret_cast<cudaGraph_t>(end_capture(number(stream)));
    return result(*graph != nullptr ? cudaSuccess : cudaErrorIllegalState);
}
// A graph and what it becomes are one here, and stay until the process ends.
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* made, cudaGraph_t graph, unsigned long long) {
    *made = reinterpret_cast<cudaGraphExec_t>(graph);
    return result();
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, std::size_t* count) {
    *count = graph_size(number(graph));
    return result();
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    launch_graph(number(graph), number(stream));
    return result();
}
cudaError_t cudaGraphDestroy(cudaGraph_t) { return result(); }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return result(); }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return result(); }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    *event = reinterpret_cast<cudaEvent_t>(make_event());
    return result();
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    return result(destroy_event(number(event)) ? cudaSuccess : cudaErrorInvalidResourceHandle);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    record(number(event), number(stream));
    return result();
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
    return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (is_broken()) return result();
    return ask(number(event)) ? result() : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    synchronise_event(number(event));
    return result();
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    *milliseconds = milliseconds_between(number(begin), number(end));
    return result();
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
    std::memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024;
    found->numRegs = 32;
    found->binaryVersion = found->ptxVersion = 90;
    return result();
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return result(); }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, std::size_t,
                                                                   unsigned) {
    *blocks = 2;
    return result();
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, std::size_t) {
    *blocks = 2;
    return result();
}
cudaError_t cudaGetSymbolAddress(void** address, const void*) {
    static char nothing[1 << 20];
    *address = nothing;
    return result();
}

cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, std::size_t, cudaStream_t stream) {
    return launched(stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void*, dim3, dim3, void**, std::size_t, cudaStream_t stream) {
    return launched(stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* shape, const void*, void**) {
    return launched(shape->stream);
}
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* argument) {
    function(argument);
    return result();
}

// What nvcc's code calls; no header declares it.
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
    *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
    return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, std::size_t, cudaStream_t stream) {
    return launched(stream);
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, std::size_t shared, cudaStream_t stream) {
    shapes.push_back({grid, block, shared, stream});
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, std::size_t* shared, void* stream) {
    const Shape shape = shapes.back();
    shapes.pop_back();
    *grid = shape.grid;
    *block = shape.block;
    *shared = shape.shared;
    std::memcpy(stream, &shape.stream, sizeof shape.stream);
    return cudaSuccess;
}
void** __cudaRegisterFatBinary(void*) {
    static void* handle[4];
    return handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, std::size_t, int, int) {}
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*, int*) {}

// The driver's functions by name, as c10 asks for them; those that are not here refuse when they are called.
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** address, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
    *address = dlsym(RTLD_DEFAULT, (std::string(name) + "_v2").c_str());
    if (*address == nullptr) *address = dlsym(RTLD_DEFAULT, name);
    if (*address == nullptr) *address = reinterpret_cast<void*>(&not_in_the_driver);
    if (found != nullptr) *found = cudaDriverEntryPointSuccess;
    return result();
}

cudaError_t cudaProfilerStart() { return result(); }
cudaError_t cudaProfilerStop() { return result(); }
}
