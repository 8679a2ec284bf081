"""What a real run did when: lowered graphs, lanes and train steps tell a Recorder, which writes a RunRecord."""
