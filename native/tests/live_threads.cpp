// Four threads on one live allocator, for a sanitizer to watch: every device without a GPU, every pool, steps and
// streams. Each thread fills its blocks with a pattern and finds it there again.
//
//     native/tests/sanitize builds and runs it.

#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../live/allocator.hpp"
#include "../live/by_name.hpp"

namespace overspill::live {
namespace {

constexpr int kThreads = 4;
constexpr int kRounds = 3000;
constexpr std::size_t kMostLive = 40;
constexpr Bytes kMostBytes = 96 * 1024;
constexpr Bytes kChunkBytes = 16 * 1024;
constexpr Bytes kPoolBytes = 1 << 20;

void require(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "live_threads: %s\n", what);
    std::exit(1);
}

struct PoolBlock {
    Address address;
    Bytes nbytes;
    unsigned char mark;
};

// One thread of a program, on its own stream; `real`: there is memory at the addresses.
class Worker {
  public:
    Worker(LiveAllocator& allocator, int number, bool real)
        : allocator_(allocator), number_(number), real_(real), random_(static_cast<unsigned>(number)) {}

    void work() {
        for (int round = 0; round < kRounds; ++round) {
            if (live_.size() < kMostLive && draw(100) < 55)
                allocate();
            else if (!live_.empty())
                free(draw(live_.size()));
            if (draw(100) < 3) other();
        }
        while (!live_.empty()) free(live_.size() - 1);
    }

  private:
    LiveAllocator& allocator_;
    int number_;
    bool real_;
    std::mt19937 random_;
    std::vector<PoolBlock> live_;

    std::size_t draw(std::size_t below) { return std::uniform_int_distribution<std::size_t>(0, below - 1)(random_); }

    void allocate() {
        const Bytes nbytes = 1 + static_cast<Bytes>(draw(static_cast<std::size_t>(draw(8) ? 4096 : kMostBytes)));
        const auto address = allocator_.allocate(nbytes, number_);
        require(address.has_value(), "no memory");
        const PoolBlock block{*address, nbytes, static_cast<unsigned char>(draw(256))};
        if (real_) {
            auto* bytes = reinterpret_cast<unsigned char*>(block.address);
            for (Bytes i = 0; i < nbytes; ++i) bytes[i] = block.mark;
        }
        live_.push_back(block);
    }

    void free(std::size_t which) {
        const PoolBlock block = live_[which];
        live_[which] = live_.back();
        live_.pop_back();
        if (real_) {
            const auto* bytes = reinterpret_cast<const unsigned char*>(block.address);
            for (Bytes i = 0; i < block.nbytes; ++i) require(bytes[i] == block.mark, "a live byte was overwritten");
        }
        require(allocator_.free(block.address), "a live block was not known");
    }

    // What a program does beside.
    void other() {
        switch (draw(4)) {
            case 0:
                if (!live_.empty()) require(allocator_.use(live_.back().address, number_ + 100), "a live block was not known");
                break;
            case 1:
                require(allocator_.statistics().allocated >= 0, "fewer bytes than none");
                break;
            case 2:
                if (number_ == 0) allocator_.begin_step();
                break;
            default:
                if (number_ == 1) allocator_.trim();
        }
    }
};

void run(const std::string& device_name, const std::string& pool_name) {
    const bool real = device_name == "host";
    auto device = make_device(device_name, 0, std::nullopt, false);
    auto pool = make_pool(pool_name, *device, kPoolBytes, kChunkBytes);
    LiveAllocator allocator(std::move(device), std::move(pool));
    allocator.begin_step();
    std::vector<Worker> workers;
    for (int i = 0; i < kThreads; ++i) workers.emplace_back(allocator, i, real);
    std::vector<std::thread> threads;
    for (Worker& worker : workers) threads.emplace_back([&worker] { worker.work(); });
    for (std::thread& thread : threads) thread.join();
    allocator.trim();
    const Statistics end = allocator.statistics();
    require(end.allocated == 0, "blocks are left");
    std::printf("%-9s %-9s %lld requests\n", device_name.c_str(), pool_name.c_str(),
                static_cast<long long>(end.requests));
}

}  // namespace
}  // namespace overspill::live

int main() {
    for (const char* device : {"host", "simulated"})
        for (const char* pool : {"best-fit", "two-ended", "virtual"})
            overspill::live::run(device, pool);
    return 0;
}
