// Dymem's pool with two ends, GTBM (Yang and Cheng, HPDC'20, §3.3, Algorithm 3 and Fig. 11): blocks by their mobility.
//
//     main space  | movable | hole | movable |      gap      | temporary | hole | temporary | closed
//                 ^low end: best fit upwards                      best fit downwards: high end^
//
// Reclaimed blocks, and those that find no room, are in an incremental space beside it, which is the device's.
//
// With the mobility of each block given it is the paper's pool: memory for all of the main space at once, for all streams.
// Where it learns, as under a running job, a stream has a main space of its own, and memory only where its blocks were. The
// mobility of a request is that of its like one step before: freed within some requests, later, or not at all. After the
// first step with mobilities the main space is closed above what both ends took, but for β: that is the squeeze (§3.3.3).
// The oracle in Python: tests/placement/allocators/two_ended_oracle.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "../live/steps.hpp"
#include "allocator.hpp"
#include "settings.hpp"

namespace overspill {

struct TwoEndedConfig {
    std::optional<Bytes> pool_bytes;
    bool grows = true;
    bool learns = false;
};

class TwoEndedAllocator final : public Allocator {
  public:
    TwoEndedAllocator(Device& device, const TwoEndedConfig& config) : Allocator(device), config_(config) {}

    void mark() override {
        marked_ = true;
        for (const auto& space : spaces_)
            if (space != nullptr) space->ends = true;
    }

    std::vector<PoolBlock*> idle_blocks() const override {
        std::vector<PoolBlock*> all = pieces_;
        for (const auto& space : spaces_)
            if (space != nullptr) each_idle(*space, [&](PoolBlock* block) { all.push_back(block); });
        return all;
    }

    void release_cached() override {
        for (const auto& space : spaces_)
            if (space != nullptr && config_.learns) each_idle(*space, [&](PoolBlock* block) { unmap(*space, block); });
    }

    // Show which parts of free blocks have memory.
    void settle() override {
        if (!config_.learns) return;
        for (const auto& space : spaces_) {
            if (space == nullptr) continue;
            std::vector<PoolBlock*> idle;
            each_idle(*space, [&](PoolBlock* block) { idle.push_back(block); });
            for (PoolBlock* block : idle) {
                std::size_t cuts = 0;
                for (; true; ++cuts) {
                    const Bytes run = run_of(*space, block->address, block->address + block->size);
                    block->mapped = space->pages[page_of(*space, block->address)];
                    if (run == block->size) break;
                    pieces_.push_back(blocks_.cut(block, run));
                    pieces_.back()->mapped = block->mapped;
                }
                settled_.emplace_back(block, cuts);
            }
        }
    }
    void resume() override {
        while (!settled_.empty()) {
            auto& [block, cuts] = settled_.back();
            for (; cuts > 0; --cuts) {
                blocks_.absorb(block, pieces_.back());
                pieces_.pop_back();
            }
            block->mapped = true;
            settled_.pop_back();
        }
    }

    // The bytes used from both ends of the main space, and the incremental space.
    Bytes spread_bytes() const override {
        if (config_.learns || spaces_.empty()) return reserved.now;
        const PoolBlock* gap = gap_of(*spaces_[0]);
        return reserved.now - (gap == nullptr ? 0 : gap->size);
    }

    Bytes usable_bytes(Bytes request) const override {
        if (!config_.learns || request <= 1) return Allocator::usable_bytes(request);
        Bytes usable = 0;
        for (const auto& space : spaces_) {
            if (space == nullptr) continue;
            each_idle(*space, [&](const PoolBlock* block) {
                for (Address at = block->address, end = at + block->size; at < end;) {
                    const Bytes run = run_of(*space, at, end);
                    if (run >= request && space->pages[page_of(*space, at)]) usable += run;
                    at += run;
                }
            });
        }
        return usable;
    }

  protected:
    PoolBlock* find_block(Bytes nbytes, std::int32_t stream) override {
        return find_grouped_block(nbytes, stream, Mobility::kMovable);
    }

    PoolBlock* find_grouped_block(Bytes nbytes, std::int32_t stream, Mobility mobility) override {
        Space& space = space_of(config_.learns ? stream : 0, stream);
        const Bytes size = round_up(nbytes, kStepBytes);
        if (!config_.learns) return placed(space, size, stream, mobility);
        begin_request(space);
        PoolBlock* block = placed(space, size, stream, expected(space, size));
        if (block == nullptr) {
            release_cached();
            ++retries;
            block = placed(space, size, stream, Mobility::kMovable);
        }
        if (block != nullptr) end_request(space, block);
        return block;
    }

