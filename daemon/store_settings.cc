#include "daemon/store_settings.h"

#include "base/bytes.h"
#include "base/command_line.h"
#include "base/fail.h"
#include "daemon/flags.h"

namespace rejoin::daemon {

std::vector<std::string> StoreSettings::endpoints() const {
  return shared() ? split(std::string_view(store).substr(kEtcd.size()), ',') : std::vector<std::string>{};
}

void bind(CommandLine& line, StoreSettings& s) {
  line.setting("--store", s.store, "REJOIN_STORE",
               "coordinator: where its decisions are: file, in --log-directory; or etcd:HOST:PORT,HOST:PORT…, in an "
               "etcd cluster that several coordinators share, and in --log-directory is a copy")
      .check(store_name());
  line.setting("--job", s.job, "REJOIN_JOB", "coordinator: the job's name in the store: letters, digits, . _ -")
      .check(or_none(job_name()));
  line.setting("--etcd-ca", s.ca, "REJOIN_ETCD_CA",
               "coordinator: certificates that etcd's is signed with; with it TLS");
  line.setting("--etcd-cert", s.cert, "REJOIN_ETCD_CERT", "coordinator: its own certificate for etcd");
  line.setting("--etcd-key", s.key, "REJOIN_ETCD_KEY", "coordinator: the private key of --etcd-cert");
  line.setting("--etcd-user", s.user, "REJOIN_ETCD_USER", "coordinator: its user name in etcd");
  line.setting("--etcd-password-file", s.password_file, "REJOIN_ETCD_PASSWORD_FILE",
               "coordinator: file with that user's password (mode 600)");
}

Result<> check(const StoreSettings& s) {
  const std::pair<const char*, const std::string*> of_etcd[] = {{"--etcd-ca", &s.ca},
                                                                {"--etcd-cert", &s.cert},
                                                                {"--etcd-key", &s.key},
                                                                {"--etcd-user", &s.user},
                                                                {"--etcd-password-file", &s.password_file}};
  for (const auto& [flag, value] : of_etcd)
    if (!s.shared() && !value->empty())
      return fail(ErrorCode::invalid_argument,
                  "{} {} says how to reach etcd, and --store is file: add --store etcd:HOST:PORT, or leave it out",
                  flag, *value);
  if (s.cert.empty() != s.key.empty())
    return fail(ErrorCode::invalid_argument, "--etcd-cert and --etcd-key go together: give both, or neither");
  if (!s.cert.empty() && s.ca.empty())
    return fail(ErrorCode::invalid_argument,
                "--etcd-cert {} is for TLS, which needs --etcd-ca, too: the certificates that etcd's is signed with",
                s.cert);
  if (s.user.empty() != s.password_file.empty())
    return fail(ErrorCode::invalid_argument, "--etcd-user and --etcd-password-file go together: give both, or neither");
  if (s.shared() && s.job.empty())
    return fail(ErrorCode::invalid_argument,
                "--store {} needs the job's name there, for others may share it: add --job NAME", s.store);
  return {};
}

}  // namespace rejoin::daemon
