// The cards of the stand-in: their memory, streams and events, what was asked of them, and failures on demand.
// Device memory is host memory. Work on a stream is done at once and in the order of the calls; what a real card could
// do otherwise is for a checker to find out from the log.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace stand_in {

using Address = std::uintptr_t;

// What the environment says, read once (README.md lists the variables).
struct Settings {
    std::string name;
    int devices;
    std::size_t card_bytes;
    std::size_t copy_limit_bytes;
    bool has_virtual_memory;
};
const Settings& settings();

enum class Kind : std::uint32_t {
    kLaunch = 1,
    kCopy,         // first: target, second: source (0: nothing that is read later); label: 1 from a device, 2 to one, 3 both
    kSet,          // first: target
    kRecord,       // first: event
    kWait,         // first: event
    kStreamDone,   // the host knows that the stream has done all it was given
    kEventDone,    // first: event; the host knows that it has passed
    kDeviceDone,   // the host knows that the device of the stream has done everything
    kMalloc,       // first: address
    kFree,         // first: address; the host waits for the device
    kAccess,       // first: address, second: 1 for a write; said by whoever knows what a kernel touches
};

struct Entry {
    Kind kind;
    std::uint32_t label;
    std::uint64_t stream;
    std::uint64_t first;
    std::uint64_t second;
    std::uint64_t nbytes;
};

// In the order of `COUNTERS` in stand_in.py.
enum class Counter { kLaunches, kCopies, kOut, kIn, kEvents, kRecords, kWaits, kSyncs, kMallocs, kFrees, kLibrary, kCount };
void count(Counter counter, std::uint64_t by = 1);

// What may be told to fail: the n-th call from now on, once (`kLaunch`: for good, as a sticky error).
enum class Failing { kMalloc, kRegister, kLaunch, kCount };
bool fails(Failing what);
void fail_at(Failing what, std::int64_t nth);
// After a kernel has failed nothing works any more in this process.
bool is_broken();

// Memory of a device; nullptr where it has no room.
void* allocate(int device, std::size_t nbytes);
bool free(void* address);
int device_of(const void* address);  // -1: not a device's memory
std::size_t used_bytes(int device);

// Addresses without memory, and memory without addresses: 0 where there is no room. A whole mapping is taken away at
// once, and only when the host has waited for the device since its last work.
void* reserve_addresses(std::size_t nbytes);
bool release_addresses(void* address, std::size_t nbytes);
std::uint64_t create_memory(int device, std::size_t nbytes);
bool release_memory(std::uint64_t memory);
bool map_memory(void* address, std::size_t nbytes, std::uint64_t memory);
bool unmap_memory(void* address, std::size_t nbytes);
bool allow_access(void* address, std::size_t nbytes);

// Page-locked host memory. Registering fails as the driver refuses: a page that is registered already, or on demand.
enum class Registering { kDone, kShared, kRefused };
Registering register_host(void* address, std::size_t nbytes);
bool unregister_host(void* address);
bool is_pinned(const void* address);
std::size_t pinned_bytes();

// The device of this thread, and whether a context of it is current.
int current_device();
void set_device(int device);
void push_context(int device);
int pop_context();  // -1: there was none
bool has_context();

// Streams and events are numbers that are never used twice. The legacy stream 0 is one for each device.
std::uint64_t make_stream(int device);
std::uint64_t resolve(std::uint64_t stream);
std::uint64_t make_event();
bool destroy_event(std::uint64_t event);
void record(std::uint64_t event, std::uint64_t stream);
void wait(std::uint64_t stream, std::uint64_t event);
bool ask(std::uint64_t event);  // all work is done at once, so it has passed, unless a test holds events back
void synchronise_event(std::uint64_t event);
void synchronise_stream(std::uint64_t stream);
void synchronise_device(int device);
float milliseconds_between(std::uint64_t begin, std::uint64_t end);
std::uint64_t event_syncs();

void launch(std::uint64_t stream);
void copy(void* target, const void* source, std::size_t nbytes, std::uint64_t stream);
void set(void* target, int value, std::size_t nbytes, std::uint64_t stream);

// Graphs. What a captured stream is given is kept, and done at each launch of the graph. A stream that waits for an event
// of a captured one is captured too.
bool begin_capture(std::uint64_t stream);
std::uint64_t end_capture(std::uint64_t stream);       // the graph; 0: the stream was not captured
std::uint64_t capture_of(std::uint64_t stream);        // 0: it is not captured
bool is_capturing();
std::size_t graph_size(std::uint64_t graph);
void launch_graph(std::uint64_t graph, std::uint64_t stream);

void log(Kind kind, std::uint64_t stream, std::uint64_t first = 0, std::uint64_t second = 0, std::uint64_t nbytes = 0,
         std::uint32_t label = 0);

// Says on the error output what nobody should have asked, and ends the process.
void require(bool holds, const char* what);

}  // namespace stand_in
