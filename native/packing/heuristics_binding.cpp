// The heuristic solvers' part of overspill.placement.packing._packing.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "boxes.hpp"
#include "greedy.hpp"
#include "skyline.hpp"

namespace nb = nanobind;

namespace overspill::packing {
namespace {

template <typename T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Offsets = nb::ndarray<nb::numpy, Bytes>;

template <typename T>
std::span<const T> span_of(const Column<T>& column) {
    return {column.data(), column.shape(0)};
}

template <typename T>
std::vector<T> vector_of(const Column<std::int64_t>& column) {
    return {column.data(), column.data() + column.shape(0)};
}

// A numpy array that owns `values`.
Offsets array_of(std::vector<Bytes>&& values) {
    auto* kept = new std::vector<Bytes>(std::move(values));
    const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<Bytes>*>(p); });
    return Offsets(kept->data(), {kept->size()}, owner);
}

// Raises ValueError unless all columns are of one length.
template <typename First, typename... Rest>
void require_equal_lengths(const First& first, const Rest&... rest) {
    if (((rest.shape(0) != first.shape(0)) || ...)) throw nb::value_error("the columns differ in length");
}

std::optional<Offsets> pack(SkylinePacker& packer, const Column<double>& key, std::optional<Bytes> capacity,
                            std::optional<Bytes> limit) {
    if (key.shape(0) != packer.size()) throw nb::value_error("there must be one key a block");
    std::optional<std::vector<Bytes>> offsets;
    {
        const nb::gil_scoped_release released;
        offsets = packer.pack(span_of(key), capacity, limit.value_or(SkylinePacker::kUnlimited));
    }
    if (!offsets) return std::nullopt;
    return array_of(std::move(*offsets));
}

Offsets greedy(const Column<Bytes>& nbytes, const Column<Bytes>& alignment, const Column<Bytes>& pinned,
               const Column<std::int64_t>& piece_first, const Column<std::int64_t>& piece_start,
               const Column<std::int64_t>& piece_end, const Column<std::int64_t>& order, bool best_fit) {
    require_equal_lengths(nbytes, alignment, pinned, order);
    require_equal_lengths(piece_start, piece_end);
    std::vector<Bytes> offsets;
    {
        const nb::gil_scoped_release released;
        const auto start = vector_of<Section>(piece_start);
        const auto end = vector_of<Section>(piece_end);
        offsets =
            place_greedily({span_of(nbytes), span_of(alignment), span_of(pinned), span_of(piece_first), start, end},
                           span_of(order), best_fit);
    }
    return array_of(std::move(offsets));
}

// Of each merge: first, second, start, end, bytes, shift; and the share that it wastes.
nb::tuple merges(const Column<std::int64_t>& start, const Column<std::int64_t>& end, const Column<Bytes>& nbytes,
                 double most_waste, std::uint64_t seed) {
    require_equal_lengths(start, end, nbytes);
    std::vector<std::int64_t> rows;
    std::vector<double> waste;
    {
        const nb::gil_scoped_release released;
        const auto starts = vector_of<Section>(start);
        const auto ends = vector_of<Section>(end);
        for (const Merge& made : Boxer(starts, ends, span_of(nbytes)).merges(most_waste, seed)) {
            rows.insert(rows.end(), {made.first, made.second, made.start, made.end, made.nbytes, made.shift});
            waste.push_back(made.waste);
        }
    }
    return nb::make_tuple(array_of(std::move(rows)), waste);
}

}  // namespace

void bind_heuristics(nb::module_& module) {
    nb::class_<SkylinePacker>(module, "SkylinePacker")
        .def(
            "__init__",
            [](SkylinePacker* self, const Column<std::int64_t>& start, const Column<std::int64_t>& end,
               const Column<Bytes>& nbytes, const Column<Bytes>& alignment) {
                require_equal_lengths(start, end, nbytes, alignment);
                new (self) SkylinePacker(vector_of<Section>(start), vector_of<Section>(end), vector_of<Bytes>(nbytes),
                                         vector_of<Bytes>(alignment));
            },
            nb::arg("start"), nb::arg("end"), nb::arg("nbytes"), nb::arg("alignment"))
        .def("pack", &pack, nb::arg("key"), nb::arg("capacity").none(), nb::arg("limit").none());
    module.def("merges", &merges, nb::arg("start"), nb::arg("end"), nb::arg("nbytes"), nb::arg("most_waste"), nb::arg("seed"));
    module.def("greedy", &greedy, nb::arg("nbytes"), nb::arg("alignment"), nb::arg("pinned"), nb::arg("piece_first"),
               nb::arg("piece_start"), nb::arg("piece_end"), nb::arg("order"), nb::arg("best_fit"));
}

}  // namespace overspill::packing
