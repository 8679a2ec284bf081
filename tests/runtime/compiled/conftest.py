"""What other tests hold does not lie beside the models of these: a plan would leave room for batches among it."""

import gc

import pytest


@pytest.fixture(autouse=True)
def _nothing_beside() -> None:
    gc.collect()
    gc.freeze()  # what is frozen, `gc.get_objects` does not list
