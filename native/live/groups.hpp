// What a thread has said of the blocks that it asks for: how long they stay, which pools may group them by.
#pragma once

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "../allocators/allocator.hpp"

namespace overspill::live {

// Beyond what Mobility knows: a block that no plan has, and that is to stay out of the way of those that one has.
constexpr Mobility kUnplanned = static_cast<Mobility>(3);

// Blocks of these sizes are of these groups, and all others of `otherwise`.
struct Groups {
    std::vector<std::pair<Bytes, Mobility>> by_size;
    Mobility otherwise = Mobility::kMovable;

    Mobility of(Bytes nbytes) const {
        const auto is_it = [nbytes](const auto& group) { return group.first == nbytes; };
        const auto found = std::find_if(by_size.begin(), by_size.end(), is_it);
        return found == by_size.end() ? otherwise : found->second;
    }
};

// A planned program runs its ops in one thread, which says before each op what it makes. Nothing: nobody has said.
inline thread_local std::optional<Groups> groups_of_thread;

}  // namespace overspill::live
