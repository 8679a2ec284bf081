"""Read Inductor's compiled programs as Graphs, with a kernel or library call as op."""