    void return_block(PoolBlock* block) override {
        Space& space = *spaces_[static_cast<std::size_t>(config_.learns ? block->stream : 0)];
        if (config_.learns) {
            space.log.freed(block->request);
            space.live -= block->counted;
        }
        if (block->region == kOutside) {
            segment_free(block);
        } else if (block->address >= space.end) {
            close(block);
        } else {
            return_to(space, block);
        }
    }

  private:
    enum Region : std::int8_t { kLow, kGap, kHigh, kOutside, kClosed };

    static constexpr Bytes kStepBytes = 512;                        // CNMEM_GRANULARITY of src/cnmem.cpp
    static constexpr Bytes kFirstPoolBytes = Bytes{10} << 30;       // "10G (another 2GB for incremental space)" (§5.5)
    static constexpr Bytes kUnlimitedSpaceBytes = Bytes{1} << 40;
    static constexpr Bytes kBeta = 64;                              // β is this part of the main space, where it learns
    static constexpr std::int64_t kSoon = 4;                        // requests within which movable blocks are freed
    static constexpr std::int64_t kMostRequests = std::int64_t{1} << 20;
    static constexpr int kMostMisses = 8;

    struct Space {
        Address base = 0, end = 0;  // of the main space
        FreeBlocks free;
        PoolBlock* closed = nullptr;  // the first block behind the end
        std::vector<bool> pages;      // which have memory
        // what it learns
        live::Log log;
        live::Repeats repeats;
        Bytes live = 0;
        std::int64_t period = 0, begin = 0, before = -1;  // requests of a step; where this one and the one before began
        int misses = 0;
        std::int64_t known = 0;  // requests of this step whose like was there one step before
        bool ends = false;
        Bytes most = 0, beside = 0;  // in this step: taken by both ends, and without room there
    };

    Space& space_of(std::int32_t number, std::int32_t stream) {
        const auto at = static_cast<std::size_t>(number);
        if (at >= spaces_.size()) spaces_.resize(at + 1);
        if (spaces_[at] == nullptr) {
            spaces_[at] = std::make_unique<Space>();
            open(*spaces_[at], stream);
        }
        return *spaces_[at];
    }

    // The main space: the size that was asked for, or all memory of the device; where it learns, addresses for more.
    void open(Space& space, std::int32_t stream) {
        const auto capacity = device_.capacity_bytes();
        PoolBlock* pool = nullptr;
        if (config_.learns) {
            const Bytes size = round_up(capacity ? *capacity + *capacity / 8 : kUnlimitedSpaceBytes, kPageBytes);
            const auto address = device_.reserve(size);
            if (!address) return;
            pool = blocks_.make(*address, size, stream);
            space.pages.assign(static_cast<std::size_t>(size / kPageBytes), false);
        } else {
            const Bytes size = round_up(config_.pool_bytes.value_or(capacity ? *capacity * 10 / 12 : kFirstPoolBytes), kStepBytes);
            if (size > 0) pool = segment_malloc(size, stream);
            if (pool == nullptr && capacity) {
                const Bytes left = (*capacity - device_.used_bytes()) / kPageBytes * kPageBytes;
                if (left > 0) pool = segment_malloc(left, stream);
            }
        }
        if (pool == nullptr) return;
        space.base = pool->address;
        space.end = pool->address + pool->size;
        put(space, pool);
    }

    PoolBlock* placed(Space& space, Bytes size, std::int32_t stream, Mobility mobility) {
        if (mobility == Mobility::kReclaimed) {
            PoolBlock* block = outside(size, stream);
            return block != nullptr ? block : inside(space, size, kLow);
        }
        PoolBlock* block = inside(space, size, mobility == Mobility::kTemporary ? kHigh : kLow);
        if (block == nullptr && config_.grows) {
            block = outside(size, stream);
            if (block != nullptr) space.beside += size;
        }
        return block;
    }

    PoolBlock* outside(Bytes size, std::int32_t stream) {
        PoolBlock* block = segment_malloc(size, stream);
        if (block != nullptr) block->region = kOutside;
        return block;
    }

    // A block from one end, or from another part of the main space: the guarantee is "soft" (§3.3.1).
    PoolBlock* inside(Space& space, Bytes size, Region end) {
        for (const Region region : {end, kGap, end == kLow ? kHigh : kLow}) {
            const auto found = space.free.lower_bound(Key{region, size});
            if (found == space.free.end() || found->second->region != region) continue;
            PoolBlock* hole = found->second;
            space.free.erase(found);
            PoolBlock* block = cut(space, hole, size, region == kGap ? end : region);
            if (!config_.learns || map(space, block)) return block;
            block->free = true;
            return_to(space, block);
            return nullptr;
        }
        return nullptr;
    }

