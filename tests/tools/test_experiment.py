"""Trained models are read whole, without running code, or one line says why not."""

import os
import pickle
import shutil

import pytest
import torch
import yaml

from espnet_mega_bias import MEGABiasDecoder
from espnet_mega_bias.tools.error import ToolError
from espnet_mega_bias.tools.experiment import load, read_config, read_state


@pytest.fixture
def rewrite():
    """Return a function that changes keys of the configuration in a folder."""

    def change(folder, **keys):
        path = folder / "config.yaml"
        config = {**yaml.safe_load(path.read_text()), **keys}
        path.write_text(yaml.safe_dump(config))

    return change


class Evil:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def weights():
    return {"decoder.a": torch.randn(5, 5), "decoder.b": torch.randn(3)}


# --- what is taken ---------------------------------------------------------------


def test_a_folder_is_its_averaged_checkpoint(make_experiment):
    folder = make_experiment()
    expected = torch.load(folder / "valid.loss.ave.pth")

    for name in ("valid.loss.best.pth", "latest.pth", "3epoch.pth"):
        torch.save({"decoder.other": torch.ones(1)}, folder / name)

    experiment = load(folder)

    assert experiment.checkpoint.name == "valid.loss.ave.pth"
    assert experiment.config_file == folder / "config.yaml"
    assert experiment.state.keys() == expected.keys()
    assert all(torch.equal(experiment.state[n], expected[n]) for n in expected)


@pytest.mark.parametrize(
    "names",
    [
        ["valid.loss.ave.pth", "valid.loss.best.pth"],
        ["valid.loss.ave_2best.pth", "valid.loss.best.pth"],
        ["valid.loss.best.pth", "latest.pth"],
        ["latest.pth", "last.ckpt"],
        ["last.ckpt", "3epoch.pth"],
    ],
)
def test_the_checkpoint_that_is_decoded_with_first_is_taken(names, make_experiment):
    folder = make_experiment()
    (folder / "valid.loss.ave.pth").rename(folder / "kept")

    for name in names:
        shutil.copy(folder / "kept", folder / name)

    assert load(folder).checkpoint.name == names[0]


def test_a_link_to_a_checkpoint_is_followed(make_experiment):
    folder = make_experiment()
    (folder / "valid.loss.ave.pth").rename(folder / "1epoch.pth")
    (folder / "latest.pth").symlink_to("1epoch.pth")

    assert load(folder).checkpoint.name == "latest.pth"


def test_the_configuration_may_lie_elsewhere(make_experiment, tmp_path):
    folder = make_experiment()
    elsewhere = shutil.move(folder / "config.yaml", tmp_path / "train.yaml")

    assert load(folder, elsewhere).config["decoder"] == "mega_bias"


@pytest.mark.parametrize("wrap", ["model", "module", "state_dict"])
@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_weights_are_found_in_every_kind_of_file(wrap, prefix, zipped, tmp_path):
    path = tmp_path / "a.pth"
    state = weights()
    torch.save(
        {
            wrap: {prefix + name: value for name, value in state.items()},
            "optimizers": [{"state": {0: torch.ones(2)}}],
            "epoch": 3,
        },
        path,
        _use_new_zipfile_serialization=zipped,
    )

    found = read_state(path)

    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_a_model_of_that_name_keeps_its_names(tmp_path):
    # Not all begin with "model.", so nothing put it in front.
    state = {"model.a": torch.ones(1), "decoder.b": torch.ones(1)}
    torch.save(state, tmp_path / "a.pth")

    assert read_state(tmp_path / "a.pth").keys() == state.keys()


def test_the_decoder_is_built_with_its_weights(make_experiment):
    experiment = load(make_experiment())
    decoder = experiment.build_decoder()

    assert isinstance(decoder, MEGABiasDecoder)
    assert not decoder.training
    assert all(
        torch.equal(value, experiment.state[f"decoder.{name}"])
        for name, value in decoder.state_dict().items()
    )


def test_either_class_takes_the_weights(make_experiment):
    experiment = load(make_experiment())
    mega = experiment.build_decoder("mega")

    assert type(mega).__name__ == "MEGADecoder"
    assert torch.equal(
        mega.embed.weight, experiment.build_decoder("mega_bias").embed.weight
    )


def test_the_whole_model_is_built_with_its_weights(make_experiment):
    experiment = load(make_experiment())
    model = experiment.build_model()

    assert not model.training
    assert all(
        torch.equal(value, experiment.state[name])
        for name, value in model.state_dict().items()
    )


