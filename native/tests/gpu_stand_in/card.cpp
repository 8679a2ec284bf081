#include "card.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <unordered_map>

namespace stand_in {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kLargePage = std::size_t{2} << 20;
constexpr int kMostDevices = 16;

struct Range {
    std::size_t nbytes;
    int device;
};

// Memory of its own: a piece of one file that the process has only in memory.
struct Memory {
    off_t offset;
    std::size_t nbytes;
    int device;
    bool is_mapped, is_released;
    std::uint64_t since;  // the work before it was mapped
};

// One lock: the stand-in is for order and counts, and what it costs is far below what a real call costs.
std::mutex guard;
std::array<std::size_t, kMostDevices> used_of;
std::map<Address, Range> blocks;  // cudaMalloc's
std::map<Address, std::size_t> reserved;
std::map<Address, std::uint64_t> mapped;  // the memory at each address
std::unordered_map<std::uint64_t, Memory> memories;
std::map<off_t, std::size_t> holes;  // of the file, before its end
off_t file_end = 0;
std::atomic<std::uint64_t> work{0};              // how much was launched so far, on any device
std::array<std::uint64_t, kMostDevices> waited;  // how much of it was when the host last waited for all of a device
bool events_held = false;
std::map<Address, std::size_t> pinned;
std::unordered_map<std::uint64_t, double> events;  // when each was recorded, in seconds
std::unordered_map<std::uint64_t, int> stream_devices;
std::atomic<std::uint64_t> next_number{0x10000};
std::atomic<std::uint64_t> waited_events{0};
std::array<std::atomic<std::uint64_t>, static_cast<std::size_t>(Counter::kCount)> counters;
std::array<std::atomic<std::int64_t>, static_cast<std::size_t>(Failing::kCount)> failing;
std::unordered_map<std::uint64_t, std::uint64_t> captured;         // streams and their captures
std::unordered_map<std::uint64_t, std::uint64_t> captured_events;  // the same of events
std::map<std::uint64_t, std::vector<std::function<void(std::uint64_t)>>> graphs;  // what each gives a stream
std::atomic<bool> broken{false};
std::atomic<bool> logging{false};
std::vector<Entry> entries;
thread_local int device_here = 0;
thread_local bool device_used = false;
thread_local std::vector<int> pushed;

std::size_t number(const char* name, std::size_t otherwise) {
    const char* text = std::getenv(name);
    return text == nullptr || *text == 0 ? otherwise : std::strtoull(text, nullptr, 10);
}

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The bytes that are taken of a device. `guard` is held.
std::size_t& used(int device) {
    require(device >= 0 && device < settings().devices, "a device that is not there");
    return used_of[static_cast<std::size_t>(device)];
}

bool take_locked(int device, std::size_t nbytes) {
    if (used(device) + nbytes > settings().card_bytes) return false;
    used(device) += nbytes;
    return true;
}

template <typename Ranges>
auto find(Ranges& ranges, const void* address) {
    const auto at = reinterpret_cast<Address>(address);
    auto found = ranges.upper_bound(at);
    if (found == ranges.begin()) return ranges.end();
    --found;
    return at < found->first + found->second.nbytes ? found : ranges.end();
}

// Whole large pages at a multiple of their size, as the driver gives them.
void* map_memory(std::size_t nbytes) {
    const std::size_t wanted = (nbytes + kLargePage - 1) / kLargePage * kLargePage;
    void* start = mmap(nullptr, wanted + kLargePage, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return nullptr;
    const auto first = reinterpret_cast<Address>(start);
    const Address aligned = (first + kLargePage - 1) / kLargePage * kLargePage;
    if (aligned > first) munmap(start, aligned - first);
    if (aligned - first < kLargePage) munmap(reinterpret_cast<void*>(aligned + wanted), first + kLargePage - aligned);
    return reinterpret_cast<void*>(aligned);
}

int memory_file() {
    static const int file = memfd_create("stand-in", 0);
    return file;
}

// Give a piece of the file back. `guard` is held.
void drop(std::unordered_map<std::uint64_t, Memory>::iterator found) {
    const Memory& memory = found->second;
    const int failed = fallocate(memory_file(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, memory.offset,
                                 static_cast<off_t>(memory.nbytes));
    require(failed == 0, "memory cannot be given back to the machine");
    holes[memory.offset] = memory.nbytes;
    used(memory.device) -= memory.nbytes;
    memories.erase(found);
}

// Keep what a captured stream is given; whether it is one.
template <typename Work>
bool is_kept(std::uint64_t stream, const Work& what) {
    const std::lock_guard lock(guard);
    const auto found = captured.find(stream);
    if (found == captured.end()) return false;
    graphs[found->second].push_back(what);
    return true;
}

void log_locked(Kind kind, std::uint64_t stream, std::uint64_t first, std::uint64_t second, std::uint64_t nbytes,
                std::uint32_t label) {
    if (logging.load(std::memory_order_relaxed)) entries.push_back({kind, label, stream, first, second, nbytes});
}

}  // namespace

const Settings& settings() {
    static const Settings found = [] {
        const char* name = std::getenv("STAND_IN_NAME");
        return Settings{name != nullptr ? name : "NVIDIA H200",
                        static_cast<int>(std::min<std::size_t>(number("STAND_IN_DEVICES", 1), kMostDevices)),
                        number("STAND_IN_CARD_BYTES", std::size_t{140} << 30),
                        number("STAND_IN_COPY_LIMIT", SIZE_MAX),
                        number("STAND_IN_VIRTUAL_MEMORY", 1) != 0};
    }();
    return found;
}

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "stand-in GPU: %s\n", what);
    std::abort();
}

