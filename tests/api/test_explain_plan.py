"""`scaleray.explain_plan` says what the command prints."""

import pytest

import scaleray
from scaleray.cli.main import main

QUESTION = {"model": "llama-3-8b", "cluster": "h100:8x2", "global_batch": 256}
OPTIONS = ["--model", "llama-3-8b", "--cluster", "h100:8x2", "--global-batch", "256"]


@pytest.mark.parametrize(("what", "more", "words"), [("constants", {}, []), ("layouts", QUESTION, OPTIONS)])
def test_python_gets_the_lines_that_the_command_prints(capsys, what, more, words):
    with pytest.raises(SystemExit) as ended:
        main(["plan", "explain", what, *words])
    assert ended.value.code in (0, None)
    assert scaleray.explain_plan(what, **more) == capsys.readouterr().out.rstrip("\n").splitlines()
