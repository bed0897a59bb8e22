#!/bin/bash
# Machines of one's own making on this one, for trials of several nodes: each has a network address, a process table, a
# host name, a /tmp and a /dev/shm of its own. Root and iproute2 are needed.
#
#   cluster/local/machines.sh NAME NETWORK NUMBER SHARED
#
# makes so many with the addresses NETWORK.11, NETWORK.12 ..., which see the folder SHARED and whatever is outside of
# /tmp; prints of each its name, its address and its first process, and then `ready`. A machine ends with its first
# process, all of them with this script or with what it reads from. To run something there:
#
#   nsenter --target FIRST_PROCESS --net --pid --mount --uts COMMAND
set -euo pipefail

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

name=$1 network=$2 number=$3 shared=$4
need ip nsenter unshare
mapfile -t machines < <(seq -f n%g "$number")
clean_up() {
  set +e
  remove_network "$name" "${machines[@]}"
  wait 2>/dev/null
}
trap clean_up EXIT
trap 'exit 130' INT TERM

make_network "$name" "$network"
# by which addresses have names: where nobody answers, torch asks for a name ten seconds at each connection
hosts="127.0.0.1 localhost"
last=10
for machine in "${machines[@]}"; do
  last=$((last + 1))
  hosts+=$'\n'"$network.$last $machine"
done
last=10
for machine in "${machines[@]}"; do
  last=$((last + 1))
  add_to_network "$name" "$network" "$machine" "$last"
  # shellcheck disable=SC2016 # for the shell inside, which takes in what its processes leave
  run_machine "$name" "$machine" bash -c '
    set -e
    hostname "$1"
    mount --bind "$2" /mnt
    mount -t tmpfs tmpfs /tmp
    mkdir -p "$2"
    mount --move /mnt "$2"
    mount -t tmpfs -o size=8g tmpfs /dev/shm
    echo "$3" >/tmp/hosts
    mount --bind /tmp/hosts /etc/hosts
    touch "$2/.$1"
    while true; do sleep 3600 & wait; done' machine "$machine" "$shared" "$hosts" </dev/null >/dev/null 2>&1 &
  starter=$!
  until [ -e "$shared/.$machine" ]; do
    kill -0 "$starter" 2>/dev/null || { echo "skipped: no machine can be made here"; exit 75; }
    sleep 0.05
  done
  rm "$shared/.$machine"
  echo "$machine $network.$last $(ps -o pid= --ppid "$(pgrep -P "$starter")" | tr -d ' ')"
done
echo ready
cat >/dev/null
