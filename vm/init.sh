#!/bin/busybox sh
# First process of the test VM: modules, network, soft-RoCE devices, then the job, then power off.
# The verdict goes to the host as the last line of the console.
export PATH=/usr/bin:/bin:/usr/sbin:/sbin HOME=/ REJOIN_BIN=/usr/bin
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm /tmp
mount -t tmpfs tmpfs /dev/shm
ulimit -l unlimited
for module in $(cat /modules.order); do
  insmod "/modules/$module" 2>/tmp/insmod || echo "vm: $module: $(cat /tmp/insmod)"
done
field() { tr ' ' '\n' </proc/cmdline | sed -n "s/^$1=//p"; }
node=$(field rejoin.node)
ip=/usr/bin/ip
$ip link set lo up
if [ -z "$node" ]; then
  # One VM, two rails: each device reaches itself.
  for rail in 0 1; do
    $ip link add "v$rail" type veth peer name "w$rail"
    $ip link set "v$rail" mtu 9000
    $ip link set "w$rail" mtu 9000
    $ip addr add "10.77.$rail.1/24" dev "v$rail"
    $ip link set "v$rail" up
    $ip link set "w$rail" up
    rdma link add "rxe$rail" type rxe netdev "v$rail"
  done
else
  # One of several nodes: two rails, each an Ethernet between the VMs.
  for rail in 0 1; do
    [ -e "/sys/class/net/eth$rail" ] || continue
    $ip link set "eth$rail" mtu 9000
    $ip addr add "10.77.$rail.$((node + 1))/24" dev "eth$rail"
    $ip link set "eth$rail" up
    rdma link add "rxe$rail" type rxe netdev "eth$rail"
  done
fi
[ -e /dev/infiniband/uverbs0 ] || { mkdir -p /dev/infiniband; for d in /sys/class/infiniband_verbs/uverbs*; do
  mknod "/dev/infiniband/$(basename "$d")" c $(tr ':' ' ' <"$d/dev"); done; }
[ -e /dev/infiniband/rdma_cm ] || mknod /dev/infiniband/rdma_cm c $(tr ':' ' ' </sys/class/misc/rdma_cm/dev)
echo "vm: up after $(cut -d' ' -f1 /proc/uptime) s"
if [ -n "$(field rejoin.shell)" ]; then
  setsid cttyhack sh
  rc=0
else
  sh /job.sh
  rc=$?
fi
echo "vm-verdict $rc"
poweroff -f
