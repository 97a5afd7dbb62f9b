"""The kernels' own tests, compiled and run on the NPU: the fixture `device` is the device here."""

from tests.kernels.test_kernels import *  # noqa: F403
