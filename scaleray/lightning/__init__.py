"""LightningModules as workloads: `as_workload(MyModule, MyDataModule)` trains them unchanged."""

from scaleray.lightning.workload import LightningWorkload, as_workload

__all__ = ["LightningWorkload", "as_workload"]
