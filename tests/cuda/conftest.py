"""The fake CUDA driver, for tests without a GPU."""

import fake_cuda
import pytest


@pytest.fixture(scope="session")
def library():
    """Return the path of the fake driver."""
    return fake_cuda.built()
