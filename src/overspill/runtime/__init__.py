"""The runtime: schedules become FX graphs, stores and lanes move what they offload, sessions plan and run."""
