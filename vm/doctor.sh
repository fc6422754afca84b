# `rejoin doctor` with soft-RoCE devices that are right, and then are not: each finding must come, with its status.
expect() { # STATUS LINE COMMAND…
  status=$1 line=$2
  shift 2
  "$@" >/tmp/doctor.out 2>&1
  got=$?
  if [ "$got" != "$status" ] || ! grep -q -- "$line" /tmp/doctor.out; then
    echo "doctor: not status $status with '$line', but $got and:"
    cat /tmp/doctor.out
    failed=1
  fi
}
failed=0
two="--transport ibverbs:rxe0,rxe1"
one="--transport ibverbs:rxe0"

expect 0 "^ok    rdma: rxe0:1 is up, with GID [0-9]*, ::ffff:10.77.0.1 and packets of 4096 bytes" rejoin doctor --strict $two
expect 0 "^ok    rdma: rxe1:1 is up" rejoin doctor --strict --transport ibverbs
expect 0 "^ok    memlock: 64 MiB were registered on rxe0:1" rejoin doctor $two
expect 2 "^FAIL  rdma: no RDMA device 'mlx5_0'" rejoin doctor --transport ibverbs:mlx5_0

# Two of them, each with the other, over one device.
(umask 077 && echo 0123456789abcdef >/tmp/doctor.key)
pair="--job-key-file /tmp/doctor.key --transport ibverbs:rxe0 --pairs 10.77.0.1:7100,10.77.0.1:7110"
rejoin doctor $pair --data-listen 0.0.0.0:7110 >/tmp/doctor.other 2>&1 &
expect 0 "^ok    pair: 10.77.0.1:7110: 64 B there and back in .* ms, 1 MiB in" rejoin doctor $pair --data-listen 0.0.0.0:7100
wait $! && grep -q "^ok    pair: 10.77.0.1:7100: 64 B there" /tmp/doctor.other || { cat /tmp/doctor.other; failed=1; }

# Whoever has CAP_IPC_LOCK may lock anything.
limited="/usr/bin/setpriv --bounding-set=-ipc_lock sh -c"
expect 2 "^FAIL  memlock: 64 MiB on rxe0:1: .*RLIMIT_MEMLOCK is 8.0 MiB.*LimitMEMLOCK=infinity" $limited "ulimit -l 8192; rejoin doctor $one"
expect 0 "^WARN  memlock: 64 MiB on rxe0:1: .*RLIMIT_MEMLOCK is 8.0 MiB" $limited "ulimit -l 8192; rejoin doctor --transport tcp"
expect 0 "^ok    memlock: " $limited "ulimit -l 131072; rejoin doctor --strict $one"

ip link set v0 mtu 1500
expect 1 "^WARN  rdma: rxe0:1: packets of 1024 bytes; it could 4096 -> raise the MTU" rejoin doctor --strict $one
ip link set v0 mtu 9000

ip addr del 10.77.0.1/24 dev v0
expect 1 "^WARN  rdma: rxe0:1 would use GID [0-9]*, fe80::.* (link-local): .*gid=N" rejoin doctor --strict $one
ip addr add 10.77.0.1/24 dev v0

ip link set v0 down
expect 2 "^FAIL  rdma: rail rxe0:1: the port is .* -> is its link up?" rejoin doctor $two
expect 0 "^WARN  rdma: rail rxe0:1: the port is .* -> is its link up?" rejoin doctor --transport tcp
ip link set v0 up
[ "$failed" = 0 ] && echo "doctor: everything was found"
exit "$failed"
