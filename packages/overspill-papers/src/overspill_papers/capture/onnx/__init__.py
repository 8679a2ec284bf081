"""Networks from ONNX files, as symbols of MXNet.

They run and train as in MXNet.
"""
