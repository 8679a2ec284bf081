// What overspill.placement.packing._packing has for files and layouts: reading rows, writing them, checking.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>

#include <array>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "check.hpp"
#include "csv_rows.hpp"

namespace nb = nanobind;

namespace overspill::packing {
namespace {

using Column = nb::ndarray<const std::int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Numbers = nb::ndarray<nb::numpy, std::int64_t>;

std::span<const std::int64_t> span_of(const Column& column) { return {column.data(), column.shape(0)}; }

Numbers array_of(std::vector<std::int64_t>&& values) {
    auto* kept = new std::vector<std::int64_t>(std::move(values));
    const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<std::int64_t>*>(p); });
    return Numbers(kept->data(), {kept->size()}, owner);
}

// The columns of the roles, then the ends of the ids, and where lines begin and end; None if the text is not plain.
nb::object rows(const nb::bytes& text, std::size_t at, std::size_t cells, const std::array<std::int64_t, kRoles>& places) {
    CsvRows found;
    bool plain = false;
    {
        const nb::gil_scoped_release released;
        plain = read_rows({text.c_str(), text.size()}, at, cells, places, found);
    }
    if (!plain) return nb::none();
    nb::list columns;
    for (auto& column : found.columns) columns.append(array_of(std::move(column)));
    columns.append(array_of(std::move(found.id_end)));
    columns.append(array_of(std::move(found.line)));
    columns.append(array_of(std::move(found.line_end)));
    return columns;
}

nb::bytes offsets_written(const nb::bytes& text, const Column& line, const Column& line_end, const Column& offsets,
                          std::int64_t place) {
    if (line.shape(0) != line_end.shape(0) || line.shape(0) != offsets.shape(0))
        throw nb::value_error("the columns differ in length");
    const std::string out =
        with_offsets({text.c_str(), text.size()}, span_of(line), span_of(line_end), span_of(offsets), place);
    return nb::bytes(out.data(), out.size());
}

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

void bind_files(nb::module_& module) {
    module.def("read_rows", &rows, nb::arg("text"), nb::arg("at"), nb::arg("cells"), nb::arg("places"));
    module.def("with_offsets", &offsets_written, nb::arg("text"), nb::arg("line"), nb::arg("line_end"), nb::arg("offsets"),
               nb::arg("place"));
    module.def("check_layout", &checked, nb::arg("start"), nb::arg("end"), nb::arg("nbytes"), nb::arg("offset"),
               nb::arg("gap_first"), nb::arg("gap_start"), nb::arg("gap_end"));
}

}  // namespace overspill::packing
