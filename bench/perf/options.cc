#include "bench/perf/options.h"

#include "base/bytes.h"
#include "base/command_line.h"
#include "base/fail.h"

namespace rejoin::bench::perf {

std::vector<std::uint64_t> Options::sizes() const {
  if (!all_sizes) return {size};
  std::vector<std::uint64_t> all;
  const std::uint64_t most = test == Test::send_lat ? 32 * 1024 : 8 * 1024 * 1024;
  for (std::uint64_t one = 2; one <= most; one *= 2) all.push_back(one);
  return all;
}

std::string Options::engine() const {
  const std::string list = rails.empty() ? device : rails;
  if (list.empty()) return transport;
  if (transport != "ibverbs") return list.empty() ? transport : transport + ":" + list;
  std::string settings;
  if (gid_index >= 0) settings += ";gid=" + std::to_string(gid_index);
  if (rdma_cm) settings += ";cm=auto";
  if (queue_pairs > 0) settings += ";qps=" + std::to_string(queue_pairs);
  std::string name;
  for (const auto& one : split(list, ',')) name += (name.empty() ? "ibverbs:" : ",") + one + settings;
  return name;
}

std::string Options::title() const {
  switch (test) {
    case Test::write_bw: return bidirectional ? "RDMA_Write Bidirectional BW Test" : "RDMA_Write BW Test";
    case Test::read_bw: return bidirectional ? "RDMA_Read Bidirectional BW Test" : "RDMA_Read BW Test";
    case Test::write_lat: return "RDMA_Write Latency Test";
    case Test::send_lat: return "Send Latency Test";
  }
  return {};
}

Result<Options> parse(Test test, int argc, char** argv) {
  Options o;
  o.test = test;
  if (o.latency()) o.size = 2;
  CommandLine line(
      o.title() +
      ". Without a host it is the server and ends after one client; with one, the client of the server there. "
      "Both sides take the same options.");
  bool ignored = false, json = false;
  line.add("host", o.host, "the server's name or address");
  line.add("-d,--ib-dev", o.device, "RDMA device (ibverbs), or local address (tcp)");
  line.add("--rails", o.rails, "several devices or addresses, comma-separated: pieces go over all of them");
  line.add("--transport", o.transport, "ibverbs, tcp, tcp+aes, shm or ucx:LIST").show_default();
  line.add("-x,--gid-index", o.gid_index, "GID index; found by itself where not given");
  line.add("-p,--port", o.port, "port of the server's control connection").range(0, 65535).show_default();
  line.add("--bind_source_ip", o.local_address, "server: address to listen on").show_default();
  const auto size = line.add("-s,--size", o.size, "bytes of a message").sized().show_default();
  line.flag("-a,--all", o.all_sizes, "sizes from 2 up to 2^23 (sends: 2^15)").excludes(size);
  line.add("-n,--iters", o.iterations, "exchanges; default 5000 (bandwidth), 1000 (latency)");
  line.add("-D,--duration", o.duration_s, "run for so many seconds instead").range(0, 3600);
  if (!o.latency()) {
    line.add("-q,--qp", o.queue_pairs, "queue pairs (ibverbs)").range(1, 8);
    line.add("-t,--tx-depth", o.depth, "messages under way").range(1, 65536).show_default();
    line.flag("-b,--bidirectional", o.bidirectional, "both sides at once");
    line.flag("--verify", o.verify, "check the contents of what arrived");
  } else {
    line.flag("-H,--report-histogram", o.histogram, "print all results, sorted");
  }
  line.flag("--report_gbits", o.gbits, "Gbit/s instead of MiB/s");
  line.flag("--out_json", json, "write the results to --out_json_file");
  line.add("--out_json_file", o.json_file, "that file; default perftest_out.json");
  line.add("--use_cuda", o.cuda,
           "memory of this GPU, counted from 0: reached by the NIC itself where it can be (dma-buf or peer memory), "
           "otherwise staged through host memory. Both sides");
  if (test != Test::write_lat)  // which looks at the memory itself
    line.flag("-e,--events", o.events, "sleep until something happens instead of polling");
  line.flag("-F,--CPU-freq", ignored, "accepted and without effect: no cycle counter is used");
  line.flag("-R,--rdma_cm", o.rdma_cm, "connect the queue pairs by rdma_cm (ibverbs; the client's wish counts)");
  if (const auto status = line.parse(argc, argv)) std::exit(*status);
  if (o.cuda && o.latency())
    return fail(ErrorCode::invalid_argument,
                "--use_cuda: the latency tests look at their memory themselves, so it must be the host's; "
                "rejoin_write_bw and rejoin_read_bw take it");
  if (o.transport == "ibverbs" && o.device.empty() && o.rails.empty() &&
      (o.gid_index >= 0 || o.queue_pairs > 0 || o.rdma_cm))
    return fail(ErrorCode::invalid_argument,
                "-x, -q and -R are settings of a device: name it with -d, or several with "
                "--rails");
  if (o.size == 0 || o.size > (std::uint64_t{1} << 31))
    return fail(ErrorCode::invalid_argument, "--size {}: from 1 byte to 2 GiB", o.size);
  if (test == Test::send_lat && o.size > 32768)
    return fail(ErrorCode::invalid_argument, "--size {}: sends are of at most 32 KiB", o.size);
  if (json && o.json_file.empty()) o.json_file = "perftest_out.json";
  if (o.iterations == 0) o.iterations = o.latency() ? 1000 : 5000;
  return o;
}

}  // namespace rejoin::bench::perf