    void return_to(Space& space, PoolBlock* block) {
        for (PoolBlock* other : {block->prev, block->next})
            if (other != nullptr && other->free && other->region != kClosed) {
                space.free.erase(key(other));
                blocks_.absorb(block, other);
            }
        put(space, block);
    }

    // `size` bytes of a free block on the side of `end`; the rest of it is free.
    PoolBlock* cut(Space& space, PoolBlock* hole, Bytes size, Region end) {
        if (hole->size == size) {
            hole->region = end;
            return hole;
        }
        PoolBlock* front = blocks_.cut(hole, end == kLow ? size : hole->size - size);
        PoolBlock *taken = end == kLow ? front : hole, *rest = end == kLow ? hole : front;
        taken->region = end;
        taken->free = false;
        put(space, rest);
        return taken;
    }

    // Add a free block to the holes of its end, or as the gap. Its neighbours are live.
    void put(Space& space, PoolBlock* block) {
        if (block->next != nullptr && block->next->region == kLow)
            block->region = kLow;
        else if (block->prev != nullptr && block->prev->region == kHigh)
            block->region = kHigh;
        else
            block->region = kGap;
        space.free.emplace(key(block), block);
    }

    // Among equals the one that is further from the gap is the first.
    static Key key(const PoolBlock* block) {
        return {block->region, block->size, block->region == kHigh ? -block->address : block->address};
    }

    static PoolBlock* gap_of(const Space& space) {
        const auto found = space.free.lower_bound(Key{kGap});
        return found == space.free.end() || found->second->region != kGap ? nullptr : found->second;
    }

    // --- What it learns of a running job.

    void begin_request(Space& space) {
        const std::int64_t now = space.log.next();
        if (marked_ ? std::exchange(space.ends, false) : space.period > 0 && now - space.begin >= space.period) {
            end_step(space, now);
        } else if (now - space.log.first() > kMostRequests) {
            space.log.forget_before(now - kMostRequests / 2);
        }
    }

    void end_request(Space& space, PoolBlock* block) {
        block->request = space.log.add(block->size, space.live);
        block->counted = block->size;
        space.live += block->size;
        const PoolBlock* gap = gap_of(space);
        space.most = std::max(space.most, space.end - space.base - (gap == nullptr ? 0 : gap->size));
        if (marked_) return;
        const auto period = space.repeats.see(space.log, space.live);
        if (!period || *period <= space.period) return;
        space.period = *period;
        space.begin = space.log.next();
        space.known = 0;
        space.most = 0;
    }

    // The number of the request that was at this place one step before; nothing where there is none.
    std::optional<std::int64_t> like(const Space& space) const {
        const std::int64_t now = space.log.next();
        if (marked_ ? space.before < 0 : space.period == 0) return std::nullopt;
        const std::int64_t found = marked_ ? space.before + (now - space.begin) : now - space.period;
        if (found < space.log.first() || found >= (marked_ ? space.begin : now)) return std::nullopt;
        return found;
    }

    Mobility expected(Space& space, Bytes size) {
        const auto before = like(space);
        if (!before || space.log[*before].nbytes != size) {
            if (++space.misses > kMostMisses) space.period = 0;
            return Mobility::kMovable;
        }
        space.misses = 0;
        ++space.known;
        const std::int64_t end = space.log[*before].end;
        if (end == live::kAlive) return Mobility::kReclaimed;
        return end - *before <= kSoon ? Mobility::kMovable : Mobility::kTemporary;
    }

    void end_step(Space& space, std::int64_t now) {
        const Bytes wanted = round_up(space.most + space.most / kBeta, kPageBytes);
        if (space.closed == nullptr && 2 * space.known > now - space.begin) squeeze(space, space.base + wanted);
        if (space.closed != nullptr) {
            if (space.beside > 0) widen(space, round_up(space.beside + wanted / kBeta, kPageBytes));
            for (PoolBlock* block = space.closed; block != nullptr; block = block->next)
                if (block->region == kClosed) unmap(space, block);
        }
        stuck_ = 0;
        space.before = space.begin;
        space.begin = now;
        if (marked_) space.log.forget_before(space.before);
        space.known = 0;
        space.most = space.beside = 0;
    }

    // Close the main space from `end` on, which lies in the gap. Blocks behind it live on, and their places are gone.
    void squeeze(Space& space, Address end) {
        PoolBlock* gap = gap_of(space);
        if (gap == nullptr || end <= gap->address || end >= gap->address + gap->size) return;
        space.free.erase(key(gap));
        for (auto hole = space.free.lower_bound(Key{kHigh}); hole != space.free.end(); hole = space.free.erase(hole))
            hole->second->region = kClosed;
        PoolBlock* front = blocks_.cut(gap, end - gap->address);
        gap->region = kClosed;
        space.closed = gap;
        space.end = end;
        put(space, front);
    }

