// Planned addresses for the steps of a job that nobody captured: profile, plan, replay, reoptimise (Sekiyama et al. 2018,
// §4). What no plan knows is served by PyTorch's rules on expandable segments of 2 MiB pages, the heap.
//
// Each stream has a region of its own, so no byte passes from one stream to another:
//
//     fence | leased ......| foreign live | leased ........| tail, without memory ...|
//           ^base                                           ^base + bytes
//
// While it is leased, planned blocks come and go by the guard's bits alone. When the heap would have to grow, the region
// is lent to it: planned blocks become blocks of the heap, and what is between them is free. The next planned request
// takes the region back, around what lives there, once the step is known for sure. Where both together would hold more
// than ever lived at once, as in a step that no plan knows, free pages are given back first, and the rest of the step is
// the heap's.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../live/shapes.hpp"
#include "caching.hpp"

namespace overspill {

// In the order of `PlannedCounts` in placement/allocators/planned.py.
struct PlannedCounts {
    std::int64_t planned = 0;    // requests that got their planned address
    std::int64_t carried = 0;    // that live on into the next step, nobody knows how long
    std::int64_t displaced = 0;  // whose place was taken or too small
    std::int64_t foreign = 0;    // that no plan knows
    std::int64_t steps = 0;
    std::int64_t plans = 0;   // solved
    std::int64_t since = -1;  // when the last one came into force

    std::array<std::int64_t, 7> values() const { return {planned, carried, displaced, foreign, steps, plans, since}; }
};

class PlannedAllocator final : public CachingAllocator {
  public:
    PlannedAllocator(Device& device, bool background, bool thorough)
        : CachingAllocator(device, heap_settings()), solver_(background, thorough) {}

    // A step ends here, whatever its requests.
    void mark() override {
        marked_ = true;
        for (const auto& lane : lanes_)
            if (lane != nullptr) lane->ends = true;
    }

    // Until all plans that were asked for are there.
    void wait() override { solver_.wait(); }

    const PlannedCounts& counts() const { return counts_; }

    Bytes region_bytes() const {
        Bytes sum = 0;
        for (const auto& lane : lanes_) sum += lane == nullptr ? 0 : lane->bytes;
        return sum;
    }

    void release_cached() override {
        for (const auto& lane : lanes_)
            if (lane != nullptr) lend(*lane);
        CachingAllocator::release_cached();
    }

    std::vector<PoolBlock*> idle_blocks() const override {
        auto all = CachingAllocator::idle_blocks();
        for (const auto& lane : lanes_)
            if (lane != nullptr && lane->tail != nullptr) all.push_back(lane->tail);
        return all;
    }

    void settle() override {
        for (const auto& lane : lanes_)
            if (lane != nullptr && lane->leased) {
                lend(*lane);
                lane->settled = true;
            }
    }
    void resume() override {
        for (const auto& lane : lanes_)
            if (lane != nullptr && std::exchange(lane->settled, false)) lease(*lane, lane->bytes, false);
    }
    PoolBlock* in_chain(PoolBlock* block) const override { return block->planned ? block->twin : block; }

  protected:
    PoolBlock* find_block(Bytes nbytes, std::int32_t stream) override {
        const Bytes size = std::max(round_up(nbytes, kMinBlockBytes), kMinBlockBytes);
        Lane& lane = lane_of(stream);
        most_ = std::max(most_, allocated.now);
        begin_step(lane, size);
        const bool followed = lane.shapes.followed != nullptr;
        const auto number = lane.shapes.number(size, lane.log, lane.begin);
        if (followed && lane.shapes.followed == nullptr) lane.trusted = std::min(4 * lane.trusted, kMostRequests);
        PoolBlock* block = number ? planned_block(lane, *number, size) : nullptr;
        if (!number) {
            ++counts_.foreign;
            block = heap_block(lane, size, true);
        }
        if (block == nullptr) return nullptr;
        block->request = lane.log.add(size, lane.live);
        lane.live += size;
        block->counted = size;
        const bool watched = std::exchange(lane.watched, !marked_ && watches(lane));
        if (lane.watched) {
            if (!watched) lane.repeats.restart(block->request);
            look_for_steps(lane);
        }
        return block;
    }

