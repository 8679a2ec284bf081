"""Lower bounds on step time: how far a plan can be from the best."""
