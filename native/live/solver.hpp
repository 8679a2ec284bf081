// Addresses for the requests of a step, from their sizes and lifetimes; in the background where that is wanted.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <optional>
#include <random>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "../packing/exact.hpp"
#include "../packing/skyline.hpp"
#include "device.hpp"

namespace overspill::live {

constexpr std::int32_t kUnknown = -1;  // how long a request lives on into the next step
constexpr std::int32_t kLonger = std::numeric_limits<std::int32_t>::max();  // until its like in the next step, or on
constexpr Bytes kUnplaced = -1;

// What is expected of the λ-th request of a step: the least and the most bytes, and before which request it is freed.
// Numbers go on into the next step, which repeats this one: a request that is carried into it has an end beyond the
// step's, and one address in all steps. What is unknown or longer is not placed.
struct Expected {
    Bytes least;
    Bytes nbytes;
    std::int32_t end;

    bool varies() const { return least != nbytes; }
    bool takes(Bytes size) const { return size == nbytes || (varies() && size <= nbytes); }
    bool placed() const { return end != kUnknown && end != kLonger; }
    bool carried(std::size_t requests) const { return !placed() || static_cast<std::size_t>(end) > requests; }
    bool operator==(const Expected&) const = default;
};

using Steps = std::vector<Expected>;

// The most bytes of placed requests that live at once, in a step between its likes.
inline Bytes load_of(const Steps& expected) {
    std::vector<Bytes> change(expected.size() + 1, 0);
    for (std::size_t i = 0; i < expected.size(); ++i) {
        if (!expected[i].placed()) continue;
        const bool carried = expected[i].carried(expected.size());
        change[0] += carried ? expected[i].nbytes : 0;
        change[i] += expected[i].nbytes;
        change[static_cast<std::size_t>(expected[i].end) - (carried ? expected.size() : 0)] -= expected[i].nbytes;
    }
    Bytes live = 0, most = 0;
    for (const Bytes by : change) most = std::max(most, live += by);
    return most;
}

struct Solution {
    std::vector<Bytes> offsets;  // one a request
    Bytes peak = 0;
    Bytes load = 0;
};

// As the portfolio (placement/packing/solvers/portfolio.py): skylines guarded by the load, by its keys, some restarts with
// weights on the best of them, and the exact search where that is not enough. It ends after so much work, whatever the
// machine.
//
// What is carried into the next step lies at the bottom, what is away for longest on top: weights that leave after their
// forward and come back for their backward then make a pyramid. The rest is packed above what of it is there.
class StepSolver {
  public:
    // Where it is thorough, hard steps take seconds, otherwise tenths of one.
    StepSolver(const Steps& expected, bool thorough) : expected_(expected), thorough_(thorough) {
        for (std::size_t i = 0; i < expected.size(); ++i) {
            if (expected[i].carried(expected.size())) {
                if (expected[i].placed()) carried_.push_back(i);
                continue;
            }
            placed_.push_back(i);
            start_.push_back(static_cast<packing::Section>(i));
            end_.push_back(expected[i].end);
            nbytes_.push_back(expected[i].nbytes);
        }
        number_maximal_sections();
    }

