"""The machines that tests of several nodes run on."""

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
        to, back = two.held_back()
        assert to > 10 and back == 0
        send(two, one, 10**6)
        assert two.held_back()[1] > 10
        two.lift_limit()
        assert two.held_back() == []
        with ThreadPoolExecutor() as pool:
            sleeping = pool.submit(subprocess.run, two.command(["sleep", "600"]), check=False)
            wait_until(lambda: "sleep" in run(two, "sh", "-c", "cat /proc/[0-9]*/comm"), seconds=60)
            two.switch_off()
            assert sleeping.result(timeout=60).returncode != 0
        wait_until(lambda: not two.is_on(), seconds=60)  # what runs there ends before its first process
        assert one.is_on()
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert one.network not in left
