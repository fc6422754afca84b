// Writes sound inputs into DIRECTORY/fuzz_TARGET: where a corpus begins.
#include <filesystem>
#include <fstream>
#include <iostream>

#include "local/owner.h"
#include "membership/link_rates.h"
#include "membership/log.h"
#include "membership/rank_set.h"
#include "membership/round_trips.h"
#include "stream.pb.h"

namespace {

using namespace rejoin;

void write(const std::filesystem::path& path, std::string_view bytes) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << bytes;
}

template <typename Message>
std::string framed(const Message& message, int to) {
  const std::string bytes = message.SerializeAsString();
  return std::string{static_cast<char>(bytes.size()), static_cast<char>(to)} + bytes;
}

proto::Member member(std::uint32_t replica, std::uint64_t incarnation, bool catching_up) {
  proto::Member made;
  made.set_replica(replica);
  made.set_incarnation(incarnation);
  made.set_catching_up(catching_up);
  made.add_batch()->set_end(3);
  return made;
}

// Two replicas of two ranks register, connect and commit a step.
std::string conversation() {
  std::string bytes;
  for (std::uint32_t replica : {0, 1})
    for (std::uint32_t rank : {0, 1}) {
      proto::FromNode up;
      up.mutable_rank_up()->set_replica(replica);
      up.mutable_rank_up()->set_rank(rank);
      up.mutable_rank_up()->set_instance(replica * 2 + rank + 1);
      up.mutable_rank_up()->set_plan_hash(7);
      bytes += framed(up, 0) + framed(up, 6);
    }
  for (std::uint32_t replica : {0, 1})
    for (std::uint32_t rank : {0, 1}) {
      proto::FromNode links;
      links.mutable_links()->set_replica(replica);
      links.mutable_links()->set_rank(rank);
      links.mutable_links()->set_instance(replica * 2 + rank + 1);
      membership::RankSet(2 - replica).to(links.mutable_links()->mutable_incarnations());
      membership::RoundTrips near;
      near.put(2 - replica, static_cast<RoundTripLength>(kNear + rank));
      near.to(links.mutable_links()->mutable_round_trips());
      membership::LinkRates rates;
      rates.keep_lower({2 - replica, static_cast<CoarseRate>(7 + rank), rank});
      rates.to(links.mutable_links()->mutable_rates());
      proto::FromNode status;
      status.mutable_replica_status()->set_replica(replica);
      status.mutable_replica_status()->set_incarnation(replica + 1);
      membership::RankSet(2 - replica).to(status.mutable_replica_status()->mutable_links());
      membership::RankSet(rank).to(status.mutable_replica_status()->mutable_ranks());
      near.to(status.mutable_replica_status()->mutable_round_trips());
      rates.to(status.mutable_replica_status()->mutable_rates());
      bytes += framed(links, 6) + framed(status, 0);
    }
  for (std::uint32_t replica : {0, 1}) {
    proto::FromNode done;
    done.mutable_reduced()->set_replica(replica);
    done.mutable_reduced()->set_epoch(1);
    done.mutable_reduced()->set_step(1);
    done.mutable_reduced()->set_incarnation(replica + 1);
    for (std::uint32_t rank : {0, 1}) membership::RankSet(rank).to(done.mutable_reduced()->mutable_ranks());
    bytes += framed(done, 0) + framed(done, 6);
  }
  proto::FromNode accusation;
  accusation.mutable_accusation()->set_epoch(1);
  accusation.mutable_accusation()->set_suspect(1);
  accusation.mutable_accusation()->set_lost(true);
  bytes += framed(accusation, 0);
  proto::ToNode plan;
  plan.mutable_plan()->set_epoch(1);
  plan.mutable_plan()->set_step(1);
  *plan.mutable_plan()->add_members() = member(0, 1, false);
  *plan.mutable_plan()->add_members() = member(1, 2, true);
  proto::ToNode registered;
  registered.mutable_registered()->set_instance(1);
  registered.mutable_registered()->set_incarnation(1);
  return bytes + framed(registered, 5) + framed(plan, 5) + framed(plan, 4);
}

std::vector<proto::LogRecord> records() {
  std::vector<proto::LogRecord> all(6);
  all[0].mutable_job()->set_replicas(2);
  all[0].mutable_job()->set_ranks(2);
  all[0].mutable_job()->set_batch(3);
  all[0].mutable_job()->set_plan_hash(7);
  all[1].mutable_incarnated()->set_incarnation(2);
  all[2].mutable_epoch()->set_epoch(1);
  all[2].mutable_epoch()->set_step(1);
  *all[2].mutable_epoch()->add_members() = member(0, 1, false);
  all[3].mutable_committed()->set_step(1);
  all[3].mutable_committed()->set_epoch(1);
  *all[3].mutable_committed()->add_members() = member(0, 1, false);
  all[4].mutable_rolled_back()->set_version(0);
  all[4].mutable_rolled_back()->set_in_order(true);
  all[5].mutable_rolled_back()->set_version(9);
  all[5].mutable_rolled_back()->set_in_order(true);
  membership::RankSet(7).to(all[5].mutable_rolled_back()->mutable_trained());
  return all;
}

