// The Python face of the native core: overspill.placement.allocators._native. All policy is in the headers, free of
// Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
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

// The events on the allocator `name` over a simulated device of its own: the event that failed or -1, how many were
// skipped, the retries, addresses, exchanges with the device as (event, action, address, bytes, stream) a row, (now, peak,
// event of the peak) of requested, allocated and reserved bytes, and the curves that were asked for.
nb::tuple replay(const std::string& name, const nb::dict& config, std::optional<Bytes> capacity_bytes,
                 const Column<std::int8_t>& action, const Column<std::int64_t>& block,
                 const Column<std::int64_t>& nbytes, const Column<std::int32_t>& stream,
                 const Column<std::int8_t>& mobility, std::int64_t block_count, bool curves,
                 std::optional<Bytes> request_bytes) {
    Device device(capacity_bytes);
    const auto allocator = make_allocator(name, config, device);
    const EventsView events{action.data(), block.data(),    nbytes.data(),
                            stream.data(), mobility.data(), static_cast<std::int64_t>(action.shape(0)),
                            block_count};
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
    std::vector<std::tuple<Bytes, Bytes, std::int64_t>> gauges;
    for (const Gauge* gauge : {&allocator->requested, &allocator->allocated, &allocator->reserved})
        gauges.emplace_back(gauge->now, gauge->peak, gauge->peak_at);
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
               nb::arg("action"), nb::arg("block"), nb::arg("nbytes"), nb::arg("stream"), nb::arg("mobility"),
               nb::arg("block_count"), nb::arg("curves"), nb::arg("request_bytes").none());
}
