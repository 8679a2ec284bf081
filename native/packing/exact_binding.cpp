// The exact search in Python: overspill.placement.packing._packing.ExactSearch.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "exact.hpp"

namespace nb = nanobind;

namespace overspill::packing {
namespace {

using Clock = std::chrono::steady_clock;
using Integers = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Factors = nb::ndarray<const double, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;

template <typename T>
std::vector<T> copied(const Integers& values) {
    return {values.data(), values.data() + values.size()};
}

// Whether to give up: so many seconds from now, or by an error if the user interrupts.
auto after(double seconds) {
    return [began = Clock::now(), seconds] {
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        return std::chrono::duration<double>(Clock::now() - began).count() > seconds;
    };
}

// The outcome (1: all fit, 0: they cannot, -1: not known), the nodes, and the offsets, which count if all fit.
nb::tuple attempt(ExactSearch& search, const Integers& highest, const Integers& ceiling, const std::string& keys,
                  const Factors& noise, bool live, std::int64_t node_limit, double seconds) {
    const Attempt request{copied<Units>(highest), copied<Units>(ceiling), keys, noise.data(), live, node_limit};
    const Outcome outcome = search.attempt(request, after(seconds));
    const int code = outcome == Outcome::kFits ? 1 : outcome == Outcome::kInfeasible ? 0 : -1;
    return nb::make_tuple(code, search.nodes(), search.offsets());
}

}  // namespace

void bind_exact(nb::module_& module) {
    nb::class_<ExactSearch>(module, "ExactSearch")
        .def(
            "__init__",
            [](ExactSearch* self, int sections, const Integers& piece_first, const Integers& piece_start,
               const Integers& piece_end, const Integers& size, const Integers& alignment, const Integers& pinned,
               const Integers& below, const Integers& lifetime) {
                ExactBlocks blocks;
                blocks.sections = sections;
                blocks.piece_first = copied<int>(piece_first);
                blocks.piece_start = copied<int>(piece_start);
                blocks.piece_end = copied<int>(piece_end);
                blocks.size = copied<Units>(size);
                blocks.alignment = copied<Units>(alignment);
                blocks.pinned = copied<Units>(pinned);
                blocks.below = copied<Units>(below);
                blocks.lifetime = copied<Units>(lifetime);
                new (self) ExactSearch(std::move(blocks));
            },
            nb::arg("sections"), nb::arg("piece_first"), nb::arg("piece_start"), nb::arg("piece_end"), nb::arg("size"),
            nb::arg("alignment"), nb::arg("pinned"), nb::arg("below"), nb::arg("lifetime"))
        .def("attempt", &attempt, nb::arg("highest"), nb::arg("ceiling"), nb::arg("keys"), nb::arg("noise"),
             nb::arg("live"), nb::arg("node_limit"), nb::arg("seconds"));
}

}  // namespace overspill::packing
