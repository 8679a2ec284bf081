// The extension overspill.runtime.live._live: the live allocator's Python face, and the C functions that PyTorch calls.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "allocator.hpp"
#include "by_name.hpp"
#include "torch_cpu.hpp"
#include "torch_error.hpp"

namespace nb = nanobind;

namespace overspill::live {
namespace {

using Unlocked = nb::call_guard<nb::gil_scoped_release>;

// The allocators that PyTorch calls, by CUDA device. They live as long as the process: tensors may outlive anything.
constexpr int kMostDevices = 64;
std::array<std::atomic<LiveAllocator*>, kMostDevices> installed;

LiveAllocator* installed_on(int device) {
    return device >= 0 && device < kMostDevices ? installed[static_cast<std::size_t>(device)].load() : nullptr;
}

// What all devices without an allocator of their own get one by, once one serves PyTorch: CUDAPluggableAllocator serves
// them all.
std::mutex making;
std::function<std::unique_ptr<LiveAllocator>(int)> make_for_device;

LiveAllocator* installed_or_made(int device) {
    if (auto* found = installed_on(device)) return found;
    if (device < 0 || device >= kMostDevices) return nullptr;
    const std::lock_guard lock(making);
    if (auto* found = installed_on(device)) return found;
    if (!make_for_device) return nullptr;
    auto* made = make_for_device(device).release();  // never deleted, as said above
    installed[static_cast<std::size_t>(device)].store(made);
    return made;
}

void tell_once(const std::exception& error) noexcept {
    static std::atomic<bool> told{false};
    if (!told.exchange(true)) std::fprintf(stderr, "overspill: a block could not be freed: %s\n", error.what());
}

class Core {
  public:
    Core(const std::string& device, const std::string& pool, int index, std::optional<Bytes> capacity_bytes,
         Bytes main_bytes, Bytes chunk_bytes, bool events_by_hand) {
        auto memory = make_device(device, index, capacity_bytes, events_by_hand);
        auto blocks = make_pool(pool, *memory, main_bytes, chunk_bytes);
        allocator_ = std::make_shared<LiveAllocator>(std::move(memory), std::move(blocks));
        make_alike_ = [device, pool, capacity_bytes, main_bytes, chunk_bytes](int other) {
            auto its_memory = make_device(device, other, capacity_bytes, false);
            auto its_blocks = make_pool(pool, *its_memory, main_bytes, chunk_bytes);
            return std::make_unique<LiveAllocator>(std::move(its_memory), std::move(its_blocks));
        };
    }

    std::optional<Address> allocate(Bytes nbytes, Stream stream) { return allocator_->allocate(nbytes, stream); }
    bool free(Address address) { return allocator_->free(address); }
    bool use(Address address, Stream stream) { return allocator_->use(address, stream); }
    void begin_step() { allocator_->begin_step(); }
    void group_untold(int mobility) { allocator_->group_untold(static_cast<Mobility>(mobility)); }
    void let_spill(bool spills) { allocator_->let_spill(spills); }
    bool resize(Bytes main_bytes, bool grows) { return allocator_->resize(main_bytes, grows); }
    void trim() { allocator_->trim(); }
    void limit(Bytes capacity_bytes) { allocator_->limit(capacity_bytes); }

    // A stream of a device whose events pass by hand has done all its work.
    void complete(Stream stream) {
        allocator_->with_device([stream](LiveDevice& device) {
            if (auto* host = dynamic_cast<HostDevice*>(&device)) host->complete(stream);
            if (auto* simulated = dynamic_cast<SimulatedLiveDevice*>(&device)) simulated->complete(stream);
        });
    }

    std::optional<Bytes> resident_bytes() const {
        return allocator_->with_device([](LiveDevice& device) {
            const auto* host = dynamic_cast<HostDevice*>(&device);
            return host != nullptr ? std::optional(host->resident_bytes()) : std::nullopt;
        });
    }

    nb::dict statistics() {
        const Statistics now = allocator_->statistics();
        nb::dict result;
        result["requests"] = now.requests;
        result["deferred"] = now.deferred;
        result["allocated_bytes"] = now.allocated;
        result["peak_allocated_bytes"] = now.peak_allocated;
        result["reserved_bytes"] = now.reserved;
        result["peak_reserved_bytes"] = now.peak_reserved;
        result["main_bytes"] = now.main.nbytes;
        result["least_gap_bytes"] = now.main.least_gap;
        result["overflows"] = now.main.overflows;
        result["peak_spilled_bytes"] = now.peak_spilled;
        return result;
    }

    // From now on PyTorch's CPU tensors that this thread makes have their memory from here, until `leave`.
    void enter() {
        TorchCpuAllocator::installed();
        serving_thread.push_back(allocator_);
    }

    void leave() { serving_thread.pop_back(); }

    // Let the C functions below serve this CUDA device from here, for good. Whether nothing else did so before.
    bool install(int device) {
        if (device < 0 || device >= kMostDevices) throw std::invalid_argument("no such CUDA device");
        LiveAllocator* nobody = nullptr;
        if (!installed[static_cast<std::size_t>(device)].compare_exchange_strong(nobody, allocator_.get()))
            return nobody == allocator_.get();
        new std::shared_ptr<LiveAllocator>(allocator_);  // never deleted, as said above
        const std::lock_guard lock(making);
        if (!make_for_device) make_for_device = make_alike_;
        return true;
    }

