"""The language-model workload: properties its transformer must have, and its data as the user gives it."""

import hashlib
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F

from scaleray.errors import ConfigError, DataError, WorkloadError
from scaleray.workload import load_workload

NAME = "jobs/language_model.py:LanguageModel"
TINY = {"width": 32, "num_blocks": 2, "num_heads": 2, "sequence_length": 16}


@pytest.fixture(scope="module")
def transformer():
    load_workload(NAME, {})  # puts the folder of the workload's neighbours on the path
    import transformer

    return transformer


@pytest.fixture(scope="module")
def library():
    return load_workload(NAME, {}).datasets()


def tiny_model(**args):
    torch.manual_seed(0)
    return load_workload(NAME, {**TINY, **args}).build_model()


def random_bytes(rows, length, seed=1):
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def all_bytes(source):
    return source.read(torch.arange(source.num_rows).numpy())["tokens"]


def write_texts(folder, texts):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return str(folder)


def sample_texts(num=60):
    return {f"{i:03d}.txt": f"text number {i} is not like the others: {'ä' * i}\n" * 3 for i in range(num)}


# the model


@pytest.mark.parametrize("args", [{}, {"num_kv_heads": 1}, {"tie_head": False}])
def test_a_later_byte_does_not_change_earlier_logits(args):
    model = tiny_model(**args)
    tokens = random_bytes(2, 12).long()
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=0)
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_rotary_scores_depend_only_on_the_distance_between_positions(transformer):
    config = transformer.TransformerConfig(vocab_size=2, width=64, num_blocks=1, num_heads=1)
    table = transformer.rotation_table(config)
    query, key = torch.randn(2, 1, 1, 1, 64, generator=torch.Generator().manual_seed(0))

    def score(query_position, key_position):
        turned_query = transformer.rotate(query, table[:, query_position : query_position + 1])
        turned_key = transformer.rotate(key, table[:, key_position : key_position + 1])
        return (turned_query * turned_key).sum()

    # float32 angles of up to 1000 radians carry errors near 1000 * 2**-24 = 6e-5
    torch.testing.assert_close(score(5, 2), score(903, 900), rtol=0, atol=5e-3)
    torch.testing.assert_close(score(7, 7), (query * key).sum(), rtol=0, atol=1e-4)
    assert abs(score(5, 2) - score(5, 4)) > 0.05


def test_attention_matches_its_definition(transformer):
    config = transformer.TransformerConfig(vocab_size=2, width=32, num_blocks=1, num_heads=4, num_kv_heads=2)
    attention = transformer.Attention(config)
    rotations = transformer.rotation_table(config)[:, :6]
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0))
    query = transformer.rotate(attention.query(x).view(2, 6, 4, 8), rotations)
    key = transformer.rotate(attention.key(x).view(2, 6, 2, 8), rotations).repeat_interleave(2, dim=2)
    value = attention.value(x).view(2, 6, 2, 8).repeat_interleave(2, dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(8)
    scores = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -math.inf)
    expected = attention.output(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value).flatten(2))
    torch.testing.assert_close(attention(x, rotations), expected)


def test_a_tied_head_is_the_embedding_itself_also_after_to_empty(transformer):
    model = tiny_model()
    assert model.head.weight is model.embedding.weight
    assert tiny_model(tie_head=False).head.weight is not tiny_model(tie_head=False).embedding.weight
    with torch.device("meta"):
        abstract = transformer.Transformer(model.config)
    abstract.to_empty(device="cpu")
    torch.manual_seed(0)
    abstract.init_weights()
    assert abstract.head.weight is abstract.embedding.weight
    tokens = random_bytes(1, 16).long()
    torch.testing.assert_close(abstract(tokens), model(tokens), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("size", "low", "high"),
    [
        ("1m", 0.9e6, 1.2e6),
        ("3m", 2.9e6, 3.5e6),
        ("10m", 9.5e6, 11e6),
        ("124m", 123e6, 125e6),
        ("1b", 1_235_814_400, 1_235_814_400),  # Llama 3.2 1B, to the parameter
        ("8b", 8_030_261_248, 8_030_261_248),  # Llama 3 8B
    ],
)
def test_named_sizes_have_the_parameters_that_their_names_say(transformer, size, low, high):
    with torch.device("meta"):
        model = transformer.Transformer(transformer.SIZES[size])
        model.init_weights()
    assert low <= sum(p.numel() for p in model.parameters()) <= high
    assert len(model.blocks) == transformer.SIZES[size].num_blocks


