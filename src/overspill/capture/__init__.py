"""Capture: from AOTAutograd's joint graph to the Graph."""