    void return_block(PoolBlock* block) override {
        Lane& lane = lane_of(block->stream);
        most_ = std::max(most_, allocated.now + block->size);
        lane.log.freed(block->request);
        lane.live -= block->counted;
        if (block->planned) {
            auto& planned = static_cast<live::PlannedBlock&>(*block);
            planned.live = false;
            --planned.layout->live;
            PoolBlock* twin = std::exchange(planned.twin, nullptr);
            if (twin == nullptr) {
                lane.guard.give(planned.parts);
                return;
            }
            twin->twin = nullptr;
            twin->free = true;
            twin->requested = 0;
            CachingAllocator::return_block(twin);
            return;
        }
        const bool inside = lane.leased && block->address >= lane.base && block->address < lane.base + lane.bytes;
        CachingAllocator::return_block(block);
        if (inside) lease(lane);
    }

  private:
    static constexpr std::int64_t kMostRequests = std::int64_t{1} << 20;
    static constexpr Bytes kSlack = 256;  // beyond what ever lived, the 256th part of it and a page
    static constexpr Bytes kGiven = 16;   // at once, for the GPU is waited for: the 16th part at least
    static constexpr std::int64_t kTrusted = 32;  // steps after which nobody looks for longer ones

    // A stream: its requests, the steps that they make, and its region.
    struct Lane {
        Lane(live::Solver& solver, std::int32_t stream_) : stream(stream_), shapes(solver) {}

        std::int32_t stream;
        live::Log log;
        live::Repeats repeats;
        live::Shapes shapes;
        std::int64_t begin = 0;     // of the current step
        std::int64_t previous = 0;  // of the step that ended there
        bool ends = false;       // the step was marked as ended
        Bytes live = 0;
        std::int64_t trusted = kTrusted;
        bool watched = false;
        int clean_steps = 0;
        bool trimmed = true;
        // the region
        PoolBlock* fence = nullptr;
        PoolBlock* tail = nullptr;
        Address base = 0;
        Bytes wanted = 0, bytes = 0;
        bool leased = false, settled = false;
        bool crowded = false;  // the rest of the step is the heap's
        bool cut = false;      // the guard knows all edges, of so many bytes
        Bytes cut_bytes = 0;
        std::vector<PoolBlock*> pieces, holes;  // with memory and without
        live::Guard guard;
    };

    static CachingConfig heap_settings() {
        CachingConfig config;
        config.expandable_segments = true;
        config.large_segment_bytes = kPageBytes;
        return config;
    }

    Lane& lane_of(std::int32_t stream) {
        const auto at = static_cast<std::size_t>(stream);
        if (at >= lanes_.size()) lanes_.resize(at + 1);
        if (lanes_[at] == nullptr) lanes_[at] = std::make_unique<Lane>(solver_, stream);
        return *lanes_[at];
    }

    // --- Steps.

    void begin_step(Lane& lane, Bytes size) {
        if (marked_) {
            if (lane.ends) {
                lane.ends = false;
                end_step(lane, true);
                lane.shapes.begin(size, false);
            } else if (lane.log.next() - lane.begin >= kMostRequests) {  // nobody marks steps any more
                lane.log.forget_before(lane.log.next());
                lane.begin = lane.log.next();
                lane.shapes.follow(nullptr, 0);
            }
            return;
        }
        if (lane.shapes.complete()) end_step(lane, true);
        if (lane.shapes.followed == nullptr && lane.shapes.begin(size, true)) {
            lane.begin = lane.log.next();
            lane.crowded = false;
        }
    }

    // The step ends before the next request; learn what it was, and put plans into force.
    void end_step(Lane& lane, bool whole) {
        live::Shapes& shapes = lane.shapes;
        const std::int64_t now = lane.log.next();
        const std::int64_t begin = std::exchange(lane.begin, now);
        const std::int64_t before = std::exchange(lane.previous, begin);
        ++counts_.steps;
        bool clean = shapes.complete() && shapes.clean;
        if (shapes.complete()) ++shapes.followed->cycles;
        if (whole && begin >= lane.log.first()) {
            const bool repeats = before >= lane.log.first() && begin - before == now - begin;
            live::Steps step = live::step_of(lane.log, begin, now, repeats);
            if (!clean || !live::covers(shapes.followed->expected, step)) clean = shapes.learn(std::move(step)) && clean;
        }
        if (marked_ || !watches(lane)) lane.log.forget_before(begin);  // which says how long the next are carried
        shapes.follow(nullptr, 0);
        lane.crowded = false;
        install(lane);
        // What no plan knew may have left memory behind.
        lane.clean_steps = clean ? lane.clean_steps + 1 : 0;
        if (lane.clean_steps == 2 && !std::exchange(lane.trimmed, true)) CachingAllocator::release_cached();
        if (!clean) lane.trimmed = false;
    }

