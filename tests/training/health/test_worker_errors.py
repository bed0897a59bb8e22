from __future__ import annotations

from scaleray.errors import DataError
from scaleray.training.health.worker_errors import explained


def test_a_failed_assertion_on_a_gpu_is_an_index_of_the_users_and_no_lost_worker():
    """The text is torch's for a label that the loss does not know."""
    text = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported at some other API call"
    error = explained(RuntimeError(text))
    assert isinstance(error, DataError)  # which is not tried again
    assert "device-side assert triggered" in str(error) and "--local" in str(error)
