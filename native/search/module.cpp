// The extension overspill.policies.auto._search: what the policy `auto` does thousands of times.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "changes.hpp"
#include "decoder.hpp"
#include "planner.hpp"
#include "program.hpp"
#include "walk.hpp"

namespace nb = nanobind;

namespace overspill::planning {
namespace {

template <typename T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Array = nb::ndarray<nb::numpy, T>;

constexpr auto kNew = nb::rv_policy::move;  // a property that is made anew, and no part of its owner

template <typename T>
std::vector<T> vector_of(const Column<T>& column) {
    return {column.data(), column.data() + column.shape(0)};
}

Flags flags_of(const Column<bool>& column) { return {column.data(), column.data() + column.shape(0)}; }

void must(bool holds, const char* what) {
    if (!holds) throw nb::value_error(what);
}

// A numpy array that owns `values`.
template <typename T>
Array<T> array_of(std::vector<T> values) {
    auto* kept = new std::vector<T>(std::move(values));
    const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return Array<T>(kept->data(), {kept->size()}, owner);
}

// The tensors, or candidates, that have the flag.
Array<Index> those(const Flags& flags) {
    std::vector<Index> found;
    for (std::size_t i = 0; i < flags.size(); ++i)
        if (flags[i]) found.push_back(static_cast<Index>(i));
    return array_of(std::move(found));
}

Lists lists_of(const nb::object& owner, const char* name) {
    Lists lists;
    for (const nb::handle item : owner) {
        for (const nb::handle value : item.attr(name)) lists.values.push_back(nb::cast<Index>(value));
        lists.close();
    }
    return lists;
}

Link link_of(const nb::object& device) {
    return {nb::cast<double>(device.attr("transfer_latency_seconds")),
            nb::cast<double>(device.attr("offload_bytes_per_second")),
            nb::cast<double>(device.attr("prefetch_bytes_per_second")), nb::cast<bool>(device.attr("full_duplex")),
            nb::cast<double>(device.attr("transfer_compute_share"))};
}

void make_graph(Graph* at, const nb::object& graph, const Column<double>& seconds, const Column<bool>& forward,
                const Column<bool>& leaves, const Column<std::int32_t>& least, bool whole) {
    Graph made;
    const nb::object ops = graph.attr("ops");
    made.reads = lists_of(ops, "reads");
    made.writes = lists_of(ops, "writes");
    made.recompute_reads = lists_of(ops, "recompute_reads");
    made.recompute_writes = lists_of(ops, "recompute_writes");
    for (const nb::handle op : ops) {
        made.workspace.push_back(nb::cast<Bytes>(op.attr("workspace_bytes")));
        std::vector<Algorithm>& algorithms = made.algorithms.emplace_back();
        for (const nb::handle one : op.attr("algorithms"))
            algorithms.push_back({nb::cast<Bytes>(one.attr("workspace_bytes")), nb::cast<double>(one.attr("slowdown"))});
    }
    for (const nb::handle tensor : graph.attr("tensors")) {
        made.nbytes.push_back(nb::cast<Bytes>(tensor.attr("nbytes")));
        made.persistent.push_back(nb::cast<bool>(tensor.attr("persistent")));
        made.movable.push_back(nb::cast<bool>(tensor.attr("movable")));
    }
    made.output.assign(made.nbytes.size(), 0);
    for (const nb::handle tensor : graph.attr("outputs")) made.output[nb::cast<std::size_t>(tensor)] = 1;
    made.forward = flags_of(forward);
    made.leaves = flags_of(leaves);
    made.seconds = vector_of(seconds);
    made.least = vector_of(least);
    made.whole = whole;
    const std::size_t op_count = made.workspace.size();
    must(made.forward.size() == op_count && made.seconds.size() == op_count && made.least.size() == op_count &&
             made.leaves.size() == made.nbytes.size(),
         "the columns differ in length");
    made.derive();
    new (at) Graph(std::move(made));
}

void make_planner(Planner* at, const Graph& graph, const Column<std::int32_t>& chosen, const nb::object& device,
                  Bytes budget) {
    auto with_algorithms = std::make_shared<Graph>(graph);
    with_algorithms->chosen = vector_of(chosen);
    must(with_algorithms->chosen.size() == graph.workspace.size(), "there must be one algorithm an op");
    new (at) Planner(std::move(with_algorithms), link_of(device), budget);
}

nb::object fitting(const Planner& planner, const Column<bool>& recompute, const Column<bool>& fleeting) {
    Flags dropped = flags_of(recompute);
    const auto tensors = static_cast<std::size_t>(planner.graph().tensors());
    must(dropped.size() == tensors && fleeting.shape(0) == tensors, "there must be one flag a tensor");
    auto decoder = planner.fitting(dropped, flags_of(fleeting));
    if (!decoder) return nb::none();
    return nb::make_tuple(std::move(decoder), those(dropped));
}

Decoded decode(const Decoder& decoder, const Column<double>& dearer, const Column<bool>& first) {
    must(dearer.shape(0) == static_cast<std::size_t>(decoder.whats()), "there must be one value a tensor and an op");
    must(first.shape(0) == static_cast<std::size_t>(decoder.candidates().size()), "there must be one flag a candidate");
    return decoder.decode({dearer.data(), dearer.shape(0)}, flags_of(first));
}

Array<Index> as_chosen(const Decoder& decoder, const Decoder& other, const Decoded& plan) {
    must(std::ranges::all_of(plan.chosen, [&](Index c) { return c < other.candidates().size(); }),
         "no plan of the other decoder");
    return those(decoder.as_chosen(other, plan));
}

void make_units(Units* at, std::vector<std::vector<Index>> tensors, std::vector<std::vector<Index>> alike,
                std::vector<Index> near) {
    new (at) Units{std::move(tensors), std::move(alike), std::move(near)};
}

void make_walk(Walk* at, const Planner& planner, const Units& units) {
    const auto below = [](const std::vector<std::vector<Index>>& lists, Index count) {
        return std::ranges::all_of(lists, [&](const auto& list) {
            return std::ranges::all_of(list, [&](Index i) { return i >= 0 && i < count; });
        });
    };
    must(units.near.size() == static_cast<std::size_t>(planner.graph().tensors()) &&
             units.alike.size() == units.tensors.size() && below(units.tensors, planner.graph().tensors()) &&
             below(units.alike, units.size()),
         "units of another graph");
    new (at) Walk(planner, units);
}

void begin(Walk& walk, const Column<bool>& recompute, const Column<Key>& away) {
    must(recompute.shape(0) == walk.tensors(), "there must be one flag a tensor");
    walk.begin(flags_of(recompute), vector_of(away));
}

void go_on(Walk& walk, std::int64_t most, std::int64_t until, double steering, Seconds warm, Seconds aim) {
    must(walk.best() != nullptr, "the walk has not begun");
    const nb::gil_scoped_release released;
    walk.go_on(most, until, steering, warm, aim, [] {
        const nb::gil_scoped_acquire held;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
    });
}

}  // namespace
}  // namespace overspill::planning

