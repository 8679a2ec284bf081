"""Training under a plan: lowering, transfers, sessions, train steps."""