// To a source as a joiner, and to a joiner as a source.
std::string stream() {
  const auto framed_message = [](int what, const auto& message) {
    const std::string bytes = message.SerializeAsString();
    return std::string{static_cast<char>(what), static_cast<char>(bytes.size())} + bytes;
  };
  proto::Stream fetch, verify, sent, reply;
  for (std::uint32_t slice : {0, 1})
    fetch.mutable_fetch()->add_slices(slice), verify.mutable_verify()->add_slices(slice);
  auto& region = *fetch.mutable_fetch()->add_regions();
  region.set_key(1);
  region.set_length(100000);
  for (std::uint64_t offset : {0, 20032, 40064})  // two columns of slice 0, one of slice 1
    fetch.mutable_fetch()->add_region_indexes(0), fetch.mutable_fetch()->add_offsets(offset);
  verify.mutable_verify()->set_request(1);
  sent.mutable_sent()->set_slice(0);
  sent.mutable_sent()->set_version(1);
  for (std::uint64_t digest : {1, 2}) sent.mutable_sent()->add_digests(digest), sent.mutable_sent()->add_coded(20);
  reply.mutable_verify_reply()->set_request(1);
  reply.mutable_verify_reply()->add_digests(3);
  const std::string nothing("\7\0", 2), write("\6\5\1\0\0\0\0", 7);
  return std::string("\4\0", 2) + nothing + framed_message(0, fetch) + nothing + framed_message(0, verify) + nothing +
         std::string("\15\0", 2) + nothing + nothing + framed_message(8, sent) + write + framed_message(8, reply) +
         nothing;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return std::cerr << "usage: fuzz_seeds DIRECTORY\n", 2;
  const std::filesystem::path to = argv[1];
  auto manifest = local::Manifest::make({{.name = "w", .count = 1000, .columns = 3},
                                         {.name = "b", .type = DataType::bfloat16, .count = 17, .elementwise = false}});
  const auto offer = local::Owner::make(*manifest).and_then([](const auto& owner) { return owner.offer(); });
  const auto described = offer ? sealed_size(offer->front()) : tl::unexpected(offer.error());
  const auto description = described ? Mapping::of(offer->front(), *described) : tl::unexpected(described.error());
  if (!description) return std::cerr << description.error().message << '\n', 1;
  write(to / "fuzz_manifest/two", as_text(description->span()));
  write(to / "fuzz_control/step", conversation());
  write(to / "fuzz_page/some", "\1\0\0\0\1\2\3\4\0\1\5\2\6\3\7\4");
  write(to / "fuzz_status/status", "GET /status HTTP/1.1\r\nHost: a\r\n\r\n");
  write(to / "fuzz_status/metrics", "GET /metrics?x=1 HTTP/1.0\r\n\r\n");
  write(to / "fuzz_config/file", "coordinator = true\nreplicas = 3\nsilence-ms = 500\n# what\nlog-level = \"info\"\n");
  write(to / "fuzz_config/rail",
        "mlx5_0:2;gid=3;qps=4;depth=128;mtu=4096;sl=0;tc=106;timeout=16;retries=7;ooo=1;cm=auto");
  write(to / "fuzz_config/address", "127.0.0.1:4000");
  write(to / "fuzz_framed/before", std::string("\0rejoin", 7));
  write(to / "fuzz_framed/after", "\1" + std::string("\3\0\0\0abc\0\0\0\0\377\377\377\377", 15));
  write(to / "fuzz_stream/both", stream());
  std::string recovered;
  for (const auto& record : records()) recovered += framed(record, 0);
  write(to / "fuzz_recover/step", recovered);
  const std::filesystem::path scratch = to / "scratch";
  {
    auto log = membership::Log::open(scratch);
    if (!log || !log->append(records())) return std::cerr << "no log in " << scratch << "\n", 1;
  }
  std::filesystem::create_directories(to / "fuzz_log");
  std::filesystem::copy_file(scratch / "decisions.log", to / "fuzz_log/step",
                             std::filesystem::copy_options::overwrite_existing);
  const auto parsed = membership::parse_one_file(scratch / "decisions.log");
  std::filesystem::resize_file(to / "fuzz_log/step", parsed.value().end());  // without the room behind it
  std::filesystem::remove_all(scratch);
  return 0;
}
