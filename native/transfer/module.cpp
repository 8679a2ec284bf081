// The extension overspill.runtime.transfer._copies: one call starts a transfer of an accelerator, one call awaits it.
// All of it runs under the interpreter lock, which no call here holds for long.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "copy_lane.hpp"

namespace nb = nanobind;

namespace overspill::transfer {
namespace {

template <typename Pointer>
Pointer pointer(std::uintptr_t address) {
    return reinterpret_cast<Pointer>(address);  // NOLINT(performance-no-int-to-ptr)
}

// A lane, and where to ask for the stream on which PyTorch computes in this thread.
struct Lane {
    CopyLane copies;
    int device;
    nb::object current;

    RawStream compute() const { return pointer<RawStream>(nb::cast<std::uintptr_t>(current(device))); }
};

// A copy under way; it holds the memory until compute has been told to wait.
class Ticket {
  public:
    Ticket(std::shared_ptr<Lane> lane, RawEvent done, nb::object memory)
        : lane_(std::move(lane)), done_(done), memory_(std::move(memory)) {}
    ~Ticket() {
        if (lane_) lane_->copies.give_back(done_);
    }
    Ticket(Ticket&&) noexcept = default;
    Ticket(const Ticket&) = delete;
    Ticket& operator=(const Ticket&) = delete;
    Ticket& operator=(Ticket&&) = delete;

    void wait() {
        lane_->copies.wait(done_, lane_->compute());
        memory_.reset();
    }

  private:
    std::shared_ptr<Lane> lane_;
    RawEvent done_;
    nb::object memory_;
};

class PyLane {
  public:
    PyLane(const std::string& path, const std::string& prefix, int device, std::uintptr_t stream, bool outward,
           nb::object current)
        : lane_(new Lane{{RuntimeLibrary(path, prefix), device, pointer<RawStream>(stream),
                          outward ? Direction::kToHost : Direction::kToDevice},
                         device,
                         std::move(current)}) {}

    Ticket submit(std::uintptr_t host, std::uintptr_t on_device, std::size_t nbytes, nb::object memory) {
        const RawEvent done =
            lane_->copies.start(pointer<void*>(host), pointer<void*>(on_device), nbytes, lane_->compute());
        return {lane_, done, std::move(memory)};
    }

  private:
    std::shared_ptr<Lane> lane_;
};

// Whether a library has what copies take.
bool can_copy(const std::string& path, const std::string& prefix) {
    try {
        const RuntimeLibrary library(path, prefix);
        return true;
    } catch (const std::runtime_error&) {
        return false;
    }
}

}  // namespace
}  // namespace overspill::transfer

NB_MODULE(_copies, module) {
    using namespace overspill::transfer;
    module.doc() = "The native part of overspill.runtime.transfer.lanes.";
    nb::set_leak_warnings(false);  // a program may end with copies under way
    module.def("can_copy", &can_copy, nb::arg("path"), nb::arg("prefix"));
    nb::class_<Ticket>(module, "CopyTicket").def("wait", &Ticket::wait);
    nb::class_<PyLane>(module, "CopyLane")
        .def(nb::init<const std::string&, const std::string&, int, std::uintptr_t, bool, nb::object>(), nb::arg("path"),
             nb::arg("prefix"), nb::arg("device"), nb::arg("stream"), nb::arg("outward"), nb::arg("current"))
        .def("submit", &PyLane::submit, nb::arg("host"), nb::arg("on_device"), nb::arg("nbytes"), nb::arg("memory"));
}
