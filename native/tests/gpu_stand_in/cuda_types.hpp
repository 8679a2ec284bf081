// What driver.cpp needs of cuda.h, where that is not there: tests of Overspill's own calls of the driver need no CUDA.
#pragma once

#include <cstddef>
#include <cstdint>

#define CUDAAPI
#define cuCtxPopCurrent cuCtxPopCurrent_v2
#define cuCtxPushCurrent cuCtxPushCurrent_v2
#define cuDevicePrimaryCtxRelease cuDevicePrimaryCtxRelease_v2
#define cuDeviceTotalMem cuDeviceTotalMem_v2
#define cuEventDestroy cuEventDestroy_v2
#define cuMemAlloc cuMemAlloc_v2
#define cuMemFree cuMemFree_v2
#define cuMemGetInfo cuMemGetInfo_v2

enum CUresult {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_NOT_READY = 600,
};
enum CUdevice_attribute { CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102 };
enum CUmemAllocationGranularity_flags : int {};
enum CUstreamCaptureMode : int {};

using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUmemGenericAllocationHandle = unsigned long long;
using CUcontext = struct Context*;
using CUevent = struct Event*;
using CUstream = struct Stream*;

struct CUmemLocation {
    int type, id;
};
struct CUmemAllocationProp {
    int type, requestedHandleTypes;
    CUmemLocation location;
};
struct CUmemAccessDesc;
