// The check of layouts in overspill.placement.packing._packing.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <span>

#include "check.hpp"

namespace nb = nanobind;

namespace overspill::packing {
namespace {

using Column = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::span<const std::int64_t> span_of(const Column& column) { return {column.data(), column.shape(0)}; }

// Two blocks that clash or None, and the most live bytes.
nb::tuple checked(const Column& start, const Column& end, const Column& nbytes, const Column& offset,
                  const Column& gap_first, const Column& gap_start, const Column& gap_end) {
    const std::size_t blocks = start.shape(0);
    if (end.shape(0) != blocks || nbytes.shape(0) != blocks || offset.shape(0) != blocks ||
        gap_first.shape(0) != blocks + 1 || gap_start.shape(0) != gap_end.shape(0))
        throw nb::value_error("the columns differ in length");
    Checked found;
    {
        const nb::gil_scoped_release released;
        found = check_layout({span_of(start), span_of(end), span_of(nbytes), span_of(offset), span_of(gap_first),
                              span_of(gap_start), span_of(gap_end)});
    }
    const nb::object clash =
        found.clash ? nb::object(nb::make_tuple(found.clash->first, found.clash->second)) : nb::object(nb::none());
    return nb::make_tuple(clash, found.most_live);
}

}  // namespace

void bind_check(nb::module_& module) {
    module.def("check_layout", &checked, nb::arg("start"), nb::arg("end"), nb::arg("nbytes"), nb::arg("offset"),
               nb::arg("gap_first"), nb::arg("gap_start"), nb::arg("gap_end"));
}

}  // namespace overspill::packing
