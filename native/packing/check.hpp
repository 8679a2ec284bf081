// The checker of layouts: a sweep over time that shares no code with the solvers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace overspill::packing {

struct CheckedBlocks {
    std::span<const std::int64_t> start, end, nbytes, offset;
    std::span<const std::int64_t> gap_first, gap_start, gap_end;  // the gaps of block i: gap_first[i] to gap_first[i + 1]
};

struct Checked {
    std::optional<std::pair<std::int64_t, std::int64_t>> clash;  // two blocks that share a byte while both live
    std::int64_t most_live = 0;                                  // bytes
};

inline Checked check_layout(const CheckedBlocks& blocks) {
    struct Change {
        std::int64_t time;
        std::int64_t block;  // -1 - block where it goes
    };
    std::vector<Change> changes;
    changes.reserve(2 * (blocks.start.size() + blocks.gap_start.size()));
    for (std::size_t i = 0; i < blocks.start.size(); ++i) {
        if (blocks.nbytes[i] == 0) continue;
        const auto block = static_cast<std::int64_t>(i);
        std::int64_t from = blocks.start[i];
        const auto live = [&](std::int64_t until) {
            if (from >= until) return;
            changes.push_back({from, block});
            changes.push_back({until, -1 - block});
        };
        for (std::int64_t gap = blocks.gap_first[i]; gap < blocks.gap_first[i + 1]; ++gap) {
            live(blocks.gap_start[static_cast<std::size_t>(gap)]);
            from = blocks.gap_end[static_cast<std::size_t>(gap)];
        }
        live(blocks.end[i]);
    }
    std::sort(changes.begin(), changes.end(), [](const Change& a, const Change& b) {
        return a.time != b.time ? a.time < b.time : a.block < b.block;  // at one time what goes comes first
    });
    Checked found;
    std::int64_t live_bytes = 0;
    std::map<std::int64_t, std::int64_t> live;  // blocks by offset: they do not overlap, so two never have the same
    for (const Change& change : changes) {
        const std::int64_t block = change.block < 0 ? -1 - change.block : change.block;
        const std::int64_t low = blocks.offset[static_cast<std::size_t>(block)];
        const std::int64_t nbytes = blocks.nbytes[static_cast<std::size_t>(block)];
        if (change.block < 0) {
            live.erase(low);
            live_bytes -= nbytes;
            continue;
        }
        const auto above = live.lower_bound(low);
        if (above != live.end() && above->first < low + nbytes) {
            found.clash = {above->second, block};
            return found;
        }
        if (above != live.begin()) {
            const auto below = std::prev(above);
            if (below->first + blocks.nbytes[static_cast<std::size_t>(below->second)] > low) {
                found.clash = {below->second, block};
                return found;
            }
        }
        live.emplace_hint(above, low, block);
        live_bytes += nbytes;
        found.most_live = std::max(found.most_live, live_bytes);
    }
    return found;
}

}  // namespace overspill::packing
