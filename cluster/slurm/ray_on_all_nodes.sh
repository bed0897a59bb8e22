# shellcheck shell=bash
# One Ray over the nodes of a job, and a command on the first of them. Sourced by the batch scripts.
#
#   run_on_all_nodes COMMAND ...   its exit code; asked to leave (SIGUSR1), the command gets SIGTERM, and `asked_to_leave` is 1

# shellcheck disable=SC2034 # the batch scripts read it
asked_to_leave=0
interrupted=0

leave() {
  # shellcheck disable=SC2034
  asked_to_leave=1
  interrupted=1
  : >"$state/leave" # for a command that has not begun
  # the command alone: Ray must live until the last checkpoint is written
  if [ -s "$state/pid" ]; then kill -TERM "$(cat "$state/pid")" || true; fi
}

address_of_this_node() {
  local found
  if [ -n "$INTERFACE" ]; then
    found=$(ip -4 -o address show dev "$INTERFACE" | awk '{sub("/.*", "", $4); print $4; exit}')
  else
    # a name may lead to 127.0.1.1 on its own machine, where no other node finds it
    found=$(getent ahostsv4 "${SLURMD_NODENAME:-$(hostname)}" | awk '$1 !~ /^127\./ {print $1; exit}')
    [ -n "$found" ] || found=$(hostname -I | awk '{print $1}')
  fi
  [ -n "$found" ] || { echo "no address for Ray: set INTERFACE in settings.sh (ip -4 address shows them)" >&2; return 1; }
  echo "$found"
}

run_on_all_nodes() {
  local address port code step
  state="$SCALERAY_CHECKPOINT__STORAGE_PATH/.slurm/${SLURM_CLUSTER_NAME:-slurm}-$SLURM_JOB_ID"
  trap 'rm -rf "$state"' EXIT # the token goes with the job: also when it is cancelled, or its time is over
  mkdir -p "$(dirname "$state")"
  rm -rf "$state"
  (umask 077 && mkdir "$state" && head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \n' >"$state/token")
  trap leave USR1 # before anything can send it
  export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$state/token"
  # does every node see it?
  # ... and end what an earlier job of yours left on these nodes: where Slurm has no cgroups, it misses Ray's daemons
  # shellcheck disable=SC2016 # for the shell on the nodes
  if ! srun --ntasks-per-node=1 bash -c 'ray stop --force >/dev/null 2>&1; test -s "$0"' "$state/token"; then
    echo "$SCALERAY_CHECKPOINT__STORAGE_PATH is not seen by every node: name a shared folder in settings.sh" >&2
    return 1
  fi
  if [ "$asked_to_leave" = 1 ]; then return 1; fi
  address=$(address_of_this_node)
  port=$((20000 + SLURM_JOB_ID % 10000)) # two users' jobs on one node: below the ports that programs are given
  if [ -n "$INTERFACE" ]; then export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE; fi
  export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300 # Ray's own 30 s are too few for a shared file system
  export RAY_USAGE_STATS_ENABLED=0
  export RAY_ADDRESS="$address:$port"
  export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=10 # of 30: Slurm kills what takes longer than KillWait
  # Ray on every node; where this one is the head, the command too. Its exit code is read from a file, as symmetric-run
  # ends with 0 where Ray does not start. The other nodes would take a minute to notice that the head is gone: --wait
  # shellcheck disable=SC2016 # for the shell on the head
  srun --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=10 \
    ray symmetric-run --address "$RAY_ADDRESS" --min-nodes "$SLURM_JOB_NUM_NODES" \
    --num-cpus="${SLURM_CPUS_PER_TASK:-1}" --disable-usage-stats -- \
    bash -c '"$@" & echo $! >"$0/pid"; [ ! -e "$0/leave" ] || kill -TERM $!; wait $! && code=0 || code=$?; echo $code >"$0/code"; exit $code' "$state" "$@" &
  step=$!
  interrupted=1
  while [ "$interrupted" = 1 ]; do # a signal ends `wait`, not what is waited for
    interrupted=0
    wait "$step" && code=0 || code=$?
  done
  trap '' USR1 # what follows is short
  if [ -s "$state/code" ]; then
    code=$(cat "$state/code")
  elif [ ! -s "$state/pid" ]; then
    echo "Ray did not start on $address:$port; its logs are in /tmp/ray of that node" >&2
    code=1
  else # ended from outside before it was done
    [ "$code" != 0 ] || code=1
    if scontrol show job "$SLURM_JOB_ID" --oneliner | grep -q ' PreemptTime=[0-9]'; then
      echo "preempted: Slurm queues the job again when its time of grace is over, and it goes on from its last checkpoint"
      rm -rf "$state"
      sleep "${PREEMPTED_WAIT_S:-3600}" # a script that ends before would be a job that failed
    fi
  fi
  rm -rf "$state"
  return "$code"
}