def test_the_rotation_table_is_not_part_of_the_state_dict():
    assert tiny_model(sequence_length=8).state_dict().keys() == tiny_model().state_dict().keys()
    tiny_model(sequence_length=8).load_state_dict(tiny_model().state_dict())


def test_weights_start_as_documented_and_residual_projections_smaller():
    model = tiny_model(width=160, num_blocks=8)
    query = torch.cat([block.attention.query.weight.flatten() for block in model.blocks])
    down = torch.cat([block.feed_forward.down.weight.flatten() for block in model.blocks])
    # the standard errors, of 204,800 draws and more, are below 0.2 %
    assert query.std().item() == pytest.approx(0.05, rel=0.02)
    assert down.std().item() == pytest.approx(0.05 / 4, rel=0.02)


def test_an_untrained_model_pays_for_little_more_than_a_uniform_guess():
    workload = load_workload(NAME, TINY)
    torch.manual_seed(0)
    bits, count = workload.metrics(workload.build_model(), {"tokens": random_bytes(32, 17)})["bits_per_byte"]
    # 8 bits, and half the variance of the logits in nats: width x 2 / (5 width), whatever the width
    assert bits.item() / count == pytest.approx(8 + 0.2 / math.log(2), abs=0.05)


def test_blocks_are_those_of_the_model():
    workload = load_workload(NAME, TINY)
    model = workload.build_model()
    assert list(workload.blocks(model)) == list(model.blocks)
    assert len(model.blocks) == 2


# loss and metrics


def test_the_loss_is_a_sum_and_a_count_so_that_two_halves_add_up():
    workload, model = load_workload(NAME, TINY), tiny_model()
    tokens = random_bytes(6, 17)
    loss, count = workload.loss(model, {"tokens": tokens})
    halves = [workload.loss(model, {"tokens": half}) for half in (tokens[:2], tokens[2:])]
    assert count == 6 * 16 == sum(number for _, number in halves)
    torch.testing.assert_close(loss, sum(nats for nats, _ in halves))
    logits = model(tokens[:, :-1].long())
    mean = F.cross_entropy(logits.reshape(-1, 256), tokens[:, 1:].reshape(-1).long())
    torch.testing.assert_close(loss / count, mean)


def test_bits_per_byte_are_the_loss_in_bits():
    workload, model = load_workload(NAME, TINY), tiny_model()
    batch = {"tokens": random_bytes(2, 17)}
    (nats, count), (bits, num_bytes) = workload.loss(model, batch), workload.metrics(model, batch)["bits_per_byte"]
    assert (bits / num_bytes).item() == pytest.approx((nats / count).item() / math.log(2))


