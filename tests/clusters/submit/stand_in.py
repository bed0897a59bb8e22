"""A program that stands in for kubectl, sbatch and others: notes how it is called, and answers what a file says.

Its folder is above that of the program; `answers` there is a list of pattern, times, exit code, output and errors.
"""

import json
import os
import re
import sys

name = os.path.basename(sys.argv[0])
folder = os.path.dirname(os.path.dirname(sys.argv[0]))
words = " ".join([name, *sys.argv[1:]])
given = sys.stdin.read() if "-f -" in words else ""
with open(f"{folder}/calls", "a") as calls:
    calls.write(json.dumps([name, sys.argv[1:], given, dict(os.environ)]) + "\n")
with open(f"{folder}/answers") as answers:
    known = json.load(answers)
for number, (pattern, times, code, out, err) in enumerate(known):
    if not re.search(pattern, words):
        continue
    used = f"{folder}/used{number}"
    count = os.path.getsize(used) if os.path.exists(used) else 0
    if times and count >= times:
        continue
    with open(used, "a") as marks:
        marks.write(".")
    sys.stdout.write(out)
    sys.stderr.write(err)
    sys.exit(code)
