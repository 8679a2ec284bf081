// Virtual addressing (window paper, section 4): physical chunks of one size, in any order, behind contiguous addresses.
// A request wastes less than one chunk (eq. 1), and no memory is ever lost between blocks.
#pragma once

#include <iterator>
#include <list>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pool.hpp"

namespace overspill::live {

class VirtualPool final : public MemoryPool {
  public:
    VirtualPool(LiveDevice& device, Bytes chunk_bytes)
        : device_(device), chunk_bytes_(round_up(chunk_bytes, device.granularity())), small_(device) {}

    ~VirtualPool() override {
        while (!live_.empty()) cache(live_.begin()->first);
        trim();
    }

    std::optional<Address> allocate(Bytes nbytes, NumberedStream stream, Mobility mobility) override {
        if (nbytes <= chunk_bytes_ / 2) return small_.allocate(nbytes, stream, mobility);
        unmap_retired(false);
        const auto count = static_cast<std::size_t>(round_up(nbytes, chunk_bytes_) / chunk_bytes_);
        const auto cached = cached_.find({stream.number, count});
        if (cached != cached_.end()) {
            const Address address = cached->second.address;
            live_.insert(cached_.extract(cached).mapped().entry());
            return address;
        }
        return map_new(count, stream);
    }

    // The chunks stay behind their addresses for a request of the same size, until another one needs them.
    void free(Address address) override {
        if (small_.owns(address)) {
            small_.free(address);
        } else {
            cache(address);
        }
    }

    void trim() override {
        while (!cached_.empty()) break_up(cached_.begin());
        unmap_retired(true);
        for (auto& [number, chunks] : idle_) {
            if (chunks.list.empty()) continue;
            finish(chunks.stream);
            for (const Chunk chunk : chunks.list) device_.release(chunk, chunk_bytes_);
            chunks.list.clear();
        }
        small_.trim();
    }

  private:
    struct Range {
        Address address = 0;
        std::vector<Chunk> chunks;
        NumberedStream stream;

        std::pair<const Address, Range> entry() { return {address, std::move(*this)}; }
    };

    // Addresses whose chunks went elsewhere, and the event after which nothing uses them here any more.
    struct Retired {
        Address address;
        std::size_t count;
        Event event;
    };

    struct Chunks {
        NumberedStream stream;
        std::vector<Chunk> list;
    };

    using Cached = std::multimap<std::pair<std::int32_t, std::size_t>, Range>;

    std::optional<Address> map_new(std::size_t count, NumberedStream stream) {
        const auto address = device_.reserve(bytes(count));
        if (!address) return std::nullopt;
        std::vector<Chunk> chunks;
        while (chunks.size() < count) {
            const auto chunk = next_chunk(stream, count - chunks.size());
            if (!chunk) break;
            chunks.push_back(*chunk);
        }
        if (chunks.size() < count) {
            auto& idle = idle_of(stream);
            idle.insert(idle.end(), chunks.begin(), chunks.end());
            device_.unreserve(*address, bytes(count));
            return std::nullopt;
        }
        for (std::size_t i = 0; i < count; ++i) device_.map(*address + bytes(i), chunk_bytes_, chunks[i]);
        device_.set_access(*address, bytes(count));
        live_.emplace(*address, Range{*address, std::move(chunks), stream});
        return address;
    }

    // An idle chunk of this stream, one of its cached ranges, a new one, or one of another stream when that is done.
    std::optional<Chunk> next_chunk(NumberedStream stream, std::size_t missing) {
        auto& idle = idle_of(stream);
        if (idle.empty()) break_up_one_of(stream, missing);
        if (idle.empty()) {
            if (const auto chunk = device_.create(chunk_bytes_)) return chunk;
            take_from_other_streams(stream);
        }
        if (idle.empty()) return std::nullopt;
        const Chunk chunk = idle.back();
        idle.pop_back();
        return chunk;
    }

    void break_up_one_of(NumberedStream stream, std::size_t missing) {
        auto it = cached_.lower_bound({stream.number, missing});
        if (it == cached_.end() || it->first.first != stream.number) {
            if (it == cached_.begin()) return;
            --it;
        }
        if (it->first.first == stream.number) break_up(it);
    }

    void take_from_other_streams(NumberedStream stream) {
        for (auto it = cached_.begin(); it != cached_.end();) break_up(it++);
        auto& mine = idle_of(stream);
        for (auto& [number, chunks] : idle_) {
            if (number == stream.number || chunks.list.empty()) continue;
            finish(chunks.stream);
            mine.insert(mine.end(), chunks.list.begin(), chunks.list.end());
            chunks.list.clear();
        }
    }

    // The chunks may be mapped elsewhere for the same stream at once, since its work runs in order; the old addresses
    // are unmapped once the work that used them is done.
    void break_up(Cached::iterator it) {
        Range range = std::move(cached_.extract(it).mapped());
        auto& idle = idle_of(range.stream);
        idle.insert(idle.end(), range.chunks.begin(), range.chunks.end());
        retired_.push_back({range.address, range.chunks.size(), device_.record(range.stream.handle)});
    }

    void unmap_retired(bool all) {
        for (auto it = retired_.begin(); it != retired_.end();) {
            if (all) device_.wait(it->event);
            if (!device_.passed(it->event)) {
                ++it;
                continue;
            }
            device_.destroy(it->event);
            for (std::size_t i = 0; i < it->count; ++i) device_.unmap(it->address + bytes(i), chunk_bytes_);
            device_.unreserve(it->address, bytes(it->count));
            it = retired_.erase(it);
        }
    }

    void cache(Address address) {
        Range range = std::move(live_.extract(address).mapped());
        const std::pair key{range.stream.number, range.chunks.size()};
        cached_.emplace(key, std::move(range));
    }

    void finish(NumberedStream stream) {
        const Event event = device_.record(stream.handle);
        device_.wait(event);
        device_.destroy(event);
    }

    std::vector<Chunk>& idle_of(NumberedStream stream) {
        Chunks& chunks = idle_[stream.number];
        chunks.stream = stream;
        return chunks.list;
    }

    Bytes bytes(std::size_t count) const { return static_cast<Bytes>(count) * chunk_bytes_; }

    LiveDevice& device_;
    Bytes chunk_bytes_;
    BestFitPool small_;
    std::unordered_map<Address, Range> live_;
    Cached cached_;
    std::map<std::int32_t, Chunks> idle_;
    std::list<Retired> retired_;
};

}  // namespace overspill::live
