// Reads command lines, REJOIN_* variables and settings files, for all programs. CLI11, which reads them, costs every
// file that includes it ten seconds of compiling: only command_line.cc does.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

#pragma GCC visibility push(default)
namespace rejoin {

// Says what a value has to look like. `form` stands for the value in --help; the error for a wrong value names the
// value and what is allowed.
struct ValueCheck {
  std::string form;
  std::function<Result<>(const std::string&)> check;
};

// One flag of a CommandLine, which owns it; copies are of the same flag. Each call refines it and gives it back.
class Flag {
 public:
  explicit Flag(CLI::Option* option) : option_(option) {}
  Flag required();
  Flag environment(const char* variable);  // the variable is used where the command line does not have the flag
  Flag show_default();                     // --help and CommandLine::settings() show the default
  Flag separated_by(char border);          // one argument has several values
  Flag sized();                            // the value is bytes, with K, M, G (powers of 1024); goes before range()
  Flag range(std::int64_t least, std::int64_t most);
  Flag real_range(double least, double most);
  Flag one_of(std::vector<std::string> values);
  Flag existing_file();
  Flag check(ValueCheck check);
  Flag excludes(const Flag& other);

 private:
  CLI::Option* option_;
};

// The arguments of a program, or of one of its commands. Every program has --help and --version. The variables that
// values are written to must outlive the parsing. Thread: one.
class CommandLine {
 public:
  explicit CommandLine(const std::string& description);
  ~CommandLine();
  CommandLine(const CommandLine&) = delete;

  // `names`: "-s,--size", or "host" for an argument without a flag. T: std::string, bool (the flag then takes true or
  // false), int, std::uint32_t, std::uint64_t, double; std::optional of one, or a std::vector for several values.
  template <typename T>
  Flag add(const char* names, T& value, const char* help);
  Flag add(const char* names, std::chrono::milliseconds& value, const char* help);  // a whole number, from 0
  // Adds a flag that a variable may also set, and whose default --help shows.
  template <typename T>
  Flag setting(const char* names, T& value, const char* variable, const char* help) {
    return add(names, value, help).environment(variable).show_default();
  }
  // Adds a flag without a value; "!--no-x" in its names sets it to false.
  Flag flag(const char* names, bool& value, const char* help);

  // Adds a command, as `status` in `rejoin status`; exactly one must then be given. This one owns it.
  CommandLine& command(const char* name, const char* help);
  bool chosen() const;

  // Adds --config FILE, with one 'name = value' a line. A name that is no flag is an error, which names the nearest
  // one.
  void allow_settings_file();

  // Parses the arguments. Returns the status to exit with after --help, --version, or wrong arguments, for which it has
  // printed something; otherwise nothing.
  [[nodiscard]] std::optional<int> parse(int argc, const char* const* argv);
  // Parses without printing. Errors: `invalid_argument` with the flag, the value and what is allowed.
  Result<> parse(const std::vector<std::string>& arguments);
  // Returns all values in the form of a settings file.
  std::string settings() const;

 private:
  CommandLine(std::unique_ptr<CLI::App> owned, CLI::App* app);
  std::unique_ptr<CLI::App> owned_;  // null: this is a command of another
  CLI::App* app_;
  std::vector<std::unique_ptr<CommandLine>> commands_;
};

}  // namespace rejoin

#pragma GCC visibility pop
