#include "base/command_line.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <numeric>

#include "base/bytes.h"
#include "base/fail.h"

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

const std::string& nearest(std::string_view name, const std::vector<std::string>& known) {
  return *std::min_element(known.begin(), known.end(), [&](const auto& one, const auto& other) {
    return distance(name, one) < distance(name, other);
  });
}

// What any program of the project, its scripts and its tests take from the environment; what the tests' own drivers do
// is not among them. docs/operations.md and docs/trainer.md say what each is for.
constexpr std::string_view kVariables =
    "ADDRESS_FILE ADVERTISE AUDIT BATCH BETWEEN_STEPS_MS BIN CHAOS_INSIDE CHUNK_BYTES CHUNKS_IN_FLIGHT "
    "COMPRESSION COORDINATOR COORDINATOR_ROLE CUDA DATA_LISTEN DEVICE DROP_REPLICA EVENTS FLIP_BIT_AT "
    "GRADIENT_LOG_BUDGET JOB_KEY_FILE LISTEN LOG_DIRECTORY LOG_LEVEL NCCL_ADDRESS NCCL_DEVICES NODE OUT "
    "PATIENCE_MS RANK RANKS RDMA REDUCE_BLOCKS REDUCE_THREADS RELAY REPLICA REPLICAS ROLL_BACK_TO "
    "SILENCE_MS SOCKET START_PATIENCE_MS STATE STATUS STEPS STREAM_LIMIT TEST_SEED TRANSPORT";

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

// A misspelt variable would have no effect, and nobody would know.
void warn_of_unknown_variables() {
  for (char** variable = environ; variable != nullptr && *variable != nullptr; ++variable) {
    std::string_view name = *variable;
    name = name.substr(0, name.find('='));
    if (is_known(name)) continue;
    name.remove_prefix(kPrefix.size());
    const auto line =
        fmt::format("rejoin: the variable REJOIN_{} is none of Rejoin's, and is ignored; the nearest is REJOIN_{}\n",
                    name, nearest(name, known_variables()));
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
  std::vector<CLI::ConfigItem> from_config(std::istream& file) const override {
    auto settings = CLI::ConfigBase::from_config(file);
    std::vector<std::string> known;
    for (const auto* option : app_.get_options())
      for (const auto& name : option->get_lnames())
        if (name != "help" && name != "version" && name != "config") known.push_back(name);
    for (const auto& item : settings) {
      const std::string name = item.fullname();
      const bool border = item.name == "++" || item.name == "--";  // of a section
      if (border || std::find(known.begin(), known.end(), name) != known.end()) continue;
      throw CLI::ConfigError(
          fmt::format("settings file: no setting is called '{}'; the nearest is '{}', and --help names all", name,
                      nearest(name, known)),
          CLI::ExitCodes::ConfigError);
    }
    return settings;
  }

 private:
  const CLI::App& app_;
};

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
Result<> parsed(const CLI::App& app, Parse parse) {
  try {
    unknown_first(app, parse);
  } catch (const CLI::Error& error) {
    return fail(ErrorCode::invalid_argument, "{}", error.what());
  }
  return {};
}

}  // namespace

Flag Flag::required() { return option_->required(), *this; }
Flag Flag::environment(const char* variable) {
  REJOIN_CHECK(is_known(variable), "{} is not among kVariables", variable);
  return option_->envname(variable), *this;
}
Flag Flag::show_default() { return option_->capture_default_str(), *this; }
Flag Flag::separated_by(char border) { return option_->delimiter(border), *this; }
Flag Flag::sized() { return option_->transform(CLI::AsSizeValue(false)), *this; }
Flag Flag::range(std::int64_t least, std::int64_t most) { return option_->check(CLI::Range(least, most)), *this; }
Flag Flag::real_range(double least, double most) { return option_->check(CLI::Range(least, most)), *this; }
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

template <typename T>
Flag CommandLine::add(const char* names, T& value, const char* help) {
  return Flag(app_->add_option(names, value, help));
}
template Flag CommandLine::add(const char*, std::string&, const char*);
template Flag CommandLine::add(const char*, bool&, const char*);
template Flag CommandLine::add(const char*, int&, const char*);
template Flag CommandLine::add(const char*, std::uint32_t&, const char*);
template Flag CommandLine::add(const char*, std::uint64_t&, const char*);
template Flag CommandLine::add(const char*, double&, const char*);
template Flag CommandLine::add(const char*, std::optional<int>&, const char*);
template Flag CommandLine::add(const char*, std::optional<std::uint32_t>&, const char*);
template Flag CommandLine::add(const char*, std::optional<std::uint64_t>&, const char*);
template Flag CommandLine::add(const char*, std::vector<std::string>&, const char*);
template Flag CommandLine::add(const char*, std::vector<int>&, const char*);
template Flag CommandLine::add(const char*, std::vector<std::uint32_t>&, const char*);
template Flag CommandLine::add(const char*, std::vector<std::uint64_t>&, const char*);

Flag CommandLine::add(const char* names, std::chrono::milliseconds& value, const char* help) {
  constexpr std::int64_t most = std::int64_t{1} << 40;
  auto* option = app_->add_option_function<std::int64_t>(
      names, [&value](const std::int64_t& given) { value = std::chrono::milliseconds(given); }, help);
  return Flag(option->default_str(std::to_string(value.count()))->check(CLI::Range(std::int64_t{0}, most)));
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
  app_->set_config("--config", "", "file with settings, one 'name = value' a line");
  app_->config_formatter(std::make_shared<Settings>(*app_));
}

std::optional<int> CommandLine::parse(int argc, const char* const* argv) {
  warn_once();
  try {
    unknown_first(*app_, [&] { app_->parse(argc, argv); });
  } catch (const CLI::ParseError& error) {
    return app_->exit(error);
  }
  return std::nullopt;
}
Result<> CommandLine::parse(const std::vector<std::string>& arguments) {
  warn_once();
  return parsed(*app_, [&] { app_->parse(std::vector<std::string>(arguments.rbegin(), arguments.rend())); });
}
Result<> CommandLine::parse_settings(std::istream& file) {
  return parsed(*app_, [&] { app_->parse_from_stream(file); });
}
std::string CommandLine::settings() const { return app_->config_to_str(true, false); }

}  // namespace rejoin
