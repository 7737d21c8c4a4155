"""tools/explain.py: the figures that are printed are those that are counted."""

import re

import pytest
import yaml

from espnet_mega_bias.tools import decoder_cost, explain, step_time, training_config
from espnet_mega_bias.tools.label_lengths import LabelLengths

SMALL = {
    "block_size": 12,
    "linear_size": 16,
    "qk_size": 8,
    "v_size": 10,
    "num_blocks": 3,
    "rel_pos_bias_type": "rotary",
}


@pytest.fixture
def read(tmp_path):
    def read(decoder="mega_bias", tokens=None, **conf):
        path = tmp_path / "train.yaml"
        config = {"decoder": decoder, "decoder_conf": {**SMALL, **conf}}
        config |= {"token_list": tokens} if tokens else {}
        path.write_text(yaml.safe_dump(config))
        return training_config.read(path)

    return read


def lines(config, lengths=None, measure=False):
    return list(explain.explain(config, lengths, measure))


def row(text, name):
    """Give the figure beside a name."""
    (line,) = [line for line in text if line.startswith(f"  {name} ")]
    return int(re.split(r"\s{2,}", line.strip())[1].replace(",", ""))


def table(text):
    """Give the rows of the table, by U."""
    rows = [line.split() for line in text if re.match(r" +\d+( +[\d.]+){4} ", line)]
    return {int(cells[0]): cells[1:] for cells in rows}


@pytest.mark.parametrize("decoder", ["mega", "mega_bias"])
def test_parameters_add_up_to_those_of_the_real_decoder(read, decoder):
    config = read(decoder, ["<blank>", "A", "B"])
    text = lines(config)
    total = sum(p.numel() for p in config.build().parameters())

    assert row(text, "total") == total
    assert row(text, "3 blocks") == 3 * row(text, "block")
    assert total == (
        row(text, "embedding")
        + row(text, "3 blocks")
        + row(text, "final normalisation")
    )
    parts = [line for line in text if line.startswith("  block: ")]
    assert row(text, "block") == sum(
        int(re.split(r"\s{2,}", line.strip())[1].replace(",", "")) for line in parts
    )


def test_without_tokens_the_embedding_is_told_per_token(read):
    tokens = ["<blank>", "A", "B"]
    known, unknown = lines(read(tokens=tokens)), lines(read())

    assert row(unknown, "embedding") == 12
    assert row(known, "embedding") == 36
    assert row(known, "total") == row(unknown, "total") + 36
    assert any(line.endswith("without the embedding") for line in unknown)


@pytest.mark.parametrize(
    ("conf", "shown"),
    [
        ({"max_positions": None}, [10, 100, 1000, 5000]),
        ({"max_positions": 1000}, [10, 100, 1000]),
        ({"max_positions": 1500}, [10, 100, 1000, 1500]),
        ({"max_positions": 99999}, [10, 100, 1000, 5000]),
        ({"max_positions": 5}, [5]),
        ({"chunk_size": 32}, [10, 32]),
    ],
)
def test_costs_are_shown_as_far_as_attention_reaches(read, conf, shown):
    config = read(**conf)
    text = lines(config)

    assert list(table(text)) == shown
    for length, (linear, attention, ema, total, *_) in table(text).items():
        cost = decoder_cost.step("mega_bias", config.settings, length)
        counted = (cost.linear, cost.attention, cost.ema, cost.total)
        assert [linear, attention, ema, total] == [f"{n / 1e6:.3f}" for n in counted]

    later = "  Later labels cost no more than in the last row."
    assert (later in text) == (decoder_cost.limit(config.settings) == shown[-1])


def test_states_are_told_in_bytes(read):
    config = read(max_positions=100)
    text = lines(config)

    assert row(text, "key and value, per label and block") == 4 * (8 + 10)
    assert row(text, "EMA, per block") == 4 * 12 * 4
    for length, cells in table(text).items():
        size = explain.size
        state = decoder_cost.state_bytes("mega_bias", config.settings, length)
        kept = decoder_cost.training_bytes("mega_bias", config.settings, length)
        assert " ".join(cells[4:]) == f"{size(state)} {size(kept)}"


def test_the_longest_text_is_told_with_its_memory(read):
    config = read(max_positions=100)
    kept = decoder_cost.training_bytes("mega_bias", config.settings, 80)

    text = lines(config, LabelLengths(79, "utterance u of text", {}))

    wanted = f"    {explain.size(kept)} for the 80 positions of utterance u of text"
    assert wanted in text
    assert text[-1] == "No setting was found that hurts."


def test_warnings_come_last_each_with_what_to_write(read):
    text = lines(read(max_positions=20, embed_pad=1), LabelLengths(20, "u", {}))

    assert [line.split()[0] for line in text[-5:] if line] == [
        "warning:",
        "write:",
        "warning:",
        "write:",
    ]
    assert "  write: max_positions: 21" in text
    assert "No setting was found that hurts." not in text


def test_times_are_measured_for_each_row_and_the_machine_is_named(read, monkeypatch):
    times = iter([1.234, 5.678])
    monkeypatch.setattr(step_time, "milliseconds", lambda *_: next(times))

    text = lines(read(max_positions=20), measure=True)

    assert [cells[-3] for cells in table(text).values()] == ["1.23", "5.68"]
    (line,) = [line for line in text if "measured on this machine, now" in line]
    assert step_time.machine() in line


def test_without_measuring_no_decoder_is_built(read, monkeypatch):
    monkeypatch.setattr(training_config.TrainingConfig, "build", None)

    assert not any("measured" in line for line in lines(read()))


@pytest.mark.parametrize("decoder", ["mega", "mega_bias"])
def test_a_real_measurement_gives_a_figure(read, decoder):
    text = lines(read(decoder, max_positions=20), measure=True)

    assert all(float(cells[-3]) > 0.0 for cells in table(text).values())


def test_a_search_that_stops_is_told_and_the_rest_is_printed(read):
    text = lines(read("mega", chunk_size=1), measure=True)

    assert any("not measured: the search of mega stops: shape" in line for line in text)
    assert 1 in table(text)


def test_a_decoder_beyond_the_memory_is_not_built(read, monkeypatch):
    monkeypatch.setattr(training_config.TrainingConfig, "build", None)

    text = lines(read(max_positions=10**10), measure=True)

    assert "  not measured: it would take 960 GB of memory" in text


@pytest.mark.parametrize(
    ("decoder", "conf", "later"),
    [
        ("mega", {"chunk_size": 8}, "Later labels cost no more than in the last row."),
        ("mega", {"max_positions": 9}, "Later labels cost more: the search of mega"),
        (
            "mega",
            {"max_positions": 9, "rel_pos_bias_type": "simple"},
            "The last row and later labels stop the search of mega with an error.",
        ),
    ],
)
def test_what_comes_after_the_last_row_is_told_of_espnets_decoder(
    read, decoder, conf, later
):
    assert any(later in line for line in lines(read(decoder, **conf)))


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1 kB"),
        (27_648_000, "27.6 MB"),
        (999_000_000, "999 MB"),
        (2_000_000_000_000, "2,000 GB"),
    ],
)
def test_sizes_have_the_unit_that_makes_them_short(count, text):
    assert explain.size(count) == text
