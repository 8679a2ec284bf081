// What a plan is made of: trips of tensors to the store, slower algorithms, and what either relieves and costs.
#pragma once

#include <array>
#include <vector>

#include "program.hpp"

namespace overspill::planning {

struct Link {
    Seconds latency;
    double offload_bytes_per_second;
    double prefetch_bytes_per_second;
    bool full_duplex;
    double compute_share;  // of compute time that a running transfer takes away

    Seconds offload(Bytes nbytes) const { return latency + static_cast<double>(nbytes) / offload_bytes_per_second; }
    Seconds prefetch(Bytes nbytes) const { return latency + static_cast<double>(nbytes) / prefetch_bytes_per_second; }
};

// A trip that a tensor may make in a gap. Its copy may start before the step `copy`, where it is needed: unless the
// store has the tensor as it is after `version` writes. It has to be gone by `latest`, and comes back from `earliest` on.
struct Trip {
    Index tensor, start, end, copy, latest, earliest, version;
    Bytes nbytes;

    bool wraps() const { return end <= start; }
};

// A slower algorithm for the op at a step: how long the op takes then, and what it saves to the fastest one.
struct Slower {
    Index position, op, number;
    Seconds cost, seconds;
    Bytes relieved, saved;
};

struct Span {
    Index start = 0, end = 0;
};

// A way to have `nbytes` less on the device during the spans: a part of a trip, or (trip < 0) a slower algorithm.
struct Candidate {
    std::array<Span, 2> spans;
    Bytes nbytes;
    Seconds cost, out, back;
    Index trip, slower;
};

struct Decoded {
    std::int64_t looks = 0;  // how often a candidate was looked at: what the choice took
    Seconds seconds = 0;
    Bytes moved_bytes = 0;
    std::vector<Index> chosen;           // candidates, in the order in which they were taken
    std::vector<Index> trips;            // those made
    std::vector<Index> release, issue;   // of each trip made
    std::vector<Seconds> lost;           // by candidate: what its tensor waited, or what its op's algorithm took longer
};

}  // namespace overspill::planning
