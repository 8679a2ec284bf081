// The extension overspill.policies._planning: what the policy `auto` does thousands of times.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "decoder.hpp"
#include "program.hpp"

namespace nb = nanobind;

namespace overspill::planning {
namespace {

template <typename T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
std::vector<T> vector_of(const Column<T>& column) {
    return {column.data(), column.data() + column.shape(0)};
}

Flags flags_of(const Column<bool>& column) { return {column.data(), column.data() + column.shape(0)}; }

// A numpy array that owns `values`.
template <typename T>
nb::ndarray<nb::numpy, T> array_of(std::vector<T>&& values) {
    auto* kept = new std::vector<T>(std::move(values));
    const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return nb::ndarray<nb::numpy, T>(kept->data(), {kept->size()}, owner);
}

Lists lists_of(const nb::object& owner, const char* name) {
    Lists lists;
    for (const nb::handle item : owner) {
        for (const nb::handle value : item.attr(name)) lists.values.push_back(nb::cast<Index>(value));
        lists.close();
    }
    return lists;
}

// A graph, a device's link and a budget: makes decoders for programs that recompute one thing or another.
class Planner {
  public:
    Planner(const nb::object& graph, const Column<double>& seconds, const Column<bool>& forward,
            const Column<bool>& leaves, const Column<std::int32_t>& chosen, const Column<std::int32_t>& least,
            bool whole, const nb::object& device, Bytes budget)
        : budget_(budget),
          link_{nb::cast<double>(device.attr("transfer_latency_seconds")),
                nb::cast<double>(device.attr("offload_bytes_per_second")),
                nb::cast<double>(device.attr("prefetch_bytes_per_second")), nb::cast<bool>(device.attr("full_duplex")),
                nb::cast<double>(device.attr("transfer_compute_share"))} {
        auto made = std::make_shared<Graph>();
        const nb::object ops = graph.attr("ops");
        made->reads = lists_of(ops, "reads");
        made->writes = lists_of(ops, "writes");
        made->recompute_reads = lists_of(ops, "recompute_reads");
        made->recompute_writes = lists_of(ops, "recompute_writes");
        for (const nb::handle op : ops) {
            made->workspace.push_back(nb::cast<Bytes>(op.attr("workspace_bytes")));
            std::vector<Algorithm>& algorithms = made->algorithms.emplace_back();
            for (const nb::handle one : op.attr("algorithms"))
                algorithms.push_back({nb::cast<Bytes>(one.attr("workspace_bytes")), nb::cast<double>(one.attr("slowdown"))});
        }
        for (const nb::handle tensor : graph.attr("tensors")) {
            made->nbytes.push_back(nb::cast<Bytes>(tensor.attr("nbytes")));
            made->persistent.push_back(nb::cast<bool>(tensor.attr("persistent")));
            made->movable.push_back(nb::cast<bool>(tensor.attr("movable")));
        }
        made->output.assign(made->nbytes.size(), 0);
        for (const nb::handle tensor : graph.attr("outputs")) made->output[nb::cast<std::size_t>(tensor)] = 1;
        made->forward = flags_of(forward);
        made->leaves = flags_of(leaves);
        made->seconds = vector_of(seconds);
        made->chosen = vector_of(chosen);
        made->least = vector_of(least);
        made->whole = whole;
        const std::size_t op_count = made->workspace.size();
        if (made->forward.size() != op_count || made->seconds.size() != op_count || made->chosen.size() != op_count ||
            made->least.size() != op_count || made->leaves.size() != made->nbytes.size())
            throw nb::value_error("the columns differ in length");
        made->derive();
        graph_ = std::move(made);
    }

    // A decoder of the program that recomputes `dropped`, which become those for which there is room where they are made
    // again; nothing where no program fits.
    std::optional<std::pair<Decoder, Flags>> fitting(Flags dropped, const Flags& fleeting) const {
        while (true) {
            const Program program(*graph_, dropped, fleeting);
            const std::vector<Bytes> alone = program.alone();
            Flags around(alone.size() + 2, 0);
            bool over = false;
            for (std::size_t i = 0; i < alone.size(); ++i) {
                if (alone[i] <= budget_) continue;
                over = true;
                around[i ? i - 1 : 0] = around[i] = around[i + 1] = 1;
            }
            if (!over) return std::pair(Decoder(graph_, program, link_, budget_), std::move(dropped));
            if (std::none_of(dropped.begin(), dropped.end(), [](auto flag) { return flag != 0; })) return std::nullopt;
            bool crowded = false;
            Flags fewer = dropped;
            for (const Gap& gap : program.gaps) {
                if (!gap.remade || !around[gap.end] || !dropped[gap.tensor]) continue;
                fewer[gap.tensor] = 0;
                crowded = true;
            }
            dropped = crowded ? fewer : Flags(dropped.size(), 0);
        }
    }