void count(Counter counter, std::uint64_t by) {
    counters[static_cast<std::size_t>(counter)].fetch_add(by, std::memory_order_relaxed);
}

bool fails(Failing what) {
    auto& left = failing[static_cast<std::size_t>(what)];
    if (left.load(std::memory_order_relaxed) <= 0) return false;
    return left.fetch_sub(1) == 1;
}

bool is_broken() { return broken.load(std::memory_order_relaxed); }

void fail_at(Failing what, std::int64_t nth) { failing[static_cast<std::size_t>(what)] = nth; }

void* allocate(int device, std::size_t nbytes) {
    const std::lock_guard lock(guard);
    count(Counter::kMallocs);
    if (fails(Failing::kMalloc) || !take_locked(device, nbytes)) return nullptr;
    void* address = map_memory(nbytes);
    require(address != nullptr, "the machine has no addresses left");
    blocks[reinterpret_cast<Address>(address)] = {nbytes, device};
    log_locked(Kind::kMalloc, resolve(0), reinterpret_cast<Address>(address), 0, nbytes, 0);
    return address;
}

bool free(void* address) {
    const std::lock_guard lock(guard);
    count(Counter::kFrees);
    const auto found = blocks.find(reinterpret_cast<Address>(address));
    if (found == blocks.end()) return false;
    const auto [nbytes, device] = found->second;
    log_locked(Kind::kFree, static_cast<std::uint64_t>(device) + 1, found->first, 0, nbytes, 0);
    munmap(address, (nbytes + kLargePage - 1) / kLargePage * kLargePage);
    used(device) -= nbytes;
    blocks.erase(found);
    return true;
}

