# In the VM: writes over TCP, not encrypted, encrypted by the processes, and by the kernel (kTLS), in turns. Processor
# time is that of the whole VM, both sides and the kernel's own threads together.
cd /tmp
busy() { awk '/^cpu / { print $2 + $3 + $4 + $7 + $8 }' /proc/stat; } # in hundredths of a second
one() { # transport MiB
  rejoin_write_bw --transport "$1" -p 0 -s 1048576 -n "$2" >server.out 2>server.err &
  until port=$(sed -n 's/listening on .*:\([0-9]*\)$/\1/p' server.out) && [ -n "$port" ]; do usleep 20000; done
  before=$(busy)
  rejoin_write_bw --transport "$1" -p "$port" -s 1048576 -n "$2" 127.0.0.1 >client.out 2>client.err || cat client.err
  wait $!
  speed=$(awk '$1 == 1048576 && NF >= 4 { print $4 }' client.out)
  awk -v name="$1" -v speed="$speed" -v spent=$(($(busy) - before)) -v size="$2" \
    'BEGIN { printf "vm-encryption %-16s %8.1f MiB/s %8.1f s of processors for each GiB\n", name, speed, spent / 100 * 1024 / size }'
}
echo "vm-encryption $(uname -r), $(grep -c ^processor /proc/cpuinfo) emulated processors: ratios mean little, figures nothing"
for round in ${ROUNDS:-1 2 3}; do
  one tcp 512
  one tcp+aes 96
  one 'tcp+aes;ktls=1' 96
  cat client.err server.err
done