    // Whether a longer step may still be found.
    static bool watches(const Lane& lane) {
        return lane.shapes.followed == nullptr || lane.shapes.followed->cycles < lane.trusted;
    }

    void look_for_steps(Lane& lane) {
        if (lane.log.next() - lane.log.first() > kMostRequests) {
            lane.log.forget_before(lane.log.next() - kMostRequests / 2);
            lane.begin = std::max(lane.begin, lane.log.first());
        }
        const auto period = lane.repeats.see(lane.log, lane.live);
        if (!period) return;
        live::Shapes& shapes = lane.shapes;
        if (shapes.followed != nullptr && static_cast<std::int64_t>(shapes.followed->expected.size()) >= *period) return;
        // Cut the step where least lives on, there before the rarest request.
        const std::int64_t now = lane.log.next();
        std::unordered_map<Bytes, std::int64_t> often;
        for (std::int64_t at = now - 2 * *period; at < now - *period; ++at) ++often[lane.log[at].nbytes];
        std::int64_t cut = now - 2 * *period;
        for (std::int64_t at = cut; at < now - *period; ++at) {
            const auto rank = [&](std::int64_t i) { return std::pair(lane.log[i].live, often[lane.log[i].nbytes]); };
            if (rank(at) < rank(cut)) cut = at;
        }
        live::Steps step = live::step_of(lane.log, cut, cut + *period, false);
        for (const auto& shape : shapes.all)
            if (shape->expected.size() == step.size() &&
                std::equal(step.begin(), step.end(), shape->expected.begin(), [](auto& a, auto& b) { return b.takes(a.nbytes); }))
                return;
        live::Shape& shape = shapes.add(std::move(step));
        // The current step has begun at the last cut.
        const std::int64_t done = (now - cut - 1) % *period + 1;
        lane.begin = now - done;
        lane.previous = lane.begin - *period;
        shapes.follow(&shape, static_cast<std::size_t>(done));
    }

    // --- The heap.

    // A block of the heap; `holes`: of the region too before it grows.
    PoolBlock* heap_block(Lane& lane, Bytes size, bool holes) {
        Pool& pool = pool_for(size);
        PoolBlock* block = find_free(pool, size, lane.stream);
        if (block == nullptr && holes && !pool.small && lane.leased) {
            lend(lane);
            block = find_free(pool, size, lane.stream);
        }
        // In a step as planned the region is needed, whatever lies idle in it now.
        const bool as_planned = lane.leased && lane.shapes.followed != nullptr && lane.shapes.clean;
        const Bytes more = round_up(size, kPageBytes);
        if (block == nullptr && !as_planned && excess(more) > 0) {
            for (const auto& other : lanes_)
                if (other != nullptr) lend(*other);
            give_back(excess(more));
            lane.crowded = true;
        }
        if (block == nullptr) block = new_block(pool, size, lane.stream);
        return block == nullptr ? nullptr : cut_off(pool, block, size);
    }

    // By how much so much new memory would go beyond what ever lived at once.
    Bytes excess(Bytes more) const {
        const bool planned = std::any_of(lanes_.begin(), lanes_.end(),
                                         [](const auto& lane) { return lane != nullptr && lane->wanted > 0; });
        const Bytes lived = std::max(most_, allocated.now + more);
        return planned ? reserved.now + more - lived - lived / kSlack - kPageBytes : 0;
    }

    void give_back(Bytes nbytes) {
        const Bytes left = reserved.now - std::max(nbytes, most_ / kGiven);
        for (Pool* pool : {&large_, &small_}) expandable_->release(*pool, [&] { return reserved.now <= left; });
    }

    // --- Plans.