    Solution solve() {
        Solution best;
        best.offsets.assign(expected_.size(), kUnplaced);
        best.load = load_of(expected_);
        Bytes lowest = 0;
        for (const auto& [number, offset] : stacked_) {
            best.offsets[number] = offset;
            lowest = std::max(lowest, offset + expected_[number].nbytes);
        }
        best.peak = lowest;
        if (placed_.empty()) return best;
        packing::SkylinePacker packer(start_, end_, nbytes_, std::vector<Bytes>(placed_.size(), 1), ground_);
        std::vector<double> key, tried;
        std::vector<Bytes> offsets;
        best.peak = packing::SkylinePacker::kUnlimited;
        const auto offer = [&](const std::vector<double>& by) {
            const auto found = packer.pack(by, best.load, best.peak - 1);
            if (!found) return false;
            offsets = *found;
            best.peak = lowest;
            for (std::size_t i = 0; i < offsets.size(); ++i) best.peak = std::max(best.peak, offsets[i] + nbytes_[i]);
            return true;
        };
        for (const auto& by : keys()) {
            if (best.peak <= best.load) break;
            if (offer(by)) key = by;
        }
        // Memory comes in pages, and a layout this near to the load is good enough.
        const Bytes enough = std::max(best.load + best.load / kClose, round_up(best.load, kPageBytes));
        std::mt19937_64 random(0);
        std::normal_distribution<double> normal(0, 0.4);
        const std::size_t count = placed_.size();
        for (std::size_t turns = (thorough_ ? kRestarted : kRestarted / 20) / (100 + count) + 4; turns > 0 && best.peak > enough; --turns) {
            tried = key;
            for (std::size_t i = 0; i < count; ++i)
                if (offsets[i] + nbytes_[i] > best.load && random() % 3 == 0) tried[i] *= 1.3;
            change(tried, offsets, best.load, random, normal);
            if (offer(tried)) key = tried;
        }
        if (best.peak > enough && thorough_ && count <= kMostSearched && carried_.empty()) search(best, offsets, enough, random);
        for (std::size_t i = 0; i < count; ++i) best.offsets[placed_[i]] = offsets[i];
        return best;
    }

  private:
    static constexpr std::size_t kRestarted = 2'000'000;  // blocks placed in restarts
    static constexpr std::uint64_t kLocal = 7;          // of ten restarts, those within a window of time
    static constexpr Bytes kClose = 512;                // no more than this part of the load above it
    static constexpr std::size_t kMostSearched = 2'000;
    static constexpr std::int64_t kNodes = 100'000;  // of the exact search

