"""Reading traces: exact times, files of any size in bounded memory, and one clear message for what cannot be read."""

import gzip
import io
import json
import tracemalloc

import pytest
from made_trace import BASE_NS, MadeTrace, gpu_step

from scaleray.errors import TraceError
from scaleray.profiling.traces import json_stream
from scaleray.profiling.traces.trace import read_trace


def read(text: str | bytes, name="a.json"):
    return read_trace(io.BytesIO(text if isinstance(text, bytes) else text.encode()), name)


def test_times_are_exact_in_nanoseconds_since_1970_too():
    """In a float of microseconds since 1970 the last digits are lost: a quarter of a microsecond."""
    trace = MadeTrace().event("cpu_op", "aten::mm", 0, 0)
    text = trace.text().replace('"ts": 0', '"ts": 1712195495505583.123').replace('"dur": 0', '"dur": 0.007')
    found = read(text.replace(f'"baseTimeNanoseconds": {BASE_NS},', ""))
    assert found.start.tolist() == [1712195495505583123] and found.end.tolist() == [1712195495505583130]


def test_names_from_elsewhere_hold_nothing_that_a_terminal_obeys():
    trace = MadeTrace().operator("aten::\x1b]0;X\x07\nmm", 0, 5)
    trace.values["deviceProperties"] = [{"id": 0, "name": "H100\x1b[2J"}]
    found = trace.read()
    assert (found.names, found.devices) == (["aten:: ]0;X  mm"], ("H100 [2J",))


@pytest.mark.parametrize("piece", [1, 7, 100])
def test_what_is_read_does_not_depend_on_the_size_of_the_pieces(monkeypatch, piece):
    whole = gpu_step().read()
    monkeypatch.setattr(json_stream, "PIECE_BYTES", piece)
    pieces = gpu_step().read()
    assert pieces.names == whole.names and pieces.start.tolist() == whole.start.tolist()
    assert pieces.messages == whole.messages and pieces.own == whole.own


def test_keys_before_and_behind_the_events_are_read():
    trace = gpu_step(rank=1)
    behind = {"traceEvents": trace.events, **trace.values}
    found = read(json.dumps(behind))
    assert (found.rank, found.world_size, found.start.min()) == (1, 2, BASE_NS)


def test_memory_does_not_grow_with_the_text_of_the_events():
    trace = gpu_step()
    trace.events = [{**event, "args": {**event["args"], "Call stack": "x" * 20_000}} for event in trace.events * 40]
    file = trace.file()
    num_bytes = len(file.getvalue())
    tracemalloc.start()
    read_trace(file, "large.json")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes > 10 << 20 and peak < num_bytes / 2


def test_arrows_and_names_of_threads_are_no_events():
    trace = gpu_step()
    count = len(trace.events)
    trace.events += [
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 1, "pid": 1, "tid": 1, "ts": 5},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "ts": 5, "args": {"name": "x"}},
        {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "x", "ts": 0, "dur": 9},
        {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 9},
    ]
    assert len(trace.read().start) == count


def test_categories_of_torch_1_are_those_of_today():
    trace = MadeTrace().event("Kernel", "gemm", 0, 5, stream=7).event("Operator", "aten::mm", 0, 5)
    assert trace.read().categories == ["kernel", "cpu_op"]


def test_a_trace_that_is_cut_off_says_behind_which_event():
    text = gpu_step().text()
    for end in (len(text) // 2, text.rindex("]"), len(text) - 1):
        with pytest.raises(TraceError, match=r"a.json is cut off after event \d+: a complete trace ends with"):
            read(text[:end])


def test_a_cut_gzip_file_is_cut_off_too():
    packed = gzip.compress(gpu_step().text().encode())
    with gzip.open(io.BytesIO(packed[: len(packed) // 2])) as file, pytest.raises(TraceError, match="cut off after"):
        read_trace(file, "a.json.gz")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "is not a JSON object"),
        ("", "is cut off after event 0"),
        ('{"traceEvents": [{"ph": "X"} nonsense]}', "is not valid JSON after event 1"),
        ('{"traceEvents" 5}', "is not valid JSON after event 0: ':' is missing after a key"),
        ('{"traceEvents": []}', "has no operators and no kernels"),
        ('{"schemaVersion": 2, "traceEvents": []}', "the schema of a.json is 2: this version reads schema 1"),
    ],
)
def test_what_is_no_trace_is_refused_with_one_message(text, message):
    with pytest.raises(TraceError, match=message):
        read(text)
