"""Reading traces of torch.profiler: what each rank did with its time, and how ranks met."""