    // The exact search of the portfolio (solvers/exact.py), for so many nodes: a quarter of them at the load, then also
    // halfway from there to the best peak. A step has no seconds, so three numbers stand for a block's lifetime in turn.
    void search(Solution& best, std::vector<Bytes>& offsets, Bytes enough, std::mt19937_64& random) const {
        const std::size_t count = placed_.size();
        Bytes unit = 0;
        for (const Bytes nbytes : nbytes_) unit = std::gcd(unit, nbytes);
        packing::ExactBlocks blocks;
        blocks.sections = *std::max_element(end_.begin(), end_.end());
        blocks.alignment.assign(count, 1);
        blocks.pinned.assign(count, packing::kAnywhere);
        std::map<std::tuple<Bytes, packing::Section, packing::Section>, packing::Units> last;  // of equal blocks
        for (std::size_t i = 0; i <= count; ++i) blocks.piece_first.push_back(static_cast<int>(i));
        for (std::size_t i = 0; i < count; ++i) {
            blocks.piece_start.push_back(start_[i]);
            blocks.piece_end.push_back(end_[i]);
            blocks.size.push_back(nbytes_[i] / unit);
            const auto [below, fresh] = last.try_emplace({nbytes_[i], start_[i], end_[i]}, static_cast<packing::Units>(i));
            blocks.below.push_back(fresh ? -1 : std::exchange(below->second, static_cast<packing::Units>(i)));
        }
        const auto sections = static_cast<std::size_t>(blocks.sections);
        std::vector<packing::ExactSearch> searches;
        for (const auto& lifetime : lifetimes()) {
            blocks.lifetime = lifetime;
            searches.emplace_back(blocks);
        }

        std::int64_t left = kNodes;
        std::vector<double> noise(3 * count);
        std::normal_distribution<double> normal;
        const auto attempt = [&](packing::ExactSearch& by, Bytes capacity, const char* keys, bool live, std::int64_t most) {
            packing::Attempt request{std::vector<packing::Units>(count), std::vector<packing::Units>(sections, capacity / unit), keys,
                                     noise.data(), live, std::min(most, left)};
            for (std::size_t i = 0; i < count; ++i) request.highest[i] = (capacity - nbytes_[i]) / unit;
            const auto outcome = by.attempt(request, [] { return false; });
            left -= by.nodes();
            if (outcome != packing::Outcome::kFits) return outcome;
            best.peak = 0;
            for (std::size_t i = 0; i < count; ++i) {
                offsets[i] = by.offsets()[i] * unit;
                best.peak = std::max(best.peak, offsets[i] + nbytes_[i]);
            }
            return outcome;
        };
        // Each preorder, then restarts with noise whose limits are in Luby's sequence.
        const auto turn = [&](int number, Bytes capacity) {
            static constexpr std::array kPreorders{"WAT", "TAW", "TWA"};
            static constexpr std::array kNoises{0.05, 0.1, 0.25};
            const std::int64_t shortest = 2 * static_cast<std::int64_t>(count), limit = shortest << number;
            std::fill(noise.begin(), noise.end(), 1);
            for (auto& by : searches)
                for (const char* keys : kPreorders)
                    if (const auto outcome = attempt(by, capacity, keys, true, limit); outcome != packing::Outcome::kUnknown)
                        return outcome;
            std::int64_t more = number > 0 ? 9 * limit : 0;
            for (std::int64_t at = 1; more > 0 && left > 0; ++at) {
                std::int64_t luby = at;
                while ((luby & (luby + 1)) != 0) luby -= (std::int64_t{1} << (std::bit_width(static_cast<std::uint64_t>(luby)) - 1)) - 1;
                const double scale = kNoises[random() % kNoises.size()];
                for (double& factor : noise) factor = std::exp(scale * normal(random));
                const std::int64_t most = shortest * ((luby + 1) / 2);
                auto& by = searches[random() % searches.size()];
                const auto outcome = attempt(by, capacity, kPreorders[static_cast<std::size_t>(at - 1) % 3], random() % 2 == 0, most);
                if (outcome != packing::Outcome::kUnknown) return outcome;
                more -= most;
            }
            return packing::Outcome::kUnknown;
        };
        Bytes bound = best.load;
        for (int number = 0; left > kNodes - kNodes / 4 && best.peak > std::max(bound, enough); ++number)
            if (turn(number, bound) == packing::Outcome::kInfeasible) bound += unit;
        for (int number = 0; left > 0 && best.peak > std::max(bound, enough); ++number) {
            for (Bytes capacity = bound; capacity < best.peak && left > 0;) {
                const auto outcome = turn(number + (capacity == bound), capacity);
                if (outcome == packing::Outcome::kInfeasible) {
                    if (capacity == bound) bound += unit;
                    capacity += unit;
                    continue;
                }
                if (outcome == packing::Outcome::kFits) capacity = bound;
                capacity += round_up(best.peak - capacity, 2 * unit) / 2;
            }
        }
    }

    // In maximal sections, in blocks that live with one, in requests.
    std::array<std::vector<packing::Units>, 3> lifetimes() const {
        std::array<std::vector<packing::Units>, 3> found;
        for (std::size_t i = 0; i < placed_.size(); ++i) {
            packing::Units others = 0;
            for (std::size_t k = 0; k < placed_.size(); ++k) others += start_[k] < end_[i] && start_[i] < end_[k];
            found[0].push_back(end_[i] - start_[i]);
            found[1].push_back(others);
            found[2].push_back(expected_[placed_[i]].end - static_cast<packing::Units>(placed_[i]));
        }
        return found;
    }

    // Change some keys: mostly of blocks that live about when one that is too high does, a window of time to be packed again.
    void change(std::vector<double>& key, const std::vector<Bytes>& offsets, Bytes load, std::mt19937_64& random,
                std::normal_distribution<double>& normal) const {
        const std::size_t count = placed_.size();
        const std::size_t from = random() % count;
        std::size_t high = from;
        while (offsets[high] + nbytes_[high] <= load) high = (high + 1) % count;
        if (random() % 10 >= kLocal) {
            for (std::size_t changed = 1 + random() % (1 + count / 20); changed > 0; --changed)
                key[random() % count] *= std::exp(normal(random));
            return;
        }
        static constexpr std::array kMargins{50, 20, 10};  // of all time, this part
        static constexpr std::array kShares{20, 5, 2};     // of the blocks there, this part
        const packing::Section sections = *std::max_element(end_.begin(), end_.end());
        const packing::Section margin = std::max<packing::Section>(1, sections / kMargins[random() % kMargins.size()]);
        const auto share = static_cast<std::uint64_t>(kShares[random() % kShares.size()]);
        for (std::size_t i = 0; i < count; ++i)
            if (start_[i] < end_[high] + margin && end_[i] + margin > start_[high] && random() % share == 0)
                key[i] *= std::exp(normal(random));
    }