    PoolBlock* planned_block(Lane& lane, std::size_t number, Bytes size) {
        live::Layout* layout = lane.shapes.followed->layout.get();
        if (layout == nullptr) {
            ++counts_.foreign;
            return heap_block(lane, size, true);
        }
        if (!lane.leased && (lane.crowded || !(marked_ || lane.shapes.sure))) {
            ++counts_.displaced;
            return heap_block(lane, size, true);
        }
        if (!lane.leased) lease(lane);
        live::PlannedBlock& block = layout->blocks[number];
        const auto take = [&] { return block.placed && size <= block.size && lane.guard.take(block.parts); };
        if (take() || (!lane.holes.empty() && fill(lane, block) && take())) [[likely]] {
            block.live = true;
            ++layout->live;
            ++counts_.planned;
            return &block;
        }
        const live::Steps& expected = lane.shapes.followed->expected;
        ++(expected[number].placed() ? counts_.displaced : counts_.carried);
        return heap_block(lane, size, !expected[number].carried(expected.size()));
    }

    // Put the plans that were solved into force; between two steps.
    void install(Lane& lane) {
        for (auto& [ticket, solution] : solver_.answers()) answers_.emplace_back(ticket, std::move(solution));
        bool changed = false;
        for (const auto& shape : lane.shapes.all) {
            const auto found = std::find_if(answers_.begin(), answers_.end(),
                                            [&](const auto& answer) { return answer.first == shape->ticket; });
            if (found == answers_.end()) continue;
            lane.shapes.retire(std::exchange(shape->layout, layout_of(lane, *shape, found->second)));
            answers_.erase(found);
            shape->ticket = 0;
            changed = true;
            lane.cut = false;
            ++counts_.plans;
            counts_.since = clock;
        }
        // Answers to questions that nobody asks any more.
        std::erase_if(answers_, [&](const auto& answer) {
            return std::none_of(lanes_.begin(), lanes_.end(), [&](const auto& other) {
                return other != nullptr && std::any_of(other->shapes.all.begin(), other->shapes.all.end(),
                                                       [&](const auto& shape) { return shape->ticket == answer.first; });
            });
        });
        if (!changed) return;
        Bytes peak = 0;
        for (const auto& shape : lane.shapes.all)
            if (shape->layout != nullptr) peak = std::max(peak, shape->layout->peak);
        if (round_up(peak, kPageBytes) > lane.wanted) {
            lane.wanted = round_up(peak, kPageBytes);
            CachingAllocator::release_cached();  // the memory that profiling took
        }
        if (lane.wanted > 0) lease(lane);
    }

    std::unique_ptr<live::Layout> layout_of(Lane& lane, const live::Shape& shape, const live::Solution& solution) {
        if (lane.fence == nullptr) open_region(lane);
        auto layout = std::make_unique<live::Layout>();
        layout->peak = solution.peak;
        layout->blocks.resize(shape.expected.size());
        for (std::size_t i = 0; i < shape.expected.size(); ++i) {
            live::PlannedBlock& block = layout->blocks[i];
            block.planned = true;
            block.layout = layout.get();
            block.stream = lane.stream;
            block.size = solution.offsets[i] == live::kUnplaced ? 0 : shape.expected[i].nbytes;
            block.address = lane.base + solution.offsets[i];
        }
        return layout;
    }

    // --- The region.

    void open_region(Lane& lane) {
        lane.tail = expandable_->open(large_, lane.stream);
        if (lane.tail == nullptr) return;
        lane.base = lane.tail->address;
        lane.fence = blocks_.make(lane.base, 0, lane.stream);
        lane.fence->free = false;
        lane.fence->base = lane.base;
        lane.fence->splice(nullptr, lane.tail);
        lane.tail->free = false;  // nothing grows into it
    }

    template <typename Do>
    void each_planned(Lane& lane, const Do& what) {
        for (const auto& shape : lane.shapes.all)
            if (shape->layout != nullptr)
                for (auto& block : shape->layout->blocks) what(block);
        for (const auto& layout : lane.shapes.retired)
            for (auto& block : layout->blocks) what(block);
    }

