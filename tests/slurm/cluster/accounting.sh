#!/usr/bin/env bash
# accounting.sh DIR PORT: a database and slurmdbd for the cluster of up.sh, which calls it with ACCOUNTING=1.
# Needs the packages slurmdbd and mariadb-server. Uses PORT for slurmdbd and the next one for the database.
set -euo pipefail
dir=${1:?accounting.sh DIR PORT}
port=${2:?accounting.sh DIR PORT}
socket=$dir/database/socket

mkdir -p "$dir/database"
if [ ! -d "$dir/database/data" ]; then
  mariadb-install-db --no-defaults --user=root --datadir="$dir/database/data" --skip-test-db \
    --auth-root-authentication-method=normal >"$dir/database/install.log" 2>&1
fi
mariadbd --no-defaults --user=root --datadir="$dir/database/data" --socket="$socket" --pid-file="$dir/database/pid" \
  --bind-address=127.0.0.1 --port=$((port + 1)) --innodb-buffer-pool-size=64M --innodb-lock-wait-timeout=900 \
  >"$dir/database/log" 2>&1 &
for _ in $(seq 60); do
  if mariadb-admin --no-defaults --socket="$socket" ping >/dev/null 2>&1; then break; fi
  sleep 0.5
done
mariadb --no-defaults --socket="$socket" --execute "
  create database if not exists slurm_acct_db;
  create user if not exists slurm@'127.0.0.1' identified by 'slurm';
  grant all on slurm_acct_db.* to slurm@'127.0.0.1';"

(umask 077 && cat >"$dir/slurmdbd.conf" <<CONF
AuthType=auth/munge
AuthInfo=socket=$dir/munge/socket
DbdHost=$(hostname -s)
DbdAddr=127.0.0.1
DbdPort=$port
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$((port + 1))
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
LogFile=$dir/slurmdbd.log
PidFile=$dir/slurmdbd.pid
CONF
)
# The munge socket is not where slurmctld looks by default, and of this file it reads the path from a key of its own.
sed -i "s#^AccountingStorageType=.*#AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=127.0.0.1\nAccountingStoragePort=$port\nAccountingStoragePass=$dir/munge/socket#" "$dir/slurm.conf"
slurmdbd
for _ in $(seq 60); do
  if grep -q "slurmdbd version" "$dir/slurmdbd.log" 2>/dev/null; then
    timeout 20 sacctmgr --immediate add cluster zlab >/dev/null
    exit 0
  fi
  sleep 0.5
done
echo "slurmdbd did not come up within 30 s; see $dir/slurmdbd.log" >&2
exit 1
