#!/usr/bin/env bash
# What check.sh has systemd run: a job of one replica, whose daemons are killed. /opt/result says how it went.
exec 3>/opt/result >/opt/said 2>&1
set -x
end() {
  echo "check: $*" >&3
  journalctl --no-pager -u 'rejoin*'
  sync
  systemctl poweroff --force --force
  exit
}
expect() {  # SECONDS WHAT COMMAND...
  local seconds=$1 what=$2
  shift 2
  for ((i = 0; i < 10 * seconds; ++i)); do "$@" && { echo "check: $what" >&3; return; }; sleep 0.1; done
  end "FAILED: $what"
}
says() { systemctl show -p StatusText --value "$1" | grep -q "$2"; }
value() { systemctl show -p "$2" --value "$1"; }
step() { value rejoin-coordinator@train StatusText | grep -o 'step [0-9]*' | cut -c6-; }
further() { [[ $(step) -gt $1 ]]; }
failed() { [[ $(value "$1" ActiveState) == failed ]]; }
again() { [[ $(value "$1" NRestarts) -ge 1 && $(value "$1" ActiveState) == active ]]; }

install -d /etc/rejoin/train
head -c 32 /dev/urandom >/etc/rejoin/train/key
chmod 600 /etc/rejoin/train/key
printf 'REJOIN_REPLICAS=1\nREJOIN_RANKS=1\nREJOIN_BATCH=8\nREJOIN_LISTEN=127.0.0.1:7000\n' >/etc/rejoin/train/coordinator.env
printf 'REJOIN_COORDINATOR=127.0.0.1:7000\nREJOIN_DATA_LISTEN=127.0.0.1:0\n' >/etc/rejoin/train/node.env
expect 1 "the node starts, though there is no coordinator" systemctl start rejoind@train
expect 1 "it says so" says rejoind@train "not connected with 127.0.0.1:7000"
expect 1 "the coordinator starts" systemctl start rejoin-coordinator@train
setpriv --reuid rejoin --regid rejoin --clear-groups env REJOIN_REPLICA=0 REJOIN_RANK=0 REJOIN_SOCKET=/run/rejoin/train/socket /opt/minimal &
expect 20 "a trainer trains" further 10
expect 20 "the node says that it is connected" says rejoind@train "node of 1 trainers, connected with"
expect 1 "doctor's findings are in the journal" sh -c 'journalctl --no-pager -u rejoind@train | grep -q "key: /run/credentials/.* can be read"'
expect 1 "nothing is gained by exec, and system calls are filtered" sh -c 'grep -q "NoNewPrivs:.1" /proc/$0/status && grep -q "Seccomp:.2" /proc/$0/status' "$(value rejoind@train MainPID)"
for unit in rejoind@train rejoin-coordinator@train; do
  systemctl kill -s KILL "$unit"
  expect 20 "$unit is killed, and started again" again "$unit"
  expect 20 "the trainer goes on" further "$(($(step) + 10))"
done
# As where the machine of one of two coordinators does not answer.
rejoind --coordinator --name other --listen 127.0.0.1:7009 --job-key-file /etc/rejoin/train/key --log-directory /opt/other --address-file /opt/other.json --replicas 1 --ranks 1 --batch 8 &
expect 10 "another coordinator listens" test -s /opt/other.json
kill -STOP %2
sed -i 's/^REJOIN_COORDINATOR=.*/&,127.0.0.1:7009/' /etc/rejoin/train/node.env
before=$(date +%s%N)
systemctl restart rejoind@train
[[ $(($(date +%s%N) - before)) -lt 2000000000 ]] || end "FAILED: a daemon is away for longer than a silence when it is started again"
kill -KILL %2
expect 20 "the trainer goes on with the daemon that was started again" further "$(($(step) + 10))"
expect 10 "both stop" systemctl stop rejoind@train rejoin-coordinator@train
[[ $(value rejoind@train Result) == success ]] || end "FAILED: the node ends with $(value rejoind@train Result)"
echo REJOIN_BATCH=none >>/etc/rejoin/train/coordinator.env
systemctl start rejoin-coordinator@train
expect 20 "a coordinator with a wrong setting ends" failed rejoin-coordinator@train  # and would be activating otherwise
[[ $(value rejoin-coordinator@train NRestarts) == 0 ]] || end "FAILED: a setting that is wrong is tried again and again"
kill %1
wait
apt-get purge -y -qq rejoin || end "FAILED: it can't be purged"
getent passwd rejoin && end "FAILED: the user stays"
end ok
