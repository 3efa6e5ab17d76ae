#!/usr/bin/env bash
# down.sh DIR: cancels the jobs of the cluster that up.sh started there and ends its daemons, by their own pid files.
dir=${1:?down.sh DIR}
export SLURM_CONF=$dir/slurm.conf
timeout 10 scancel --user="$(id -un)" 2>/dev/null
for _ in $(seq 20); do
  [ -z "$(timeout 5 squeue --noheader 2>/dev/null)" ] && break
  sleep 0.5
done
touch "$dir/stopping"
pids=()
for file in "$dir"/slurmd.*.pid "$dir/slurmctld.pid" "$dir/slurmdbd.pid" "$dir/database/pid" "$dir/munge/pid"; do
  [ -s "$file" ] || continue
  pid=$(cat "$file")
  # A file may outlive its daemon, and the number be used again.
  case "$(ps --no-headers -o comm "$pid" 2>/dev/null)" in
    slurmd* | slurmctld* | mariadbd* | munged*) kill "$pid" 2>/dev/null && pids+=("$pid") ;;
  esac
done
for _ in $(seq 40); do
  left=0
  for pid in "${pids[@]}"; do kill -0 "$pid" 2>/dev/null && left=1; done
  [ "$left" = 0 ] && exit 0
  sleep 0.25
done
echo "still running after 10 s: ${pids[*]}" >&2
exit 1