    // As keys.py has it: sections whose live blocks are not all live in another.
    void number_maximal_sections() {
        const std::size_t sections = expected_.size();
        std::vector<char> starts(sections + 1, 0), ends(sections + 1, 0);
        for (std::size_t i = 0; i < placed_.size(); ++i) starts[start_[i]] = ends[end_[i] - 1] = 1;
        for (const std::size_t i : carried_) starts[0] = starts[i] = ends[expected_[i].end - sections - 1] = ends[sections - 1] = 1;
        std::vector<packing::Section> number(sections + 1, 0);
        bool started = false;
        packing::Section count = 0;
        for (std::size_t at = 0; at < sections; ++at) {
            number[at] = count;
            started = started || starts[at];
            if (!ends[at] || !started) continue;
            ++count;
            started = false;
        }
        number[sections] = count;
        for (std::size_t i = 0; i < placed_.size(); ++i) {
            start_[i] = number[start_[i]];
            end_[i] = number[end_[i]];
        }
        stack(number);
    }

    // Place what is carried: one after the other in its order, each on the highest that lives with it.
    void stack(const std::vector<packing::Section>& number) {
        const auto size = static_cast<std::int64_t>(expected_.size());
        const auto away = [&](std::size_t i) { return static_cast<std::int64_t>(i) + size - expected_[i].end; };
        std::stable_sort(carried_.begin(), carried_.end(), [&](std::size_t a, std::size_t b) { return away(a) < away(b); });
        ground_.assign(static_cast<std::size_t>(number.back()), 0);
        for (const std::size_t i : carried_) {
            const auto until = ground_.begin() + number[static_cast<std::size_t>(expected_[i].end - size)];
            const auto since = ground_.begin() + number[i];
            const Bytes offset = std::max(*std::max_element(ground_.begin(), until), *std::max_element(since, ground_.end()));
            std::fill(ground_.begin(), until, offset + expected_[i].nbytes);
            std::fill(since, ground_.end(), offset + expected_[i].nbytes);
            stacked_.emplace_back(i, offset);
        }
    }

    std::vector<double> loads() const {
        const auto sections = static_cast<std::size_t>(*std::max_element(end_.begin(), end_.end()));
        std::vector<Bytes> load(sections + 1, 0);
        for (std::size_t i = 0; i < start_.size(); ++i) {
            load[start_[i]] += nbytes_[i];
            load[end_[i]] -= nbytes_[i];
        }
        for (std::size_t at = 1; at <= sections; ++at) load[at] += load[at - 1];
        std::vector<double> most(start_.size());
        for (packing::Section width = 1;; width *= 2) {  // maxima over ranges of doubling width
            bool longer = false;
            for (std::size_t i = 0; i < most.size(); ++i) {
                const packing::Section length = end_[i] - start_[i];
                if (length >= width && length < 2 * width)
                    most[i] = static_cast<double>(std::max(load[start_[i]], load[end_[i] - width]));
                longer = longer || length >= 2 * width;
            }
            if (!longer) return most;
            for (std::size_t at = 0; at + width < load.size(); ++at) load[at] = std::max(load[at], load[at + width]);
        }
    }

