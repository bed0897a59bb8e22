"""A rank that hangs: its process ends and says where, unless a person may be looking at it in a debugger."""

import os
import subprocess
import sys

from scaleray.training.rank import HANG_EXIT_CODE

SCRIPT = """
import sys, time
from small_runs import Classify, make_job
from scaleray.records.worker_requests import ControlRequest
from scaleray.training import rank
from scaleray.training.setup.rank_context import RankContext

class Hangs(Classify):
    calls = 0

    def loss(self, model, batch):
        Hangs.calls += 1
        if Hangs.calls == 5:
            time.sleep({sleep_s})
        return super().loss(model, batch)

def beat(heartbeat):
    print(heartbeat.phase, "|", heartbeat.tail, flush=True)
    return ControlRequest.NOTHING

rank.BEAT_S = 0.05
job, sources = make_job(Hangs(), {{"scale.collective_timeout_s": 0.5, "stop.after": "6 steps"}}, world_size=1)
channel = rank.Channel(lambda message: None, beat, flush=lambda: print("flushed", flush=True))
options = {{"sources": sources, "run_path": sys.argv[1], "facts": {{}}, "tail": ["its last line"]}}
rank.run_rank(job, RankContext(), channel, ends_hangs={ends_hangs}, **options)
"""


def ran(folder, **values):
    script = folder / "script.py"
    script.write_text(SCRIPT.format(**values))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), str(folder)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode in (0, HANG_EXIT_CODE), found.stderr
    return found.returncode, found.stdout.splitlines()


def test_a_rank_that_hangs_says_where_and_ends_its_process(tmp_path):
    code, lines = ran(tmp_path, sleep_s=90, ends_hangs=True)
    assert code == HANG_EXIT_CODE and lines[-1] == "flushed"
    assert lines[-2].startswith("a hang: it has been in `forward` of step ")
    assert "time.sleep" in lines[-2] and "its last line" in lines[-2]


def test_a_rank_without_a_limit_may_stop_for_longer(tmp_path):
    code, lines = ran(tmp_path, sleep_s=3, ends_hangs=False)
    # a last sign of life may come later: it is on its way in a thread of its own
    assert code == 0 and "flushed" in lines and not any("a hang" in line for line in lines)
