// cuBLAS and cuBLASLt: handles and descriptors that hold nothing, and success.
#include <cublasLt.h>
#include <cublas_api.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "card.hpp"

namespace {

// no_ops.cpp defines these without their headers, which have them: some with overloads, so that no more can be asked.
#define CUBLAS(name) using ::name;
#include "no_ops.def"
static_assert(sizeof(cublasStatus_t) == sizeof(int) && CUBLAS_STATUS_SUCCESS == 0);

constexpr std::size_t kDescriptorBytes = 4096;  // more than any: nobody looks into it

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
}
