"""Plans and runs as files of the tools that people have: Perfetto's traces, PyTorch's memory snapshots."""
