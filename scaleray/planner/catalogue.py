"""The GPUs, links and networks that the planner knows, each with its source. All peaks are dense.

Sources in short: MLE is stas00/ml-engineering (compute/accelerator and network, commit 744d01e), where peaks, link speeds,
bus bandwidths and largest measured matrix products (MAMF) were read; `data sheet` is the vendor's, from memory where MLE does
not give the figure, and marked so. Where no matrix product was measured, the share of the nearest relative is taken.
"""

from __future__ import annotations

from scaleray.planner.hardware import Catalogue, Gpu, Link, Network

LINKS = (
    # latencies: NCCL's tuning.cc has 0.6 to 1.0 us a ring step on NVLink and 1.0 to 1.9 on PCIe, before the kernel's own part
    Link(name="pcie3", nominal_gb_per_s=15.8, bus_gb_per_s=5.0, latency_us=5.0, source="nominal: PCIe 3 x16; bus: through the host without peer access, 5 to 6 GB/s in reports from memory; T4 traces of Pollux agree"),
    Link(name="pcie3-host", nominal_gb_per_s=15.8, bus_gb_per_s=1.5, latency_us=10.0, source="workstation cards without peer access copy through the host's memory: 1.3 to 1.6 GB/s in Sia's Quadro traces, of what backward passes do not hide"),
    Link(name="pcie4", nominal_gb_per_s=31.0, bus_gb_per_s=24.0, latency_us=4.0, source="MLE network: A100 PCIe"),
    Link(name="pcie5", nominal_gb_per_s=63.0, bus_gb_per_s=48.0, latency_us=4.0, source="MLE network: H100 PCIe"),
    Link(name="nvlink1", nominal_gb_per_s=80.0, bus_gb_per_s=60.0, latency_us=3.0, source="P100 data sheet, 4 x 20 GB/s; bus at NVLink2's share, not measured"),
    Link(name="nvlink2", nominal_gb_per_s=150.0, bus_gb_per_s=122.0, latency_us=2.5, source="MLE network: V100 SXM2"),
    Link(name="nvlink3", nominal_gb_per_s=300.0, bus_gb_per_s=232.0, latency_us=2.5, source="MLE network: A100 SXM"),
    Link(name="nvlink4", nominal_gb_per_s=450.0, bus_gb_per_s=370.0, latency_us=2.5, switch_sum_gb_per_s=274.0, source="MLE network: H100 SXM; with in-switch reduction 480 of bus bandwidth on 8 GPUs, which is 274 of summed bytes"),
    Link(name="nvlink4-h800", nominal_gb_per_s=200.0, bus_gb_per_s=160.0, latency_us=2.5, source="H800 data sheet, 400 GB/s both ways; bus at H100's share"),
    Link(name="nvlink5", nominal_gb_per_s=900.0, bus_gb_per_s=720.0, latency_us=2.5, source="MLE network for the nominal figure; bus at H100's share, not measured"),
    Link(name="xgmi3", nominal_gb_per_s=350.0, bus_gb_per_s=130.0, latency_us=3.0, source="MLE network for the nominal figure; bus from memory"),
    Link(name="xgmi4", nominal_gb_per_s=448.0, bus_gb_per_s=310.0, latency_us=3.0, source="MLE network: 7 x 64 GB/s to peers; bus from vendor blogs, from memory"),
    Link(name="xgmi5", nominal_gb_per_s=535.5, bus_gb_per_s=370.0, latency_us=3.0, source="MLE network for the nominal figure; bus at MI300X's share"),
    Link(name="ici-v5p", nominal_gb_per_s=300.0, bus_gb_per_s=240.0, latency_us=2.0, source="TPU v5p page, 4800 Gb/s a chip both ways, from memory"),
    Link(name="ici-v5e", nominal_gb_per_s=100.0, bus_gb_per_s=80.0, latency_us=2.0, source="TPU v5e page, 1600 Gb/s a chip both ways, from memory"),
    Link(name="shared-memory", nominal_gb_per_s=10.0, bus_gb_per_s=2.0, latency_us=50.0, source="gloo between processes of one machine: order of magnitude only; measure it", is_shared=True),
)  # fmt: skip

