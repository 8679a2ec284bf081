// An allocator's settings by name, and the allocators by name: each header registers its own.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "allocator.hpp"

namespace overspill {

// The configuration that an allocator is made with, whoever holds it.
class Settings {
  public:
    virtual ~Settings() = default;
    virtual bool flag(const char* name) const = 0;
    virtual Bytes bytes(const char* name) const = 0;
    virtual std::optional<Bytes> maybe_bytes(const char* name) const = 0;
    virtual double number(const char* name) const = 0;
    virtual std::string text(const char* name) const = 0;
    virtual std::vector<std::int64_t> integers(const char* name) const = 0;
};

using MakeAllocator = std::unique_ptr<Allocator> (*)(Device&, const Settings&);

inline std::map<std::string, MakeAllocator>& allocators() {
    static std::map<std::string, MakeAllocator> known;
    return known;
}

// At a header's end: inline const Registered kMine("mine", [](Device& device, const Settings& settings) { … });
struct Registered {
    Registered(const char* name, MakeAllocator make) { allocators()[name] = make; }
};

}  // namespace overspill
