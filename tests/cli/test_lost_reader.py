"""A command whose reader has gone, as `| head` goes after its lines, says nothing of it."""

import os
import subprocess
import sys


def test_help_for_a_reader_that_has_gone_prints_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "scaleray", "train", "--help"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    os.close(writer)
    assert done.stderr == "" and done.returncode in (0, 1, 141)