@pytest.mark.parametrize("listed", [True, False], ids=["in the file", "in a file"])
def test_tokens_are_given_by_label(listed, make_experiment, rewrite):
    folder = make_experiment()
    tokens = load(folder).tokens
    assert tokens[:3] == ["<blank>", "<unk>", "A"]

    if not listed:
        (folder / "data").mkdir()
        (folder / "data" / "tokens.txt").write_text("\n".join(tokens) + "\n")
        # As a recipe writes it: relative to where it runs, above the folder.
        rewrite(folder, token_list=f"{folder.name}/data/tokens.txt")

    assert load(folder).tokens == tokens


# --- what is refused, and how ------------------------------------------------------


def refusal(call, *args):
    """Return the message that a call is refused with."""
    with pytest.raises(ToolError) as caught:
        call(*args)

    message = str(caught.value)
    assert "Traceback" not in message
    assert len(" ".join(message.split())) < 300

    return message


def test_a_path_that_is_not_there(tmp_path):
    message = refusal(load, tmp_path / "no.pth")

    assert message == f"no such file: {tmp_path / 'no.pth'}"


def test_a_folder_without_checkpoint(tmp_path):
    message = refusal(load, tmp_path)

    assert message.startswith(f"{tmp_path} holds no checkpoint")
    assert "latest.pth" in message


def test_a_checkpoint_without_configuration(make_experiment):
    folder = make_experiment()
    (folder / "config.yaml").unlink()

    message = refusal(load, folder)

    assert f"no configuration {folder / 'config.yaml'}" in message
    assert "--config" in message


def test_a_configuration_that_is_no_yaml(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("decoder: [mega\n")
    assert f"{path} is no YAML" in refusal(read_config, path)

    path.write_bytes(b"\xff\xfe\x00")
    assert f"{path} is no YAML" in refusal(read_config, path)

    path.write_text("!!python/object/apply:os.mkdir [ran]\n")
    assert f"{path} is no YAML" in refusal(read_config, path)

    for text in ("", "just words\n", "- a\n- b\n"):
        path.write_text(text)
        assert refusal(read_config, path) == f"{path} holds no keys"


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_truncated_file_wherever_it_ends(zipped, tmp_path):
    path = tmp_path / "a.pth"
    state = {**weights(), "decoder.c": torch.randn(1000)}
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    whole = path.read_bytes()

    for end in range(0, len(whole), 41):
        path.write_bytes(whole[:end])
        assert str(path) in refusal(read_state, path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello world\n",
        b"# A model\n",
        b"version https://git-lfs.github.com/spec/v1\n",
        b'{"a": 1}',
        b"\x80\x02",
        b"PK\x03\x04 cut off here",
        bytes(range(256)),
    ],
    ids=["empty", "text", "markdown", "lfs", "json", "pickle", "zip", "bytes"],
)
def test_a_file_that_is_none(content, tmp_path):
    path = tmp_path / "a.pth"
    path.write_bytes(content)

    assert refusal(read_state, path).startswith(f"{path} is no checkpoint, or damaged")


