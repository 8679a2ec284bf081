"""Inductor's compiled programs as Graphs: what each kernel reads and writes, and the buffers between them."""