def test_a_few_steps_on_one_batch_lower_the_loss():
    workload, model = load_workload(NAME, TINY), tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = {"tokens": random_bytes(4, 17)}
    means = []
    for _ in range(15):
        loss, count = workload.loss(model, batch)
        (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        means.append(loss.item() / count)
    assert means[-1] < 0.7 * means[0]


# the data


def test_the_standard_library_gives_millions_of_bytes_in_both_splits(library):
    train, val = library["train"], library["val"]
    assert train.sequence_length == val.sequence_length == 256
    num_bytes = train.describe()["bytes"] + val.describe()["bytes"]
    assert num_bytes > 5e6
    assert 0.03 < val.describe()["bytes"] / num_bytes < 0.2
    assert train.read(torch.arange(2).numpy())["tokens"].dtype == "uint8"


def test_the_same_text_gives_the_same_data_every_time(library):
    again = load_workload(NAME, {}).datasets()
    assert {name: source.describe() for name, source in again.items()} == {
        name: source.describe() for name, source in library.items()
    }


def test_splits_are_disjoint_and_follow_the_hash_of_each_file(tmp_path):
    texts = sample_texts()
    texts["copy.txt"] = texts["000.txt"]
    folder = write_texts(tmp_path, texts)
    data = load_workload(NAME, {**TINY, "text": folder, "validation_share": 0.3}).datasets()
    joined = {name: all_bytes(source)[:, :-1].tobytes() for name, source in data.items()}
    for text in texts.values():
        is_val = int(hashlib.sha256(text.encode()).hexdigest(), 16) < 0.3 * 2**256
        start = text.encode()[:40]
        assert (start in joined["val"]) == is_val
        assert (start in joined["train"]) == (not is_val)


def test_a_new_file_moves_no_other_file_to_the_other_split(tmp_path):
    args = {**TINY, "text": write_texts(tmp_path, sample_texts()), "validation_share": 0.3}
    before = load_workload(NAME, args).datasets()["val"].describe()["bytes"]
    new = "a new text\n" * 10
    write_texts(tmp_path, {"sub/new.txt": new})
    after = load_workload(NAME, args).datasets()["val"].describe()["bytes"]
    assert after - before in (0, len(new) + 1)


def test_text_and_parquet_folders_of_the_same_documents_give_the_same_data(tmp_path):
    texts = list(sample_texts().values())
    folder = write_texts(tmp_path / "text", sample_texts())
    (tmp_path / "parquet").mkdir()
    for name, share in {"a.parquet": texts[:25], "b.parquet": texts[25:]}.items():
        table = pa.table({"body": share, "id": range(len(share))})
        pq.write_table(table, tmp_path / "parquet" / name, row_group_size=10)
    args = {**TINY, "validation_share": 0.3}
    from_text = load_workload(NAME, {**args, "text": folder}).datasets()
    from_parquet = load_workload(NAME, {**args, "text": str(tmp_path / "parquet"), "text_column": "body"}).datasets()
    for name in ("train", "val"):
        assert from_text[name].describe() == from_parquet[name].describe()


def test_a_suffix_chooses_files_and_hidden_ones_are_left_out(tmp_path):
    folder = write_texts(tmp_path, {**sample_texts(), "big.md": "x" * 5000, ".hidden/a.txt": "y" * 5000})
    args = {**TINY, "validation_share": 0.3, "text": folder}

    def num_bytes(**more):
        return sum(s.describe()["bytes"] for s in load_workload(NAME, {**args, **more}).datasets().values())

    assert num_bytes() - num_bytes(suffix=".txt") == 5001


# errors


@pytest.mark.parametrize(
    ("files", "args", "words"),
    [
        (None, {}, "does not exist"),
        ({}, {}, "holds no files"),
        ({"a.txt": "text"}, {"suffix": ".md"}, "holds no files ending in .md"),
        ({".hidden": "text"}, {}, "hidden files"),
        ({"a.txt": ""}, {}, "one sequence needs 17 bytes"),
        ({"a.txt": "only one document" * 10}, {}, "another validation_share"),
        ({"a.parquet": "not Parquet"}, {}, "cannot be read"),
    ],
)
def test_text_that_cannot_be_used_says_why(tmp_path, files, args, words):
    folder = tmp_path / "text"
    if files is not None:
        write_texts(folder, files)
    workload = load_workload(NAME, {**TINY, "text": str(folder), **args})
    with pytest.raises(DataError, match=words) as caught:
        workload.datasets()
    assert caught.value.hint


@pytest.mark.parametrize(
    ("column", "values", "words"),
    [("body", ["a"], "columns body"), ("text", [1], "must hold strings"), ("text", ["a", None], "1 nulls")],
)
def test_a_parquet_file_without_a_full_text_column_says_so(tmp_path, column, values, words):
    pq.write_table(pa.table({column: values}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=words) as caught:
        load_workload(NAME, {"text": str(tmp_path)}).datasets()
    assert caught.value.hint


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({"size": "2m"}, "workload.args.size"),
        ({"sequence_length": 0}, "workload.args.sequence_length"),
        ({"validation_share": 1.0}, "workload.args.validation_share"),
        ({"num_heads": 3}, "num_heads"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"rope_base": 1.0}, "rope_base"),
    ],
)
def test_impossible_arguments_are_refused_by_name(args, key):
    with pytest.raises(ConfigError) as caught:
        load_workload(NAME, args)
    assert caught.value.key == key


def test_an_unknown_argument_is_refused_with_the_signature():
    with pytest.raises(WorkloadError, match="sequence_length"):
        load_workload(NAME, {"sequence": 128})


def test_a_sequence_longer_than_the_table_of_rotations_is_refused():
    with pytest.raises(ValueError, match="max_sequence_length is 16"):
        tiny_model()(random_bytes(1, 17).long())
