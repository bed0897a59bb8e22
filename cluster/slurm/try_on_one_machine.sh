#!/bin/bash
# Runs the batch scripts beside this file on a Slurm of two nodes on this machine: each node has a network, a process
# table, a host name and a /tmp of its own. Root, and Debian's slurm-wlm, munge and iproute2, are needed.
#
#   cluster/slurm/try_on_one_machine.sh        a quarter of an hour on 2 cores; ends with `all is well`
#
# It starts and ends only processes of its own; nothing is left behind.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
project=$(cd "$here/../.." && pwd)
python=$(command -v python)
export VIRTUAL_ENV=${VIRTUAL_ENV:-$(dirname "$(dirname "$python")")}
export PYTHONPATH=$project${PYTHONPATH:+:$PYTHONPATH}

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

need slurmctld slurmd sbatch scontrol munged ip nsenter unshare ray
seen_by_all "$project" "$VIRTUAL_ENV"

work=$(mktemp -d /var/tmp/scaleray-slurm.XXXXXX)
name=sr$$
network=10.213.$(($$ % 250))
started=()

clean_up() {
  set +e
  if [ "${#started[@]}" != 0 ]; then kill "${started[@]}" 2>/dev/null; fi
  sleep 1
  if [ "${#started[@]}" != 0 ]; then kill -9 "${started[@]}" 2>/dev/null; fi
  remove_network "$name" n1 n2
  wait 2>/dev/null
  if [ -z "${KEEP:-}" ]; then rm -rf "$work"; else echo "kept: $work"; fi
}
trap clean_up EXIT
trap 'exit 130' INT TERM

make_network "$name" "$network"
add_to_network "$name" "$network" n1 11
add_to_network "$name" "$network" n2 12
printf '127.0.0.1 localhost\n%s.11 n1\n%s.12 n2\n' "$network" "$network" >"$work/hosts"

mkdir -p "$work/state" "$work/munge"
chmod 711 "$work" "$work/munge"
(umask 077 && head -c 128 /dev/urandom >"$work/munge/key")
munged --foreground --force --key-file="$work/munge/key" --socket="$work/munge/socket" --pid-file="$work/munge/pid" \
  --log-file="$work/munge/log" --seed-file="$work/munge/seed" >"$work/munge/out" 2>&1 &
started+=("$!")
cat >"$work/slurm.conf" <<END
ClusterName=one-machine
SlurmctldHost=$(hostname -s)($network.1)
SlurmctldPort=16817
SlurmdPort=16818
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$work/munge/socket
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/%n/spool
SlurmctldPidFile=$work/controller.pid
SlurmdPidFile=$work/%n/slurmd.pid
SlurmctldLogFile=$work/controller.log
SlurmdLogFile=$work/%n/slurmd.log
SlurmctldDebug=info
SlurmdDebug=info
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
MessageTimeout=30
GresTypes=gpu
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeAddr=$network.11 CPUs=192 RealMemory=4000 Gres=gpu:h100:8 State=UNKNOWN
NodeName=n2 NodeAddr=$network.12 CPUs=192 RealMemory=4000 Gres=gpu:h100:8 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=15
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
END
# GPUs in name alone: Slurm counts devices, and these are /dev/null
for number in $(seq 0 7); do mknod "$work/gpu$number" c 1 3; done
echo "Name=gpu Type=h100 File=$work/gpu[0-7]" >"$work/gres.conf"
export SLURM_CONF=$work/slurm.conf

slurmctld -D -i >"$work/controller.out" 2>&1 &
started+=("$!")
start_node() {
  mkdir -p "$work/$1/spool" "$work/$1/tmp"
  # shellcheck disable=SC2016 # for the shell inside
  run_machine "$name" "$1" bash -c '
    hostname "$1"
    mount --bind "$2/hosts" /etc/hosts
    mount --bind "$2/$1/tmp" /tmp
    mount -t tmpfs -o size=8g tmpfs /dev/shm
    slurmd -D -N "$1" -f "$2/slurm.conf" & # not by exec: the first process of a table must reap the others
    wait' node "$1" "$work" >"$work/$1/out" 2>&1 &
  started+=("$!")
}
start_node n1
start_node n2

