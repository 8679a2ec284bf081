"""Lower bounds on step time: the linear relaxation that proves how far a plan can be from the best."""
