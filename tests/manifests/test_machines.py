"""The machines that tests of several nodes run on."""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from machines import machines
from waiting import wait_until

RECEIVE = """
import socket, sys
server = socket.create_server((sys.argv[1], 7000))
print("listening", flush=True)
connection, _ = server.accept()
print(sum(iter(lambda: len(connection.recv(1 << 16)), 0)))
"""
SEND = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 7000))
connection.sendall(bytes(int(sys.argv[2])))
"""


def run(machine, *words):
    done = subprocess.run(machine.command(words), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def send(sender, receiver, size):
    """Send so many bytes from one machine to another."""
    words = receiver.command([sys.executable, "-c", RECEIVE, receiver.address])
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout.readline() == "listening\n"
        run(sender, sys.executable, "-c", SEND, receiver.address, str(size))
        assert int(server.stdout.readline()) == size


def held_back(machine):
    """How many packets its link has let wait, in each direction."""
    told = [
        subprocess.run(["tc", "-s", *end[1:], "show", "dev", device], capture_output=True, text=True, check=True).stdout
        for end, device in machine.ends()
    ]
    return [int(re.search(r"overlimits (\d+)", text)[1]) if " rate 8Mbit" in text else None for text in told]


def test_a_machine_has_a_name_processes_and_temporary_files_of_its_own(tmp_path):
    (tmp_path / "for_all").write_text("here")
    with machines(2, tmp_path) as (one, two):
        assert [run(each, "hostname").strip() for each in (one, two)] == ["n1", "n2"]
        assert run(one, "getent", "hosts", two.address).split() == [two.address, "n2"]
        assert run(one, "cat", str(tmp_path / "for_all")) == "here"
        assert run(one, "ls", "/tmp") != "" and "for_all" not in run(one, "ls", "/tmp")
        assert run(one, "cat", "/proc/1/comm") == "bash\n"
        assert subprocess.check_output(one.command(["pwd"], folder=tmp_path), text=True) == f"{tmp_path}\n"
        run(one, "touch", "/tmp/of_one")
        assert "of_one" not in run(two, "ls", "/tmp")
        two.limit("8mbit")
        before = two.received_bytes()
        send(one, two, 10**6)
        assert 10**6 < two.received_bytes() - before < 2 * 10**6
        to, back = held_back(two)
        assert to > 10 and back == 0
        send(two, one, 10**6)
        assert held_back(two)[1] > 10
        two.lift_limit()
        assert held_back(two) == [None, None]
        with ThreadPoolExecutor() as pool:
            sleeping = pool.submit(subprocess.run, two.command(["sleep", "600"]), check=False)
            wait_until(lambda: "sleep" in run(two, "sh", "-c", "cat /proc/[0-9]*/comm"), seconds=60)
            two.switch_off()
            assert sleeping.result(timeout=60).returncode != 0
        wait_until(lambda: not two.is_on(), seconds=60)  # what runs there ends before its first process
        assert one.is_on()
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert one.network not in left