num_idle() { sinfo --noheader --Node --partition=low --format=%t 2>/dev/null | grep -c '^idle$'; }
for _ in $(seq 60); do
  if [ "$(num_idle)" = 2 ]; then break; fi
  sleep 1
done
if [ "$(num_idle)" != 2 ]; then
  scontrol show node n1
  tail -n 20 "$work/controller.log" "$work"/n?/slurmd.log "$work"/n?/out
  echo "failed: the two nodes did not come up" >&2
  exit 1
fi

# the scripts as they are, but for the CPUs that this machine does not have
cd "$project"
export SCALERAY_CHECKPOINT__STORAGE_PATH=$work/runs SCALERAY_TRACKING__URI=sqlite:///$work/mlflow.db
export SLURM_SCRIPTS=$here MLFLOW_ENABLE_ASYNC_LOGGING=false OMP_NUM_THREADS=1
export HOME=$work/home
mkdir -p "$work/runs" "$HOME"
small=(--parsable --cpus-per-task=2 --mem=1000 --output="$work/%j.out" --no-requeue)
training=(-c jobs/digits.yaml --scale.workers 2 --scale.cpus-per-worker 2 --data.reserved-cpus 0 --scale.gpus-per-worker 0)
training+=(--checkpoint.every "40 steps" --tracking.interval-s 1)

state_of() { scontrol show job "$1" --oneliner | grep -o 'JobState=[A-Z]*' | cut -d= -f2; }
code_of() { scontrol show job "$1" --oneliner | grep -o ' ExitCode=[0-9]*' | cut -d= -f2; }
show() { sed "s/^/    /" "$work/$1.out" 2>/dev/null | tail -n 40; }
until_state() { # job, seconds, state ...
  local job=$1 end=$((SECONDS + $2)) now
  shift 2
  while [ "$SECONDS" -lt "$end" ]; do
    now=$(state_of "$job")
    for wanted in "$@"; do [ "$now" = "$wanted" ] && return 0; done
    sleep 1
  done
  echo "failed: job $job is $now, and should be $*" >&2
  show "$job"
  return 1
}
until_line() { # job, seconds, pattern
  local end=$((SECONDS + $2))
  while [ "$SECONDS" -lt "$end" ]; do
    grep -Eq "$3" "$work/$1.out" 2>/dev/null && return 0
    sleep 0.5
  done
  echo "failed: job $1 did not say: $3" >&2
  show "$1"
  return 1
}
passed() { echo "ok   $1"; }

records() { # what the records of runs say: status, after which steps they went on, and where their workers were
  "$python" - "$1" <<'END'
import json, pathlib, sys
for path in sorted(pathlib.Path(sys.argv[1]).rglob("record.json")):
    record = json.loads(path.read_text())
    print(record["status"], "steps", record["steps"], "resumed after", record["resumed_after"], "workers", record["workers"])
END
}
ended_with() { # job, seconds, exit code
  until_state "$1" "$2" COMPLETED FAILED
  [ "$(code_of "$1")" = "$3" ] && return 0
  echo "failed: job $1 ended with $(code_of "$1"), and should with $3" >&2
  show "$1"
  return 1
}

now() { # do not wait the two minutes that Slurm leaves a job that is queued again
  until_state "$1" 90 PENDING RUNNING
  for _ in $(seq 60); do # what ran before must be gone from both nodes
    if [ "$(num_idle)" = 2 ]; then break; fi
    sleep 1
  done
  sleep 3
  scontrol update "jobid=$1" starttime=now 2>/dev/null || true
}

try_training() {
  local job
  job=$(sbatch "${small[@]}" "$here/train.sbatch" "${training[@]}" --stop.after "2 epochs")
  ended_with "$job" 240 0
  records "$work/runs" | grep -q '^FINISHED .* workers 2$'
  grep -q 'On worker node' "$work/$job.out"
  # where its workers were, by the run's own account
  [ "$(grep -Eoh "$network\.1[12]" "$work"/runs/digits-*/environment.yaml | sort -u | wc -l)" = 2 ]
  grep -q 'grace_s: 240' "$work"/runs/digits-*/config.yaml # time to save
  passed "a training on two workers of two nodes ended with 0"
}

