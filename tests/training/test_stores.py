"""Where workers meet, and who else can reach that."""

import stat

import psutil
import pytest

from scaleray.common import own_folder as place
from scaleray.common.own_folder import own_folder
from scaleray.training.setup import stores
from scaleray.training.setup.stores import OwnedStore, is_loopback, open_store


def listening():
    return {(c.laddr.ip, c.laddr.port) for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}


def test_workers_of_several_machines_meet_at_one_address_and_not_at_all_of_them():
    address = next(
        (
            a.address
            for all_of in psutil.net_if_addrs().values()
            for a in all_of
            if a.family == 2 and a.address[:4] != "127."
        ),
        None,
    )
    if address is None:
        pytest.skip("this machine has no address but loopback")
    before = listening()
    owned = OwnedStore(address)
    server, member = open_store(owned.place), open_store(owned.place)
    server.set("key", "value")
    assert member.get("key") == b"value"
    assert listening() - before == {(address, owned.place.port)}
    assert stores._listeners == {}
    del server


def test_workers_of_one_machine_meet_on_loopback():
    before = listening()
    owned = OwnedStore("127.0.0.1")
    server, member = open_store(owned.place), open_store(owned.place)
    server.set("key", "value")
    assert member.get("key") == b"value" and listening() - before == {("127.0.0.1", owned.place.port)}
    owned.close()
    assert member.get("key") == b"value", "the server lives as long as its store"


def test_a_place_that_nobody_opened_is_given_back():
    before = listening()
    owned = OwnedStore("127.0.0.1")
    assert listening() - before == {("127.0.0.1", owned.place.port)}
    owned.close()
    assert listening() == before


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.2", True), ("::1", True), ("localhost", True), ("10.0.0.1", False), ("a", False)]
)
def test_loopback_is_what_no_other_machine_can_have(host, expected):
    assert is_loopback(host) is expected


def test_the_users_folder_is_closed_again_and_never_one_that_is_not_the_users(monkeypatch, tmp_path):
    monkeypatch.setattr(place, "short_path", lambda: tmp_path)
    folder = own_folder()
    folder.chmod(0o777)
    assert own_folder() == folder and stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.rmdir()
    folder.symlink_to(tmp_path)  # as somebody else could have made it beforehand
    other = own_folder()
    assert other != folder and stat.S_IMODE(other.stat().st_mode) == 0o700
