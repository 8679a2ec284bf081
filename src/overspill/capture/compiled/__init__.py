"""What torch.compile captures: AOTAutograd's joint graph, read as a Graph."""
