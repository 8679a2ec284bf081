"""The door of torch.compile: AOTAutograd's joint graph, read as a Graph."""
