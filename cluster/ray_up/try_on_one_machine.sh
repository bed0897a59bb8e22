#!/bin/bash
# `ray up` of on_premise.yaml for real: two machines of one's own making on this one, each with a network, a process table, a
# home, a /tmp, a user and an ssh server of its own, which only a new key opens. Root and openssh-server are needed.
#
#   cluster/ray_up/try_on_one_machine.sh        about 3 minutes on 2 cores; ends with `all is well`
#
# It starts and ends only processes of its own; nothing is left behind.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
project=$(cd "$here/../.." && pwd)
environment=$(dirname "$(dirname "$(command -v python)")")
# machines of one's own making: each has a network address, a process table, mounts and a host name of its own
need() { # programs; exit code 75 says that this cannot be tried here
  local program
  for program in "$@"; do
    command -v "$program" >/dev/null || { echo "skipped: $program is not installed"; exit 75; }
  done
  [ "$(id -u)" = 0 ] || { echo "skipped: network namespaces need root"; exit 75; }
}

seen_by_all() { # paths that each machine must see
  local path
  for path in "$@"; do
    case "$(realpath "$path")/" in
      /tmp/*) echo "skipped: $path lies in /tmp, and each machine has a /tmp of its own: take it from another folder"; exit 75 ;;
    esac
  done
}

make_network() { # name of at most 10 letters, first three numbers of its addresses
  ip link add "$1" type bridge 2>/dev/null || { echo "skipped: no network can be made here"; exit 75; }
  ip address add "$2.1/24" dev "$1"
  ip link set "$1" up
}

add_to_network() { # its name, its addresses, machine, last number of the machine's address
  ip netns add "$1-$3"
  ip link add "$1$3" type veth peer name eth0 netns "$1-$3"
  ip link set "$1$3" master "$1" up
  ip -n "$1-$3" address add "$2.$4/24" dev eth0
  ip -n "$1-$3" link set eth0 up
  ip -n "$1-$3" link set lo up
  ip -n "$1-$3" route add default via "$2.1" # by which Ray finds its own address
}

run_machine() { # network, machine, command: with a process table and mounts of its own
  local network=$1 machine=$2
  shift 2
  nsenter --net="/run/netns/$network-$machine" unshare --pid --fork --kill-child --mount-proc --uts "$@"
}

remove_network() { # name, machines; what runs there ends
  local network=$1 machine process
  shift
  for machine in "$@"; do
    for process in $(ip netns pids "$network-$machine" 2>/dev/null); do kill -9 "$process" 2>/dev/null; done
    ip netns delete "$network-$machine" 2>/dev/null
  done
  ip link delete "$network" 2>/dev/null
}

need ip nsenter unshare ssh ssh-keygen rsync python ray
seen_by_all "$project" "$environment"
user=trainer number=48123
places=("$project" "$environment" "$(python -c 'import sys; print(sys.base_prefix)')") # what the user needs

closed_above() { # the topmost folder above a path that only its owner may enter; none: all may
  local at='' part parts
  IFS=/ read -r -a parts <<<"${1#/}"
  for part in "${parts[@]}"; do
    at+=/$part
    case $(stat -Lc %A "$at") in *x | *t) ;; *) echo "$at" && return ;; esac
  done
}
open_places() { # for a machine alone: places below such folders, and nothing beside them
  local place closed
  mount -t tmpfs -o mode=755 tmpfs /mnt
  for place in "$@"; do
    if [ -n "$(closed_above "$place")" ]; then mkdir -p "/mnt$place" && mount --bind "$place" "/mnt$place"; fi
  done
  for place in "$@"; do
    closed=$(closed_above "$place")
    if [ -n "$closed" ]; then mount --rbind "/mnt$closed" "$closed"; fi
  done
}
export -f closed_above open_places
sshd=$(command -v sshd || echo /usr/sbin/sshd)
[ -x "$sshd" ] || { echo "skipped: sshd is not installed"; exit 75; }

work=$(mktemp -d /var/tmp/scaleray-up.XXXXXX)
name=su$$
network=10.214.$(($$ % 250))
started=()
clean_up() {
  set +e
  remove_network "$name" n1 n2
  if [ "${#started[@]}" != 0 ]; then kill -9 "${started[@]}" 2>/dev/null; fi
  rm -f "/tmp/ray/cluster-$name".{lock,state} # what `ray up` remembers of a list of machines
  wait 2>/dev/null
  if [ -z "${KEEP:-}" ]; then rm -rf "$work"; else echo "kept: $work"; fi
}
trap clean_up EXIT
trap 'exit 130' INT TERM

make_network "$name" "$network"
mkdir -p "$work/home/.ssh" "$work/home/.ray" "$work/shared" /run/sshd
chmod 711 "$work"
chown "$number:$number" "$work/shared"
ssh-keygen -q -t ed25519 -N '' -f "$work/key"
ssh-keygen -q -t ed25519 -N '' -f "$work/host_key"
start_machine() { # name, last number of its address
  add_to_network "$name" "$network" "$1" "$2"
  mkdir -p "$work/$1/home/.ssh" "$work/$1/tmp"
  cp "$work/key.pub" "$work/$1/home/.ssh/authorized_keys"
  chmod -R go= "$work/$1/home/.ssh"
  ln -s "$environment" "$work/$1/home/scaleray"
  { cat /etc/passwd; echo "$user:*:$number:$number::$work/$1/home:/bin/bash"; } >"$work/$1/passwd"
  printf 'export PYTHONPATH=%s OMP_NUM_THREADS=1\n' "$project" >"$work/$1/home/.bashrc"
  cp "$work/$1/home/.bashrc" "$work/$1/home/.profile"
  chown -Rh "$number:$number" "$work/$1/home"
  chmod 1777 "$work/$1/tmp"
  # shellcheck disable=SC2016 # for the shell inside
  run_machine "$name" "$1" bash -c '
    set -e
    hostname "$1"
    open_places "${@:5}"
    mount --bind "$2/$1/passwd" /etc/passwd
    mount --bind "$2/$1/tmp" /tmp
    mount -t tmpfs -o size=8g tmpfs /dev/shm
    "$3" -D -e -f /dev/null -h "$2/host_key" -o ListenAddress="$4" -o PasswordAuthentication=no -o UsePAM=no \
      -o PermitRootLogin=no -o PidFile=none &
    wait' machine "$1" "$work" "$sshd" "$network.$2" "${places[@]}" >"$work/$1/out" 2>&1 &
  started+=("$!")
}
start_machine n1 11
start_machine n2 12

# who runs `ray up` has a home of its own too, with a token
export HOME=$work/home RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 PYTHONPATH=$project
ray get-auth-token --generate >/dev/null 2>&1
sed -e "s/10\.0\.0\.1\$/$network.11/" -e "s/worker_ips: .*/worker_ips: [$network.12]/" -e "s/ssh_user: .*/ssh_user: $user/" \
  -e "s#ssh_private_key: .*#ssh_private_key: $work/key#" -e "s/^cluster_name: .*/cluster_name: $name/" \
  -e 's/--disable-usage-stats/--disable-usage-stats --num-cpus=3/' "$here/on_premise.yaml" >"$work/up.yaml"
on_head() { ssh -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR -i "$work/key" "$user@$network.11" "$1"; }
for _ in $(seq 50); do
  on_head true 2>/dev/null && break
  sleep 0.2
done
[ "$(on_head 'id -u')" = "$number" ] || { echo "failed: ssh does not lead to the machines' own user" >&2; cat "$work/n1/out"; exit 1; }
ray up --yes --no-config-cache "$work/up.yaml" >"$work/up.log" 2>&1 || { tail -n 40 "$work/up.log" "$work/n1/out"; exit 1; }
echo "ok   ray up"

nodes() { on_head 'RAY_AUTH_MODE=token ~/scaleray/bin/python -c "import ray; ray.init(address=\"auto\", logging_level=\"ERROR\"); print(sum(n[\"Alive\"] for n in ray.nodes()))"' 2>/dev/null | tail -n 1; }
for _ in $(seq 30); do
  [ "$(nodes)" = 2 ] && break
  sleep 3
done
[ "$(nodes)" = 2 ] || { echo "failed: the second machine did not come" >&2; tail -n 30 "$work"/n1/tmp/ray/session_2*/logs/monitor.log; exit 1; }
echo "ok   two machines, the second one started by the first over ssh"

[ "$(stat -c %a "$work/n1/home/.ray/auth_token")$(stat -c %a "$work/n2/home/.ray/auth_token")" = 600600 ]
code=$(on_head "curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:8265/api/jobs/" || true)
[ "$code" = 401 ] || { echo "failed: without a token the dashboard says $code, and should 401" >&2; exit 1; }
if (exec 3<>"/dev/tcp/$network.11/8265") 2>/dev/null; then echo "failed: the dashboard is reached from another machine" >&2; exit 1; fi
echo "ok   the token's file is for its owner, and the dashboard lets nobody in without it"

on_head "RAY_AUTH_MODE=token ~/scaleray/bin/ray job submit --address http://127.0.0.1:8265 -- \
  env --chdir=$project GLOO_SOCKET_IFNAME=eth0 ~/scaleray/bin/python -m scaleray train -c jobs/digits.yaml \
  --scale.workers 2 --scale.cpus-per-worker 2 --scale.gpus-per-worker 0 --stop.after '2 epochs' --tracking.uri sqlite:///$work/shared/mlflow.db --checkpoint.storage-path $work/shared/runs --checkpoint.save-final false" \
  >"$work/train.log" 2>&1 || { tail -n 40 "$work/train.log"; exit 1; }
grep -q "accuracy" "$work/train.log"
grep -q 'grace_s: 90' "$work"/shared/runs/digits-*/config.yaml # time to save, as the head was told
echo "ok   a training on both, as a job of Ray"

ray down --yes "$work/up.yaml" >"$work/down.log" 2>&1 || { tail -n 40 "$work/down.log"; exit 1; }
for _ in $(seq 120); do # `ray down` stops the head; the others notice after a minute
  left=$(for node in n1 n2; do ip netns pids "$name-$node"; done | xargs -r -n1 ps -o comm= -p 2>/dev/null | grep -Ec 'raylet|gcs_server' || true)
  [ "$left" = 0 ] && break
  sleep 1
done
[ "$left" = 0 ] || { echo "failed: $left processes of Ray are left" >&2; exit 1; }
echo "ok   ray down"
echo "all is well"
