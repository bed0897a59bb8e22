#!/bin/bash
# Starts what it is given, by default scaleray, after a look at what trainings in containers lack most often.
set -euo pipefail
umask 077

shm_mib=$(df --output=size -BM /dev/shm 2>/dev/null | tail -n 1 | tr -dc 0-9)
if [ "${shm_mib:-0}" -lt 1024 ]; then
  echo "note: /dev/shm has ${shm_mib:-0} MiB; Ray wants 30 % of the memory: docker run --shm-size=10g" >&2
fi
if [ ! -w "${HOME:-/}" ]; then
  echo "note: the home folder ${HOME:-/} cannot be written: mount a volume there, or set HOME" >&2
fi

if [ $# -gt 0 ] && ! command -v -- "$1" >/dev/null; then set -- scaleray "$@"; fi # such as: train -c FILE
# tini reaps what Ray's processes leave behind, and hands signals on; -s: where it is not the first process too
exec tini -s -g -- "$@"