  private:
    std::shared_ptr<LiveAllocator> allocator_;
    std::function<std::unique_ptr<LiveAllocator>(int)> make_alike_;
};

// What this thread says from now on of the blocks that it asks for, until `forget_groups`.
void tell_groups(const std::vector<std::pair<Bytes, int>>& by_size, int otherwise) {
    Groups groups;
    groups.otherwise = static_cast<Mobility>(otherwise);
    for (const auto& [nbytes, mobility] : by_size) groups.by_size.emplace_back(nbytes, static_cast<Mobility>(mobility));
    groups_of_thread = std::move(groups);
}

}  // namespace
}  // namespace overspill::live

// What torch.cuda.memory.CUDAPluggableAllocator looks up by name; a stream is a cudaStream_t.
extern "C" {

[[gnu::visibility("default")]] void* overspill_malloc(ssize_t size, int device, void* stream) {
    auto* allocator = overspill::live::installed_or_made(device);
    if (allocator == nullptr)
        throw std::runtime_error("no Overspill allocator was installed on CUDA device " + std::to_string(device));
    const auto address = allocator->allocate(size, reinterpret_cast<overspill::live::Stream>(stream));
    if (!address)
        overspill::live::TorchOutOfMemory::get().raise(
            "CUDA out of memory: Overspill's allocator finds no room for " + std::to_string(size) +
            " bytes on device " + std::to_string(device) + ", of which it holds " +
            std::to_string(allocator->statistics().reserved));
    return reinterpret_cast<void*>(*address);
}

// Called by destructors, which must not throw: after a sticky error of the device every call fails, and what counts is
// that error, which PyTorch's next call reports.
[[gnu::visibility("default")]] void overspill_free(void* ptr, ssize_t, int device, void*) noexcept {
    try {
        if (auto* allocator = overspill::live::installed_on(device))
            allocator->free(reinterpret_cast<overspill::Address>(ptr));
    } catch (const std::exception& error) {
        overspill::live::tell_once(error);
    }
}

// PyTorch begins a capture of a CUDA graph, or the use of a memory pool: its blocks would have to keep their addresses.
[[gnu::visibility("default")]] void overspill_begin_pool(int, std::pair<unsigned long long, unsigned long long>,
                                                         std::function<bool(void*)>) {
    throw std::runtime_error(
        "CUDA graphs and memory pools do not work with Overspill's live allocator (placement='planned'), which gives "
        "blocks other addresses in other steps; take placement='planned' or the graph away");
}

[[gnu::visibility("default")]] void overspill_empty_cache() {
    for (const auto& allocator : overspill::live::installed)
        if (auto* found = allocator.load()) found->trim();
}

[[gnu::visibility("default")]] void overspill_record_stream(void* ptr, void* stream) {
    for (const auto& allocator : overspill::live::installed) {
        auto* found = allocator.load();
        const auto handle = reinterpret_cast<overspill::live::Stream>(stream);
        if (found != nullptr && found->use(reinterpret_cast<overspill::Address>(ptr), handle)) return;
    }
}

}  // extern "C"

NB_MODULE(_live, module) {
    using overspill::live::Core;
    using overspill::live::Unlocked;
    module.doc() = "The native core of overspill.runtime.live.allocator.";
    // An allocator that serves PyTorch lives as long as the process, and with it what Python has of it.
    nb::set_leak_warnings(false);
    nb::class_<Core>(module, "LiveCore")
        .def(nb::init<const std::string&, const std::string&, int, std::optional<overspill::Bytes>, overspill::Bytes,
                      overspill::Bytes, bool>(),
             nb::arg("device"), nb::arg("pool"), nb::arg("index"), nb::arg("capacity_bytes").none(),
             nb::arg("main_bytes"), nb::arg("chunk_bytes"), nb::arg("events_by_hand"))
        .def("allocate", &Core::allocate, nb::arg("nbytes"), nb::arg("stream"), Unlocked())
        .def("free", &Core::free, nb::arg("address"), Unlocked())
        .def("use", &Core::use, nb::arg("address"), nb::arg("stream"), Unlocked())
        .def("begin_step", &Core::begin_step, Unlocked())
        .def("group_untold", &Core::group_untold, nb::arg("mobility"), Unlocked())
        .def("let_spill", &Core::let_spill, nb::arg("spills"), Unlocked())
        .def("resize", &Core::resize, nb::arg("main_bytes"), nb::arg("grows"), Unlocked())
        .def("enter", &Core::enter)
        .def("leave", &Core::leave)
        .def("trim", &Core::trim, Unlocked())
        .def("limit", &Core::limit, nb::arg("capacity_bytes"), Unlocked())
        .def("complete", &Core::complete, nb::arg("stream"), Unlocked())
        .def("resident_bytes", &Core::resident_bytes)
        .def("statistics", &Core::statistics)
        .def("install", &Core::install, nb::arg("device"));
    module.def("tell_groups", &overspill::live::tell_groups, nb::arg("by_size"), nb::arg("otherwise"));
    module.def("forget_groups", [] { overspill::live::groups_of_thread.reset(); });
    module.def("cpu_bytes", [] {
        const auto& asked = overspill::live::TorchCpuAllocator::installed().asked();
        return std::pair(asked.ours.load(), asked.elsewhere.load());
    });
}