try_exit_code() {
  local job
  printf '%s\n' '#!/bin/bash' 'set -euo pipefail' "source $here/settings.sh" "source $here/ray_on_all_nodes.sh" \
    "run_on_all_nodes bash -c 'exit 7'" >"$work/seven.sbatch"
  job=$(sbatch "${small[@]}" --nodes=2 --ntasks-per-node=1 "$work/seven.sbatch")
  ended_with "$job" 180 7
  passed "exit code 7 of the command is the job's"
}

no_token_is_left() {
  local left
  left=$(ls -A "$work/runs/.slurm")
  [ -z "$left" ] || { echo "failed: the token stays in $left" >&2; return 1; }
}

try_end_of_time() { # Slurm gives its signal up to a minute early
  local job begun=$SECONDS
  job=$(sbatch "${small[@]}" --requeue --time=30 --signal=B:USR1@60 "$here/train.sbatch" "${training[@]}" --stop.after "1000 epochs")
  until_line "$job" 240 '^step +[0-9]+'
  scontrol update "jobid=$job" "timelimit=$(((SECONDS - begun) / 60 + 3))" # two to three minutes from now
  until_line "$job" 240 'queued again, and on from'
  until_state "$job" 90 PENDING RUNNING
  no_token_is_left
  scontrol update "jobid=$job" timelimit=30
  now "$job"
  until_line "$job" 240 'continuing after step [0-9]+'
  scancel "$job"
  until_state "$job" 90 CANCELLED
  passed "a job whose time is over saves, is queued again and goes on"
}

try_leave_and_preemption() {
  local job other
  job=$(sbatch "${small[@]}" --requeue "$here/train.sbatch" "${training[@]}" --stop.after "20 epochs")
  until_line "$job" 180 '^step +[0-9]+'
  scancel --signal=USR1 --batch "$job" # as Slurm does before the time is up
  until_line "$job" 90 'queued again, and on from'
  now "$job"
  until_line "$job" 240 'continuing after step [0-9]+'
  passed "asked to leave, a training saves, is queued again and goes on"
  other=$(sbatch --parsable --partition=high --nodes=2 --exclusive --output="$work/%j.out" --wrap 'sleep 1')
  until_state "$other" 120 COMPLETED
  until_line "$job" 60 'DUE TO PREEMPTION'
  now "$job"
  ended_with "$job" 400 0
  records "$work/runs"
  records "$work/runs" | grep -q '^FINISHED steps 460 resumed after \[[0-9]'
  passed "a job of more priority takes the nodes; the training goes on after it, and ends with 0 after its last step"
}

try_cancel() {
  local job left
  job=$(sbatch "${small[@]}" "$here/train.sbatch" "${training[@]}" --stop.after "1000 epochs" --seed 7)
  until_line "$job" 180 'step +[0-9]+'
  scancel "$job"
  until_state "$job" 90 CANCELLED
  for _ in $(seq 60); do
    left=$(for node in n1 n2; do ip netns pids "$name-$node"; done | xargs -r -n1 ps -o comm= -p 2>/dev/null | grep -Ec 'raylet|gcs_server' || true)
    [ "$left" = 0 ] && break
    sleep 1
  done
  [ "$left" = 0 ] || { echo "failed: $left processes of Ray are left" >&2; return 1; }
  no_token_is_left
  passed "a job that is cancelled leaves no process of Ray on its nodes, and no token"
}

try_without_shared_folder() {
  local job
  job=$(SCALERAY_CHECKPOINT__STORAGE_PATH=/tmp/runs sbatch "${small[@]}" "$here/train.sbatch" "${training[@]}")
  ended_with "$job" 60 1
  grep -q '/tmp/runs is not seen by every node' "$work/$job.out"
  passed "a folder that is not shared is one message"
}

