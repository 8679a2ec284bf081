"""What an eager run did to device memory, written down, and the Graph of one of its steps."""
