// Random numbers that are the same on every machine: SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable
// pseudorandom number generators", §3).
#pragma once

#include <cmath>
#include <cstdint>

#include "program.hpp"

namespace overspill::search {

class Random {
  public:
    explicit Random(std::uint64_t seed) : state_(seed) {}

    // At least 0 and less than 1.
    double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

    // At least 0 and less than `count`.
    Index below(Index count) { return static_cast<Index>(uniform() * count); }

    // Of mean 1.
    double exponential() { return -std::log1p(-uniform()); }

  private:
    std::uint64_t state_;

    std::uint64_t next() {
        std::uint64_t z = state_ += 0x9e3779b97f4a7c15;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
        z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
        return z ^ (z >> 31);
    }
};

}  // namespace overspill::search
