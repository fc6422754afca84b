# In the VM: user-space instructions for each 8-byte write, the provider's included, as cachegrind counts them. The
# difference of a long and a short run leaves out what each does once; polls that find nothing are in it, and fewer the
# more is under way, since the device is fast beside a program that cachegrind runs.
cd /tmp
host=10.77.0.1
# perftest's server, which says nothing before it has a client: port 18515.
listens() { for _ in $(seq 250); do grep -qs ':4853 .* 0A ' /proc/net/tcp /proc/net/tcp6 && return; usleep 20000; done; }
counted() {
  valgrind.bin --tool=cachegrind --cache-sim=no --cachegrind-out-file=/dev/null --log-file=counts "$@" >client.out 2>&1 || cat client.out >&2
  sed -n 's/.*I *refs: *//p' counts | tr -d ,
}
theirs() { # writes, under way
  ib_write_bw -d rxe0 -x 1 -F -s 8 -n $1 -t $2 >server.out 2>&1 &
  listens
  counted ib_write_bw -d rxe0 -x 1 -F -s 8 -n $1 -t $2 $host
  wait $!
}
ours() {
  rejoin_write_bw -d rxe0 -p 0 -s 8 -n $1 -t $2 -q 1 >server.out 2>&1 &
  until port=$(sed -n 's/listening on .*:\([0-9]*\)$/\1/p' server.out) && [ -n "$port" ]; do usleep 20000; done
  counted rejoin_write_bw -d rxe0 -p $port -s 8 -n $1 -t $2 -q 1 $host
  wait $!
}
each() { awk -v few="$1" -v many="$2" 'BEGIN { printf "%.0f", (many - few) / 4000 }'; }
for depth in 16 128; do
  echo "vm-bench instructions for each 8-byte write, $depth under way: perftest $(each "$(theirs 1000 $depth)" "$(theirs 5000 $depth)"), rejoin $(each "$(ours 1000 $depth)" "$(ours 5000 $depth)")"
done
