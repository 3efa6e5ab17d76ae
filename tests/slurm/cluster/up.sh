#!/usr/bin/env bash
# up.sh DIR [NODES]: starts a SLURM cluster of its own on this machine, as root, with all that it writes under DIR.
# ACCOUNTING=1 gives it slurmdbd, so that sacct answers. Prints the line that points SLURM's commands at it.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
dir=${1:?up.sh DIR [NODES]}
nodes=${2:-2}
host=$(hostname -s)

is_free() { ! (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }
free_ports() { # the first of COUNT ports that nobody listens on, all below the range that the kernel hands out
  local count=$1 first try
  for try in $(seq 50); do
    first=$((20000 + (RANDOM % 1000) * 10))
    for port in $(seq "$first" $((first + count - 1))); do is_free "$port" || continue 2; done
    echo "$first"
    return
  done
  echo "no free ports between 20000 and 30000" >&2
  return 1
}

ulimit -c 0
mkdir -p "$dir/state" "$dir/munge"
rm -f "$dir/stopping"
for number in $(seq "$nodes"); do mkdir -p "$dir/spool.node$number"; done
chmod 755 "$dir" "$dir/munge"
first_port=$(free_ports $((nodes + 3)))
for name in slurm gres; do
  sed -e "s#@DIR@#$dir#g; s#@HOST@#$host#g; s#@NODES@#$nodes#g; s#@CPUS@#${CPUS:-8}#g" \
    -e "s#@FIRST_PORT@#$first_port#g; s#@LAST_PORT@#$((first_port + nodes - 1))#g" \
    -e "s#@CTLD_PORT@#$((first_port + nodes))#g" "$here/$name.conf.in" >"$dir/$name.conf"
done
for number in 0 1; do [ -c "$dir/gpu$number" ] || mknod -m 666 "$dir/gpu$number" c 1 3; done
export SLURM_CONF=$dir/slurm.conf

if [ ! -s "$dir/munge/key" ]; then (umask 077 && head -c 128 /dev/urandom >"$dir/munge/key"); fi
munged --key-file="$dir/munge/key" --socket="$dir/munge/socket" --pid-file="$dir/munge/pid" \
  --seed-file="$dir/munge/seed" --log-file="$dir/munge/log" --num-threads=2
if [ -n "${ACCOUNTING:-}" ]; then "$here/accounting.sh" "$dir" $((first_port + nodes + 1)); fi
slurmctld -i
# slurmd of 22.05 has been seen to crash when several steps start at once. Started again at once it takes up its jobs;
# down.sh makes the file that ends this.
keep_slurmd() {
  until [ -e "$dir/stopping" ]; do
    code=0
    slurmd -D -N "$1" </dev/null >/dev/null 2>&1 || code=$?
    [ -e "$dir/stopping" ] || echo "slurmd of $1 ended with $code" >>"$dir/crashes"
    sleep 0.2
  done
}
for number in $(seq "$nodes"); do keep_slurmd "node$number" </dev/null >/dev/null 2>&1 & done

for _ in $(seq 60); do
  idle=$(timeout 5 sinfo --noheader --partition=main --states=idle --format=%D || true)
  if [ "${idle:-0}" = "$nodes" ]; then
    echo "export SLURM_CONF=$SLURM_CONF"
    exit 0
  fi
  sleep 0.5
done
echo "the nodes did not come up within 30 s; see the logs in $dir" >&2
exit 1
