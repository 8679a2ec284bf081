// The rows of a CSV of blocks as columns, where it is plain: no quotes, ASCII, whole numbers. Anything else is for the
// reader in Python, which says what is wrong and in which line.
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

namespace overspill::packing {

enum Role : std::size_t { kId, kLower, kUpper, kSize, kAlignment, kOffset, kSpace, kRoles };

struct CsvRows {
    std::array<std::vector<std::int64_t>, kRoles> columns;  // kId: where the id begins in the text
    std::vector<std::int64_t> id_end, line, line_end;       // the line without what ends it
};

inline std::string_view trimmed(std::string_view cell) {
    while (!cell.empty() && (cell.front() == ' ' || cell.front() == '\t')) cell.remove_prefix(1);
    while (!cell.empty() && (cell.back() == ' ' || cell.back() == '\t')) cell.remove_suffix(1);
    return cell;
}

// A whole number of at most 18 digits.
inline bool whole(std::string_view cell, std::int64_t& value) {
    const std::string_view digits = !cell.empty() && (cell.front() == '-' || cell.front() == '+') ? cell.substr(1) : cell;
    if (digits.empty() || digits.size() > 18 || digits.front() < '0' || digits.front() > '9') return false;
    const auto [stop, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (cell.front() == '-') value = -value;
    return error == std::errc() && stop == digits.data() + digits.size();
}

// The rows of `text` from `at` on, with `cells` in each; role r is in cell places[r], nowhere if that is negative. False
// if the text is not plain.
inline bool read_rows(std::string_view text, std::size_t at, std::size_t cells,
                      const std::array<std::int64_t, kRoles>& places, CsvRows& rows) {
    if (std::any_of(text.begin(), text.end(), [](char c) { return c == '"' || c == '\0' || (c & 0x80) != 0; }))
        return false;
    std::vector<std::string_view> row(cells);
    std::unordered_set<std::string_view> ids;
    const auto lines = static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n')) + 1;
    ids.reserve(lines);
    while (at < text.size()) {
        const std::size_t stop = std::min(text.find('\n', at), text.size());
        std::string_view line = text.substr(at, stop - at);
        const std::size_t begin = at;
        at = stop + 1;
        if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
        if (line.empty()) continue;
        if (line.find('\r') != std::string_view::npos) return false;
        std::size_t cell = 0;
        for (std::size_t from = 0; from <= line.size(); ++cell) {
            const std::size_t comma = std::min(line.find(',', from), line.size());
            if (cell == cells) return false;
            row[cell] = trimmed(line.substr(from, comma - from));
            from = comma + 1;
        }
        if (cell != cells) return false;
        const std::string_view id = row[static_cast<std::size_t>(places[kId])];
        if (id.empty() || std::any_of(id.begin(), id.end(), [](char c) { return c < 0x20 || c == 0x7f; })) return false;
        if (!ids.insert(id).second) return false;
        constexpr std::array<std::int64_t, kRoles> kDefaults{0, 0, 0, 0, 1, -1, 0};
        for (std::size_t role = kLower; role < kRoles; ++role) {
            std::int64_t value = kDefaults[role];
            const std::string_view text_of_role =
                places[role] < 0 ? std::string_view{} : row[static_cast<std::size_t>(places[role])];
            if (!(text_of_role.empty() && role >= kAlignment) && !whole(text_of_role, value)) return false;
            rows.columns[role].push_back(value);
        }
        rows.columns[kId].push_back(id.data() - text.data());
        rows.id_end.push_back(id.data() - text.data() + static_cast<std::int64_t>(id.size()));
        rows.line.push_back(static_cast<std::int64_t>(begin));
        rows.line_end.push_back(static_cast<std::int64_t>(begin + line.size()));
    }
    return true;
}

// The lines with `offsets` in the cell `place`, or behind all cells if there is none (negative).
template <typename Values>
std::string with_offsets(std::string_view text, const Values& line, const Values& line_end, const Values& offsets,
                         std::int64_t place) {
    std::string out;
    out.reserve(text.size() + 12 * line.size());
    std::array<char, 24> digits{};
    for (std::size_t i = 0; i < line.size(); ++i) {
        const auto begin = static_cast<std::size_t>(line[i]);
        const std::string_view row = text.substr(begin, static_cast<std::size_t>(line_end[i]) - begin);
        const char* last = std::to_chars(digits.data(), digits.data() + digits.size(), offsets[i]).ptr;
        const std::string_view offset(digits.data(), static_cast<std::size_t>(last - digits.data()));
        if (place < 0) {
            out.append(row).append(",").append(offset);
        } else {
            std::size_t from = 0;
            for (std::int64_t cell = 0; cell < place; ++cell) from = row.find(',', from) + 1;
            out.append(row.substr(0, from)).append(offset).append(row.substr(std::min(row.find(',', from), row.size())));
        }
        out.push_back('\n');
    }
    return out;
}

}  // namespace overspill::packing
