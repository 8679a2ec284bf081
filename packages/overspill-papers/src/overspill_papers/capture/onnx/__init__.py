"""A network from an ONNX file, as MXNet's symbols, so that it is run and trained as MXNet does."""