void* reserve_addresses(std::size_t nbytes) {
    const std::lock_guard lock(guard);
    void* start = mmap(nullptr, nbytes + kLargePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return nullptr;
    const Address aligned = (reinterpret_cast<Address>(start) + kLargePage - 1) / kLargePage * kLargePage;
    reserved[aligned] = nbytes;
    return reinterpret_cast<void*>(aligned);
}

bool release_addresses(void* address, std::size_t nbytes) {
    const std::lock_guard lock(guard);
    const auto found = reserved.find(reinterpret_cast<Address>(address));
    if (found == reserved.end() || found->second != nbytes) return false;
    const auto inside = mapped.lower_bound(found->first);
    if (inside != mapped.end() && inside->first < found->first + nbytes) return false;
    munmap(address, nbytes);
    reserved.erase(found);
    return true;
}

std::uint64_t create_memory(int device, std::size_t nbytes) {
    const std::lock_guard lock(guard);
    count(Counter::kMallocs);
    if (nbytes % kLargePage != 0 || fails(Failing::kMalloc) || !take_locked(device, nbytes)) return 0;
    Memory made{file_end, nbytes, device, false, false, 0};
    const auto hole = std::find_if(holes.begin(), holes.end(), [&](const auto& entry) { return entry.second == nbytes; });
    if (hole != holes.end()) {
        made.offset = hole->first;
        holes.erase(hole);
    } else {
        file_end += static_cast<off_t>(nbytes);
        require(ftruncate(memory_file(), file_end) == 0, "the machine has no room for a file in memory");
    }
    const std::uint64_t memory = next_number += 16;
    memories.emplace(memory, made);
    return memory;
}

bool release_memory(std::uint64_t memory) {
    const std::lock_guard lock(guard);
    count(Counter::kFrees);
    const auto found = memories.find(memory);
    if (found == memories.end() || found->second.is_released) return false;
    found->second.is_released = true;
    if (!found->second.is_mapped) drop(found);  // otherwise when it is unmapped
    return true;
}

bool map_memory(void* address, std::size_t nbytes, std::uint64_t memory) {
    const std::lock_guard lock(guard);
    const auto at = reinterpret_cast<Address>(address);
    const auto found = memories.find(memory);
    auto space = reserved.upper_bound(at);
    if (found == memories.end() || space == reserved.begin()) return false;
    --space;
    Memory& made = found->second;
    const auto next = mapped.lower_bound(at);
    const bool is_free = next == mapped.end() || next->first >= at + nbytes;
    const bool is_behind = next == mapped.begin() || std::prev(next)->first + memories[std::prev(next)->second].nbytes <= at;
    if (made.is_mapped || made.is_released || made.nbytes != nbytes || at + nbytes > space->first + space->second ||
        !is_free || !is_behind)
        return false;
    if (mmap(address, nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, memory_file(), made.offset) == MAP_FAILED) return false;
    made.is_mapped = true;
    made.since = work;
    mapped[at] = memory;
    blocks[at] = {nbytes, made.device};
    log_locked(Kind::kMalloc, resolve(0), at, 0, nbytes, 0);
    return true;
}

bool unmap_memory(void* address, std::size_t nbytes) {
    const std::lock_guard lock(guard);
    const auto at = reinterpret_cast<Address>(address);
    const auto found = mapped.find(at);
    if (found == mapped.end() || memories[found->second].nbytes != nbytes) return false;
    const auto memory = memories.find(found->second);
    require(std::max(memory->second.since, waited[static_cast<std::size_t>(memory->second.device)]) == work,
            "memory was unmapped while work may use it");
    log_locked(Kind::kFree, static_cast<std::uint64_t>(memory->second.device) + 1, at, 0, nbytes, 0);
    mmap(address, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    memory->second.is_mapped = false;
    if (memory->second.is_released) drop(memory);
    mapped.erase(found);
    blocks.erase(at);
    return true;
}

bool allow_access(void* address, std::size_t nbytes) {
    const std::lock_guard lock(guard);
    const auto begin = reinterpret_cast<Address>(address);
    for (Address at = begin; at < begin + nbytes;) {
        const auto found = mapped.find(at);
        if (found == mapped.end()) return false;
        at += memories[found->second].nbytes;
    }
    return mprotect(address, nbytes, PROT_READ | PROT_WRITE) == 0;
}

int device_of(const void* address) {
    const std::lock_guard lock(guard);
    if (const auto found = find(blocks, address); found != blocks.end()) return found->second.device;
    return -1;
}

std::size_t used_bytes(int device) {
    const std::lock_guard lock(guard);
    return used(device);
}

Registering register_host(void* address, std::size_t nbytes) {
    const std::lock_guard lock(guard);
    if (fails(Failing::kRegister)) return Registering::kRefused;
    const auto begin = reinterpret_cast<Address>(address) / kPage * kPage;
    const auto end = (reinterpret_cast<Address>(address) + nbytes + kPage - 1) / kPage * kPage;
    const auto next = pinned.lower_bound(begin);
    if (next != pinned.end() && next->first < end) return Registering::kShared;
    if (next != pinned.begin()) {
        const auto& [before, size] = *std::prev(next);
        if ((before + size + kPage - 1) / kPage * kPage > begin) return Registering::kShared;
    }
    pinned[reinterpret_cast<Address>(address)] = nbytes;
    return Registering::kDone;
}

bool unregister_host(void* address) {
    const std::lock_guard lock(guard);
    return pinned.erase(reinterpret_cast<Address>(address)) == 1;
}

bool is_pinned(const void* address) {
    const std::lock_guard lock(guard);
    const auto at = reinterpret_cast<Address>(address);
    const auto found = pinned.upper_bound(at);
    return found != pinned.begin() && at < std::prev(found)->first + std::prev(found)->second;
}

std::size_t pinned_bytes() {
    const std::lock_guard lock(guard);
    std::size_t sum = 0;
    for (const auto& [address, nbytes] : pinned) sum += nbytes;
    return sum;
}

int current_device() { return pushed.empty() ? device_here : pushed.back(); }

void set_device(int device) {
    device_used = true;
    (pushed.empty() ? device_here : pushed.back()) = device;
}

void push_context(int device) { pushed.push_back(device); }

int pop_context() {
    if (pushed.empty()) return -1;
    const int device = pushed.back();
    pushed.pop_back();
    return device;
}

bool has_context() { return device_used || !pushed.empty(); }

std::uint64_t make_stream(int device) {
    const std::lock_guard lock(guard);
    const std::uint64_t stream = next_number += 16;
    stream_devices[stream] = device;
    return stream;
}

// The legacy stream of device d is d + 1 in the log.
std::uint64_t resolve(std::uint64_t stream) {
    return stream != 0 ? stream : static_cast<std::uint64_t>(current_device()) + 1;
}

std::uint64_t make_event() {
    const std::lock_guard lock(guard);
    count(Counter::kEvents);
    const std::uint64_t event = next_number += 16;
    events[event] = 0;
    return event;
}

bool destroy_event(std::uint64_t event) {
    const std::lock_guard lock(guard);
    return events.erase(event) == 1;
}

void record(std::uint64_t event, std::uint64_t stream) {
    const std::lock_guard lock(guard);
    count(Counter::kRecords);
    const auto found = events.find(event);
    require(found != events.end(), "an event was recorded that is not there");
    found->second = now();
    const auto capture = captured.find(stream);
    if (capture != captured.end())
        captured_events[event] = capture->second;
    else
        captured_events.erase(event);
    log_locked(Kind::kRecord, resolve(stream), event, 0, 0, 0);
}

void wait(std::uint64_t stream, std::uint64_t event) {
    const std::lock_guard lock(guard);
    count(Counter::kWaits);
    require(events.count(event) == 1, "a stream waits for an event that is not there");
    if (const auto capture = captured_events.find(event); capture != captured_events.end())
        if (graphs.contains(capture->second)) captured[stream] = capture->second;
    log_locked(Kind::kWait, resolve(stream), event, 0, 0, 0);
}

bool ask(std::uint64_t event) {
    const std::lock_guard lock(guard);
    require(events.count(event) == 1, "an event was asked for that is not there");
    if (events_held) return false;
    log_locked(Kind::kEventDone, 0, event, 0, 0, 0);
    return true;
}

void synchronise_event(std::uint64_t event) {
    const std::lock_guard lock(guard);
    count(Counter::kSyncs);
    ++waited_events;
    require(events.count(event) == 1, "the host waits for an event that is not there");
    log_locked(Kind::kEventDone, 0, event, 0, 0, 0);
}

void synchronise_stream(std::uint64_t stream) {
    const std::lock_guard lock(guard);
    count(Counter::kSyncs);
    log_locked(Kind::kStreamDone, resolve(stream), 0, 0, 0, 0);
}

void synchronise_device(int device) {
    const std::lock_guard lock(guard);
    count(Counter::kSyncs);
    waited[static_cast<std::size_t>(device)] = work;
    events_held = false;
    log_locked(Kind::kDeviceDone, static_cast<std::uint64_t>(device) + 1, 0, 0, 0, 0);
}

float milliseconds_between(std::uint64_t begin, std::uint64_t end) {
    const std::lock_guard lock(guard);
    const auto first = events.find(begin), last = events.find(end);
    require(first != events.end() && last != events.end(), "the time between events that are not there");
    return static_cast<float>((last->second - first->second) * 1e3);
}

std::uint64_t event_syncs() { return waited_events; }

bool begin_capture(std::uint64_t stream) {
    const std::lock_guard lock(guard);
    const std::uint64_t graph = next_number += 16;
    graphs[graph];
    return stream != 0 && captured.emplace(stream, graph).second;
}

std::uint64_t end_capture(std::uint64_t stream) {
    const std::lock_guard lock(guard);
    const auto found = captured.find(stream);
    if (found == captured.end()) return 0;
    const std::uint64_t graph = found->second;
    std::erase_if(captured, [&](const auto& entry) { return entry.second == graph; });
    std::erase_if(captured_events, [&](const auto& entry) { return entry.second == graph; });
    return graph;
}

std::uint64_t capture_of(std::uint64_t stream) {
    const std::lock_guard lock(guard);
    const auto found = captured.find(stream);
    return found == captured.end() ? 0 : found->second;
}

bool is_capturing() {
    const std::lock_guard lock(guard);
    return !captured.empty();
}

std::size_t graph_size(std::uint64_t graph) {
    const std::lock_guard lock(guard);
    return graphs.at(graph).size();
}

void launch_graph(std::uint64_t graph, std::uint64_t stream) {
    for (const auto& work_of : graphs.at(graph)) work_of(stream);
}

void launch(std::uint64_t stream) {
    if (is_kept(stream, [](std::uint64_t on) { launch(on); })) return;
    count(Counter::kLaunches);
    ++work;
    if (fails(Failing::kLaunch)) broken = true;
    if (!logging.load(std::memory_order_relaxed)) return;
    const std::lock_guard lock(guard);
    log_locked(Kind::kLaunch, resolve(stream), 0, 0, 0, 0);
}

void copy(void* target, const void* source, std::size_t nbytes, std::uint64_t stream) {
    if (is_kept(stream, [=](std::uint64_t on) { copy(target, source, nbytes, on); })) return;
    const bool from_device = device_of(source) >= 0, to_device = device_of(target) >= 0;
    count(Counter::kCopies);
    ++work;
    if (from_device && !to_device) count(Counter::kOut, nbytes);
    if (!from_device && to_device) count(Counter::kIn, nbytes);
    if (nbytes <= settings().copy_limit_bytes) std::memmove(target, source, nbytes);
    if (!logging.load(std::memory_order_relaxed)) return;
    // Pageable memory is staged: of a copy from it nothing is read later, and a copy to it is waited for.
    const bool staged = !from_device && !is_pinned(source), waited = !to_device && !is_pinned(target);
    const std::lock_guard lock(guard);
    log_locked(Kind::kCopy, resolve(stream), reinterpret_cast<Address>(target),
               staged ? 0 : reinterpret_cast<Address>(source), nbytes, (from_device ? 1 : 0) + (to_device ? 2 : 0));
    if (waited) log_locked(Kind::kStreamDone, resolve(stream), 0, 0, 0, 0);
}

void set(void* target, int value, std::size_t nbytes, std::uint64_t stream) {
    if (is_kept(stream, [=](std::uint64_t on) { set(target, value, nbytes, on); })) return;
    if (nbytes <= settings().copy_limit_bytes) std::memset(target, value, nbytes);
    ++work;
    const std::lock_guard lock(guard);
    log_locked(Kind::kSet, resolve(stream), reinterpret_cast<Address>(target), 0, nbytes, 0);
}

void log(Kind kind, std::uint64_t stream, std::uint64_t first, std::uint64_t second, std::uint64_t nbytes,
         std::uint32_t label) {
    const std::lock_guard lock(guard);
    log_locked(kind, resolve(stream), first, second, nbytes, label);
}

}  // namespace stand_in

// For whoever tests: see stand_in.py.
extern "C" {

void stand_in_log(int on) {
    const std::lock_guard lock(stand_in::guard);
    stand_in::logging = on != 0;
}
std::size_t stand_in_log_size() { return stand_in::entries.size(); }
const stand_in::Entry* stand_in_log_entries() { return stand_in::entries.data(); }
void stand_in_log_clear() {
    const std::lock_guard lock(stand_in::guard);
    stand_in::entries.clear();
}
void stand_in_access(std::uint64_t stream, std::uint64_t address, std::uint64_t nbytes, int writes,
                     std::uint32_t label) {
    stand_in::log(stand_in::Kind::kAccess, stream, address, writes != 0, nbytes, label);
}
std::uint64_t stand_in_counter(int which) { return stand_in::counters[static_cast<std::size_t>(which)]; }
void stand_in_fail(int what, std::int64_t nth) { stand_in::fail_at(static_cast<stand_in::Failing>(what), nth); }
void stand_in_launch(std::uint64_t stream) { stand_in::launch(stream); }
// Events are passed no more, until this is taken back or the host waits for the device.
void stand_in_hold_events(int on) {
    const std::lock_guard lock(stand_in::guard);
    stand_in::events_held = on != 0;
}
std::size_t stand_in_used(int device) { return stand_in::used_bytes(device); }
std::size_t stand_in_pinned() { return stand_in::pinned_bytes(); }
std::uint64_t stand_in_event_syncs() { return stand_in::event_syncs(); }
}
