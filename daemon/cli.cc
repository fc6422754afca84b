// rejoin: examines a node, asks daemons how they are, audits a coordinator's log, makes a trace of recordings and
// explains incidents out of them.
#include <asio.hpp>
#include <csignal>
#include <filesystem>
#include <iostream>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/command_line.h"
#include "base/deadlines.h"
#include "base/fail.h"
#include "base/fd.h"
#include "base/result.h"
#include "daemon/doctor_command.h"
#include "daemon/explain.h"
#include "daemon/flags.h"
#include "daemon/log_audit.h"
#include "daemon/log_transfer.h"
#include "daemon/status_command.h"
#include "daemon/store_factory.h"
#include "daemon/trace.h"
#include "membership/log.h"

namespace rejoin::daemon {
namespace {

Result<int> show_audit(const std::string& path, std::optional<Step> last_step) {
  LogAuditor auditor;
  bool empty = true;
  const auto log = membership::for_each_record(path, [&](const proto::LogRecord& record) {
    empty = false;
    auditor.take(record);
    if (record.has_epoch()) {
      std::string members;
      for (const auto& m : record.epoch().members())
        members += fmt::format(" {}{}", m.replica(), m.catching_up() ? " (catching up)" : "");
      std::cout << fmt::format("epoch {:>4} after step {:>7}: replicas{}; {}\n", record.epoch().epoch(),
                               record.epoch().step() - 1, members, record.epoch().reason());
    }
    if (record.has_rolled_back() && record.rolled_back().from() > record.rolled_back().version())
      std::cout << fmt::format("rolled back from step {} to step {}\n", record.rolled_back().from(),
                               record.rolled_back().version());
  });
  if (!log) return tl::unexpected(log.error());
  if (empty)
    return fail(ErrorCode::not_found,
                "{} holds no decision, in {} bytes: no job has begun with it, or what it held is lost", path,
                log->intact + log->torn);
  const LogAudit audit = auditor.result(last_step);
  std::cout << fmt::format(
      "{} steps committed in {} epochs; {} samples: {} trained once, {} lost, {} repeated, {} to be trained again\n",
      audit.committed, audit.epochs, audit.samples, audit.once, audit.lost, audit.repeated, audit.to_be_trained);
  if (audit.compacted > 0)
    std::cout << fmt::format(
        "{} of them are trained by what the log says of the steps up to {}: it was compacted then, and the archive of "
        "what was in it is not beside it\n",
        audit.before_compacted, audit.compacted);
  if (audit.checkpoint > 0)
    std::cout << fmt::format("{} of them are trained by the checkpoint of step {}, from which the job went on\n",
                             audit.before_checkpoint, audit.checkpoint);
  const auto& given_up = auditor.rolled_back();
  if (given_up.steps > given_up.before)
    std::cout << fmt::format("{} committed steps of {} samples were rolled back, and their samples handed out again\n",
                             given_up.steps - given_up.before, given_up.samples);
  if (given_up.before > 0)
    std::cout << fmt::format("{} committed steps were rolled back before that\n", given_up.before);
  if (audit.left_over > 0)
    std::cout << fmt::format("{} samples are not trained: at most so many were with who was lost in the last steps\n",
                             audit.left_over);
  if (audit.to_be_trained > 0 && !last_step)
    std::cout << fmt::format(
        "The log does not tell whether the job is finished. If step {} was its last one, nobody trains the {} samples "
        "that are to be trained again; --steps {} counts them so.\n",
        audit.committed, audit.to_be_trained, audit.committed);
  if (log->torn > 0)
    std::cout << fmt::format(
        "{} bytes behind the last record are torn: a crash left them, and nobody was told of them\n", log->torn);
  const std::uint64_t missing = last_step ? last_step->value - std::min(last_step->value, audit.committed) : 0;
  if (missing > 0)
    std::cout << fmt::format("{} of the job's {} steps are MISSING: the log ends with step {}\n", missing,
                             last_step->value, audit.committed);
  const std::uint64_t beyond = last_step ? audit.committed - std::min(last_step->value, audit.committed) : 0;
  if (beyond > 0)
    std::cout << fmt::format("The log has {} steps behind --steps {}: that was not the job's last one\n", beyond,
                             last_step->value);
  return audit.lost + audit.repeated + missing + beyond == 0 ? 0 : 1;
}

Result<int> export_to(const std::string& log, const std::string& out) {
  const auto done = export_log(log, out);
  if (!done) return tl::unexpected(done.error());
  std::cout << fmt::format("{}: {} records of job {:016x}, up to step {}\n", out, done->records, done->job,
                           done->committed);
  if (done->begins_after > 0)
    std::cout << fmt::format(
        "It begins with what follows from the steps up to {}: what was decided in them is not here\n",
        done->begins_after);
  if (done->torn > 0)
    std::cout << fmt::format("{} bytes behind the last record are torn, and left out: nobody was told of them\n",
                             done->torn);
  return 0;
}

Result<int> import_from(const std::string& log, const StoreSettings& settings, bool replace) {
  if (auto together = check(settings); !together) return tl::unexpected(together.error());
  if (!settings.shared())
    return fail(ErrorCode::invalid_argument, "nothing says into which store: --store etcd:HOST:PORT,HOST:PORT…");
  asio::io_context io(1);
  auto store = open_store(io, settings, deadlines::kSilence);
  if (!store) return tl::unexpected(store.error());
  const auto where = fmt::format("job {} in {}", settings.job, settings.store);
  const auto done = import_log(io, **store, log, replace, where, settings.prefix(), deadlines::kSilence);
  if (!done) return tl::unexpected(done.error());
  std::cout << fmt::format(
      "{} stands for {} records of job {:016x} now, up to step {}. Nobody leads, in term {}: start the coordinators "
      "with this store, and each with a --log-directory that is new, or that has no more than these records\n",
      where, done->records, done->job, done->committed, done->term);
  return 0;
}

Result<int> show_trace(const std::vector<std::string>& paths, const std::string& output, std::uint64_t job) {
  const auto merged = merge_trace(paths, output, job);
  if (!merged) return tl::unexpected(merged.error());
  for (const auto& note : merged->notes) std::cerr << "rejoin: " << note << "\n";
  std::cout << fmt::format("{} processes in {}; open it in ui.perfetto.dev or chrome://tracing\n", merged->processes,
                           output);
  return 0;
}

Result<int> show_incident(ExplainOptions options, std::uint64_t job) {
  options.job = job;
  const auto text = explain(options);
  if (!text) return tl::unexpected(text.error());
  std::cout << *text;
  return 0;
}

// As recordings and the status name it.
ValueCheck job_number() {
  return {"16 hex digits", [](const std::string& text) -> Result<> {
            const bool right = text.size() == 16 && text.find_first_not_of("0123456789abcdef") == std::string::npos &&
                               text.find_first_not_of('0') != std::string::npos;
            return right ? Result<>()
                         : fail(ErrorCode::invalid_argument, "'{}' is no job's number: 16 hex digits", text);
          }};
}

}  // namespace
}  // namespace rejoin::daemon

