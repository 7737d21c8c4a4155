"""tools/training_config.py: the three kinds of configuration, and what is refused."""

import re
from pathlib import Path

import pytest
import yaml

from espnet_mega_bias.tools import training_config
from espnet_mega_bias.tools.error import ToolError

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "conf").glob("train*.yaml"))
TOKENS = ["<blank>", "<unk>", "A", "B", "<sos/eos>"]


@pytest.fixture
def write(tmp_path):
    def write(config, name="train.yaml"):
        text = config if isinstance(config, str) else yaml.safe_dump(config)
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_espnet2_configurations_are_read(path):
    conf = yaml.safe_load(path.read_text())["decoder_conf"]

    config = training_config.read(path)

    assert config.decoder == "mega_bias"
    assert config.given == conf
    assert config.settings.items() >= conf.items()
    assert config.settings["embed_pad"] == 0
    assert config.vocab_size is None


def test_a_config_that_a_training_wrote_is_read(make_experiment):
    folder = make_experiment()
    written = yaml.safe_load((folder / "config.yaml").read_text())

    config = training_config.read(folder / "config.yaml")

    assert config.given == written["decoder_conf"]
    assert config.vocab_size == len(written["token_list"])
    assert config.build().embed.num_embeddings == config.vocab_size


def test_espnet3_configurations_are_read_whatever_else_does_not_resolve(write):
    path = write(
        "width: 12\n"
        "dataset: {preprocessor: {token_type: char, bpemodel: '${nowhere.else}'}}\n"
        "model:\n"
        "  token_list: ${nowhere}/tokens.txt\n"
        "  frontend_conf: {hop_length: '${nowhere}'}\n"
        "  decoder: mega_bias\n"
        "  decoder_conf: {block_size: '${width}', max_positions: 30}\n"
    )

    config = training_config.read(path)

    assert config.given == {"block_size": 12, "max_positions": 30}
    assert config.config["token_type"] == "char"
    assert config.config["bpemodel"] is None
    assert config.vocab_size is None


def test_a_recipe_of_espnet3_is_read(tmp_path):
    path = ROOT / "egs/mini_an4/esp2_asr/conf/training.yaml"

    config = training_config.read(path)

    conf = yaml.safe_load(path.read_text())["model"]["decoder_conf"]
    assert config.given == conf
    assert config.config["token_type"] == "bpe"


def test_an_espnet3_value_that_does_not_resolve_is_named_where_it_is_needed(write):
    path = write("model: {decoder: mega_bias, decoder_conf: {qk_size: '${nowhere}'}}")

    with pytest.raises(ToolError, match=r"train\.yaml: model: .*nowhere"):
        training_config.read(path)


def test_options_take_the_place_of_keys(write, tmp_path):
    (tmp_path / "tokens.txt").write_text("\n".join(TOKENS) + "\n")
    path = write({"decoder": "mega_bias", "token_type": "bpe", "bpemodel": "x.model"})

    config = training_config.read(
        path,
        token_list=str(tmp_path / "tokens.txt"),
        token_type="char",
        bpemodel=None,
    )

    assert config.tokens == TOKENS
    assert config.config["token_type"] == "char"
    assert config.config["bpemodel"] == "x.model"

    with pytest.raises(ToolError, match=r"token_list: .*absent"):
        training_config.read(path, token_list=str(tmp_path / "absent"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("a: [1\n", "is no YAML"),
        ("- 1\n", "holds no keys"),
        ("batch_size: 1\n", "no decoder is named, mega_bias or mega is needed"),
        ("model:\n", "no decoder is named"),
        ("decoder: rnn\n", "the decoder is 'rnn', not mega_bias or mega$"),
        ("decoder: [mega]\n", r"the decoder is \['mega'\], not"),
        ("decoder: mega_bais\n", "'mega_bais', .*did you mean mega_bias?"),
        (
            "decoder: mega\ndecoder_cnf: {}\n",
            "unknown key 'decoder_cnf'; did you mean decoder_conf?",
        ),
        ("decoder: mega\ndecoder_conf: [1]\n", r"decoder_conf: keys expected, .*\[1\]"),
    ],
)
def test_what_is_no_configuration_of_these_decoders_is_refused(write, config, message):
    with pytest.raises(ToolError, match=message):
        training_config.read(write(config))


@pytest.mark.parametrize("decoder", ["mega", "mega_bias"])
@pytest.mark.parametrize(
    ("conf", "message"),
    [
        ({"qk_sise": 32}, "has no key 'qk_sise'; did you mean qk_size?"),
        ({"colour": 1}, "has no key 'colour'; known: block_size, "),
        ({"vocab_size": 5}, "has no key 'vocab_size'"),
        ({"qk_size": "32"}, r'"qk_size" \(str\) is not an instance of int'),
        ({"embed_pad": "0"}, r'"embed_pad" \(str\) is not an instance of int'),
        ({"qk_size": 33, "rel_pos_bias_type": "rotary"}, "even .*rotary, got 33"),
        ({"rel_pos_bias_type": "rotery"}, "simple, rotary, got 'rotery'"),
        ({"dropout_rate": 1.5}, "dropout_rate must be between 0 and 1, got 1.5"),
        ({"num_blocks": 0}, "num_blocks must be at least 1, got 0"),
        ({"max_positions": None}, "max_positions must be a number with"),
        ({"embed_pad": -1}, "embed_pad must be a label"),
        ({"activation_type": "swoosh"}, "activation_type must be one of"),
    ],
)
def test_keys_and_values_of_decoder_conf_are_checked(write, decoder, conf, message):
    path = write({"decoder": decoder, "decoder_conf": conf})

    with pytest.raises(ToolError, match=f"^{re.escape(str(path))}: .*{message}"):
        training_config.read(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ToolError, match=r"no such file: .*absent\.yaml"):
        training_config.read(tmp_path / "absent.yaml")


def test_the_outline_takes_no_memory_and_has_the_parameters_of_either_decoder(write):
    conf = {"block_size": 12, "linear_size": 16, "qk_size": 8, "v_size": 10}
    paths = {
        decoder: write({"decoder": decoder, "decoder_conf": conf}, f"{decoder}.yaml")
        for decoder in ("mega", "mega_bias")
    }

    for decoder, path in paths.items():
        config = training_config.read(path)
        outline, real = config.outline(), config.build()

        assert type(real).__module__.startswith(
            "espnet2" if decoder == "mega" else "espnet_mega_bias"
        )
        assert not real.training
        assert {p.device.type for p in outline.parameters()} == {"meta"}
        assert {name: p.shape for name, p in outline.named_parameters()} == {
            name: p.shape for name, p in real.named_parameters()
        }


def test_positions_beyond_any_memory_can_be_read(write):
    conf = {"rel_pos_bias_type": "rotary", "max_positions": 10**12}

    config = training_config.read(write({"decoder": "mega", "decoder_conf": conf}))

    assert config.settings["max_positions"] == 10**12