    std::array<std::vector<double>, 5> keys() const {
        const std::size_t count = placed_.size();
        std::vector<double> sections(count), lifetime(count), size(count), area(count);
        for (std::size_t i = 0; i < count; ++i) {
            size[i] = static_cast<double>(nbytes_[i]);
            sections[i] = end_[i] - start_[i];
            lifetime[i] = static_cast<double>(expected_[placed_[i]].end) - static_cast<double>(placed_[i]);
            area[i] = size[i] * lifetime[i];
        }
        const auto tied = [](std::vector<double> key, const std::vector<double>& by) {
            const double scale = 2 * *std::max_element(by.begin(), by.end()) + 1;
            for (std::size_t i = 0; i < key.size(); ++i) key[i] += by[i] / scale;
            return key;
        };
        return {tied(loads(), sections), tied(area, size), tied(sections, size), tied(size, sections), tied(lifetime, size)};
    }

    const Steps& expected_;
    bool thorough_;
    std::vector<std::size_t> placed_, carried_;  // the numbers of the blocks' requests
    std::vector<std::pair<std::size_t, Bytes>> stacked_;  // addresses of what is carried
    std::vector<Bytes> ground_;                           // how high it is
    std::vector<packing::Section> start_, end_;
    std::vector<Bytes> nbytes_;
};

// The answer for a step that is simulated. Whoever looks for the memory that is enough for a job simulates the same steps
// again and again, so the last answers are kept.
inline Solution simulated(const Steps& expected) {
    static constexpr std::size_t kKept = 8;
    static std::mutex mutex;
    static std::deque<std::pair<Steps, Solution>> kept;
    const auto known = [&]() -> const Solution* {
        for (const auto& [steps, answer] : kept)
            if (steps == expected) return &answer;
        return nullptr;
    };
    {
        const std::lock_guard lock(mutex);
        if (const Solution* answer = known()) return *answer;
    }
    Solution found = StepSolver(expected, false).solve();
    const std::lock_guard lock(mutex);
    if (known() == nullptr) kept.emplace_back(expected, found);
    if (kept.size() > kKept) kept.pop_front();
    return found;
}

// Solves one problem after the other: at once, or on a thread of its own.
class Solver {
  public:
    struct Answer {
        std::int64_t ticket;
        Solution solution;
    };

    Solver(bool background, bool thorough) : background_(background), thorough_(thorough) {}
    ~Solver() {
        {
            const std::lock_guard lock(mutex_);
            ends_ = true;
        }
        wake_.notify_all();
        if (thread_.joinable()) thread_.join();
    }
    Solver(const Solver&) = delete;
    Solver& operator=(const Solver&) = delete;

    // A number by which the answer will be known.
    std::int64_t ask(const Steps& expected) {
        const std::int64_t ticket = ++tickets_;
        if (!background_) {
            answers_.push_back({ticket, solved(expected)});
            return ticket;
        }
        const std::lock_guard lock(mutex_);
        questions_.emplace_back(ticket, expected);
        if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
        wake_.notify_all();
        return ticket;
    }

    std::vector<Answer> answers() {
        const std::lock_guard lock(mutex_);
        return std::exchange(answers_, {});
    }

    // Until all that was asked is answered.
    void wait() {
        std::unique_lock lock(mutex_);
        idle_.wait(lock, [this] { return questions_.empty() && !busy_; });
    }

  private:
    Solution solved(const Steps& expected) const {
        return thorough_ ? StepSolver(expected, true).solve() : simulated(expected);
    }

    void work() {
        std::unique_lock lock(mutex_);
        while (true) {
            wake_.wait(lock, [this] { return ends_ || !questions_.empty(); });
            if (ends_) return;
            const auto [ticket, expected] = std::move(questions_.front());
            questions_.erase(questions_.begin());
            busy_ = true;
            lock.unlock();
            Solution found = solved(expected);
            lock.lock();
            busy_ = false;
            answers_.push_back({ticket, std::move(found)});
            idle_.notify_all();
        }
    }

    bool background_, thorough_;
    std::int64_t tickets_ = 0;
    std::mutex mutex_;
    std::condition_variable wake_, idle_;
    std::vector<std::pair<std::int64_t, Steps>> questions_;
    std::vector<Answer> answers_;
    bool ends_ = false, busy_ = false;
    std::thread thread_;
};

}  // namespace overspill::live
