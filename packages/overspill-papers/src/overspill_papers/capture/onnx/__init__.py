"""Networks from ONNX files, as symbols of MXNet.

They are run and trained as MXNet does.
"""