  private:
    std::shared_ptr<const Graph> graph_;
    Bytes budget_;
    Link link_;
};

nb::object fitting(const Planner& planner, const Column<bool>& dropped, const Column<bool>& fleeting) {
    auto found = planner.fitting(flags_of(dropped), flags_of(fleeting));
    if (!found) return nb::none();
    std::vector<Index> kept;
    for (std::size_t t = 0; t < found->second.size(); ++t)
        if (found->second[t]) kept.push_back(static_cast<Index>(t));
    return nb::make_tuple(std::move(found->first), array_of(std::move(kept)));
}

nb::tuple decode(const Decoder& decoder, const Column<double>& dearer, const Column<bool>& first) {
    const auto count = static_cast<std::size_t>(decoder.candidates().size());
    if (dearer.shape(0) != count || first.shape(0) != count)
        throw nb::value_error("there must be one value a candidate");
    Decoded plan = decoder.decode({dearer.data(), dearer.shape(0)},
                                  {reinterpret_cast<const std::uint8_t*>(first.data()), first.shape(0)});
    return nb::make_tuple(plan.looks, plan.seconds, plan.moved_bytes, array_of(std::move(plan.chosen)),
                          array_of(std::move(plan.trips)), array_of(std::move(plan.release)),
                          array_of(std::move(plan.issue)), array_of(std::move(plan.lost)));
}

nb::ndarray<nb::numpy, std::uint8_t> as_chosen(const Decoder& decoder, const Decoder& other,
                                               const Column<std::int32_t>& chosen) {
    const std::span<const Index> before{chosen.data(), chosen.shape(0)};
    if (std::any_of(before.begin(), before.end(), [&](Index c) { return c < 0 || c >= other.candidates().size(); }))
        throw nb::value_error("a number that no candidate of the other decoder has");
    return array_of(decoder.as_chosen(other, before));
}

}  // namespace
}  // namespace overspill::planning

NB_MODULE(_planning, module) {
    using namespace overspill::planning;
    module.doc() = "The native part of overspill.policies.decoding.";
    nb::class_<Decoder>(module, "Decoder")
        .def("__len__", [](const Decoder& self) { return self.candidates().size(); })
        .def("decode", &decode, nb::arg("dearer"), nb::arg("first"))
        .def("as_chosen", &as_chosen, nb::arg("other"), nb::arg("chosen"))
        .def("trip_of",
             [](const Decoder& self) {
                 std::vector<Index> found;
                 for (const Candidate& c : self.candidates().all()) found.push_back(c.trip);
                 return array_of(std::move(found));
             })
        .def("trips",
             [](const Decoder& self) {
                 std::vector<Index> found;
                 for (const Trip& t : self.candidates().trips()) found.insert(found.end(), {t.tensor, t.start, t.end, t.copy});
                 return array_of(std::move(found));
             })
        .def("slower",
             [](const Decoder& self) {
                 std::vector<Index> found;
                 for (const Slower& s : self.candidates().slower()) found.insert(found.end(), {s.op, s.number});
                 return array_of(std::move(found));
             })
        .def("ops", [](const Decoder& self) { return array_of(std::vector<Index>(self.ops())); });
    nb::class_<Planner>(module, "Planner")
        .def(nb::init<const nb::object&, const Column<double>&, const Column<bool>&, const Column<bool>&,
                      const Column<std::int32_t>&, const Column<std::int32_t>&, bool, const nb::object&, Bytes>(),
             nb::arg("graph"), nb::arg("seconds"), nb::arg("forward"), nb::arg("leaves"), nb::arg("chosen"),
             nb::arg("least"), nb::arg("whole"), nb::arg("device"), nb::arg("budget"))
        .def("fitting", &fitting, nb::arg("dropped"), nb::arg("fleeting"));
}
