// The Python face of the native core: overspill.placement.allocators._native. All policy is in the headers, free of
// Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
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

// A device in Python, which answers in place of the simulated one. Whoever has the allocator keeps it alive: a
// reference from here would be one that Python's garbage collection does not see.
class DeviceInPython final : public Device {
  public:
    DeviceInPython(std::optional<Bytes> capacity_bytes, nb::handle device) : Device(capacity_bytes), device_(device) {}

    std::optional<Address> malloc(Bytes nbytes) override { return address_of(device_.attr("malloc")(nbytes)); }
    void free(Address address) override { device_.attr("free")(address); }
    std::optional<Address> reserve(Bytes nbytes) override { return address_of(device_.attr("reserve")(nbytes)); }
    void unreserve(Address address, Bytes nbytes) override { device_.attr("unreserve")(address, nbytes); }
    bool map(Address address, Bytes nbytes) override { return nb::cast<bool>(device_.attr("map")(address, nbytes)); }
    void unmap(Address address, Bytes nbytes) override { device_.attr("unmap")(address, nbytes); }

  private:
    static std::optional<Address> address_of(const nb::object& answer) {
        return nb::cast<std::optional<Address>>(answer);
    }

    nb::handle device_;
};

using GaugeTuple = std::tuple<Bytes, Bytes, std::int64_t>;
using ExchangeTuple = std::tuple<std::int64_t, std::int64_t, Address, Bytes, std::int32_t>;
using BlockTuple = std::tuple<Address, Bytes, Bytes, int>;  // address, size, requested, state
enum BlockState { kLive = 0, kFreeBlock = 1, kUnmapped = 2 };

GaugeTuple tuple_of(const Gauge& gauge) { return {gauge.now, gauge.peak, gauge.peak_at}; }

// An allocator, to be called event by event.
class Stepper {
  public:
    Stepper(const std::string& name, const nb::dict& config, std::optional<Bytes> capacity_bytes, nb::handle device)
        : device_(device.is_none() ? std::make_unique<Device>(capacity_bytes)
                                   : std::make_unique<DeviceInPython>(capacity_bytes, device)),
          allocator_(make_allocator(name, config, *device_)) {}

    std::optional<Address> allocate(std::int64_t at, Bytes nbytes, std::int32_t stream, std::int8_t mobility) {
        allocator_->clock = at;
        PoolBlock* block = allocator_->allocate_block(nbytes, stream, Mobility{mobility});
        if (block == nullptr) return std::nullopt;
        live_[block->address] = block;
        return block->address;
    }

    // Whether a block was allocated there.
    bool free(std::int64_t at, Address address) {
        const auto found = live_.find(address);
        if (found == live_.end()) return false;
        allocator_->clock = at;
        PoolBlock* block = found->second;
        live_.erase(found);
        allocator_->free_block(block);
        return true;
    }

    void empty_cache(std::int64_t at) {
        allocator_->clock = at;
        allocator_->release_cached();
    }

    // What only PyTorch's can: begin with a segment, and say whether its cache could serve an allocation.
    void adopt(Address base, std::int32_t stream, bool small, bool expandable, const std::vector<BlockTuple>& blocks) {
        std::vector<CachingAllocator::Piece> pieces;
        for (const auto& [address, size, requested, state] : blocks)
            pieces.push_back({address, size, requested, state != kLive, state != kUnmapped});
        for (PoolBlock* block : caching().adopt(base, stream, small, expandable, pieces)) live_[block->address] = block;
    }

    bool finds(Bytes nbytes, std::int32_t stream) { return caching().finds(nbytes, stream); }

    void mark_step() { allocator_->mark(); }

    // What only the planned one can say.
    std::array<std::int64_t, 7> counts() const { return planning().counts().values(); }

    std::array<GaugeTuple, 3> gauges() const {
        return {tuple_of(allocator_->requested), tuple_of(allocator_->allocated), tuple_of(allocator_->reserved)};
    }
    std::int64_t retries() const { return allocator_->retries; }
    Bytes used_bytes() const { return device_->used_bytes(); }
    Bytes spread_bytes() const { return allocator_->spread_bytes(); }
    Bytes usable_bytes(Bytes request) const { return allocator_->usable_bytes(request); }
    std::size_t exchanged() const { return allocator_->segment_log.size(); }

    // The exchanges with the device from the number `first` on.
    std::vector<ExchangeTuple> exchanges(std::size_t first) const {
        std::vector<ExchangeTuple> found;
        for (std::size_t i = first; i < allocator_->segment_log.size(); ++i) {
            const SegmentEvent& event = allocator_->segment_log[i];
            found.emplace_back(event.at, static_cast<std::int64_t>(event.action), event.address, event.nbytes,
                               event.stream);
        }
        return found;
    }

    std::vector<Address> live_addresses() const {
        std::vector<Address> found;
        for (const auto& entry : live_) found.push_back(entry.first);
        return found;
    }
    std::size_t idle_count() const {
        allocator_->settle();
        const std::size_t count = allocator_->idle_blocks().size();
        allocator_->resume();
        return count;
    }