    // Lend the region to the heap.
    void lend(Lane& lane) {
        if (!lane.leased) return;
        lane.leased = false;
        for (PoolBlock* hole : std::exchange(lane.holes, {})) {
            hole->free = true;
            join(hole, hole->prev);
            join(hole, hole->next);
            large_.unmapped.emplace(Key{hole->stream, hole->address}, hole);
        }
        std::vector<live::PlannedBlock*> live;
        each_planned(lane, [&](live::PlannedBlock& block) {
            if (block.live) live.push_back(&block);
        });
        std::sort(live.begin(), live.end(), [](auto* a, auto* b) { return a->address < b->address; });
        auto block = live.begin();
        for (PoolBlock* piece : std::exchange(lane.pieces, {})) {
            PoolBlock *before = piece->prev, *after = piece->next;
            Address at = piece->address;
            const Address end = at + piece->size;
            blocks_.drop(piece);
            const auto add = [&](Bytes size) {
                PoolBlock* part = blocks_.make(at, size, lane.stream);
                part->base = lane.base;
                part->born = birth();
                part->splice(before, nullptr);
                before = part;
                at += size;
                return part;
            };
            const auto add_free = [&](Bytes size) {
                if (size > 0) put(add(size));
            };
            for (; block != live.end() && (*block)->address < end; ++block) {
                add_free((*block)->address - at);
                PoolBlock* twin = add((*block)->size);
                twin->free = false;
                twin->requested = (*block)->requested;
                twin->twin = *block;
                (*block)->twin = twin;
            }
            add_free(end - at);
            before->splice(before->prev, after);
        }
    }

    // Take the region back from the heap, around the blocks of the heap that live there; with memory for all of it, or
    // where that would be more than ever lived, with what it has.
    void lease(Lane& lane) { lease(lane, lane.wanted); }
    void lease(Lane& lane, Bytes wanted, bool maps = true) {
        lend(lane);
        if (lane.fence == nullptr) return;
        bool more = maps && make_room(lane, wanted);
        PoolBlock* piece = nullptr;
        const auto leave = [&](PoolBlock* block) {
            block->free = false;
            lane.holes.push_back(block);
            piece = nullptr;
        };
        const auto take = [&](PoolBlock* block) {
            if (piece == nullptr) {
                block->free = false;
                block->twin = nullptr;
                lane.pieces.push_back(piece = block);
            } else {
                piece->size += block->size;
                piece->splice(piece->prev, block->next);
                blocks_.drop(block);
            }
        };
        lane.bytes = 0;
        PoolBlock* block = lane.fence->next;
        for (PoolBlock* following; block != lane.tail && block->address < lane.base + wanted; block = following) {
            following = block->next;
            if (!block->free && block->twin == nullptr) {
                piece = nullptr;
            } else if (!block->free) {
                block->twin->twin = nullptr;
                take(block);
            } else if (block->mapped) {
                large_.free.erase(key(block));
                take(block);
            } else {
                large_.unmapped.erase(Key{block->stream, block->address});
                more = more && map(block);
                if (more) {
                    take(block);
                } else {
                    leave(block);
                }
            }
        }
        lane.bytes = block->address - lane.base;
        const Bytes behind = std::min(wanted - lane.bytes, lane.tail->size - kPageBytes);
        if (behind > 0) {  // then it ends at the tail
            PoolBlock* added = blocks_.cut(lane.tail, behind);
            lane.bytes += behind;
            if (more && map(added)) {
                take(added);
            } else {
                leave(added);
            }
        }
        lane.leased = true;
        mark_used(lane);
    }

    bool map(PoolBlock* block) {
        if (!device_.map(block->address, block->size)) return false;
        block->mapped = true;
        log_exchange(SegmentAction::kMap, block->address, block->size, block->stream);
        return true;
    }

    // Memory for the place of a planned block that nothing else is in the way of. Whether it has some now.
    bool fill(Lane& lane, const live::PlannedBlock& planned) {
        const Address from = planned.address - (planned.address - lane.base) % kPageBytes;
        const Address to = lane.base + round_up(planned.address + planned.size - lane.base, kPageBytes);
        Bytes without = 0;
        for (const PoolBlock* hole : lane.holes)
            without += std::max<Bytes>(0, std::min(to, hole->address + hole->size) - std::max(from, hole->address));
        if (!planned.placed || without == 0) return false;
        lend(lane);  // all that lives there has its place among the heap's blocks now
        const auto next = [&](const auto& wanted) {
            PoolBlock* block = lane.fence->next;
            while (block != lane.tail && (block->address + block->size <= from || !wanted(*block))) block = block->next;
            return block != lane.tail && block->address < to ? block : nullptr;
        };
        bool done = next([&](const PoolBlock& block) {
            return !block.free && block.address < planned.address + planned.size && planned.address < block.address + block.size;
        }) == nullptr;
        std::vector<PoolBlock*> own;  // which is not given back
        const auto keep = [&](PoolBlock* block) {
            block->free = false;
            own.push_back(block);
        };
        while (PoolBlock* block = done ? next([](const PoolBlock& b) { return b.free && b.mapped; }) : nullptr) {
            large_.free.erase(key(block));
            keep(block);
        }
        if (done && excess(without) > 0) give_back(excess(without));
        while (PoolBlock* block = done ? next([](const PoolBlock& b) { return b.free && !b.mapped; }) : nullptr) {
            done = map_within(block, from, to);
            if (done) keep(block);
        }
        for (PoolBlock* block : own) {
            block->free = true;
            put(block);
        }
        lease(lane, lane.bytes, false);
        return done;
    }

