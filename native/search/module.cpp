// The extension overspill.policies.auto._search: what the policy `auto` does thousands of times.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "annealing.hpp"
#include "changes.hpp"
#include "list_scheduler.hpp"
#include "planner.hpp"
#include "program.hpp"

namespace nb = nanobind;

namespace overspill::search {
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

Flags flags_of(const Column<bool>& column) {
    return {column.data(), column.data() + column.shape(0)};
}

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
            nb::cast<double>(device.attr("transfer_compute_share")),
            nb::cast<double>(device.attr("transfer_host_seconds")),
            nb::cast<double>(device.attr("op_overhead_seconds")),
            nb::cast<bool>(device.attr("runs_behind_host"))};
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
            algorithms.push_back(
                {nb::cast<Bytes>(one.attr("workspace_bytes")), nb::cast<double>(one.attr("slowdown"))});
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
    made.sent.assign(made.workspace.size(), 0);
    made.sends.assign(made.workspace.size(), Sends::kNothing);
    for (const nb::handle op : ops) {
        const nb::object collective = op.attr("collective");
        if (collective.is_none()) continue;
        const auto kind = nb::cast<std::string>(nb::str(collective.attr("kind")));
        if (kind == "reduce") continue;
        const auto number = nb::cast<std::size_t>(op.attr("id"));
        made.sends[number] = kind == "gather" ? Sends::kGather : Sends::kScatter;
        made.sent[number] = std::exchange(made.seconds[number], 0);
    }
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

void make_groups(RematGroups* at, std::vector<std::vector<Index>> tensors, std::vector<std::vector<Index>> alike,
                 std::vector<Index> near) {
    new (at) RematGroups{std::move(tensors), std::move(alike), std::move(near)};
}

void make_annealing(Annealing* at, const Planner& planner, const RematGroups& groups) {
    const auto below = [](const std::vector<std::vector<Index>>& lists, Index count) {
        return std::ranges::all_of(lists, [&](const auto& list) {
            return std::ranges::all_of(list, [&](Index i) { return i >= 0 && i < count; });
        });
    };
    must(groups.near.size() == static_cast<std::size_t>(planner.graph().tensors()) &&
             groups.alike.size() == groups.tensors.size() && below(groups.tensors, planner.graph().tensors()) &&
             below(groups.alike, groups.size()),
         "groups of another graph");
    new (at) Annealing(planner, groups);
}

Seconds begin(Annealing& annealing, const Column<bool>& recompute, const Column<bool>& kept) {
    must(recompute.shape(0) == annealing.tensors() && kept.shape(0) == annealing.tensors(),
         "there must be one flag a tensor");
    return annealing.begin(flags_of(recompute), flags_of(kept));
}

void anneal(Annealing& annealing, std::int64_t most, std::int64_t most_evaluations, double perturbation_rate,
            Seconds temperature, Seconds target_seconds) {
    must(annealing.best() != nullptr, "the annealing has no start");
    const nb::gil_scoped_release released;
    annealing.anneal(most, most_evaluations, perturbation_rate, temperature, target_seconds, [] {
        const nb::gil_scoped_acquire held;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
    });
}

}  // namespace
}  // namespace overspill::search

NB_MODULE(_search, module) {
    using namespace overspill::search;
    module.doc() = "The native part of overspill.policies.auto.search.";
    nb::class_<TimedPlan>(module, "TimedPlan")
        .def_ro("seconds", &TimedPlan::seconds)
        .def_ro("moved_bytes", &TimedPlan::moved_bytes)
        .def_ro("peak_bytes", &TimedPlan::peak_bytes)
        .def_prop_ro(
            "chosen", [](const TimedPlan& self) { return array_of(self.chosen); }, kNew)
        .def_prop_ro(
            "swaps", [](const TimedPlan& self) { return array_of(self.swaps); }, kNew)
        .def_prop_ro(
            "release", [](const TimedPlan& self) { return array_of(self.release); }, kNew)
        .def_prop_ro("issue", [](const TimedPlan& self) { return array_of(self.issue); }, kNew);
    nb::class_<ListScheduler>(module, "ListScheduler")
        .def("__len__", [](const ListScheduler& self) { return self.candidates().size(); })
        .def("swaps",
             [](const ListScheduler& self) {
                 std::vector<Index> found;
                 for (const Swap& t : self.candidates().swaps())
                     found.insert(found.end(), {t.tensor, t.start, t.end, t.copy});
                 return array_of(std::move(found));
             })
        .def("slower", [](const ListScheduler& self) {
            std::vector<Index> found;
            for (const Slower& s : self.candidates().slower()) found.insert(found.end(), {s.op, s.number});
            return array_of(std::move(found));
        });
    nb::class_<Graph>(module, "Graph")
        .def("__init__", &make_graph, nb::arg("graph"), nb::arg("seconds"), nb::arg("forward"), nb::arg("leaves"),
             nb::arg("least"), nb::arg("whole"));
    nb::class_<Planner>(module, "Planner")
        .def("__init__", &make_planner, nb::arg("graph"), nb::arg("chosen"), nb::arg("device"), nb::arg("budget"));
    nb::class_<RematGroups>(module, "RematGroups")
        .def("__init__", &make_groups, nb::arg("tensors"), nb::arg("alike"), nb::arg("near"));
    nb::class_<Attempt>(module, "Attempt")
        .def_prop_ro(
            "recompute", [](const Attempt& self) { return those(self.decision.recompute); }, kNew)
        .def_prop_ro(
            "drop_after_use", [](const Attempt& self) { return those(self.decision.drop_after_use); }, kNew)
        .def_prop_ro(
            "kept", [](const Attempt& self) { return those(self.decision.kept); }, kNew)
        .def_ro("scheduler", &Attempt::scheduler)
        .def_ro("plan", &Attempt::plan);
    nb::class_<Annealing>(module, "Annealing")
        .def("__init__", &make_annealing, nb::arg("planner"), nb::arg("groups"))
        .def_prop_ro("best", &Annealing::best)
        .def("begin", &begin, nb::arg("recompute"), nb::arg("kept"))
        .def("anneal", &anneal, nb::arg("attempts"), nb::arg("evaluations"), nb::arg("perturbation_rate"),
             nb::arg("temperature_seconds"), nb::arg("target_seconds"));
}
