// The Python face of the native core: overspill.placement.allocators._native. All policy is in the headers, free of
// Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "registered.hpp"  // all headers of this folder, found when the build is configured
#include "replay.hpp"

namespace nb = nanobind;

namespace overspill {
namespace {

template <typename T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Array = nb::ndarray<nb::numpy, std::int64_t>;

// The fields of a configuration in Python.
class Fields final : public Settings {
  public:
    explicit Fields(const nb::dict& config) : config_(config) {}

    bool flag(const char* name) const override { return get<bool>(name); }
    Bytes bytes(const char* name) const override { return get<Bytes>(name); }
    std::optional<Bytes> maybe_bytes(const char* name) const override { return get<std::optional<Bytes>>(name); }
    double number(const char* name) const override { return get<double>(name); }
    std::string text(const char* name) const override { return get<std::string>(name); }
    std::vector<std::int64_t> integers(const char* name) const override { return get<std::vector<std::int64_t>>(name); }

  private:
    const nb::dict& config_;

    template <typename T>
    T get(const char* name) const {
        return nb::cast<T>(config_[name]);
    }
};

std::unique_ptr<Allocator> make_allocator(const std::string& name, const nb::dict& config, Device& device) {
    const auto found = allocators().find(name);
    if (found == allocators().end()) throw std::invalid_argument("the native core has no allocator '" + name + "'");
    return found->second(device, Fields(config));
}

std::vector<std::string> names() {
    std::vector<std::string> found;
    for (const auto& [name, make] : allocators()) found.push_back(name);
    return found;
}

// A numpy array that owns `values`.
Array array_of(std::vector<std::int64_t>&& values, std::vector<std::size_t> shape) {
    auto* kept = new std::vector<std::int64_t>(std::move(values));
    const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<std::int64_t>*>(p); });
    return Array(kept->data(), shape.size(), shape.data(), owner);
}

Array column_of(std::vector<std::int64_t>&& values) {
    const std::size_t count = values.size();
    return array_of(std::move(values), {count});
}

// An allocator over a simulated device of its own, with its blocks found by address.
class SimulatedAllocator {
  public:
    SimulatedAllocator(const std::string& name, const nb::dict& config, std::optional<Bytes> capacity_bytes)
        : device_(capacity_bytes), allocator_(make_allocator(name, config, device_)) {}

    std::optional<Address> allocate(Bytes nbytes, std::int32_t stream, std::int8_t mobility) {
        PoolBlock* block = allocator_->allocate_block(nbytes, stream, static_cast<Mobility>(mobility));
        if (block == nullptr) return std::nullopt;
        live_[block->address] = block;
        return block->address;
    }

    bool free(Address address) {
        const auto found = live_.find(address);
        if (found == live_.end()) return false;
        PoolBlock* block = found->second;
        live_.erase(found);
        allocator_->free_block(block);
        return true;
    }

    // failed_at, skipped, addresses, and the curves that were asked for
    nb::tuple replay(const Column<std::int8_t>& action, const Column<std::int64_t>& block,
                     const Column<std::int64_t>& nbytes, const Column<std::int32_t>& stream,
                     const Column<std::int8_t>& mobility, std::int64_t block_count, bool curves,
                     std::optional<Bytes> request_bytes) {
        const EventsView events{action.data(), block.data(),    nbytes.data(),
                                stream.data(), mobility.data(), static_cast<std::int64_t>(action.shape(0)),
                                block_count};
        ReplayResult result;
        {
            const nb::gil_scoped_release released;
            result = Replayer(*allocator_, events).run(curves, request_bytes);
        }
        std::vector<Array> kept;
        for (auto& curve : result.curves) kept.push_back(column_of(std::move(curve)));
        return nb::make_tuple(result.failed_at, result.skipped, column_of(std::move(result.addresses)), kept);
    }

    // (now, peak, event of the peak) of requested, allocated and reserved bytes
    std::vector<std::tuple<Bytes, Bytes, std::int64_t>> gauges() const {
        std::vector<std::tuple<Bytes, Bytes, std::int64_t>> rows;
        for (const Gauge* gauge : {&allocator_->requested, &allocator_->allocated, &allocator_->reserved})
            rows.emplace_back(gauge->now, gauge->peak, gauge->peak_at);
        return rows;
    }

