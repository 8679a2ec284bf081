// cuBLAS, cuBLASLt and cuDNN: handles and descriptors that hold nothing, workspaces of a given size, and success.
#include <cublasLt.h>
#include <cublas_api.h>
#include <cudnn.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "card.hpp"

namespace {

// no_ops.cpp defines these without their headers, which have them: some with overloads, so that no more can be asked.
#define CUBLAS(name) using ::name;
#define CUDNN CUBLAS
#include "no_ops.def"
static_assert(sizeof(cublasStatus_t) == sizeof(int) && sizeof(cudnnStatus_t) == sizeof(int));
static_assert(CUBLAS_STATUS_SUCCESS == 0 && CUDNN_STATUS_SUCCESS == 0);

// cuDNN's frontend asks some descriptors for more than their handle; nobody looks behind it.
constexpr std::size_t kDescriptorBytes = 4096;
constexpr std::size_t kBatchNormWorkspaceBytes = 1024;
constexpr std::size_t kBatchNormReserveBytes = 4096;

template <typename Handle>
void make(Handle* handle) {
    *handle = static_cast<Handle>(std::calloc(1, kDescriptorBytes));
}

}  // namespace

extern "C" {

cublasStatus_t CUBLASWINAPI cublasCreate_v2(cublasHandle_t* handle) {
    make(handle);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t CUBLASWINAPI cublasDestroy_v2(cublasHandle_t handle) {
    std::free(handle);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t CUBLASWINAPI cublasGetMathMode(cublasHandle_t, cublasMath_t* mode) {
    *mode = CUBLAS_DEFAULT_MATH;
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t CUBLASWINAPI cublasGetPointerMode_v2(cublasHandle_t, cublasPointerMode_t* mode) {
    *mode = CUBLAS_POINTER_MODE_HOST;
    return CUBLAS_STATUS_SUCCESS;
}

std::size_t CUBLASWINAPI cublasLtGetVersion() { return CUBLAS_VERSION; }
cublasStatus_t CUBLASWINAPI cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* made, cublasComputeType_t, cudaDataType_t) {
    make(made);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t CUBLASWINAPI cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t made) {
    std::free(made);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t CUBLASWINAPI cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* made) {
    make(made);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t CUBLASWINAPI cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t made) {
    std::free(made);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t CUBLASWINAPI cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* made, cudaDataType, std::uint64_t,
                                                       std::uint64_t, std::int64_t) {
    make(made);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t CUBLASWINAPI cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t made) {
    std::free(made);
    return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t CUBLASWINAPI cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t,
                                                           cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                                           cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                                           cublasLtMatmulPreference_t, int wanted,
                                                           cublasLtMatmulHeuristicResult_t results[], int* found) {
    *found = wanted > 0;
    if (wanted > 0) std::memset(results, 0, sizeof *results);
    return CUBLAS_STATUS_SUCCESS;
}

std::size_t CUDNNWINAPI cudnnGetVersion() { return CUDNN_VERSION; }
std::size_t CUDNNWINAPI cudnnGetCudartVersion() { return CUDART_VERSION; }
const char* CUDNNWINAPI cudnnGetErrorString(cudnnStatus_t) { return "an error of the stand-in GPU's cuDNN"; }
void CUDNNWINAPI cudnnGetLastErrorString(char* message, std::size_t size) {
    if (size > 0) *message = 0;
}
cudnnStatus_t CUDNNWINAPI cudnnGetProperty(libraryPropertyType which, int* value) {
    *value = which == MAJOR_VERSION ? CUDNN_MAJOR : which == MINOR_VERSION ? CUDNN_MINOR : CUDNN_PATCHLEVEL;
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t CUDNNWINAPI cudnnCreate(cudnnHandle_t* handle) {
    make(handle);
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t CUDNNWINAPI cudnnDestroy(cudnnHandle_t handle) {
    std::free(handle);
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t CUDNNWINAPI cudnnGetStream(cudnnHandle_t, cudaStream_t* stream) {
    *stream = nullptr;
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t CUDNNWINAPI cudnnCreateTensorDescriptor(cudnnTensorDescriptor_t* made) {
    make(made);
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t CUDNNWINAPI cudnnDestroyTensorDescriptor(cudnnTensorDescriptor_t made) {
    std::free(made);
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t CUDNNWINAPI cudnnCreateActivationDescriptor(cudnnActivationDescriptor_t* made) {
    make(made);
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t CUDNNWINAPI cudnnDestroyActivationDescriptor(cudnnActivationDescriptor_t made) {
    std::free(made);
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t CUDNNWINAPI cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnActivationDescriptor_t, std::size_t* nbytes) {
    *nbytes = kBatchNormWorkspaceBytes;
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t CUDNNWINAPI cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnActivationDescriptor_t,
    std::size_t* nbytes) {
    *nbytes = kBatchNormWorkspaceBytes;
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t CUDNNWINAPI cudnnGetBatchNormalizationTrainingExReserveSpaceSize(cudnnHandle_t, cudnnBatchNormMode_t,
                                                                               cudnnBatchNormOps_t,
                                                                               const cudnnActivationDescriptor_t,
                                                                               const cudnnTensorDescriptor_t,
                                                                               std::size_t* nbytes) {
    *nbytes = kBatchNormReserveBytes;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t CUDNNWINAPI cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t, cudnnBackendDescriptor_t* made) {
    make(made);
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t CUDNNWINAPI cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t made) {
    std::free(made);
    return CUDNN_STATUS_SUCCESS;
}
// One engine is found for everything. Its plan needs the workspace that the settings say, or more, by all the numbers that
// were set since the plan before: convolutions and the passes of one differ, as cuDNN's do.
thread_local std::uint64_t numbers = 0;
cudnnStatus_t CUDNNWINAPI cudnnBackendSetAttribute(cudnnBackendDescriptor_t, cudnnBackendAttributeName_t name,
                                                   cudnnBackendAttributeType_t type, std::int64_t count,
                                                   const void* values) {
    const bool is_of_plan = type == CUDNN_TYPE_INT64 && name != CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS;  // which a run sets
    for (std::int64_t i = 0; is_of_plan && i < count; ++i)
        numbers = (numbers ^ static_cast<std::uint64_t>(static_cast<const std::int64_t*>(values)[i] + name)) * 0x100000001b3;
    return CUDNN_STATUS_SUCCESS;
}
cudnnStatus_t CUDNNWINAPI cudnnBackendGetAttribute(cudnnBackendDescriptor_t const, cudnnBackendAttributeName_t name,
                                                   cudnnBackendAttributeType_t type, std::int64_t wanted,
                                                   std::int64_t* found, void* values) {
    const bool is_number = type == CUDNN_TYPE_INT64 && values != nullptr && wanted == 1;
    if (is_number) {
        const std::size_t least = stand_in::settings().convolution_workspace_bytes;
        const bool is_workspace = name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE;
        const std::size_t nbytes = is_workspace ? least + (numbers >> 32) % 4 * (least / 4) : 0;
        if (is_workspace) numbers = 0;
        *static_cast<std::int64_t*>(values) = static_cast<std::int64_t>(nbytes);
    }
    if (found != nullptr) *found = is_number || name == CUDNN_ATTR_ENGINEHEUR_RESULTS;
    return CUDNN_STATUS_SUCCESS;
}
}