int main(int argc, char** argv) {
  using namespace rejoin;
  open_standard_descriptors();
  ::signal(SIGXFSZ, SIG_IGN);  // a file that may not grow is an error like a full disk
  CommandLine line("Looks at a Rejoin job.");
  std::string address, log, job, output = "trace.json";
  std::vector<std::string> paths;
  bool json = false;
  auto& status = line.command("status", "what a daemon is doing, and for whom it waits");
  status.add("address", address, "the daemon's --status address").required().environment("REJOIN_STATUS");
  status.flag("--json", json, "the whole document");
  std::vector<std::string> addresses;
  std::uint64_t interval_ms = 1000, count = 0;
  auto& top = line.command("top", "the same of one or more daemons, renewed until Ctrl-C");
  top.add("addresses", addresses, "the daemons' --status addresses").required();
  top.add("--interval-ms", interval_ms, "between two looks").range(50, 3600000).show_default();
  top.add("--count", count, "looks; 0: until Ctrl-C").check(daemon::whole_number()).show_default();
  auto& audit = line.command("audit", "epochs and the ledger out of a coordinator's log: every sample once?");
  audit.add("log", log, "…/decisions.log, or its directory").required();
  std::uint64_t steps = 0;
  audit.add("--steps", steps, "the job's last step, which the log does not name; 0: not known")
      .check(daemon::whole_number())
      .show_default();
  const char* const of_job = "of the recordings of several jobs, this one's; otherwise the last one's";
  auto& trace =
      line.command("trace", "flight recordings and event files of all processes as one Chrome/Perfetto trace");
  trace.add("files", paths, "files, or directories of them (--flight-dir, --events); none: the default --flight-dir");
  trace.add("-o,--output", output, "file to write").show_default();
  trace.add("--job", job, of_job).check(daemon::job_number());
  daemon::ExplainOptions what;
  auto& explain = line.command("explain", "what happened when a process was lost, out of the flight recordings of all");
  explain.add("files", what.paths, "files, or directories of them (--flight-dir); none: the default --flight-dir");
  const auto at = explain.add("--at", what.at, "the incident nearest to this time in UTC; without it the last one");
  explain.add("--epoch", what.epoch, "the incident that this epoch began for")
      .check(daemon::or_none(daemon::whole_number()))
      .excludes(at);
  explain.flag("--list", what.list, "a line for each incident");
  explain.add("--job", job, of_job).check(daemon::job_number());
  auto& logs = line.command("log", "a coordinator's decisions as one file, or into the store of several coordinators");
  auto& out = logs.command("export", "all that a log and the archives beside it hold, as one file");
  std::string from, to;
  out.add("log", from, "…/decisions.log").required();
  out.add("file", to, "which must not exist").required();
  auto& in =
      logs.command("import", "a log into a store: to begin with several coordinators, or where its data is lost");
  daemon::StoreSettings store;
  bool replace = false;
  in.add("log", from, "…/decisions.log, or what 'rejoin log export' has written").required();
  daemon::bind(in, store);
  in.flag("--replace", replace, "put it in place of what the store has of this job; no coordinator may run");
  daemon::DoctorCommand doctor;
  auto& examine = line.command("doctor", "tries what a node needs, and says what to do about what fails");
  doctor.bind(examine);
  if (const auto exit = line.parse(argc, argv)) return *exit;
  std::error_code ignored;
  for (std::string* path : {&log, &from})
    if (std::filesystem::is_directory(*path, ignored)) *path += "/decisions.log";
  const auto number_of = [](const std::string& text) { return std::strtoull(text.c_str(), nullptr, 16); };
  auto done = examine.chosen()   ? Result<int>(doctor.run())
              : status.chosen()  ? daemon::show_status(address, json)
              : top.chosen()     ? daemon::top(addresses, std::chrono::milliseconds(interval_ms), count)
              : out.chosen()     ? daemon::export_to(from, to)
              : in.chosen()      ? daemon::import_from(from, store, replace)
              : explain.chosen() ? daemon::show_incident(what, number_of(job))
              : audit.chosen()   ? daemon::show_audit(log, steps == 0 ? std::nullopt : std::optional(Step(steps)))
                                 : daemon::show_trace(paths, output, number_of(job));
  if (!done) {
    std::cerr << "rejoin: " << done.error().message << "\n";
    return done.error().code == ErrorCode::invalid_argument ? 2 : 1;
  }
  if (!std::cout.flush()) {
    std::cerr << "rejoin: not all of this could be written: free space where the output goes\n";
    return 1;
  }
  return *done;
}