try_sweep() {
  local job
  printf '%s\n' '--optimizer.learning-rate 1e-3 --stop.after "20 epochs"' '--optimizer.learning-rate 3e-3 --stop.after "2 epochs"' >"$work/sweep.txt"
  job=$(SWEEP=$work/sweep.txt sbatch --parsable --cpus-per-task=2 --mem=1000 --nodes=1 --array=1-2 \
    --output="$work/%A_%a.out" "$here/sweep.sbatch" "${training[@]:0:2}" --scale.gpus-per-worker 0 --checkpoint.every "40 steps")
  until_line "${job}_1" 180 '^step +[0-9]+'
  scancel --signal=USR1 --batch "${job}_1"
  until_line "${job}_1" 90 'queued again, and on from'
  scontrol update "jobid=${job}_1" starttime=now 2>/dev/null || true
  until_line "${job}_1" 400 'continuing after step [0-9]+'
  ended_with "${job}_1" 240 0
  ended_with "${job}_2" 240 0
  [ "$(records "$work/runs/sweep-$job-1" | wc -l)$(records "$work/runs/sweep-$job-2" | wc -l)" = 11 ]
  records "$work/runs/sweep-$job-1" | grep -q '^FINISHED steps 460 resumed after \[[0-9]'
  passed "an array trains each line of a file, with a folder each; a task that was asked to leave goes on"
}

try_submit() {
  local sizes="options: [--cpus-per-task=2, --mem=1000]" said
  mkdir -p "$HOME/.config/scaleray" "$work/shared" "$work/project/jobs" "/tmp/$name"
  cp jobs/digits.py jobs/digits.yaml "$work/project/jobs"
  printf '%s\n' "here: {kind: slurm, folder: $work/shared, environment: $VIRTUAL_ENV, $sizes}" \
    "apart: {kind: slurm, folder: /tmp/$name, $sizes}" >"$HOME/.config/scaleray/clusters.yaml"
  unset SLURM_SCRIPTS # the scripts travel
  scaleray() { (cd "$work/project" && "$python" -m scaleray "$@"); }
  KEY_OF_MINE=hunter2 scaleray submit -c jobs/digits.yaml --to here --wait --name first --secret-env KEY_OF_MINE \
    "${training[@]:2}" --stop.after "2 epochs" >"$work/first.log" 2>&1 || { tail -n 40 "$work/first.log"; return 1; }
  grep -q 'job first: SUCCEEDED' "$work/first.log" && grep -q '^done: 46 steps' "$work/first.log"
  if grep -rq hunter2 "$work/shared" "$work/first.log" || scontrol show job | grep -q hunter2; then
    echo "failed: a secret is written down" >&2
    return 1
  fi
  passed "scaleray submit --wait: versions compared, code in a folder of its own, the log followed to exit code 0"
  scaleray submit -c jobs/digits.yaml --to here --name second "${training[@]:2}" --stop.after "1000 epochs" >/dev/null
  for _ in $(seq 180); do
    if grep -Eq '^step +[0-9]+' "$work/shared/second.out" 2>/dev/null; then break; fi
    sleep 1
  done
  scaleray jobs stop second --to here
  scaleray jobs logs second --to here --follow >"$work/second.log" 2>&1 || true
  grep -q '^stopped: what was trained is saved' "$work/second.log" || { tail -n 20 "$work/second.log"; return 1; }
  for _ in $(seq 60); do # its nodes may still be at its end
    said=$(scaleray jobs list --to here --json)
    case "$said" in *'"status": "STOPPED"'*) break ;; esac
    sleep 1
  done
  case "$said" in *'"status": "STOPPED"'*) ;; *) echo "failed: it is not stopped: $said" >&2; return 1 ;; esac
  passed "scaleray jobs stop: saved, ended, not queued again"
  if scaleray submit -c jobs/digits.yaml --to apart --wait --name third "${training[@]:2}" >"$work/third.log" 2>&1; then
    echo "failed: a folder that is not shared did not fail the job" >&2
    return 1
  fi
  said=$(tail -n 1 "$work/third.log")
  rm -rf "/tmp/$name"
  case "$said" in *"name a folder that all nodes see"*) ;; *) echo "failed: it said: $said" >&2; return 1 ;; esac
  passed "scaleray submit into a folder that is not shared is one message"
}

for try in ${TRIES:-try_training try_exit_code try_without_shared_folder try_end_of_time try_leave_and_preemption try_cancel try_sweep try_submit}; do
  "$try"
done
echo "all is well"