# FlashAttention-2 uses Ampere's instructions: 335 TFLOP/s on H100 where FlashAttention-3 has 580 (arXiv:2407.08608, forward and
# backward together), and the Triton kernels before it had less; on Blackwell the same kernels gain little
HOPPER_ATTENTION = 0.35
# the same 335 TFLOP/s over Blackwell's largest product: prime-rl's logs on B200 have it no faster than on H100
BLACKWELL_ATTENTION = 0.19
# FlashAttention-3 has 580 TFLOP/s of H100's 795 at its best, 475 in prime-rl's training steps at 65,536 tokens; cuDNN's kernels are as fast.
# Of Blackwell's kernels, cuDNN and FlashAttention-4 report 1.0 to 1.6 PFLOP/s of 1.75, from memory: the same share
BEST_ATTENTION = 0.60

GPUS = (
    Gpu(name="p100", aliases=("P100 16GB SXM2",), peak_tflops={"fp16": 21.2, "fp32": 10.6}, matmul_share=0.85,
        num_cores=56, memory_gib=15.9, memory_gb_per_s=732, link="nvlink1", source="data sheet, from memory"),
    Gpu(name="v100", aliases=("V100 SXM2", "V100 16GB SXM2", "V100 16GB", "V100 SXM3 16GB"), peak_tflops={"fp16": 125, "fp32": 15.7},
        matmul_share=0.80, num_cores=80, memory_gib=15.8, memory_gb_per_s=900, link="nvlink2", network="100G",
        source="peak and link MLE; memory data sheet; share: 100 of 125 TFLOP/s in cuBLAS benchmarks, from memory"),
    Gpu(name="v100-32", aliases=("V100 32GB", "V100 32GB SXM2", "V100 32GB SXM3", "V100 32GB SXM"), peak_tflops={"fp16": 125, "fp32": 15.7},
        matmul_share=0.80, num_cores=80, memory_gib=31.7, memory_gb_per_s=900, link="nvlink2", network="100G", source="as v100"),
    Gpu(name="v100-pcie", aliases=("V100 PCIe", "V100 PCIe 16GB", "V100 PCIe 32GB"), peak_tflops={"fp16": 112, "fp32": 14}, matmul_share=0.80,
        num_cores=80, memory_gib=15.8, memory_gb_per_s=900, link="pcie3", source="data sheet, from memory"),
    Gpu(name="t4", aliases=("T4 16GB", "Tesla T4"), peak_tflops={"fp16": 65, "fp32": 8.1}, matmul_share=0.55,
        num_cores=40, memory_gib=14.6, memory_gb_per_s=320, link="pcie3", gpus_per_node=4, network="25G",
        source="data sheet, from memory; share: 70 W keeps the clock down, 25 to 40 TFLOP/s are reported"),
    Gpu(name="rtx-2080-ti", aliases=("RTX 2080 Ti", "2080 Ti"), peak_tflops={"fp16": 53.8, "fp32": 13.4}, matmul_share=0.85,
        num_cores=68, memory_gib=10.8, memory_gb_per_s=616, link="pcie3-host", source="data sheet, from memory; fp16 products summed in fp32 run at half of 107.6"),
    Gpu(name="quadro-rtx-6000", aliases=("Quadro RTX 6000 24GB", "RTX 6000", "RTX 6000 24GB"), peak_tflops={"fp16": 130.5, "fp32": 16.3}, matmul_share=0.75,
        num_cores=72, memory_gib=23.6, memory_gb_per_s=672, link="pcie3-host", source="data sheet, from memory"),
    Gpu(name="rtx-3090", aliases=("RTX 3090", "3090"), peak_tflops={"bf16": 71, "fp16": 71, "tf32": 35.6, "fp32": 35.6}, matmul_share=0.88,
        num_cores=82, memory_gib=23.7, memory_gb_per_s=936, link="pcie4", source="data sheet, from memory; products summed in fp32"),
    Gpu(name="rtx-4090", aliases=("RTX 4090", "4090", "RTX 4090 24GB"), peak_tflops={"fp8": 330.3, "bf16": 165.2, "fp16": 165.2, "tf32": 82.6, "fp32": 82.6},
        matmul_share=0.95, num_cores=128, memory_gib=23.6, memory_gb_per_s=1008, link="pcie4", source="data sheet, from memory; products summed in fp32"),
    Gpu(name="rtx-a6000", aliases=("RTX A6000", "A6000", "A6000 48GB"), peak_tflops={"bf16": 154.8, "fp16": 154.8, "tf32": 77.4, "fp32": 38.7},
        matmul_share=0.75, num_cores=84, memory_gib=47.5, memory_gb_per_s=768, link="pcie4", source="data sheet, from memory; 300 W hold the clock down"),
    Gpu(name="rtx-6000-ada", aliases=("RTX 6000 Ada",), peak_tflops={"fp8": 728, "bf16": 364, "fp16": 364, "tf32": 182, "fp32": 91.1},
        matmul_share=0.75, num_cores=142, memory_gib=47.5, memory_gb_per_s=960, link="pcie4", source="data sheet, from memory"),
    Gpu(name="a10g", aliases=("A10G 24GB",), peak_tflops={"bf16": 70, "fp16": 70, "tf32": 35, "fp32": 31.2}, matmul_share=0.85,
        num_cores=80, memory_gib=22.1, memory_gb_per_s=600, link="pcie4", network="100G-efa", source="MLE for the link; rest data sheet, from memory"),
    Gpu(name="a10", aliases=("A10 24GB",), peak_tflops={"bf16": 125, "fp16": 125, "tf32": 62.5, "fp32": 31.2}, matmul_share=0.60,
        num_cores=72, memory_gib=22.1, memory_gb_per_s=600, link="pcie4", source="data sheet, from memory; 150 W hold the clock down"),
    Gpu(name="a40", aliases=("A40 48GB",), peak_tflops={"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4}, matmul_share=0.75,
        num_cores=84, memory_gib=44.4, memory_gb_per_s=696, link="pcie4", source="data sheet, from memory"),
    Gpu(name="l4", aliases=("L4 24GB",), peak_tflops={"fp8": 242, "bf16": 121, "fp16": 121, "tf32": 60, "fp32": 30.3}, matmul_share=0.50,
        num_cores=58, memory_gib=22.0, memory_gb_per_s=300, link="pcie4", network="100G-tcp", source="MLE for the link; rest data sheet, from memory; 72 W hold the clock down"),
    Gpu(name="l40s", aliases=("L40S 48GB",), peak_tflops={"fp8": 733, "bf16": 362, "fp16": 362, "tf32": 183, "fp32": 91.6}, matmul_share=0.70,
        num_cores=142, memory_gib=44.4, memory_gb_per_s=864, link="pcie4", source="MLE; share from memory"),
    Gpu(name="a100-40", aliases=("A100 40GB", "A100 SXM 40GB", "A100-SXM4-40GB"), peak_tflops={"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5},
        matmul_share=271.2 / 312, num_cores=108, memory_gib=39.4, memory_gb_per_s=1555, link="nvlink3", network="8x200G", source="MLE (MAMF 271.2); memory data sheet"),
    Gpu(name="a100-80", aliases=("A100", "A100 80GB", "A100 SXM 80GB", "A100 SXM", "A100-SXM4-80GB"), peak_tflops={"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5},
        matmul_share=271.2 / 312, num_cores=108, memory_gib=79.2, memory_gb_per_s=2039, link="nvlink3", network="8x200G", source="MLE (MAMF 271.2); 2039 GB/s data sheet"),
    Gpu(name="a100-pcie-40", aliases=("A100 PCIe 40GB",), peak_tflops={"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5},
        matmul_share=252.9 / 312, num_cores=108, memory_gib=39.4, memory_gb_per_s=1555, link="pcie4", source="as a100-pcie"),
    Gpu(name="a100-pcie", aliases=("A100 PCIe", "A100 PCIe 80GB", "A100 80GB PCIe"), peak_tflops={"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5},
        matmul_share=252.9 / 312, num_cores=108, memory_gib=79.2, memory_gb_per_s=1940, link="pcie4", source="MLE (MAMF 252.9)"),
    Gpu(name="a800", aliases=("A800 80GB", "A800 SXM"), peak_tflops={"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5},
        matmul_share=271.2 / 312, num_cores=108, memory_gib=79.2, memory_gb_per_s=2039, link="nvlink4-h800", network="8x200G", source="as a100-80, with 400 GB/s of NVLink both ways; data sheet, from memory"),
    Gpu(name="h100", aliases=("H100", "H100 80GB", "H100 SXM", "H100 SXM 80GB", "H100 80GB HBM3"), peak_tflops={"fp8": 1979, "bf16": 989, "fp16": 989, "tf32": 494.5, "fp32": 67},
        matmul_share=794.5 / 989, narrow_matmul_share=1402.6 / 1979, num_cores=132, attention_share=HOPPER_ATTENTION, best_attention_share=BEST_ATTENTION, memory_gib=79.1, memory_gb_per_s=3350, link="nvlink4", network="8x400G", source="MLE (MAMF 794.5, in 8 bit 1402.6); tf32 and fp32 data sheet"),
    Gpu(name="h100-96", aliases=("H100 96GB", "H100 96GB HBM2e"), peak_tflops={"fp8": 1979, "bf16": 989, "fp16": 989, "tf32": 494.5, "fp32": 67},
        matmul_share=0.62, narrow_matmul_share=0.62 * 1402.6 / 1979 / (794.5 / 989), num_cores=132, attention_share=HOPPER_ATTENTION, best_attention_share=BEST_ATTENTION, memory_gib=94.5, memory_gb_per_s=2400, link="nvlink4", network="8x400G",
        source="torchtitan's hosts: 500 W cap and HBM2e; the share is that of H100 times 500/700 W to the power 0.75, an assumption"),
    Gpu(name="h100-pcie", aliases=("H100 PCIe", "H100 PCIe 80GB"), peak_tflops={"fp8": 1513, "bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51},
        matmul_share=0.65, num_cores=114, attention_share=HOPPER_ATTENTION, best_attention_share=BEST_ATTENTION, memory_gib=79.1, memory_gb_per_s=2000, link="pcie5", source="MLE; 350 W hold the clock down, share from memory"),
    Gpu(name="h100-nvl", aliases=("H100 NVL", "H100 NVL 94GB"), peak_tflops={"fp8": 1671, "bf16": 835, "fp16": 835, "tf32": 418, "fp32": 60},
        matmul_share=0.68, num_cores=132, attention_share=HOPPER_ATTENTION, best_attention_share=BEST_ATTENTION, memory_gib=93.1, memory_gb_per_s=3900, link="pcie5", source="data sheet, from memory; bridges between pairs are left out"),
    Gpu(name="h800", aliases=("H800 80GB", "H800 SXM"), peak_tflops={"fp8": 1979, "bf16": 989, "fp16": 989, "tf32": 494.5, "fp32": 67},
        matmul_share=794.5 / 989, narrow_matmul_share=1402.6 / 1979, num_cores=132, attention_share=HOPPER_ATTENTION, best_attention_share=BEST_ATTENTION, memory_gib=79.1, memory_gb_per_s=3350, link="nvlink4-h800", network="8x400G", source="as h100; link data sheet, from memory"),
    Gpu(name="h20", aliases=("H20 96GB",), peak_tflops={"fp8": 296, "bf16": 148, "fp16": 148, "tf32": 74, "fp32": 44}, matmul_share=0.93,
        num_cores=78, attention_share=HOPPER_ATTENTION, best_attention_share=BEST_ATTENTION, memory_gib=95.1, memory_gb_per_s=4000, link="nvlink4", network="8x400G", source="data sheet, from memory"),
    Gpu(name="h200", aliases=("H200", "H200 SXM", "H200 141GB", "H200 SXM 141GB"), peak_tflops={"fp8": 1979, "bf16": 989, "fp16": 989, "tf32": 494.5, "fp32": 67},
        matmul_share=794.5 / 989, narrow_matmul_share=1453.4 / 1979, num_cores=132, attention_share=HOPPER_ATTENTION, best_attention_share=BEST_ATTENTION, memory_gib=139.8, memory_gb_per_s=4800, link="nvlink4", network="8x400G", source="MLE; share of h100"),
    Gpu(name="gh200", aliases=("GH200", "GH200 96GB", "GH200 480GB"), peak_tflops={"fp8": 1979, "bf16": 989, "fp16": 989, "tf32": 494.5, "fp32": 67},
        matmul_share=794.5 / 989, narrow_matmul_share=1535.0 / 1979, num_cores=132, attention_share=HOPPER_ATTENTION, best_attention_share=BEST_ATTENTION, memory_gib=94.5, memory_gb_per_s=4000, link="nvlink4", gpus_per_node=4, network="4x200G", source="data sheet, from memory; share of h100"),
    Gpu(name="b200", aliases=("B200", "B200 SXM", "B200 180GB", "B200 192GB"), peak_tflops={"fp4": 9000, "fp8": 4500, "bf16": 2250, "fp16": 2250, "tf32": 1125, "fp32": 75},
        matmul_share=1745 / 2250, narrow_matmul_share=3432.5 / 4500, overlaps_tiles=True, num_cores=148, attention_share=BLACKWELL_ATTENTION, best_attention_share=BEST_ATTENTION, memory_gib=178.4, memory_gb_per_s=8000, link="nvlink5", network="8x400G", source="MLE (MAMF 1745, in 8 bit 3432.5); tf32 and fp32 data sheet, from memory"),
    Gpu(name="gb200", aliases=("GB200", "GB200 186GB", "GB200 NVL72"), peak_tflops={"fp4": 10000, "fp8": 5000, "bf16": 2500, "fp16": 2500, "tf32": 1250, "fp32": 80},
        matmul_share=1822 / 2500, narrow_matmul_share=3615.6 / 5000, overlaps_tiles=True, num_cores=152, attention_share=BLACKWELL_ATTENTION, best_attention_share=BEST_ATTENTION, memory_gib=184.3, memory_gb_per_s=8000, link="nvlink5", gpus_per_node=72, network="72x400G",
        source="MLE (MAMF 1822, in 8 bit 3615.6); a node is the 72 GPUs that NVLink joins"),
    Gpu(name="b300", aliases=("B300", "B300 SXM", "B300 288GB"), peak_tflops={"fp4": 13500, "fp8": 4500, "bf16": 2250, "fp16": 2250, "tf32": 1125, "fp32": 75},
        matmul_share=1745 / 2250, narrow_matmul_share=3353.3 / 4500, overlaps_tiles=True, num_cores=148, attention_share=BLACKWELL_ATTENTION, best_attention_share=BEST_ATTENTION, memory_gib=267.0, memory_gb_per_s=8000, link="nvlink5", network="8x800G", source="MLE for the network; rest as b200, from memory"),
    Gpu(name="gb300", aliases=("GB300", "GB300 288GB", "GB300 NVL72"), peak_tflops={"fp4": 15000, "fp8": 5000, "bf16": 2500, "fp16": 2500, "tf32": 1250, "fp32": 80},
        matmul_share=1822 / 2500, narrow_matmul_share=3615.6 / 5000, overlaps_tiles=True, num_cores=152, attention_share=BLACKWELL_ATTENTION, best_attention_share=BEST_ATTENTION, memory_gib=276.0, memory_gb_per_s=8000, link="nvlink5", gpus_per_node=72, network="72x800G",
        source="MLE; share of gb200; memory from the B300 row"),
    Gpu(name="mi250x", aliases=("MI250X (per package)", "MI250X 128GB"), peak_tflops={"bf16": 383, "fp16": 383, "fp32": 95.7}, matmul_share=0.50,
        num_cores=220, memory_gib=127.9, memory_gb_per_s=3280, link="xgmi3", gpus_per_node=4, network="4x200G", source="MLE, per package of two dies; share from memory"),
    Gpu(name="mi300x", aliases=("MI300X 192GB",), peak_tflops={"fp8": 2610, "bf16": 1307, "fp16": 1307, "tf32": 653.7, "fp32": 163.4},
        matmul_share=668.4 / 1307, num_cores=304, memory_gib=191.9, memory_gb_per_s=5300, link="xgmi4", network="8x400G", source="MLE (MAMF 668.4)"),
    Gpu(name="mi325x", aliases=("MI325X 256GB",), peak_tflops={"fp8": 2610, "bf16": 1300, "fp16": 1300, "tf32": 653.7, "fp32": 163.4},
        matmul_share=784.9 / 1300, num_cores=304, memory_gib=255.9, memory_gb_per_s=6000, link="xgmi4", network="8x400G", source="MLE (MAMF 784.9)"),
    Gpu(name="mi355x", aliases=("MI355X 288GB",), peak_tflops={"fp8": 5000, "bf16": 2500, "fp16": 2500, "fp32": 157.3},
        matmul_share=1565 / 2500, num_cores=256, memory_gib=287.9, memory_gb_per_s=8000, link="xgmi5", network="8x400G", source="MLE (MAMF 1565)"),
    Gpu(name="tpu-v5p", aliases=("TPU v5p", "v5p"), peak_tflops={"bf16": 459, "fp32": 57}, matmul_share=0.90, num_cores=2, memory_gib=95.0, memory_gb_per_s=2760,
        link="ici-v5p", gpus_per_node=4, source="MLE; fp32 from memory"),
    Gpu(name="tpu-v5e", aliases=("TPU v5e", "v5e"), peak_tflops={"bf16": 197, "fp32": 25}, matmul_share=0.90, num_cores=1, memory_gib=16.0, memory_gb_per_s=820,
        link="ici-v5e", gpus_per_node=4, source="MLE; fp32 from memory"),
    Gpu(name="cpu", aliases=("CPU core",), peak_tflops={"fp32": 0.05, "bf16": 0.05}, matmul_share=0.6, num_cores=1, memory_gib=4.0, memory_gb_per_s=10,
        link="shared-memory", gpus_per_node=2, source="one AVX2 core at 3 GHz: 16 multiply-adds a cycle; order of magnitude, give your own"),
)  # fmt: skip

NETWORKS = (
    Network(name="dgx-a100", gb_per_s=200, num_adapters=8, source="MLE: 8 x 200 Gb/s", aliases=("8x hdr",)),
    Network(name="dgx-h100", gb_per_s=400, num_adapters=8, source="MLE: NDR 8 x 400", aliases=("ndr",)),
    Network(name="dgx-b300", gb_per_s=800, num_adapters=8, source="MLE: XDR 8 x 800", aliases=("xdr",)),
    Network(name="aws-p4d", gb_per_s=50, num_adapters=4, transport="efa", source="AWS: 4 x 100 Gb/s EFA, from memory", aliases=("efa-v1",)),
    Network(name="aws-p5", gb_per_s=400, num_adapters=32, transport="efa", source="MLE: EFA v2 32 x 100", aliases=("efa", "efa-v2")),
    Network(name="aws-p6-b200", gb_per_s=400, num_adapters=8, transport="efa", source="MLE: EFA v4 8 x 400", aliases=("efa-v4",)),
    Network(name="gcp-a3-mega", gb_per_s=200, num_adapters=8, source="MLE: TCPXO 8 x 200"),
    Network(name="gcp-a3-high", gb_per_s=100, num_adapters=4, source="MLE: TCPX 4 x 200"),
    Network(name="10gbe", gb_per_s=1.25, transport="tcp", source="10 Gb/s Ethernet", aliases=("ethernet",)),
    Network(name="25gbe", gb_per_s=3.125, transport="tcp", source="25 Gb/s Ethernet"),
    Network(name="100gbe", gb_per_s=12.5, transport="tcp", source="100 Gb/s Ethernet, sockets"),
    Network(name="hdr", gb_per_s=25, source="one HDR InfiniBand adapter a node", aliases=("infiniband",)),
    Network(name="edr", gb_per_s=12.5, source="one EDR InfiniBand adapter a node"),
)  # fmt: skip

CATALOGUE = Catalogue(GPUS, LINKS, NETWORKS, sources=("scaleray",))
