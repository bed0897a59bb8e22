#!/bin/bash
# From nothing to a training on two nodes of this machine, each a process of its own; afterwards all of it is gone.
# Copy it and change three lines; its arguments are options of `scaleray train`.
set -euo pipefail
nodes=2
cpus=2 # that each node hands out; input tasks want some beside the workers
config=jobs/digits.yaml

name=t$$
scaleray cluster up "$name" --nodes "$nodes" --cpus "$cpus"
trap 'scaleray cluster down "$name"' EXIT
trap 'exit 130' INT TERM
variables=$(scaleray cluster status "$name" --export)
eval "$variables"
scaleray train -c "$config" --scale.workers "$nodes" --scale.placement STRICT_SPREAD "$@"
