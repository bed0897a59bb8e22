# shellcheck shell=bash
# What differs from one site to another. Sourced by the batch scripts, on the first node.

# the environment with scaleray; one that is activated when you submit goes along by itself
if [ -z "${VIRTUAL_ENV:-}" ]; then
  # shellcheck disable=SC1091 # on the cluster
  source "$SLURM_SUBMIT_DIR/.venv/bin/activate"
fi

# a folder that every node sees: runs, checkpoints, and the token of each job
export SCALERAY_CHECKPOINT__STORAGE_PATH=${SCALERAY_CHECKPOINT__STORAGE_PATH:-$SLURM_SUBMIT_DIR/runs}

# seconds that a training which is asked to leave may take to save: less than `--signal` in the batch scripts gives
export SCALERAY_CHECKPOINT__GRACE_S=${SCALERAY_CHECKPOINT__GRACE_S:-240}

# the interface of the fast network, such as ib0; empty: the one that the node's name leads to
export INTERFACE=${INTERFACE:-}
