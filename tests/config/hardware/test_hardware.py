"""Hardware by the names that people and drivers give it, and figures that cannot be."""

import pytest

from scaleray.config.hardware.catalogue import CATALOGUE, find_gpu
from scaleray.config.hardware.hardware_file import read_hardware_file
from scaleray.config.hardware.hardware_kinds import TRANSPORTS, Cluster
from scaleray.errors import ConfigError, UsageError


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("h100", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("A100 80GB SXM", "a100-80"),
        ("a100", "a100-80"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-32GB", "v100-32"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GB200", "gb200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("Quadro RTX 6000", "quadro-rtx-6000"),
        ("H100 96GB HBM2e (500 W cap, 2.4 TB/s)", "h100-96"),
    ],
)
def test_a_gpu_is_found_by_the_names_that_drivers_and_people_use(typed: str, name: str) -> None:
    assert find_gpu(typed).name == name


def test_an_unknown_gpu_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(UsageError, match="h100") as caught:
        find_gpu("h1000")
    assert "nearest" in str(caught.value)


@pytest.mark.parametrize("link", CATALOGUE.links, ids=lambda link: link.name)
def test_every_link_is_found_by_its_own_name(link) -> None:
    assert CATALOGUE.find_link(link.name) is link


def test_no_two_entries_share_a_name() -> None:
    for entries in (CATALOGUE.gpus, CATALOGUE.links, CATALOGUE.networks):
        names = [known.lower() for entry in entries for known in {entry.name, *getattr(entry, "aliases", ())}]
        # an alias may repeat its own entry's name in capitals
        own = [{known.lower() for known in (entry.name, *getattr(entry, "aliases", ()))} for entry in entries]
        assert len(set().union(*own)) == sum(len(group) for group in own), sorted(names)


@pytest.mark.parametrize("gpu", CATALOGUE.gpus, ids=lambda gpu: gpu.name)
def test_an_entry_is_complete_and_within_what_is_possible(gpu) -> None:
    assert gpu.source
    assert 0 < gpu.matmul_share <= 1
    assert all(peak > 0 for peak in gpu.peak_tflops.values())
    assert CATALOGUE.find_link(gpu.link).bus_gb_per_s < CATALOGUE.find_link(gpu.link).nominal_gb_per_s
    if gpu.network:
        assert CATALOGUE.find_network(gpu.network).gb_per_s > 0
    order = [gpu.peak_tflops[name] for name in ("fp8", "bf16", "tf32", "fp32") if name in gpu.peak_tflops]
    assert order == sorted(order, reverse=True)


def test_peaks_are_those_of_the_data_sheets() -> None:
    assert find_gpu("h100").peak_flops("bf16") == 989e12
    assert find_gpu("a100").peak_flops("tf32") == 156e12
    assert find_gpu("v100").peak_flops("fp16") == 125e12
    assert find_gpu("v100").peak_flops("bf16") == 15.7e12, "V100 has no bf16 units"
    with pytest.raises(ConfigError, match="int3"):
        find_gpu("h100").peak_flops("int3")


@pytest.mark.parametrize(
    ("text", "gb_per_s", "transport", "adapters"),
    [("200G", 25.0, "rdma", 1), ("8x400G", 400.0, "rdma", 8), ("10G", 1.25, "tcp", 1), ("100G-tcp", 12.5, "tcp", 1),
     ("efa", 400.0, "efa", 32)],
)  # fmt: skip
def test_a_network_is_found_by_name_or_speed(text: str, gb_per_s: float, transport: str, adapters: int) -> None:
    network = CATALOGUE.find_network(text)
    assert (network.gb_per_s, network.transport, network.num_adapters) == (gb_per_s, transport, adapters)
    assert 0 < TRANSPORTS[network.transport].bandwidth_share < 1


@pytest.mark.parametrize("text", ["0G", "100G-pigeon", "fast"])
def test_an_impossible_network_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        CATALOGUE.find_network(text)


def test_several_nodes_need_a_network() -> None:
    gpu = find_gpu("h100")
    with pytest.raises(ConfigError, match="net=100G"):
        Cluster(gpu=gpu, gpus_per_node=8, num_nodes=2, link=CATALOGUE.find_link(gpu.link), network=None)


def test_a_users_gpu_wins_over_the_catalogues(tmp_path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "gpus:\n- {name: h100, peak_tflops: {bf16: 500}, matmul_share: 0.9, memory_gib: 10, memory_gb_per_s: 100, link: mine}\n"
        "links:\n- {name: mine, nominal_gb_per_s: 5, bus_gb_per_s: 4, latency_us: 9, source: measured}\n"
    )
    mine = CATALOGUE.with_entries(read_hardware_file(path))
    assert mine.find_gpu("h100").peak_flops("bf16") == 500e12
    assert mine.find_link("mine").latency_us == 9
    assert mine.find_gpu("a100").name == "a100-80"


@pytest.mark.parametrize(
    ("text", "says"),
    [("gpus: [{name: x}]", "gpus.0.peak_tflops"), ("gpus: [{nam: x}]", "did you mean name"), ("planets: []", "gpus, links, networks"), ("gpus: [", "cannot be read"),
     ("links: [{name: l, nominal_gb_per_s: fast, bus_gb_per_s: 1, latency_us: 1, source: s}]", "nominal_gb_per_s")],
)  # fmt: skip
def test_a_slip_in_a_hardware_file_is_one_message(tmp_path, text: str, says: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_hardware_file(path)
