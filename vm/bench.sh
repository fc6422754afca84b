# In the VM: perftest's tools and ours, the same device, sizes and iterations, one after the other; three rounds.
cd /tmp
host=10.77.0.1
# perftest's server, which says nothing before it has a client: port 18515.
listens() { for _ in $(seq 250); do grep -qs ':4853 .* 0A ' /proc/net/tcp /proc/net/tcp6 && return; usleep 20000; done; }
figure() { awk -v column="$1" '$1 == size && NF >= 4 { print $column }' size="$2"; }
theirs() { # tool size arguments…: its column 4 (bandwidth average, or t_typical is 5)
  tool=$1 column=$2 size=$3; shift 3
  $tool -d rxe0 -x 1 -F "$@" -s $size >server.out 2>&1 &
  listens
  $tool -d rxe0 -x 1 -F "$@" -s $size $host 2>&1 | figure $column $size
  wait $!
}
ours() {
  tool=$1 column=$2 size=$3 device=$4; shift 4
  $tool $device -p 0 "$@" -s $size >server.out 2>&1 &
  until port=$(sed -n 's/listening on .*:\([0-9]*\)$/\1/p' server.out) && [ -n "$port" ]; do usleep 20000; done
  $tool $device -p $port "$@" -s $size $host 2>client.err | figure $column $size
  cat client.err
  wait $!
}
line() { printf 'vm-bench %-34s perftest %9s   rejoin %9s   ratio %s\n' "$1" "$2" "$3" "$(awk -v a="$2" -v b="$3" 'BEGIN { printf "%.2f", b / a }')"; }
echo "vm-bench inside one emulated VM with soft-RoCE: the ratios mean something, the figures nothing"
for round in ${ROUNDS:-1 2 3}; do
  line "write 1 MiB, 1 queue pair, MiB/s" "$(theirs ib_write_bw 4 1048576 -n 150)" "$(ours rejoin_write_bw 4 1048576 '-d rxe0' -q 1 -n 150)"
  line "write 1 MiB, 2 queue pairs, MiB/s" "$(theirs ib_write_bw 4 1048576 -q 2 -n 75)" "$(ours rejoin_write_bw 4 1048576 '-d rxe0' -q 2 -n 150)"
  line "read 1 MiB, 1 queue pair, MiB/s" "$(theirs ib_read_bw 4 1048576 -n 150)" "$(ours rejoin_read_bw 4 1048576 '-d rxe0' -q 1 -n 150)"
  line "write 8 B, typical µs one way" "$(theirs ib_write_lat 5 8 -n 500)" "$(ours rejoin_write_lat 5 8 '-d rxe0' -n 500)"
  line "send 8 B, typical µs one way" "$(theirs ib_send_lat 5 8 -n 500)" "$(ours rejoin_send_lat 5 8 '-d rxe0' -n 500)"
  line "write 1 MiB, two rails, MiB/s" "$(theirs ib_write_bw 4 1048576 -n 150)" "$(ours rejoin_write_bw 4 1048576 '--rails rxe0,rxe1' -n 150)"
done
for tool in all-reduce catch-up; do
  if [ $tool = all-reduce ]; then
    bw=$(rejoin_allreduce_perf --transport 'ibverbs:rxe0' --ranks 2 -b 8M -e 8M -n 8 -w 1 2>&1 | awk '$1 == 8388608 { printf "%.1f", 8e6 / $5 }')
  else
    bw=$(rejoin_catchup_bw --transport 'ibverbs:rxe0' --sources 2 -s 64M -n 2 2>&1 | awk '$1 == 2 { print $4 * 1000 / 1.048576 }')
  fi
  line "$tool over verbs, MiB/s" "$(theirs ib_write_bw 4 1048576 -n 150)" "$bw"
done