    // Open so much of what was closed.
    void widen(Space& space, Bytes nbytes) {
        PoolBlock* closed = space.closed;
        if (closed->size <= nbytes) return;
        PoolBlock* front = blocks_.cut(closed, nbytes);
        front->free = true;
        space.end += nbytes;
        return_to(space, front);
    }

    void close(PoolBlock* block) {
        block->region = kClosed;
        if (block->prev->region == kClosed) {
            PoolBlock* before = block->prev;
            blocks_.absorb(before, block);
            block = before;
        }
        if (block->next != nullptr && block->next->region == kClosed) blocks_.absorb(block, block->next);
    }

    // --- Memory behind the addresses of a space.

    static std::size_t page_of(const Space& space, Address address) {
        return static_cast<std::size_t>((address - space.base) / kPageBytes);
    }

    // How many bytes of a range, from its front, are in pages alike.
    static Bytes run_of(const Space& space, Address start, Address end) {
        std::size_t page = page_of(space, start);
        const bool mapped = space.pages[page];
        Address at = start;
        while (at < end && space.pages[page] == mapped) at = space.base + static_cast<Address>(++page) * kPageBytes;
        return std::min(at, end) - start;
    }

    // Where more would be held than ever lived, and more lies idle than could not be given back the last time, idle pages go
    // first, as those that the low end left before there were mobilities.
    bool map(Space& space, const PoolBlock* block) {
        const std::size_t first = page_of(space, block->address), stop = page_of(space, block->address + block->size - 1) + 1;
        const auto missing = std::count(space.pages.begin() + static_cast<std::ptrdiff_t>(first),
                                        space.pages.begin() + static_cast<std::ptrdiff_t>(stop), false);
        if (missing == 0) return true;
        const Bytes lived = std::max(allocated.peak, allocated.now + block->size), slack = lived / kBeta + kPageBytes;
        if (reserved.now + missing * kPageBytes > lived + slack && reserved.now - allocated.now > stuck_ + slack) {
            release_cached();
            stuck_ = reserved.now - allocated.now;
        }
        return each_run(space, first, stop, false, [&](Address address, Bytes nbytes) {
            if (!device_.map(address, nbytes)) return false;
            log_exchange(SegmentAction::kMap, address, nbytes, block->stream);
            return true;
        });
    }

    // Give back all whole pages inside a free block.
    void unmap(Space& space, const PoolBlock* block) {
        const Address first = space.base + round_up(block->address - space.base, kPageBytes);
        const Address last = space.base + (block->address + block->size - space.base) / kPageBytes * kPageBytes;
        if (first >= last) return;
        each_run(space, page_of(space, first), page_of(space, last), true, [&](Address address, Bytes nbytes) {
            device_.unmap(address, nbytes);
            log_exchange(SegmentAction::kUnmap, address, nbytes, block->stream);
            return true;
        });
    }

    // Do it for each run of pages that are mapped or not; they are the other way round then. Whether all went well.
    template <typename Do>
    static bool each_run(Space& space, std::size_t first, std::size_t last, bool mapped, const Do& what) {
        for (std::size_t page = first; page < last;) {
            if (space.pages[page] != mapped) {
                ++page;
                continue;
            }
            std::size_t stop = page;
            while (stop < last && space.pages[stop] == mapped) ++stop;
            const auto count = static_cast<Bytes>(stop - page);
            if (!what(space.base + static_cast<Address>(page) * kPageBytes, count * kPageBytes)) return false;
            std::fill(space.pages.begin() + static_cast<std::ptrdiff_t>(page), space.pages.begin() + static_cast<std::ptrdiff_t>(stop),
                      !mapped);
            page = stop;
        }
        return true;
    }

    template <typename Do>
    void each_idle(const Space& space, const Do& what) const {
        for (const auto& entry : space.free) what(entry.second);
        for (PoolBlock* block = space.closed; block != nullptr; block = block->next)
            if (block->region == kClosed) what(block);
    }

    TwoEndedConfig config_;
    std::vector<std::unique_ptr<Space>> spaces_;
    bool marked_ = false;
    Bytes stuck_ = 0;  // idle bytes that were left when idle pages were given back
    // while it is settled: free blocks by how many pieces were cut from them, and those
    std::vector<std::pair<PoolBlock*, std::size_t>> settled_;
    std::vector<PoolBlock*> pieces_;
};

inline const Registered kTwoEnded("gtbm", [](Device& device, const Settings& settings) -> std::unique_ptr<Allocator> {
    return std::make_unique<TwoEndedAllocator>(
        device, TwoEndedConfig{settings.maybe_bytes("pool_bytes"), settings.flag("grows"), settings.flag("learns")});
});

}  // namespace overspill
