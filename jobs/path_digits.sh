#!/bin/bash
# Digits from a baseline on one worker to a model that MLflow serves, along `scaleray path`.
# FOLDER: where everything is kept; RUNS: trainings of each side; below 5 the policy's gates would be inconclusive.
# Started again, it goes on where it was.
set -euo pipefail
folder=${FOLDER:-$HOME/scaleray/path-of-digits} runs=${RUNS:-5} python=${PYTHON:-python}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.." # where jobs/digits.py is found
path=$folder/path-digits uri=sqlite:///$folder/mlflow.db
name=path$$ server=

scaleray() { "$python" -m scaleray "$@"; }
stage() { echo "== $1 at ${SECONDS} s, load $(cut -d' ' -f1 /proc/loadavg 2> /dev/null || echo unknown)"; }
leave() {
    if [ -n "$server" ]; then kill -- "-$server" 2> /dev/null || true; fi
    scaleray cluster down "$name" > /dev/null
}
along() { scaleray path next --name "$path" --until "$1"; }

stage "a Ray of its own"
trap leave EXIT
scaleray cluster up "$name" --cpus 4
eval "$(scaleray cluster status "$name" --export)"

if [ ! -e "$path/path.json" ]; then
    scaleray path start -c "jobs/digits.yaml" --target "test/accuracy >= 0.95" --workers 2 --runs "$runs" --name digits \
        --policy "jobs/path_digits.policy.yaml" --cluster h100:8x1 --kind kubernetes --local --checkpoint.storage-path "$folder" \
        --tracking.uri "$uri" --stop.after "8 epochs" --evaluation.every "256 samples"
fi
stage baseline
along baseline
stage distribute
along distribute
stage optimise
rc=0
along optimise || rc=$?
if [ "$rc" = 3 ]; then # a person decides: here to go on with this job
    scaleray path skip optimise/decide --reason "the job's own batch is good enough for an example" --name "$path"
elif [ "$rc" != 0 ]; then
    exit "$rc"
fi
stage validate
along validate
stage produce
along produce

stage serve
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
set -m # the server and its workers are a group of their own
PATH="$(dirname "$("$python" -c 'import sys; print(sys.executable)')"):$PATH" MLFLOW_TRACKING_URI=$uri \
    "$python" -m mlflow models serve -m models:/digits@champion --env-manager local --port "$port" > "$folder/serve.log" 2>&1 &
server=$!
set +m
"$python" - "$port" "$server" << 'END'
import json, os, sys, time, urllib.request
from sklearn.datasets import load_digits

images, labels = load_digits(return_X_y=True)
rows = {"inputs": {"image": (images[:8] / 16).reshape(-1, 1, 8, 8).tolist()}}
address = f"http://127.0.0.1:{sys.argv[1]}"
while True:
    try:
        urllib.request.urlopen(f"{address}/ping", timeout=5).close()
        break
    except OSError:
        os.kill(int(sys.argv[2]), 0)  # raises where the server has gone
        time.sleep(0.5)
request = urllib.request.Request(
    f"{address}/invocations", json.dumps(rows).encode(), {"Content-Type": "application/json"}
)
scores = json.loads(urllib.request.urlopen(request, timeout=60).read())["predictions"]
scores = next(iter(scores.values())) if isinstance(scores, dict) else scores
answers = [max(range(10), key=row.__getitem__) for row in scores]
print("asked for", labels[:8].tolist(), "answered", answers)
END
stage "the end; the runbook is $path/runbook.md"
