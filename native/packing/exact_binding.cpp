#include <nanobind/nanobind.h>

namespace overspill::packing {
void bind_exact(nanobind::module_&) {}
}  // namespace overspill::packing
