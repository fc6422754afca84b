#include "base/settings_file.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <optional>

#include "base/bytes.h"
#include "base/fail.h"

namespace rejoin {

namespace {

constexpr std::string_view kBlanks = " \t\r";
constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";  // some editors begin a file with it

std::string_view trimmed(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(kBlanks);
  if (begin == text.npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlanks) - begin + 1);
}

bool is_name(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char letter) {
    return std::isalnum(letter) != 0 || std::strchr("-_.+", letter) != nullptr;
  });
}

bool nothing_or_comment(std::string_view text) {
  const auto rest = trimmed(text);
  return rest.empty() || rest.front() == '#';
}

// What stands between the quotes that `text` begins with; nothing where they do not close.
std::optional<std::string_view> quoted(std::string_view text) {
  for (std::size_t end = text.find(text.front(), 1); end != text.npos; end = text.find(text.front(), end + 1))
    if (nothing_or_comment(text.substr(end + 1))) return text.substr(1, end - 1);
  return std::nullopt;
}

// Of what stands behind the '='.
Result<std::string> value_of(const std::string& name, std::string_view text) {
  constexpr const char* kQuotes = "One with blanks stands in quotes; a comment stands on a line of its own";
  if (!text.empty() && (text.front() == '"' || text.front() == '\'')) {
    if (const auto inside = quoted(text)) return std::string(*inside);
    return fail(ErrorCode::invalid_argument, "'{} = {}' is not of the form name = value: its quotes do not close", name,
                printable(text, 200));
  }
  std::vector<std::string_view> words;
  for (auto rest = text; !rest.empty() && rest.front() != '#';) {
    words.push_back(rest.substr(0, rest.find_first_of(kBlanks)));
    rest = trimmed(rest.substr(words.back().size()));
  }
  if (words.size() > 1) return fail(ErrorCode::invalid_argument, "'{}' has {} values. {}", name, words.size(), kQuotes);
  if (words.empty()) return std::string();
  if (words.front().find_first_of("#\"") != words.front().npos)
    return fail(ErrorCode::invalid_argument,
                "'{} = {}' is not clear: a value with # or quotes in it stands in quotes, and a comment behind a value "
                "has a blank before it",
                name, printable(words.front(), 200));
  return std::string(words.front());
}

}  // namespace

Result<std::vector<Setting>> parse_settings(std::string_view text) {
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  std::vector<Setting> all;
  std::size_t number = 0;
  for (const auto& whole : split(text, '\n')) {
    ++number;
    const std::string_view line = trimmed(whole);
    if (line.empty() || line.front() == '#' || line.front() == ';') continue;
    Setting setting{.name = std::string(line.substr(0, line.find_first_of(" \t\r="))), .value = "true", .line = number};
    const std::string_view rest = trimmed(line.substr(setting.name.size()));
    const bool named = is_name(setting.name);
    if (line.front() == '[')
      return fail(ErrorCode::invalid_argument,
                  "line {}: '{}' begins a section, and settings stand in none: take it out", number,
                  printable(line, 200));
    if (!named || (!rest.empty() && rest.front() != '=' && rest.front() != '#'))
      return fail(ErrorCode::invalid_argument, "line {}: '{}' is not of the form name = value{}", number,
                  printable(line, 200), named ? ": it has no '=' behind the name" : "");
    if (rest.starts_with('=')) {
      auto value = value_of(setting.name, trimmed(rest.substr(1)));
      if (!value) return fail(value.error().code, "line {}: {}", number, value.error().message);
      setting.value = std::move(*value);
    }
    const auto before = std::ranges::find(all, setting.name, &Setting::name);
    if (before != all.end())
      return fail(ErrorCode::invalid_argument, "line {}: '{}' is set once more in line {}: take one of them out",
                  before->line, setting.name, number);
    all.push_back(std::move(setting));
  }
  return all;
}

}  // namespace rejoin
