"""The experiments themselves, a file a topic; `jobs.py`, `ways.py` and `offload_hooks.py` are what several share."""
