"""The page docs/cluster_files.md: every file of `cluster/`, and the tests that look at it."""

from __future__ import annotations

import ast
import fnmatch
import functools
from pathlib import Path

from scaleray.clusters.manifests.cluster_spec import ClusterSpec
from scaleray.clusters.manifests.written_files import files

FOLDER = Path(__file__).parents[1] / "tests" / "clusters" / "manifests"
WRITTEN = (
    "as written by the table of versions",
    "test_files.py::test_the_repositorys_files_are_what_is_written_by_default",
)
SHELL = ("shellcheck finds nothing", "test_slurm.py::test_shellcheck_finds_nothing_in_any_script")
SCHEMA = ("schema of its kind", "test_kubernetes.py::test_an_object_keeps_the_schema_of_its_kind")
RULES = ("the operator's rules and ours", "test_kubernetes.py::test_a_ray_cluster_keeps_every_rule")
SLIPS = (
    "slips of the pen, 98 % found in all files together",
    "test_kubernetes.py::test_at_least_19_of_20_slips_of_the_pen_are_found",
)
BUILT = (
    "built by kubectl kustomize",
    "test_kubernetes.py::test_kustomize_builds_a_folder_whose_objects_keep_schemas_and_rules",
)
ON_SLURM = ("**run** on a Slurm of two nodes", "test_slurm.py::test_the_scripts_run_on_a_slurm_of_two_nodes")
SWEPT = ("**run** on a Slurm of two nodes, one a task", "test_slurm.py::test_the_scripts_run_on_a_slurm_of_two_nodes")
OVER_SSH = (
    "**run** over ssh on two machines of one's own making: up, token, training, down",
    "test_ray_up.py::test_ray_up_starts_two_machines_over_ssh_and_ends_them",
)
BY_RAY = (
    "Ray's `prepare_config` and schema",
    "test_ray_up.py::test_ray_itself_takes_the_file_and_refuses_one_without_a_provider",
)
UP_RULES = ("rules of ours", "test_ray_up.py::test_it_keeps_every_rule")
UP_SLIPS = ("misspelt keys, at least 95 % found", "test_ray_up.py::test_misspelt_keys_are_found_by_schema_or_rules")
IN_A_ROOT = (
    "**run** in a clean Debian: every step, then a training as its user with a read-only root",
    "test_image.py::test_the_steps_of_the_image_run_in_a_clean_root",
)
ENTRY = ("**run**", "test_image.py::test_the_entry_point_starts_scaleray_unless_told_otherwise")
HADOLINT = ("hadolint finds nothing", "test_image.py::test_hadolint_finds_nothing")
COPIED = ("what is copied is there, and nothing else", "test_image.py::test_what_is_copied_is_there_and_not_ignored")
SKY = ("schema of a task", "test_skypilot.py::test_the_task_keeps_skypilots_schema")
SKY_PLANTED = ("planted faults, all found", "test_skypilot.py::test_planted_faults_are_found")

ON_NODES = ("**run**", "test_local.py::test_the_script_trains_on_two_nodes_of_this_machine_and_leaves_nothing")
ON_MACHINES = ("**run**", "test_machines.py::test_a_machine_has_a_name_processes_and_temporary_files_of_its_own")

LEVELS: dict[str, tuple[tuple[str, str], ...]] = {
    "local/machines.sh": (SHELL, ON_MACHINES),
    "local/train.sh": (SHELL, ON_NODES),
    "kubernetes/**/kustomization.yaml": (BUILT,),
    "kubernetes/*/ray*.yaml": (SCHEMA, RULES, SLIPS, BUILT),
    "kubernetes/**.yaml": (SCHEMA, SLIPS, BUILT),
    "slurm/sweep.sbatch": (SHELL, SWEPT),
    "slurm/*.sbatch": (SHELL, ON_SLURM),
    "slurm/*.sh": (SHELL, ON_SLURM),
    "ray_up/on_premise.yaml": (BY_RAY, UP_RULES, UP_SLIPS, OVER_SSH),
    "ray_up/*.yaml": (BY_RAY, UP_RULES, UP_SLIPS),
    "ray_up/*.sh": (SHELL, OVER_SSH),
    "image/Dockerfile": (HADOLINT, IN_A_ROOT),
    "image/Dockerfile.dockerignore": (COPIED,),
    "image/entrypoint.sh": (SHELL, ENTRY, IN_A_ROOT),
    "image/*.sh": (SHELL, IN_A_ROOT),
    "skypilot/*.yaml": (SKY, SKY_PLANTED),
}
"""Files -> what is done to them, and by which test; the first pattern that fits counts."""


@functools.cache
def is_slow(test: str) -> bool:
    """Whether a test has the marker of those that are not run with all others."""
    file, _, name = test.partition("::")
    for node in ast.parse((FOLDER / file).read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            marks = [ast.unparse(one) for one in node.decorator_list]
            return any(one == "pytest.mark.slow" or one.startswith("needs(") for one in marks)
    raise LookupError(f"there is no test {test}")


def tests_of(name: str) -> tuple[tuple[str, str], ...]:
    """What looks at a file, in words and by the name of a test."""
    for pattern, levels in LEVELS.items():
        if fnmatch.fnmatch(name, pattern):
            return tuple((f"{words} (slow)" if is_slow(test) else words, test) for words, test in (*levels, WRITTEN))
    raise LookupError(f"nothing tests cluster/{name}: name what does in {Path(__file__).name}")


def tested_files_page(note: str) -> str:
    """The whole page. note: line that says where it comes from."""
    lines = [
        "# How the files of a cluster were tested",
        "",
        note,
        "",
        "Every file is also compared with what the table of versions gives (`scaleray cluster write --check`). What is not said to have been run was not:",
        "there was no Kubernetes, no cloud, no Docker daemon and no GPU. [cluster.md](cluster.md) tells how the files are used.",
        "",
        "| file of `cluster/` | how it was tested |",
        "|---|---|",
    ]
    lines += [
        f"| `{name}` | {'; '.join(words for words, test in tests_of(name) if test != WRITTEN[1])} |"
        for name in files(ClusterSpec())
    ]
    return "\n".join([*lines, ""])
