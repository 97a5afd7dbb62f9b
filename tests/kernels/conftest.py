"""The kernels run compiled on a GPU, if there is one, and in Triton's interpreter otherwise."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Read by each @triton.jit; set before the kernels are imported.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
