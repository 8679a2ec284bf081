// The extension overspill.placement.packing._packing: offline solvers of dynamic storage allocation.

#include <nanobind/nanobind.h>

namespace overspill::packing {
void bind_heuristics(nanobind::module_& module);
void bind_exact(nanobind::module_& module);
void bind_check(nanobind::module_& module);
}  // namespace overspill::packing

NB_MODULE(_packing, module) {
    module.doc() = "The native solvers of overspill.placement.packing.";
    overspill::packing::bind_heuristics(module);
    overspill::packing::bind_exact(module);
    overspill::packing::bind_check(module);
}
