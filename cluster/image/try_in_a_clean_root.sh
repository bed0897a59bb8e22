#!/bin/bash
# Runs the steps of the Dockerfile, in its order, in a fresh Debian bookworm under a folder, and a training as its user. For machines
# without Docker. Root and debootstrap are needed; it takes the packages from the mirrors that apt and pip of this machine use.
#
#   cluster/image/try_in_a_clean_root.sh    a quarter of an hour; ends with `all is well`
#   CPU_WHEELS=INDEX cluster/image/...      where PyTorch's own index is not reached: pip would ask it for every package again and again
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
project=$(cd "$here/../.." && pwd)
[ "$(id -u)" = 0 ] || { echo "skipped: a root of its own needs root"; exit 75; }
command -v debootstrap >/dev/null || { echo "skipped: debootstrap is not installed"; exit 75; }
# in mounts of its own: nothing that is mounted is seen outside, and all of it goes with the last process
if [ -z "${ROOT:-}" ]; then
  root=$(mktemp -d /var/tmp/scaleray-root.XXXXXX)
  chmod 755 "$root" # it is what the image's user sees as /
  trap 'rm -f "$root.log"; if [ -z "${KEEP:-}" ]; then rm -rf --one-file-system "$root"; else echo "kept: $root"; fi' EXIT
  trap 'exit 130' INT TERM
  ROOT=$root unshare --mount --propagation private "$0" "$@"
  exit
fi
root=$ROOT

echo "== FROM: Debian bookworm with Python 3.11"
mirror=$({ cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null || true; } |
  sed -nE 's/^(URIs:|deb) +(http[^ ]+).*/\2/p' | sed -n 1p)
debootstrap --variant=minbase --include=python3.11,python3-venv,ca-certificates bookworm "$root" "${MIRROR:-$mirror}" >"$root.log" 2>&1 ||
  { tail -n 5 "$root.log"; exit 1; }
rm -f "$root.log"
mount --bind "$root" "$root" # so that it can be made read-only in the end
for path in /etc/apt/sources.list.d/* /etc/apt/apt.conf.d/* /etc/resolv.conf /etc/pip.conf; do
  # never through a link of the new root's, which would lead back to this one
  if [ -f "$path" ]; then mkdir -p "$root$(dirname "$path")"; cp -L --remove-destination "$path" "$root$path"; fi
done
# certificates that this machine trusts: those of the new root are made anew with its packages
cp -L /etc/ssl/certs/ca-certificates.crt "$root/opt/certificates.crt"
mount --bind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/dev/shm"
mount -t proc proc "$root/proc"
wheels=${PIP_FIND_LINKS:-} # a folder of wheels that pip of this machine looks into
if [ -d "$wheels" ]; then mkdir -p "$root$wheels"; mount --bind "$wheels" "$root$wheels"; fi
inside() { chroot "$root" /usr/bin/env -i PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin "${passed_on[@]}" "$@"; }
passed_on=(PIP_NO_CACHE_DIR=1 RAY_USAGE_STATS_ENABLED=0 PYTHONUNBUFFERED=1)
while IFS= read -r line; do passed_on+=("$line"); done < <(env | grep -iE '^(PIP_|https?_proxy=|no_proxy=)' | grep -v '^PIP_CERT=' || true)
if [ -n "${CPU_WHEELS:-}" ]; then passed_on+=("CPU_WHEELS=$CPU_WHEELS"); fi # an index of torch's CPU wheels that is reached from here
passed_on+=(PIP_CERT=/opt/certificates.crt SSL_CERT_FILE=/opt/certificates.crt REQUESTS_CA_BUNDLE=/opt/certificates.crt)
inside python3.11 -m venv /usr/local

# each COPY and RUN of the Dockerfile, as it stands there
while read -r instruction rest; do
  case "$instruction" in
    COPY)
      read -r -a words <<<"$rest"
      target=$root${words[-1]}
      case "${words[-1]}" in */) mkdir -p "$target" ;; *) mkdir -p "$(dirname "$target")" ;; esac
      for source in "${words[@]::${#words[@]}-1}"; do cp -r "$project/$source" "$target"; done
      ;;
    RUN)
      echo "== RUN $rest"
      inside TORCH="${TORCH:-cpu}" bash -c "$rest"
      ;;
  esac
done <"$here/Dockerfile"

echo "== as user 1000, with a root that cannot be written: versions, then a training on two workers"
mount -o remount,ro,bind "$root"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t tmpfs -o uid=1000,gid=1000,mode=700 tmpfs "$root/home/ray"
as_user() { inside HOME=/home/ray setpriv --reuid 1000 --regid 1000 --clear-groups bash -c "cd /app && /opt/entrypoint.sh $1"; }
as_user "python -c 'import ray, torch; print(ray.__version__, torch.__version__)'" | tee "$root/tmp/versions"
grep -q '^2.60.0 2.13.0' "$root/tmp/versions"
as_user "train -c jobs/digits.yaml --scale.workers 2 --stop.after '2 epochs'"
if chroot "$root" setpriv --reuid 1000 --regid 1000 --clear-groups touch /opt/scaleray/x 2>/dev/null; then
  echo "failed: the user can change what is installed" >&2
  exit 1
fi
echo "all is well"
