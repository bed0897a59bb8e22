#!/bin/bash
# The steps of the image, by name, so that they can be run and tried without one: try_in_a_clean_root.sh does.
#
#   install.sh system                          packages of Debian, and the user that everything runs as
#   install.sh requirements FOLDER cpu|cuda    what pyproject.toml of the folder asks for, in the versions of constraints.txt
#   install.sh scaleray FOLDER                 scaleray itself
set -euo pipefail

PYTHON=${PYTHON:-python}
EXTRAS=${EXTRAS:-train,search,s3}
CPU_WHEELS=${CPU_WHEELS:-https://download.pytorch.org/whl/cpu}

install_system() {
  # gcc and its headers: torch.compile builds kernels. wget: KubeRay asks with it whether Ray is well. rsync and ssh: `ray up`
  export DEBIAN_FRONTEND=noninteractive
  apt-get update
  apt-get install -y --no-install-recommends ca-certificates gcc libc6-dev openssh-client procps rsync tini wget
  rm -rf /var/lib/apt/lists/*
  groupadd --gid 1000 ray
  useradd --uid 1000 --gid 1000 --create-home --shell /bin/bash ray
}

install_requirements() {
  local folder=$1 kind=$2 wheels=()
  case "$kind" in
    cpu) wheels=(--extra-index-url "$CPU_WHEELS") ;; # 0.2 GB in place of 2.7: a local version is newer than the plain one
    cuda) ;;
    *)
      echo "TORCH is $kind, but it is cpu or cuda" >&2
      return 2
      ;;
  esac
  # a package without code has the same requirements, and is replaced by the real one
  mkdir -p /tmp/requirements/scaleray
  cp "$folder"/{pyproject.toml,README.md,LICENSE,constraints.txt} /tmp/requirements
  touch /tmp/requirements/scaleray/__init__.py
  "$PYTHON" -m pip install --constraint "$folder/constraints.txt" "${wheels[@]}" "/tmp/requirements[$EXTRAS]"
  rm -rf /tmp/requirements
}

install_scaleray() {
  "$PYTHON" -m pip install --no-deps --force-reinstall --constraint "$1/constraints.txt" "$1"
  "$PYTHON" -m compileall -q "$("$PYTHON" -c 'import os, scaleray; print(os.path.dirname(scaleray.__file__))')"
  "$PYTHON" -m pip check
}

step=$1
shift
"install_$step" "$@"
