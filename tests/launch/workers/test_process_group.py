from __future__ import annotations

from scaleray.training.process_group import interface_of


def test_an_address_is_found_on_the_interface_that_has_it():
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") is None  # kept for documentation: no machine has it
