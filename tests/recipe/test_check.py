"""recipe.check: what is told before any long work begins."""

from pathlib import Path

import pytest
import yaml

CONF = Path(__file__).resolve().parents[2] / "conf"
TRAIN_CONFIG = CONF / "train_mini_an4_mega_bias.yaml"
TOKENS = ["<blank>", "<unk>", *"EN", "<space>", *"TVFGO", "<sos/eos>"]


@pytest.fixture
def check(local):
    return local("check")


@pytest.fixture
def write_config(tmp_path):
    """Return a function that writes the recipe's training YAML with changes."""

    def write(more_decoder_conf=(), **changes):
        config = yaml.safe_load(TRAIN_CONFIG.read_text())
        config["decoder_conf"].update(more_decoder_conf)
        path = tmp_path / "train.yaml"
        path.write_text(yaml.safe_dump({**config, **changes}))
        return path

    return write


@pytest.fixture
def write_data(tmp_path):
    """Return a function that writes a token list and a text."""

    def write(tokens=TOKENS, text="utt-1 GO\nutt-2 FEE GO\n"):
        (tmp_path / "tokens.txt").write_text("".join(f"{token}\n" for token in tokens))
        (tmp_path / "text").write_text(text)
        return tmp_path / "tokens.txt", [tmp_path / "text"]

    return write


def test_builds_the_model_of_the_recipe(check, write_data):
    model, found = check.check_train_config(TRAIN_CONFIG, *write_data())

    assert type(model.decoder).__name__ == "MEGABiasDecoder"
    assert model.decoder.vocab_size == len(TOKENS)
    size = sum(parameter.numel() for parameter in model.decoder.parameters())
    assert found.startswith(f"decoder mega_bias: {size:,} of ")
    for search in ("default", "maes"):
        check.check_decode_config(CONF / f"decode_{search}.yaml", model)


@pytest.mark.parametrize(
    ("decoder_conf", "message"),
    [
        ({"qk_sise": 32}, "has no key 'qk_sise'; did you mean qk_size?"),
        ({"colour": 1}, "has no key 'colour'; known: block_size, "),
        ({"qk_size": "32"}, r'"qk_size" \(str\) is not an instance of int'),
        ({"dropout_rate": [0.1]}, r'"dropout_rate" \(list\) is .* float'),
        ({"qk_size": 33}, "33"),
        ({"rel_pos_bias_type": "rotery"}, "simple, rotary, got 'rotery'"),
        ({"normalization_type": "norm"}, "layer_norm"),
        ({"activation_type": "swoosh"}, "swish"),
    ],
)
def test_names_what_is_wrong_in_decoder_conf(
    check, write_config, decoder_conf, message
):
    config = write_config(decoder_conf)

    with pytest.raises(check.CheckError, match=f"{config}: decoder_conf: .*{message}"):
        check.check_train_config(config, None, [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder": "mega_bais"}, "ESPnet knows mega, mega_bias, .*not 'mega_bais'"),
        ({"decoder_conf": [1]}, r"decoder_conf: keys expected, not \[1\]"),
        ({"decoder_cnf": {}}, "unrecognized arguments: decoder_cnf"),
        ({"joint_network_conf": {"size": 1}}, "TypeError: .*'size'"),
        ({"encoder_conf": {"body_conf": [{"block_type": "lstm"}]}}, "lstm"),
        ({"normalize": "utterance_mvm"}, "global_mvn, utterance_mvn, not .*_mvm'"),
        (
            {"normalize": "utterance_mvn", "normalize_conf": {"norm_var": True}},
            "has no key 'norm_var'; did you mean norm_vars?",
        ),
        (
            {"normalize": "global_mvn", "normalize_conf": {"norm_var": True}},
            "has no key 'norm_var'; did you mean norm_vars?",
        ),
    ],
)
def test_names_what_is_wrong_elsewhere(check, write_config, changes, message):
    config = write_config(**changes)

    with pytest.raises(check.CheckError, match=f"{config}: .*{message}"):
        check.check_train_config(config, None, [])


@pytest.mark.parametrize(
    ("name", "conf", "built"),
    [
        (None, {}, "None"),
        (
            "utterance_mvn",
            {"norm_vars": True},
            "UtteranceMVN(norm_means=True, norm_vars=True)",
        ),
        ("global_mvn", {"norm_vars": False}, "None"),  # its file is yet to come
        ("global_mvn", {"stats_file": "stats.npz"}, "None"),
        ("Global_MVN", {}, "None"),  # as ESPnet reads it
    ],
)
def test_takes_each_normalisation_of_espnet(check, write_config, name, conf, built):
    config = write_config(normalize=name, normalize_conf=conf)

    model, _ = check.check_train_config(config, None, [])

    assert repr(model.normalize) == built


def test_names_the_file_that_is_no_yaml(check, tmp_path):
    config = tmp_path / "train.yaml"
    config.write_text("decoder: [mega_bias\n")

    with pytest.raises(check.CheckError, match=r"train\.yaml is no YAML: .*line 2"):
        check.check_train_config(config, None, [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("beam_size: 5\nbeam_search_config: {search_type: best}\n", "best"),
        ("beam_size: 500\n", "500"),
        ("beam_search_config: {nsteps: 2}\n", "nsteps"),
        ("beam: 5\n", "unrecognized arguments: beam"),
    ],
)
def test_names_what_is_wrong_in_a_decoding_yaml(
    check, write_data, tmp_path, text, message
):
    model, _ = check.check_train_config(TRAIN_CONFIG, *write_data())
    config = tmp_path / "decode.yaml"
    config.write_text(text)

    with pytest.raises(check.CheckError, match=f"{config}: .*{message}"):
        check.check_decode_config(config, model)


