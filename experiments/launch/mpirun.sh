#!/usr/bin/env bash
# One process a host (PER_HOST=N: so many), by Open MPI 5; process 0 is on the first host.
# Usage: experiments/launch/mpirun.sh HOSTFILE --config=configs/NAME.py --workdir=DIR
set -euo pipefail

if [ "$#" -lt 2 ]; then
  sed -n 's/^# Usage: /usage: /p' "$0" >&2
  exit 2
fi
hostfile=$1
shift
first=$(awk '!/^#/ && NF { print $1; exit }' "$hostfile")
export JAX_COORDINATOR_ADDRESS="$first:${PORT:-9999}"

exec mpirun --hostfile "$hostfile" --map-by "ppr:${PER_HOST:-1}:node" --bind-to none \
  --tag-output -x JAX_COORDINATOR_ADDRESS \
  "${PYTHON:-python}" -m "${MODULE:-jaxdec}" "$@"
