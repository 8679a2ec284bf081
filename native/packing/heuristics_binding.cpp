#include <nanobind/nanobind.h>

namespace overspill::packing {
void bind_heuristics(nanobind::module_&) {}
}  // namespace overspill::packing
