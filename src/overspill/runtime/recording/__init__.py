"""The measured record of a real run.

Lowered graphs, lanes and train steps report to a Recorder, which writes a RunRecord.
"""