@pytest.mark.parametrize("kind", ["zip", "legacy", "pickle"])
def test_code_in_a_file_does_not_run(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.pth"

    if kind == "pickle":
        path.write_bytes(pickle.dumps({"a": Evil()}, protocol=2))
    else:
        torch.save(
            {**weights(), "a": Evil()},
            path,
            _use_new_zipfile_serialization=kind == "zip",
        )

    message = refusal(read_state, path)

    assert str(path) in message
    assert not (tmp_path / "ran").exists()

    if kind != "pickle":
        assert "wants to run code" in message
        assert "mkdir" in message


@pytest.mark.parametrize("saved", [[1, 2], {}, {"a": 1}, {"model": {}}, "text", 3.0])
def test_a_file_of_something_else(saved, tmp_path):
    path = tmp_path / "a.pth"
    torch.save(saved, path)

    assert refusal(read_state, path) == f"{path} holds no weights of a model"


def test_a_whole_module_is_named_for_what_it_is(tmp_path):
    path = tmp_path / "a.pth"
    torch.save(torch.nn.Linear(2, 2), path)

    message = refusal(read_state, path)

    assert "wants to run code" in message
    assert "torch.nn.modules.linear.Linear" in message


def test_a_file_that_may_not_be_read_is_left_to_the_system(tmp_path):
    with pytest.raises(OSError, match=r"a\.pth"):
        read_state(tmp_path / "a.pth")


def test_weights_without_a_decoder(make_experiment):
    folder = make_experiment()
    torch.save({"encoder.a": torch.ones(1)}, folder / "valid.loss.ave.pth")

    message = refusal(load(folder).build_decoder)

    assert message == f"{folder / 'valid.loss.ave.pth'} holds no decoder"


@pytest.mark.parametrize("name", ["rnn", "transformer", None])
def test_a_configuration_of_another_decoder(name, make_experiment, rewrite):
    folder = make_experiment()
    rewrite(folder, decoder=name)

    message = refusal(load(folder).build_decoder)

    assert message == (
        f"{folder / 'config.yaml'}: the decoder is {name!r}, not mega or mega_bias"
    )


@pytest.mark.parametrize(
    ("conf", "named"),
    [
        ({"block_sise": 12}, "block_sise"),
        ({"max_positions": "many"}, "max_positions"),
        ({"qk_size": 7, "rel_pos_bias_type": "rotary"}, "qk_size"),
        ({"normalization_type": "none"}, "normalization_type"),
        (["block_size"], "mapping"),
    ],
)
def test_a_bad_decoder_conf(conf, named, make_experiment, rewrite):
    folder = make_experiment()
    rewrite(folder, decoder_conf=conf)

    message = refusal(load(folder).build_decoder)

    assert message.startswith(f"{folder / 'config.yaml'}: decoder_conf: ")
    assert named in message


def test_max_positions_without_limit_is_no_value_for_espnets_class(
    make_experiment, rewrite
):
    folder = make_experiment()
    conf = load(folder).config["decoder_conf"]
    rewrite(folder, decoder_conf={**conf, "max_positions": None})

    load(folder).build_decoder()
    assert "max_positions" in refusal(load(folder).build_decoder, "mega")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.pop("decoder.embed.weight"), r"embed.weight is missing"),
        (lambda s: s.update({"decoder.lstm": torch.ones(1)}), r"lstm is unknown"),
        (
            lambda s: s.update({"decoder.embed.weight": torch.ones(3, 2)}),
            r"embed.weight is (3, 2), not (7, 12)",
        ),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_weights_that_do_not_fit(change, said, make_experiment):
    folder = make_experiment()
    path = folder / "valid.loss.ave.pth"
    state = torch.load(path)
    change(state)
    torch.save(state, path)

    message = refusal(load(folder).build_decoder)

    assert message == f"{path} does not fit {folder / 'config.yaml'}: {said}"
    assert said in refusal(load(folder).build_model)


def test_a_checkpoint_of_another_model_is_said_in_one_line(make_experiment):
    folder = make_experiment()
    names = [f"decoder.layers.{n}.weight" for n in range(100)]
    torch.save({n: torch.ones(1) for n in names}, folder / "valid.loss.ave.pth")

    assert "more" in refusal(load(folder).build_decoder)


def test_a_model_that_cannot_be_built(make_experiment, rewrite):
    folder = make_experiment()
    rewrite(folder, encoder_conf={"body_conf": []})

    message = refusal(load(folder).build_model)

    assert message.startswith(f"{folder / 'config.yaml'}: no transducer can be built")


@pytest.mark.parametrize("tokens", [None, [], 3, "no/such/file"])
def test_a_configuration_without_tokens(tokens, make_experiment, rewrite):
    folder = make_experiment()
    rewrite(folder, token_list=tokens)

    with pytest.raises(ToolError, match=r"config\.yaml: .*token_list"):
        _ = load(folder).tokens


def test_a_token_may_hold_what_unicode_calls_a_line_separator(make_experiment, rewrite):
    folder = make_experiment()
    tokens = [*load(folder).tokens[:-2], "\u2028", "<sos/eos>"]
    (folder / "tokens.txt").write_text("".join(f"{token}\n" for token in tokens))
    rewrite(folder, token_list=str(folder / "tokens.txt"))

    assert load(folder).tokens == tokens


def test_a_token_list_that_is_no_text(make_experiment, rewrite):
    folder = make_experiment()
    (folder / "tokens.txt").write_bytes(b"\xff\xfe\x00")
    rewrite(folder, token_list=str(folder / "tokens.txt"))

    with pytest.raises(ToolError, match=r"config\.yaml: token_list: .*utf-8"):
        _ = load(folder).tokens
