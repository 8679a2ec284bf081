"""Tools that policies share: step programs, lifetimes, gaps, and assembling a Schedule."""