    // All segments by address, each as its stream and its blocks.
    std::vector<std::pair<std::int32_t, std::vector<BlockTuple>>> segments() const {
        allocator_->settle();
        std::vector<PoolBlock*> firsts = allocator_->idle_blocks();
        for (const auto& entry : live_) firsts.push_back(allocator_->in_chain(entry.second));
        // A fence of no bytes may stand before the first.
        std::erase_if(firsts, [](const PoolBlock* block) { return block->prev != nullptr && block->prev->size > 0; });
        std::sort(firsts.begin(), firsts.end(),
                  [](const PoolBlock* a, const PoolBlock* b) { return a->address < b->address; });
        std::vector<std::pair<std::int32_t, std::vector<BlockTuple>>> found;
        for (const PoolBlock* first : firsts) {
            std::vector<BlockTuple> blocks;
            for (const PoolBlock* block = first; block != nullptr; block = block->next)
                blocks.emplace_back(block->address, block->size, block->requested,
                                    !block->mapped ? kUnmapped : block->free ? kFreeBlock : kLive);
            found.emplace_back(first->stream, std::move(blocks));
        }
        allocator_->resume();
        return found;
    }

  private:
    CachingAllocator& caching() const { return dynamic_cast<CachingAllocator&>(*allocator_); }
    PlannedAllocator& planning() const { return dynamic_cast<PlannedAllocator&>(*allocator_); }

    std::unique_ptr<Device> device_;
    std::unique_ptr<Allocator> allocator_;
    std::unordered_map<Address, PoolBlock*> live_;
};

Bytes rounded(Bytes nbytes, const std::array<std::int64_t, kDivisionIntervals>& divisions) {
    return round_size(nbytes, divisions);
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

// The events on the allocator `name` over a simulated device of its own: the event that failed or -1, how many were
// skipped, the retries, addresses, exchanges with the device as (event, action, address, bytes, stream) a row, (now, peak,
// event of the peak) of requested, allocated and reserved bytes, and the curves that were asked for.
nb::tuple replay(const std::string& name, const nb::dict& config, std::optional<Bytes> capacity_bytes,
                 const Column<std::int8_t>& action, const Column<std::int64_t>& block,
                 const Column<std::int64_t>& nbytes, const Column<std::int32_t>& stream,
                 std::int64_t block_count, bool curves, std::optional<Bytes> request_bytes,
                 const std::optional<Column<std::int8_t>>& mobility) {
    Device device(capacity_bytes);
    const auto allocator = make_allocator(name, config, device);
    const EventsView events{
        action.data(), block.data(), nbytes.data(), stream.data(), mobility ? mobility->data() : nullptr,
        static_cast<std::int64_t>(action.shape(0)), block_count};
    ReplayResult result;
    {
        const nb::gil_scoped_release released;
        result = Replayer(*allocator, events).run(curves, request_bytes);
    }
    std::vector<std::int64_t> table;
    table.reserve(allocator->segment_log.size() * 5);
    for (const SegmentEvent& event : allocator->segment_log)
        table.insert(table.end(), {event.at, static_cast<std::int64_t>(event.action), event.address, event.nbytes,
                                   static_cast<std::int64_t>(event.stream)});
    const std::array<GaugeTuple, 3> gauges{tuple_of(allocator->requested), tuple_of(allocator->allocated),
                                           tuple_of(allocator->reserved)};
    std::vector<Array> kept;
    for (auto& curve : result.curves) kept.push_back(column_of(std::move(curve)));
    return nb::make_tuple(result.failed_at, result.skipped, allocator->retries, column_of(std::move(result.addresses)),
                          array_of(std::move(table), {allocator->segment_log.size(), 5}), gauges, kept);
}

}  // namespace
}  // namespace overspill

NB_MODULE(_native, module) {
    module.doc() = "The native core of overspill.placement.";
    module.def("names", &overspill::names, "The allocators that there are.");
    module.def("replay", &overspill::replay, nb::arg("name"), nb::arg("config"), nb::arg("capacity_bytes").none(),
               nb::arg("action"), nb::arg("block"), nb::arg("nbytes"), nb::arg("stream"),
               nb::arg("block_count"), nb::arg("curves"), nb::arg("request_bytes").none(), nb::arg("mobility") = nb::none());
    module.def("round_size", &overspill::rounded, nb::arg("nbytes"), nb::arg("divisions"));
    using overspill::Stepper;
    nb::class_<Stepper>(module, "Stepper")
        .def(nb::init<const std::string&, const nb::dict&, std::optional<overspill::Bytes>, nb::handle>(),
             nb::arg("name"), nb::arg("config"), nb::arg("capacity_bytes").none(), nb::arg("device").none())
        .def("allocate", &Stepper::allocate, nb::arg("at"), nb::arg("nbytes"), nb::arg("stream"), nb::arg("mobility") = 0)
        .def("free", &Stepper::free)
        .def("empty_cache", &Stepper::empty_cache)
        .def("adopt", &Stepper::adopt)
        .def("finds", &Stepper::finds)
        .def("mark_step", &Stepper::mark_step)
        .def("counts", &Stepper::counts)
        .def("gauges", &Stepper::gauges)
        .def("retries", &Stepper::retries)
        .def("used_bytes", &Stepper::used_bytes)
        .def("spread_bytes", &Stepper::spread_bytes)
        .def("usable_bytes", &Stepper::usable_bytes)
        .def("exchanged", &Stepper::exchanged)
        .def("exchanges", &Stepper::exchanges)
        .def("live_addresses", &Stepper::live_addresses)
        .def("idle_count", &Stepper::idle_count)
        .def("segments", &Stepper::segments);
}
