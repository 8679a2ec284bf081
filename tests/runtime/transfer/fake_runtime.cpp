// A stand-in for the runtime library of an accelerator, over host memory: copies run when somebody waits for them, which is
// as late as they may. Rules of the library that would go wrong silently otherwise end the process. Compute is host code.
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <utility>
#include <string>

namespace {

struct Stream;
struct Event {
    int device;
    Stream* stream = nullptr;  // on which it was recorded last, as number `record` there
    long record = 0;
};
struct Stream {
    std::string name;
    int device;
    std::deque<std::pair<long, std::function<void()>>> queue;
    long records = 0;
};

int current = 0, events = 0, made = 0, fails_at = -1, error = 0;
std::string log_;
std::map<int, Stream> compute;

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "fake runtime: %s\n", what);
    std::abort();
}

// Handle 0 is the default stream of the current device, which is where the tests compute.
Stream& stream_of(void* handle) {
    if (handle != nullptr) return *static_cast<Stream*>(handle);
    Stream& found = compute[current];
    found.name = "compute", found.device = current;
    return found;
}

void run_until(Stream& stream, long record) {
    while (!stream.queue.empty() && stream.queue.front().first <= record) {
        stream.queue.front().second();
        stream.queue.pop_front();
    }
}

void say(const std::string& line) { log_ += line + "\n"; }

int answer() {
    if (fails_at < 0 || fails_at-- > 0) return 0;
    return error = 719;
}

}  // namespace

extern "C" {

int fakeGetDevice(int* device) {
    *device = current;
    return 0;
}
int fakeSetDevice(int device) {
    current = device;
    return 0;
}
int fakeEventCreateWithFlags(void** event, unsigned flags) {
    require(flags == 2, "events without times");
    *event = new Event{current};
    ++events;
    return 0;
}
int fakeEventDestroy(void* event) {
    delete static_cast<Event*>(event);
    --events;
    return 0;
}
int fakeEventRecord(void* event, void* handle) {
    Stream& stream = stream_of(handle);
    Event& recorded = *static_cast<Event*>(event);
    require(recorded.device == stream.device, "an event of another device");
    recorded.stream = &stream, recorded.record = ++stream.records;
    say(stream.name + " records");
    return 0;
}
int fakeStreamWaitEvent(void* handle, void* event, unsigned flags) {
    require(flags == 0 && static_cast<Event*>(event)->stream != nullptr, "a wait for an event that was recorded");
    const Event& awaited = *static_cast<Event*>(event);
    say(stream_of(handle).name + " waits for " + awaited.stream->name);
    run_until(*awaited.stream, awaited.record);
    return 0;
}
int fakeMemcpyAsync(void* to, const void* from, std::size_t nbytes, int kind, void* handle) {
    if (const int status = answer()) return status;
    Stream& stream = stream_of(handle);
    say(stream.name + (kind == 1 ? " copies in" : " copies out"));
    stream.queue.emplace_back(stream.records + 1, [=] { std::memcpy(to, from, nbytes); });
    return 0;
}
const char* fakeGetErrorName(int status) { return status == 719 ? "fakeErrorLaunchFailure" : nullptr; }
int fakeGetLastError() { return std::exchange(error, 0); }

// For the tests.
void* fake_stream(int device) { return new Stream{"copy" + std::to_string(++made), device, {}}; }
void fake_synchronize(void* stream) { run_until(*static_cast<Stream*>(stream), 1L << 62); }
void fake_fail_at(int copy) { fails_at = copy; }
int fake_error() { return error; }
int fake_events() { return events; }
const char* fake_log() { return log_.c_str(); }
void fake_forget() { log_.clear(), made = 0; }
}
