// The live allocator's devices and pools, by the names that Python gives them.
#pragma once

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "cuda_device.hpp"
#include "host_device.hpp"
#include "pool.hpp"
#include "two_ended_pool.hpp"
#include "virtual_pool.hpp"

namespace overspill::live {

inline std::unique_ptr<LiveDevice> make_device(const std::string& name, int index, std::optional<Bytes> capacity_bytes,
                                               bool events_by_hand) {
    if (name == "cuda") return std::make_unique<CudaDevice>(index, capacity_bytes);
    if (name == "host") return std::make_unique<HostDevice>(capacity_bytes, events_by_hand);
    if (name == "simulated") return std::make_unique<SimulatedLiveDevice>(capacity_bytes, events_by_hand);
    throw std::invalid_argument("there is no device '" + name + "'");
}

inline std::unique_ptr<MemoryPool> make_pool(const std::string& name, LiveDevice& device, Bytes main_bytes,
                                             Bytes chunk_bytes) {
    if (name == "best-fit") return std::make_unique<BestFitPool>(device);
    if (name == "two-ended") return std::make_unique<TwoEndedPool>(device, main_bytes);
    if (name == "virtual") return std::make_unique<VirtualPool>(device, chunk_bytes);
    throw std::invalid_argument("there is no pool '" + name + "'");
}

}  // namespace overspill::live
