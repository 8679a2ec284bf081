"""Transfers: stores, lanes, and the engine that moves tensors between them."""
