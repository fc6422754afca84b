# In the VM: the NCCL plugin under its conformance program, over verbs; and a link that goes down in mid-stream.
plugin=/usr/lib/libnccl-net-rejoin.so
check() { "$@" || { echo "nccl: failed: $*"; exit 1; }; }
export REJOIN_NCCL_ADDRESS=10.77.0.1
# All active ports, each a device; all versions of the interface are checked over TCP.
check rejoin_nccl_net_test $plugin --abi 12 --log
export REJOIN_NCCL_DEVICES='ibverbs:rxe0;depth=32,rxe1;depth=32'
# Two rails; one goes down while messages are under way both ways, and comes back.
rejoin_nccl_net_test $plugin --abi 12 --stream 8 --log >/tmp/stream 2>&1 &
until grep -q streaming /tmp/stream; do usleep 20000; done
usleep 1000000
ip link set v1 down
echo "nccl: rail 1 is down"
until grep -q 'rail 1 to a peer is down' /tmp/stream || ! kill -0 $! 2>/dev/null; do usleep 20000; done
usleep 1000000
ip link set v1 up
echo "nccl: rail 1 is up"
wait $!
rc=$?
cat /tmp/stream
grep -q 'rail 1 to a peer is down' /tmp/stream || { echo "nccl: failed: nobody noticed that the rail was down"; exit 1; }
exit $rc