NB_MODULE(_search, module) {
    using namespace overspill::planning;
    module.doc() = "The native part of overspill.policies.auto.search.";
    nb::class_<Decoded>(module, "Decoded")
        .def_ro("seconds", &Decoded::seconds)
        .def_ro("moved_bytes", &Decoded::moved_bytes)
        .def_ro("peak_bytes", &Decoded::peak_bytes)
        .def_prop_ro("chosen", [](const Decoded& self) { return array_of(self.chosen); }, kNew)
        .def_prop_ro("trips", [](const Decoded& self) { return array_of(self.trips); }, kNew)
        .def_prop_ro("release", [](const Decoded& self) { return array_of(self.release); }, kNew)
        .def_prop_ro("issue", [](const Decoded& self) { return array_of(self.issue); }, kNew)
        .def_prop_ro("lost", [](const Decoded& self) { return array_of(self.lost); }, kNew);
    nb::class_<Decoder>(module, "Decoder")
        .def("__len__", [](const Decoder& self) { return self.candidates().size(); })
        .def("decode", &decode, nb::arg("dearer"), nb::arg("first"))
        .def("among", [](const Decoder& self, const Column<Key>& gaps) { return those(self.among(vector_of(gaps))); },
             nb::arg("gaps"))
        .def("as_chosen", &as_chosen, nb::arg("other"), nb::arg("plan"))
        .def("trips",
             [](const Decoder& self) {
                 std::vector<Index> found;
                 for (const Trip& t : self.candidates().trips()) found.insert(found.end(), {t.tensor, t.start, t.end, t.copy});
                 return array_of(std::move(found));
             })
        .def("slower", [](const Decoder& self) {
            std::vector<Index> found;
            for (const Slower& s : self.candidates().slower()) found.insert(found.end(), {s.op, s.number});
            return array_of(std::move(found));
        });
    nb::class_<Graph>(module, "Graph")
        .def("__init__", &make_graph, nb::arg("graph"), nb::arg("seconds"), nb::arg("forward"), nb::arg("leaves"),
             nb::arg("least"), nb::arg("whole"));
    nb::class_<Planner>(module, "Planner")
        .def("__init__", &make_planner, nb::arg("graph"), nb::arg("chosen"), nb::arg("device"), nb::arg("budget"))
        .def("fitting", &fitting, nb::arg("recompute"), nb::arg("fleeting"));
    nb::class_<Units>(module, "Units")
        .def("__init__", &make_units, nb::arg("tensors"), nb::arg("alike"), nb::arg("near"));
    nb::class_<Attempt>(module, "Attempt")
        .def_prop_ro("recompute", [](const Attempt& self) { return those(self.decision.recompute); }, kNew)
        .def_prop_ro("fleeting", [](const Attempt& self) { return those(self.decision.fleeting); }, kNew)
        .def_ro("decoder", &Attempt::decoder)
        .def_ro("plan", &Attempt::plan)
        .def("seconds_on",
             [](const Attempt& self, const nb::object& device) { return self.decoder->seconds_on(link_of(device), self.plan); },
             nb::arg("device"));
    nb::class_<Walk>(module, "Walk")
        .def("__init__", &make_walk, nb::arg("planner"), nb::arg("units"))
        .def_rw("looks", &Walk::looks)
        .def_prop_ro("best", &Walk::best)
        .def("begin", &begin, nb::arg("recompute"), nb::arg("away"))
        .def("go_on", &go_on, nb::arg("most"), nb::arg("until"), nb::arg("steering"), nb::arg("warm"), nb::arg("aim"));
}