@pytest.mark.parametrize(
    "decoder_conf", [{}, {"max_positions": None}, {"max_positions": 2, "chunk_size": 2}]
)
def test_a_text_fits_where_there_are_positions_enough(
    check, write_config, write_data, decoder_conf
):
    # "FEE GO" has six labels, and the blank stands before them
    config = write_config({"max_positions": 7, **decoder_conf})

    check.check_train_config(config, *write_data())


def test_names_both_numbers_where_max_positions_is_too_small(
    check, write_config, write_data
):
    config = write_config({"max_positions": 6})

    with pytest.raises(
        check.CheckError, match=r"max_positions: 6 is less than the 7 .*utt-2.*6 labels"
    ):
        check.check_train_config(config, *write_data())


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (TOKENS[1:], "<blank> must be first, found '<unk>'"),
        (["<unk>", "<blank>", *TOKENS[2:]], "<blank> must be first, found '<unk>'"),
        ([], "<blank> must be first, found nothing"),
        ([*TOKENS, "E"], "listed more than once: E"),
    ],
)
def test_names_what_is_wrong_in_a_token_list(check, write_data, tokens, message):
    path, texts = write_data(tokens)

    with pytest.raises(check.CheckError, match=f"{path}: {message}"):
        check.check_train_config(TRAIN_CONFIG, path, texts)


def test_a_decoder_that_is_not_registered_is_the_doctors_case(check, monkeypatch):
    from espnet2.tasks.asr_transducer import decoder_choices

    monkeypatch.delitem(decoder_choices.classes, "mega_bias")

    with pytest.raises(check.CheckError, match=r"does not know mega_bias; .*doctor"):
        check.check_train_config(TRAIN_CONFIG, None, [])


# The installation: each check is the doctor's (tests/tools/test_installation.py)


def test_this_installation_is_enough(check):
    check.check_installation()


def test_the_package_itself_may_be_missing(check, monkeypatch):
    monkeypatch.setattr(check.importlib.util, "find_spec", lambda name: None)

    with pytest.raises(check.CheckError, match=r"espnet-mega-bias is not installed in"):
        check.check_installation()


def test_a_torchaudio_that_does_not_load_is_named_with_both_versions(
    check, monkeypatch
):
    """D7."""
    from espnet_mega_bias.tools import probes

    def broken():
        raise OSError("_torchaudio.so: undefined symbol: aoti_torch_abi")

    monkeypatch.setattr(probes, "load_torchaudio", broken)

    with pytest.raises(
        check.CheckError,
        match=r"torchaudio: \S+ does not load beside torch \S+ \(OSError: .*undefined "
        r"symbol.*; pip install .*torchaudio",
    ):
        check.check_installation()


def test_names_the_modules_that_are_missing(check, monkeypatch):
    monkeypatch.setattr(check, "MODULES", ("json", "no_such_module"))

    with pytest.raises(
        check.CheckError,
        match=r"missing: no_such_module; pip install 'espnet-mega-bias\[recipe\]'",
    ):
        check.check_installation()


def test_a_streaming_yaml_is_tried_on_the_encoder(check, write_config):
    streaming = CONF / "decode_default_streaming_640.yaml"
    by_statistics = ["--normalize", "global_mvn"]
    model, _ = check.check_train_config(TRAIN_CONFIG, None, [], by_statistics)

    with pytest.raises(
        check.CheckError, match=f"{streaming}: .*not trained for stream"
    ):
        check.check_decode_config(streaming, model)

    conf = yaml.safe_load(TRAIN_CONFIG.read_text())["encoder_conf"]
    conf["main_conf"] = {"dynamic_chunk_training": True}
    for hop, remark in ((128, None), (160, "loses 1 of 16 encoder frames")):
        config = write_config(encoder_conf=conf, frontend_conf={"hop_length": hop})
        model, _ = check.check_train_config(config, None, [], by_statistics)
        found = check.check_decode_config(streaming, model)
        assert found is None if remark is None else remark in found


def test_the_means_of_an_utterance_do_not_go_with_streaming(check, write_config):
    streaming = CONF / "decode_default_streaming_640.yaml"
    conf = yaml.safe_load(TRAIN_CONFIG.read_text())["encoder_conf"]
    conf["main_conf"] = {"dynamic_chunk_training": True}
    config = write_config(encoder_conf=conf, normalize="utterance_mvn")
    model, _ = check.check_train_config(config, None, [])

    with pytest.raises(check.CheckError, match=f"{streaming}: .*train with global_mvn"):
        check.check_decode_config(streaming, model)


def test_alsd_does_not_stream(check, tmp_path):
    model, _ = check.check_train_config(TRAIN_CONFIG, None, [])
    config = tmp_path / "decode.yaml"
    config.write_text("streaming: true\nbeam_search_config: {search_type: alsd}\n")

    with pytest.raises(check.CheckError, match="ALSD is not available in streaming"):
        check.check_decode_config(config, model)
