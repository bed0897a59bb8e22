"""Submit to Kubernetes: a RayJob that meets every requirement, created with kubectl or, failing that, in a file."""

import shlex
import tempfile
from pathlib import Path

from scaleray.clusters.submit.clusters import KubernetesCluster
from scaleray.clusters.submit.kubernetes_jobs import KubernetesJobs
from scaleray.clusters.submit.kubernetes_objects import Objects, kubernetes_name, objects_of, refuse_unsafe
from scaleray.clusters.submit.package import pack
from scaleray.clusters.submit.package_versions import Versions
from scaleray.clusters.submit.programs import is_there
from scaleray.clusters.submit.submission import Submission, imported, refuse_differences
from scaleray.common.progress import stage
from scaleray.errors import StorageError, UsageError
from scaleray.records.run_record import Say

REMEDY = "rebuild the image with these versions (cluster/image), or install those of the image here"


def checked_and_started(
    submission: Submission, cluster: KubernetesCluster, *, allow_differences: bool, say: Say
) -> tuple[KubernetesJobs | None, str]:
    """Check manifest, versions and cluster, and create the job; return the cluster's jobs and the job's name. Without
    kubectl, write the job to a file, and return None and the file. Raises UsageError."""
    with tempfile.TemporaryDirectory(prefix="scaleray-submit-") as folder:
        package = Path(folder) / "working_dir.zip"
        with stage("packing the working directory"):
            pack(submission.contents, package)
        objects = objects_of(
            cluster,
            name=kubernetes_name(submission.name),
            command=submission.command,
            package=package.read_bytes(),
            secret_names=list(submission.variables),
            folder=Path.cwd(),
        )
    try:
        _compare(submission, objects, say)
    except UsageError as exc:
        if not allow_differences:
            raise
        say(f"  warning: {exc}")
    if not is_there("kubectl"):
        refuse_unsafe(objects, kuberay=cluster.tested_kuberay)
        return None, str(_written(objects))
    jobs = KubernetesJobs(cluster)
    with stage("querying the cluster"):
        release = jobs.check_room(objects, list(submission.variables))
    if release is None:
        say(f"  KubeRay's release cannot be read; it is assumed to be {cluster.tested_kuberay}")
    refuse_unsafe(objects, kuberay=release or cluster.tested_kuberay)
    with stage("creating the job"):
        jobs.create(objects)
    return jobs, objects.name


def to_apply(cluster: KubernetesCluster, file: str) -> str:
    """Command that applies a written file."""
    context = ["--context", cluster.context] if cluster.context else []
    # create: apply copies its input to an annotation, and a package is too large for one
    return shlex.join(["kubectl", *context, "--namespace", cluster.namespace, "create", "-f", file])


def _compare(submission: Submission, objects: Objects, say: Say) -> None:
    """Compare versions given by the image's name and the manifest; all others are unknown until the job runs."""
    known = Versions(objects.python_version, {"ray": objects.ray_version} if objects.ray_version else {})
    refuse_differences(submission, Versions.here(), known, remedy=REMEDY)
    versions = [f"Python {known.python}"] if known.python else []
    versions += [f"Ray {objects.ray_version}"] if objects.ray_version else []
    needs = ", ".join(sorted(imported(submission) - {"scaleray", "torch", "ray"}))
    by_name = f"{' and '.join(versions) or 'none'} according to manifest and image name"
    say(f"  versions: {by_name}; torch and packages are unknown until the job runs")
    if needs:
        say(f"  the image {', '.join(objects.images)} must have: {needs}")


def _written(objects: Objects) -> Path:
    path = Path.cwd() / f"{objects.name}.yaml"
    try:
        path.write_text(objects.as_yaml())
    except OSError as exc:
        raise StorageError.problem("The manifest", f"{path} cannot be written: {exc.strerror}") from exc
    return path
