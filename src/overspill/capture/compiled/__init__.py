"""Read the joint forward-backward graph of torch.compile as a Graph."""
