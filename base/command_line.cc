#include "base/command_line.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <limits>
#include <map>
#include <numeric>
#include <sstream>

#include "base/bytes.h"
#include "base/fail.h"
#include "base/longest_time.h"
#include "base/number.h"
#include "base/settings_file.h"

namespace rejoin {

namespace {

// How many letters to put in, leave out or change, to come from one name to the other.
std::size_t distance(std::string_view from, std::string_view to) {
  std::vector<std::size_t> row(to.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < from.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < to.size(); ++j) {
      const std::size_t changed = diagonal + (from[i] == to[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({changed, row[j] + 1, diagonal + 1});
    }
  }
  return row.back();
}

// Nothing where none of them is near: a third of the letters may differ, and an end may be missing.
std::optional<std::string> nearest(std::string_view name, const std::vector<std::string>& known) {
  const auto far = [&](const std::string& other) {
    return other.starts_with(name) ? std::min<std::size_t>(1, other.size() - name.size()) : distance(name, other);
  };
  const auto found = std::min_element(known.begin(), known.end(),
                                      [&](const auto& one, const auto& other) { return far(one) < far(other); });
  if (3 * far(*found) > std::max(name.size(), found->size())) return std::nullopt;
  return *found;
}

// What any program of the project, its scripts and its tests take from the environment; what the tests' own drivers do
// is not among them. docs/operations.md and docs/trainer.md say what each is for.
constexpr std::string_view kVariables =
    "ADDRESS_FILE ADVERTISE AUDIT BALANCE_AT_LEAST BALANCE_AT_MOST BALANCE_BATCHES BATCH BETWEEN_STEPS_MS BIN "
    "CHAOS_INSIDE CHUNK_BYTES CHUNKS_IN_FLIGHT CODING CODING_ERROR CONSTANT_BATCH "
    "COMPRESSION COORDINATOR COORDINATOR_ROLE CUDA DATA_LISTEN DEVICE DROP_REPLICA ETCD_CA ETCD_CERT ETCD_KEY "
    "ETCD_PASSWORD_FILE ETCD_USER EVENTS FLIGHT_DIR FLIP_BIT_AT FULL_MESH_MEMBERS "
    "GRADIENT_LOG_BUDGET JOB JOB_KEY_FILE LISTEN LOCATION LOG_ARCHIVES LOG_COMPACT_KIB LOG_DIRECTORY LOG_LEVEL "
    "NCCL_ADDRESS NCCL_DEVICES NODE NUMA "
    "OTHER_JOB_KEY_FILE OUT PATIENCE_MS RANK RANKS RDMA REDUCE_BLOCKS REDUCE_THREADS RELAY REPLICA REPLICAS "
    "ROLL_BACK_TO ROUND_TRIPS "
    "SILENCE_MS SOCKET START_PATIENCE_MS STATE STATUS STEPS STORE STREAM_LIMIT TEST_SEED TLS_CA TLS_CERT TLS_KEY "
    "TRANSPORT";

constexpr int kUsageError = 2;  // the exit status, as of most programs
constexpr std::string_view kPrefix = "REJOIN_";

const std::vector<std::string>& known_variables() {
  static const auto all = split(kVariables, ' ');
  return all;
}

bool is_known(std::string_view variable) {
  if (!variable.starts_with(kPrefix)) return true;
  const auto& known = known_variables();
  return std::find(known.begin(), known.end(), variable.substr(kPrefix.size())) != known.end();
}

// An empty one counts for none.
bool is_set(std::string_view name) {
  if (name.empty()) return false;
  for (char** variable = environ; variable != nullptr && *variable != nullptr; ++variable) {
    const std::string_view entry = *variable;
    if (entry.size() > name.size() + 1 && entry.starts_with(name) && entry[name.size()] == '=') return true;
  }
  return false;
}

// A flag that nothing but the command line can give.
bool is_no_setting(const std::string& name) { return name == "help" || name == "version" || name == "config"; }

// A misspelt variable would have no effect, and nobody would know.
void warn_of_unknown_variables() {
  for (char** variable = environ; variable != nullptr && *variable != nullptr; ++variable) {
    std::string_view name = *variable;
    name = name.substr(0, name.find('='));
    if (is_known(name)) continue;
    name.remove_prefix(kPrefix.size());
    const auto near = nearest(name, known_variables());
    const auto line = fmt::format("rejoin: the variable REJOIN_{} is none of Rejoin's, and is ignored{}\n", name,
                                  near ? "; the nearest is REJOIN_" + *near : "");
    (void)std::fputs(line.c_str(), stderr);
  }
}

// Once in a process: a trainer may have several lines.
void warn_once() {
  static const bool warned = (warn_of_unknown_variables(), true);
  (void)warned;
}

// A settings file in which every name is known: CLI11 takes any, and a misspelt setting would have no effect.
class Settings : public CLI::ConfigBase {
 public:
  explicit Settings(const CLI::App& app) : app_(app) {}
  // CLI11's own reader would cut a value at a '#' in quotes, and make a list of one with commas.
  std::vector<CLI::ConfigItem> from_config(std::istream& file) const override {
    std::stringstream text;
    text << file.rdbuf();
    lines_.clear();
    const auto read = parse_settings(text.str());
    if (!read) refuse(fmt::format("{} {}", path(), read.error().message));
    std::vector<CLI::ConfigItem> settings;
    for (const auto& setting : *read) {
      lines_.emplace(setting.name, setting.line);
      check_known(setting.name);
      // A variable wins; CLI11 would let the file. And nothing is what an empty one without a default has anyway.
      const auto* option = app_.get_option("--" + setting.name);
      if (is_set(option->get_envname()) || (setting.value.empty() && option->get_default_str() == "")) continue;
      settings.push_back({.parents = {}, .name = setting.name, .inputs = {setting.value}});
    }
    return settings;
  }

  bool has(const std::string& name) const { return lines_.contains(name); }
  // "FILE line 3", where the name is set.
  std::string place_of(const std::string& name) const { return fmt::format("{} line {}", path(), lines_.at(name)); }

 private:
  std::string path() const { return app_.get_config_ptr()->results().front(); }
  [[noreturn]] static void refuse(const std::string& why) { throw CLI::ConfigError(why, CLI::ExitCodes::ConfigError); }
  void check_known(const std::string& name) const {
    std::vector<std::string> known;
    for (const auto* option : app_.get_options())
      for (const auto& its : option->get_lnames())
        if (!is_no_setting(its)) known.push_back(its);
    if (std::find(known.begin(), known.end(), name) != known.end()) return;
    std::string lower = name;
    for (char& letter : lower) letter = letter == '_' ? '-' : static_cast<char>(std::tolower(letter));
    const auto near = nearest(lower, known);
    refuse(fmt::format("{}: no setting is called '{}'; {}--help names all", place_of(name), name,
                       near ? fmt::format("the nearest is '{}', and ", *near) : ""));
  }

  const CLI::App& app_;
  mutable std::map<std::string, std::size_t> lines_;  // where each name stands; from_config() is const
};

// CLI11 names the flag also where a variable or the settings file has set it.
void name_source(const CLI::App& app, const std::vector<std::string>& arguments, std::string& message) {
  for (const auto* option : app.get_options()) {
    for (const auto& name : option->get_lnames()) {
      if (is_no_setting(name)) continue;
      const std::string flag = "--" + name;
      const auto gives = [&](const std::string& argument) {
        return argument == flag || argument.starts_with(flag + "=");
      };
      if (std::any_of(arguments.begin(), arguments.end(), gives)) continue;
      const auto file = std::dynamic_pointer_cast<Settings>(app.get_config_formatter());
      std::string source;
      if (is_set(option->get_envname())) source = option->get_envname();
      else if (file && file->has(name)) source = file->place_of(name) + ": " + name;
      else continue;
      for (std::size_t at = message.find(flag); at != std::string::npos; at = message.find(flag, at + source.size())) {
        const std::size_t end = at + flag.size();
        const bool longer = end < message.size() && (std::isalnum(message[end]) != 0 || message[end] == '-');
        if (!longer) message.replace(at, flag.size(), source);
      }
    }
  }
  for (const auto* command : app.get_subcommands()) name_source(*command, arguments, message);
}

// A flag that does not exist is reported before one that is missing: a misspelt flag is often both.
template <typename Parse>
void unknown_first(const CLI::App& app, Parse parse) {
  try {
    parse();
  } catch (const CLI::RequiredError&) {
    auto unknown = app.remaining();
    if (unknown.empty()) throw;
    std::reverse(unknown.begin(), unknown.end());
    throw CLI::ExtrasError(app.get_name(), std::move(unknown));
  }
}

template <typename Parse>
Result<> parsed(const CLI::App& app, const std::vector<std::string>& arguments, Parse parse) {
  try {
    unknown_first(app, parse);
  } catch (const CLI::Error& error) {
    std::string message = error.what();
    name_source(app, arguments, message);
    return fail(ErrorCode::invalid_argument, "{}", message);
  }
  return {};
}

// CLI11 would read 010 as 8.
void take_zeros_off(std::string& digits) {
  const std::size_t sign = digits.starts_with('-') ? 1 : 0;
  while (digits.size() > sign + 1 && digits[sign] == '0' && std::isdigit(static_cast<unsigned char>(digits[sign + 1])))
    digits.erase(sign, 1);
}

// Of a flag whose value is a whole number: no other digits than decimal ones, as everywhere else, and none too large.
template <typename Number>
std::string in_decimal(std::string& text) {
  if (text.empty()) return {};
  const std::string_view digits = std::string_view(text).substr(text.starts_with('-') ? 1 : 0);
  if (digits.empty() || digits.find_first_not_of("0123456789") != digits.npos)
    return fmt::format("'{}' is not a whole number in decimal digits", text);
  take_zeros_off(text);
  using Limits = std::numeric_limits<Number>;
  if (Number number{}; !parse_number(text, number))
    return fmt::format("'{}' is not a whole number from {} to {}", text, Limits::min(), Limits::max());
  return {};
}

// The numbers that a flag takes: of one, of none or one, or of several.
template <typename T>
struct ElementOf {
  using Type = T;
};
template <typename T>
struct ElementOf<std::optional<T>> : ElementOf<T> {};
template <typename T>
struct ElementOf<std::vector<T>> : ElementOf<T> {};

}  // namespace

Flag Flag::required() { return option_->required(), *this; }
Flag Flag::environment(const char* variable) {
  REJOIN_CHECK(is_known(variable), "{} is not among kVariables", variable);
  return option_->envname(variable), *this;
}
Flag Flag::show_default() { return option_->capture_default_str(), *this; }
Flag Flag::separated_by(char border) { return option_->delimiter(border), *this; }
Flag Flag::sized() {
  // The one that is added last is asked first.
  option_->transform(CLI::AsSizeValue(false));
  const auto decimal = [](std::string& text) {
    const std::size_t unit = text.find_first_not_of("0123456789");
    if (unit != text.npos && text.find_first_of("0123456789", unit) != text.npos)
      return fmt::format("'{}' is not a number of bytes in decimal digits, with K, M or G behind it", text);
    take_zeros_off(text);
    return std::string();
  };
  return option_->transform(CLI::Validator(decimal, "")), *this;
}
Flag Flag::range(std::int64_t least, std::int64_t most) { return option_->check(CLI::Range(least, most)), *this; }
Flag Flag::real_range(double least, double most) {
  const auto within = [least, most](const std::string& text) {
    double value = 0;
    if (parse_number(text, value) && least <= value && value <= most) return std::string();
    return fmt::format("'{}' is not a number from {} to {}", text, least, most);
  };
  return option_->check(CLI::Validator(within, fmt::format("FLOAT in [{} - {}]", least, most))), *this;
}
Flag Flag::one_of(std::vector<std::string> values) { return option_->check(CLI::IsMember(std::move(values))), *this; }
Flag Flag::existing_file() { return option_->check(CLI::ExistingFile), *this; }
Flag Flag::check(ValueCheck check) {
  const auto say = [right = std::move(check.check)](const std::string& value) {
    const Result<> fits = right(value);
    return fits ? std::string() : fits.error().message;
  };
  return option_->check(CLI::Validator(say, check.form)), *this;
}
Flag Flag::excludes(const Flag& other) { return option_->excludes(other.option_), *this; }

CommandLine::CommandLine(const std::string& description)
    : owned_(std::make_unique<CLI::App>(description)), app_(owned_.get()) {
  app_->set_version_flag("--version", "rejoin " REJOIN_VERSION);
}
CommandLine::CommandLine(std::unique_ptr<CLI::App> owned, CLI::App* app) : owned_(std::move(owned)), app_(app) {}
CommandLine::~CommandLine() = default;

// Written with a point whatever the program's locale is.
template <>
Flag CommandLine::add(const char* names, double& value, const char* help) {
  auto* option = app_->add_option_function<std::string>(
      names, [&value](const std::string& given) { (void)parse_number(given, value); }, help);
  option->type_name("FLOAT")->default_str(fmt::format("{}", value));
  const auto real = [](const std::string& text) {
    double read = 0;
    return parse_number(text, read) ? std::string() : fmt::format("'{}' is not a number such as 0.15", text);
  };
  return Flag(option->check(CLI::Validator(real, "")));
}
template <typename T>
Flag CommandLine::add(const char* names, T& value, const char* help) {
  auto* option = app_->add_option(names, value, help);
  using Element = typename ElementOf<T>::Type;
  if constexpr (std::is_integral_v<Element> && !std::is_same_v<Element, bool>)
    option->transform(CLI::Validator(in_decimal<Element>, ""));
  return Flag(option);
}
template Flag CommandLine::add(const char*, std::string&, const char*);
template Flag CommandLine::add(const char*, bool&, const char*);
template Flag CommandLine::add(const char*, int&, const char*);
template Flag CommandLine::add(const char*, std::uint32_t&, const char*);
template Flag CommandLine::add(const char*, std::uint64_t&, const char*);
template Flag CommandLine::add(const char*, std::optional<int>&, const char*);
template Flag CommandLine::add(const char*, std::optional<std::uint32_t>&, const char*);
template Flag CommandLine::add(const char*, std::optional<std::uint64_t>&, const char*);
template Flag CommandLine::add(const char*, std::vector<std::string>&, const char*);
template Flag CommandLine::add(const char*, std::vector<int>&, const char*);
template Flag CommandLine::add(const char*, std::vector<std::uint32_t>&, const char*);
template Flag CommandLine::add(const char*, std::vector<std::uint64_t>&, const char*);

Flag CommandLine::add(const char* names, std::chrono::milliseconds& value, const char* help) {
  constexpr std::int64_t most = kLongestTimeMs;
  auto* option = app_->add_option_function<std::int64_t>(
      names, [&value](const std::int64_t& given) { value = std::chrono::milliseconds(given); }, help);
  option->default_str(std::to_string(value.count()))->transform(CLI::Validator(in_decimal<std::int64_t>, ""));
  return Flag(option->check(CLI::Range(std::int64_t{0}, most)));
}

Flag CommandLine::flag(const char* names, bool& value, const char* help) {
  return Flag(app_->add_flag(names, value, help));
}

CommandLine& CommandLine::command(const char* name, const char* help) {
  app_->require_subcommand(1);
  commands_.emplace_back(new CommandLine(nullptr, app_->add_subcommand(name, help)));
  return *commands_.back();
}
bool CommandLine::chosen() const { return app_->parsed(); }

void CommandLine::allow_settings_file() {
  app_->set_config("--config", "", "file with settings, one 'name = value' a line")->check(CLI::ExistingFile);
  app_->config_formatter(std::make_shared<Settings>(*app_));
}

std::optional<int> CommandLine::parse(int argc, const char* const* argv) {
  warn_once();
  try {
    unknown_first(*app_, [&] { app_->parse(argc, argv); });
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app_->exit(error);
    std::string message = error.what();
    name_source(*app_, {argv, argv + argc}, message);
    (void)std::fputs((message + "\nRun with --help for more information.\n").c_str(), stderr);
    return kUsageError;
  }
  return std::nullopt;
}
Result<> CommandLine::parse(const std::vector<std::string>& arguments) {
  warn_once();
  return parsed(*app_, arguments, [&] { app_->parse(std::vector<std::string>(arguments.rbegin(), arguments.rend())); });
}
std::string CommandLine::settings() const {
  std::string text = app_->config_to_str(true, false);
  for (const auto* option : app_->get_options()) {
    if (option->get_expected_max() != 0 || option->count() == 0 || option->get_lnames().empty()) continue;
    // A flag may have been given as 1 or yes.
    const std::string begin = option->get_lnames().front() + "=";
    const std::size_t at = text.starts_with(begin) ? 0 : text.find("\n" + begin) + 1;
    if (at == 0 && !text.starts_with(begin)) continue;
    const std::size_t value = at + begin.size();
    text.replace(value, text.find('\n', value) - value, option->as<bool>() ? "true" : "false");
  }
  return text;
}

}  // namespace rejoin