    // Memory for the part of a block without any that lies in a range, and becomes a block of its own.
    bool map_within(PoolBlock*& block, Address from, Address to) {
        const auto without = [&](PoolBlock* rest) { large_.unmapped.emplace(Key{rest->stream, rest->address}, rest); };
        large_.unmapped.erase(Key{block->stream, block->address});
        if (block->address < from) {
            PoolBlock* before = blocks_.cut(block, from - block->address);
            before->born = birth();
            without(before);
        }
        if (block->address + block->size > to) {
            PoolBlock* rest = std::exchange(block, blocks_.cut(block, to - block->address));
            block->born = birth();
            without(rest);
        }
        if (map(block)) return true;
        give_back(block->size);
        ++retries;
        if (map(block)) return true;
        without(block);
        return false;
    }

    // The heap's idle pages go where the region has no memory, rather than new ones. Whether all of it may have some.
    bool make_room(Lane& lane, Bytes wanted) {
        Bytes without = lane.tail->address < lane.base + wanted ? lane.base + wanted - lane.tail->address : 0;
        std::vector<PoolBlock*> own;
        for (PoolBlock* block = lane.fence->next; block != lane.tail && block->address < lane.base + wanted; block = block->next) {
            if (!block->free) continue;
            if (!block->mapped)
                without += block->size;
            else
                own.push_back(block);
        }
        if (without == 0 || excess(without) <= 0) return true;
        for (PoolBlock* block : own) large_.free.erase(key(block));
        give_back(excess(without));
        for (PoolBlock* block : own) put(block);
        return excess(without) <= 0;
    }

    // Set the guard, cut at the edges of all plans, by what lives.
    void mark_used(Lane& lane) {
        const auto parts = [&](const PoolBlock& block) {
            return lane.guard.parts(block.address - lane.base, block.address - lane.base + block.size);
        };
        if (!lane.cut || lane.cut_bytes != lane.bytes) {
            std::vector<Bytes> edges{0, lane.bytes};
            each_planned(lane, [&](live::PlannedBlock& block) {
                block.placed = block.size > 0 && block.address + block.size <= lane.base + lane.bytes;
                if (!block.placed) return;
                edges.push_back(block.address - lane.base);
                edges.push_back(block.address - lane.base + block.size);
            });
            lane.guard.cut(std::move(edges));
            each_planned(lane, [&](live::PlannedBlock& block) {
                if (block.placed) block.parts = parts(block);
            });
            lane.cut = true;
            lane.cut_bytes = lane.bytes;
        } else {
            lane.guard.clear();
        }
        each_planned(lane, [&](live::PlannedBlock& block) {
            if (block.placed && block.live) lane.guard.set(block.parts);
        });
        auto piece = lane.pieces.begin();
        for (PoolBlock* block = lane.fence->next; block != lane.tail && block->address < lane.base + lane.bytes; block = block->next) {
            if (piece != lane.pieces.end() && block == *piece)
                ++piece;
            else
                lane.guard.set(parts(*block));
        }
    }

    live::Solver solver_;
    std::vector<std::pair<std::int64_t, live::Solution>> answers_;
    std::vector<std::unique_ptr<Lane>> lanes_;
    PlannedCounts counts_;
    bool marked_ = false;
    Bytes most_ = 0;  // that ever lived at once
};

inline const Registered kPlanned("planned", [](Device& device, const Settings& settings) -> std::unique_ptr<Allocator> {
    return std::make_unique<PlannedAllocator>(device, settings.flag("background"), settings.flag("thorough"));
});

}  // namespace overspill