    // (event, action, address, bytes, stream) a row
    Array segment_table() const {
        std::vector<std::int64_t> table;
        table.reserve(allocator_->segment_log.size() * 5);
        for (const SegmentEvent& event : allocator_->segment_log)
            table.insert(table.end(), {event.at, static_cast<std::int64_t>(event.action), event.address, event.nbytes,
                                       static_cast<std::int64_t>(event.stream)});
        const std::size_t count = allocator_->segment_log.size();
        return array_of(std::move(table), {count, 5});
    }

    // (segment, address, bytes, requested bytes, live 1 / free 0 / unmapped -1, stream) for each block of each segment
    std::vector<std::tuple<std::int64_t, Address, Bytes, Bytes, int, std::int32_t>> block_rows() const {
        std::vector<PoolBlock*> heads = allocator_->idle_blocks();
        for (const auto& entry : live_) heads.push_back(entry.second);
        std::erase_if(heads, [](const PoolBlock* block) { return block->prev != nullptr; });
        std::sort(heads.begin(), heads.end(), [](PoolBlock* a, PoolBlock* b) { return a->address < b->address; });
        std::vector<std::tuple<std::int64_t, Address, Bytes, Bytes, int, std::int32_t>> rows;
        std::int64_t segment = 0;
        for (const PoolBlock* head : heads) {
            for (const PoolBlock* block = head; block != nullptr; block = block->next)
                rows.emplace_back(segment, block->address, block->size, block->requested,
                                  !block->mapped ? -1 : (block->free ? 0 : 1), block->stream);
            ++segment;
        }
        return rows;
    }

    std::vector<Address> live_addresses() const {
        std::vector<Address> addresses;
        for (const auto& entry : live_) addresses.push_back(entry.first);
        return addresses;
    }

    Bytes usable_bytes(Bytes request_bytes) const { return allocator_->usable_bytes(request_bytes); }
    Bytes spread_bytes() const { return allocator_->spread_bytes(); }
    std::size_t idle_count() const { return allocator_->idle_blocks().size(); }
    std::int64_t retries() const { return allocator_->retries; }
    Bytes used_bytes() const { return device_.used_bytes(); }
    std::int64_t clock() const { return allocator_->clock; }
    void set_clock(std::int64_t clock) { allocator_->clock = clock; }

  private:
    SimulatedDevice device_;
    std::unique_ptr<Allocator> allocator_;
    std::unordered_map<Address, PoolBlock*> live_;
};

}  // namespace
}  // namespace overspill

NB_MODULE(_native, module) {
    using overspill::SimulatedAllocator;
    module.doc() = "The native core of overspill.placement.";
    module.def("names", &overspill::names, "The allocators that there are.");
    nb::class_<SimulatedAllocator>(module, "SimulatedAllocator")
        .def(nb::init<const std::string&, const nb::dict&, std::optional<overspill::Bytes>>(), nb::arg("name"),
             nb::arg("config"), nb::arg("capacity_bytes").none())
        .def("allocate", &SimulatedAllocator::allocate, nb::arg("nbytes"), nb::arg("stream"), nb::arg("mobility"))
        .def("free", &SimulatedAllocator::free, nb::arg("address"))
        .def("replay", &SimulatedAllocator::replay, nb::arg("action"), nb::arg("block"), nb::arg("nbytes"),
             nb::arg("stream"), nb::arg("mobility"), nb::arg("block_count"), nb::arg("curves"),
             nb::arg("request_bytes").none())
        .def("gauges", &SimulatedAllocator::gauges)
        .def("segment_table", &SimulatedAllocator::segment_table)
        .def("block_rows", &SimulatedAllocator::block_rows)
        .def("live_addresses", &SimulatedAllocator::live_addresses)
        .def("usable_bytes", &SimulatedAllocator::usable_bytes, nb::arg("request_bytes"))
        .def_prop_ro("spread_bytes", &SimulatedAllocator::spread_bytes)
        .def_prop_ro("idle_count", &SimulatedAllocator::idle_count)
        .def_prop_ro("retries", &SimulatedAllocator::retries)
        .def_prop_ro("used_bytes", &SimulatedAllocator::used_bytes)
        .def_prop_rw("clock", &SimulatedAllocator::clock, &SimulatedAllocator::set_clock);
}
