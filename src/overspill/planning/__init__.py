"""The toolbox that policies share: the program of a step, its lifetimes and gaps, and what turns decisions into a Schedule."""
